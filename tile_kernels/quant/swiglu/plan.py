"""Tiles of SwiGLU and its gradient with casts along rows. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.quant.storage import GROUPS, LANES, access, threads_of_row
from tile_kernels.runtime.device import Device

# Bounds of sf_clamp_min: the smallest for which 448 / bound is a float32, and the largest.
SF_CLAMP_RANGE = (2.0**-119, 2.0**127)

FMT = "e4m3"

# ---- forward ------------------------------------------------------------------------------------

CHUNK = 16  # channels per thread: 16 bytes of e4m3
WARPS = 4
MAX_KEPT = 64  # values of a row that a thread holds in registers
COUNTING_BLOCKS = 8  # per multiprocessor: fewer blocks, fewer atomics


class Plan(NamedTuple):
    """`load` and `store` channels per access; `blocks` of a counting kernel, else 0."""

    source: str
    hidden: int
    group: int
    load: int
    store: int
    layout: str
    round_sf: bool
    weighted: bool
    padded: bool
    clamped: bool
    blocks: int
    threads: int


def plan(
    source: str,
    hidden: int,
    group: int,
    layout: str,
    round_sf: bool,
    weighted: bool,
    padded: bool,
    clamped: bool,
    counted: bool,
    alignment: int,
    out_alignment: int,
    device: Device,
) -> Plan:
    """A warp per 512 channels of a row; for one scale per row, a block per row."""
    load = access(source, hidden, alignment, CHUNK)
    store = access(FMT, hidden, out_alignment, CHUNK)
    threads = WARPS * LANES
    if group not in GROUPS:
        threads = threads_of_row(hidden, CHUNK, MAX_KEPT)
    blocks = COUNTING_BLOCKS * device.num_sms if counted else 0
    return Plan(
        source, hidden, group, load, store, layout, round_sf, weighted, padded, clamped, blocks,
        threads,
    )  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------

BACKWARD_GROUPS = (32, 128)
PART = 8  # channels per thread and step: 16 bytes of bfloat16, so that warps access runs of memory
MAX_THREADS = 128


class BackwardPlan(NamedTuple):
    """Channels per access of the quantized rows, of the gradient, and of the four results."""

    hidden: int
    group: int
    round_sf: bool
    clamped: bool
    load: int
    load_grad: int
    store: int
    store_codes: int
    store_grad: int
    threads: int


def plan_backward(
    hidden: int,
    group: int,
    round_sf: bool,
    clamped: bool,
    alignment: int,
    grad_alignment: int,
    out_alignment: int,
    codes_alignment: int,
    x_grad_alignment: int,
    device: Device,
) -> BackwardPlan:
    """A block per row."""
    parts = -(-hidden // PART)
    # As few idle threads as possible, then as many threads as are allowed.
    options = range(LANES, MAX_THREADS + 1, LANES)
    threads = min(options, key=lambda t: (-(-parts // t) * t, -t))
    return BackwardPlan(
        hidden, group, round_sf, clamped,
        access("e4m3", hidden, alignment, PART), access("bfloat16", hidden, grad_alignment, PART),
        access("bfloat16", hidden, out_alignment, PART),
        access("e4m3", hidden, codes_alignment, PART),
        access("bfloat16", hidden, x_grad_alignment, PART), threads,
    )  # fmt: skip
