"""Tiling of the kernels that write into the memory of peers. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.plan import ACCESS_BYTES, split
from tile_kernels.runtime.device import WARP, Device

MAX_LANES, MAX_WIDE_LANES = 512, 1024  # threads of a block that copy a row, one vector each
PUT_THREADS, SUM_THREADS = 512, 256  # of a block, about


class PutPlan(NamedTuple):
    """`vector` elements per access; see `moe.plan.Split` for the rest of the tiling."""

    dtype: str
    width: int
    num_topk: int
    vector: int
    lanes: int
    steps: int
    parts: int
    rows: int
    num_scales: int
    num_words: int


def put_plan(
    dtype: str,
    element_size: int,
    width: int,
    num_topk: int,
    num_tokens: int,
    alignment: int,
    num_scales: int,
    num_words: int,
    wide: bool,
    device: Device,
) -> PutPlan:
    """`alignment` divides the addresses of the rows here and at the peers, in bytes.

    With `wide`, for rows that are written often, blocks may have more threads, as in `moe.expand`.
    """
    vector = math.gcd(ACCESS_BYTES // element_size, width, max(alignment // element_size, 1))
    vectors = width // vector
    lanes = -(-vectors // WARP) * WARP
    few = num_tokens < 2 * device.num_sms
    cut = split(vectors, num_tokens, device)
    if not few and lanes <= (MAX_WIDE_LANES if wide else MAX_LANES):  # one store of every thread
        cut = cut._replace(lanes=lanes, steps=1, parts=1)
    rows = 1 if few else max(1, PUT_THREADS // cut.lanes)
    return PutPlan(dtype, width, num_topk, vector, *cut, rows, num_scales, num_words)


class SumPlan(NamedTuple):
    """As `PutPlan`; `bits` are those of an access."""

    dtype: str
    hidden: int
    num_topk: int
    vector: int
    bits: int
    lanes: int
    steps: int
    parts: int
    rows: int
    num_words: int


def sum_plan(
    dtype: str,
    element_size: int,
    hidden: int,
    num_topk: int,
    num_rows: int,
    alignment: int,
    num_words: int,
    device: Device,
) -> SumPlan:
    """`alignment` divides the addresses of the rows here and at the peers, in bytes."""
    vector = math.gcd(ACCESS_BYTES // element_size, hidden, max(alignment // element_size, 1))
    cut = split(hidden // vector, num_rows, device)
    rows = 1 if num_rows < 2 * device.num_sms else max(1, SUM_THREADS // cut.lanes)
    bits = 8 * element_size * vector
    return SumPlan(dtype, hidden, num_topk, vector, bits, *cut, rows, num_words)
