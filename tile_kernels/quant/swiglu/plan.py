"""Tiles of SwiGLU and its gradient with casts along rows. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.quant.storage import GROUPS, LANES, access, threads_of_row
from tile_kernels.runtime.device import Device

# Bounds of sf_clamp_min: the smallest for which 448 / bound is a float32, and the largest.
SF_CLAMP_RANGE = (2.0**-119, 2.0**127)

FMT = "e4m3"

# Which rows exist: all, those whose expert is not negative, those inside the ranges of experts,
# those with an index of a weight.
ALL, EXPERTS, RANGES, INDEXED = "all", "experts", "ranges", "indexed"
MAX_EXPERTS = 8192
SEARCH_STEPS = MAX_EXPERTS.bit_length()  # that find an expert among them

# The weight of a row: none, the one that an index names, the row's element.
UNWEIGHTED, BY_INDEX, BY_ROW = "", "index", "row"

# ---- forward ------------------------------------------------------------------------------------

CHUNK = 16  # channels per thread: 16 bytes of e4m3
WARPS = 4
MAX_KEPT = 64  # values of a row that a thread holds in registers
COUNTING_BLOCKS = 8  # per multiprocessor: fewer blocks, fewer atomics


class Plan(NamedTuple):
    """`load` and `store` channels per access; `blocks` of a kernel with `counters`, else 0."""

    source: str
    hidden: int
    group: int
    load: int
    store: int
    layout: str
    round_sf: bool
    weights: str
    rows: str
    clamped: bool
    counters: int
    blocks: int
    fill: bool  # writes rows that do not exist
    threads: int

    @property
    def weighted(self) -> bool:
        """Whether rows have weights."""
        return self.weights != UNWEIGHTED


def plan(
    source: str,
    hidden: int,
    group: int,
    layout: str,
    round_sf: bool,
    weights: str,
    rows: str,
    clamped: bool,
    counters: int,
    fill: bool,
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
    blocks = COUNTING_BLOCKS * device.num_sms if counters else 0
    return Plan(
        source, hidden, group, load, store, layout, round_sf, weights, rows, clamped, counters,
        blocks, fill, threads,
    )  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------

BACKWARD_GROUPS = (32, 128)
PART = 8  # channels per thread and step: 16 bytes of bfloat16, so that warps access runs of memory
MAX_THREADS = 128


class BackwardPlan(NamedTuple):
    """Channels per access of the quantized rows, of the gradient, and of the four results."""

    hidden: int
    group: int
    layout: str
    round_sf: bool
    rows: str
    weighted: bool
    clamped: bool
    recompute: bool
    load: int
    load_grad: int
    store: int
    store_codes: int
    store_grad: int
    threads: int


def plan_backward(
    hidden: int,
    group: int,
    layout: str,
    round_sf: bool,
    rows: str,
    weighted: bool,
    clamped: bool,
    recompute: bool,
    alignment: int,
    grad_alignment: int,
    out_alignment: int,
    codes_alignment: int,
    x_grad_alignment: int,
    device: Device,
) -> BackwardPlan:
    """A block per row."""
    return BackwardPlan(
        hidden, group, layout, round_sf, rows, weighted, clamped, recompute,
        access("e4m3", hidden, alignment, PART), access("bfloat16", hidden, grad_alignment, PART),
        access("bfloat16", hidden, out_alignment, PART),
        access("e4m3", hidden, codes_alignment, PART),
        access("bfloat16", hidden, x_grad_alignment, PART), threads_of_gradient(hidden),
    )  # fmt: skip


def threads_of_gradient(hidden: int) -> int:
    """Threads of a block per row: as few idle ones as possible, then as many as are allowed."""
    parts = -(-hidden // PART)
    options = range(LANES, MAX_THREADS + 1, LANES)
    return min(options, key=lambda t: (-(-parts // t) * t, -t))


# ---- without a cast -----------------------------------------------------------------------------


class PlainPlan(NamedTuple):
    """As `Plan`, without a cast."""

    source: str
    target: str
    hidden: int
    load: int
    store: int
    rows: str
    weighted: bool
    clamped: bool
    counters: int
    blocks: int
    fill: bool
    threads: int


def plan_plain(
    source: str,
    target: str,
    hidden: int,
    rows: str,
    weighted: bool,
    clamped: bool,
    counters: int,
    fill: bool,
    alignment: int,
    out_alignment: int,
    device: Device,
) -> PlainPlan:
    """A warp per 512 channels of a row."""
    load = access(source, hidden, alignment, CHUNK)
    store = access(target, hidden, out_alignment, CHUNK)
    blocks = COUNTING_BLOCKS * device.num_sms if counters else 0
    return PlainPlan(
        source, target, hidden, load, store, rows, weighted, clamped, counters, blocks, fill,
        WARPS * LANES,
    )  # fmt: skip


class PlainBackwardPlan(NamedTuple):
    """Channels per access of the rows, of their gradient, and of the two results."""

    source: str
    target: str
    hidden: int
    load: int
    load_grad: int
    store: int
    store_grad: int
    rows: str
    weighted: bool
    clamped: bool
    recompute: bool
    threads: int


def plan_plain_backward(
    source: str,
    target: str,
    hidden: int,
    rows: str,
    weighted: bool,
    clamped: bool,
    recompute: bool,
    alignment: int,
    grad_alignment: int,
    out_alignment: int,
    x_grad_alignment: int,
    device: Device,
) -> PlainBackwardPlan:
    """A block per row."""
    return PlainBackwardPlan(
        source, target, hidden,
        access(source, hidden, alignment, PART), access(source, hidden, grad_alignment, PART),
        access(target, hidden, out_alignment, PART), access(target, hidden, x_grad_alignment, PART),
        rows, weighted, clamped, recompute, threads_of_gradient(hidden),
    )  # fmt: skip
