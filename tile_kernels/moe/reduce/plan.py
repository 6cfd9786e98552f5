"""Tiling of the weighted sums from the fused layout. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.plan import ACCESS_BYTES, split
from tile_kernels.runtime.device import Device

REDUCE_THREADS = 256  # about
SLOTS_AT_ONCE = 1  # rows of a token that are loaded before the first is added


class Plan(NamedTuple):
    """`vector` elements per access, of `x_bits` in all when loaded and `out_bits` when stored."""

    dtype: str
    out_dtype: str
    hidden: int
    num_topk: int
    vector: int
    x_bits: int
    out_bits: int
    lanes: int
    steps: int
    parts: int
    rows: int
    weighted: bool
    x_scaled: bool
    out_scaled: bool


def plan(
    dtype: str,
    out_dtype: str,
    x_width: int,
    out_width: int,
    hidden: int,
    num_topk: int,
    num_tokens: int,
    x_alignment: int,
    out_alignment: int,
    weighted: bool,
    x_scaled: bool,
    out_scaled: bool,
    device: Device,
) -> Plan:
    """Widths of elements and what divides the addresses are in bytes."""
    vector = math.gcd(
        ACCESS_BYTES // max(x_width, out_width),
        hidden,
        max(x_alignment // x_width, 1),
        max(out_alignment // out_width, 1),
    )
    cut = split(hidden // vector, num_tokens, device)
    rows = 1 if num_tokens < 2 * device.num_sms else max(1, REDUCE_THREADS // cut.lanes)
    return Plan(
        dtype, out_dtype, hidden, num_topk, vector, 8 * x_width * vector, 8 * out_width * vector,
        *cut, rows, weighted, x_scaled, out_scaled,
    )  # fmt: skip
