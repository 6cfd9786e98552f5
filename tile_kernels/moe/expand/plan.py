"""Tiling of the copies to the fused layout. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.plan import ACCESS_BYTES, Split, split
from tile_kernels.runtime.device import WARP, Device

EXPAND_LANES, WIDE_LANES = 512, 1024
MIN_COPIES_FOR_WIDE = 4  # positions per token
EXPAND_THREADS = 512  # about; also what makes finding the uncovered positions quick
# Blocks that fill what no slot names, a power of two: enough to write at the memory's speed, few
# enough that each may read all slots. By the number of positions.
MIN_FILLS, MAX_FILLS = 4, 32
MIN_POSITIONS_FOR_MAX_FILLS = 128
MARKED_POSITIONS = 8192  # positions that one block marks at a time
SLOTS_IN_FLIGHT = 16  # per thread, while marking


class Plan(NamedTuple):
    """`vector` elements per access; `scan` slots per access while marking, `run` unrolled."""

    dtype: str
    width: int
    hidden: int
    num_topk: int
    vector: int
    scan: int
    run: int
    lanes: int
    steps: int
    parts: int
    rows: int
    fills: int
    sf_dtype: str
    num_scales: int
    column_major: bool


def spread(vectors: int, num_tokens: int, num_positions: int, device: Device) -> Split:
    """A thread for each vector, if a block has as many threads, else `split`.

    Blocks may have more threads where a token is written often: a whole row in one store of every
    thread is the fastest access pattern for the memory.
    """
    lanes = -(-vectors // WARP) * WARP
    max_lanes = WIDE_LANES if num_positions >= MIN_COPIES_FOR_WIDE * num_tokens else EXPAND_LANES
    if num_tokens < 2 * device.num_sms or lanes > max_lanes:
        return split(vectors, num_tokens, device)
    return Split(lanes, 1, 1)


def plan(
    dtype: str,
    width: int,
    hidden: int,
    num_topk: int,
    num_tokens: int,
    num_positions: int,
    alignment: int,
    slots_alignment: int,
    sf_dtype: str,
    num_scales: int,
    column_major: bool,
    device: Device,
) -> Plan:
    """`alignment` is what divides the address of `x`, in bytes; `sf_dtype` is empty without."""
    vector = math.gcd(ACCESS_BYTES // width, hidden, max(alignment // width, 1))
    scan = math.gcd(4, num_topk, max(slots_alignment // 4, 1))
    run = max(n for n in range(scan, SLOTS_IN_FLIGHT + 1, scan) if num_topk % n == 0)
    cut = spread(hidden // vector, num_tokens, num_positions, device)
    rows = 1 if num_tokens < 2 * device.num_sms else max(1, EXPAND_THREADS // cut.lanes)
    fills = MIN_FILLS if num_positions < MIN_POSITIONS_FOR_MAX_FILLS else MAX_FILLS
    return Plan(
        dtype, width, hidden, num_topk, vector, scan, run, *cut, rows, fills,
        sf_dtype, num_scales, column_major,
    )  # fmt: skip
