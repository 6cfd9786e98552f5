"""Plans of RMS norm, forward and backward. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.quant.storage import LANES, access, e2m1_conversion, threads_of_row
from tile_kernels.runtime.device import Device
from tile_kernels.utils import next_power_of_two

MAX_WIDTH = 16384  # channels that stay in the registers of a block
WARP_WIDTH = 1024  # rows of at most that many channels take a warp or less
WARP_THREADS = 128  # of a block in that case, forward
PLAIN_CHUNK = 8  # neighbouring values of a thread without a cast
# And with one: a warp has all groups of a packed word. H200, 8192 x 7168 to e4m3 in groups of 32:
# 51.2 us with 224 threads of 32 values, 53.1 with 64 of 112; chunks of 8, 128 threads: 51.8.
CAST_CHUNK = 16
# Values of a row that a thread keeps in registers. H200, 8192 x 7168: bf16 58.1 us, with 32 59.4,
# with 16 58.3, with 8 86.6; float32 129.2 us, with 64 137.1.
MAX_KEPT = {"bfloat16": 64, "float32": 32}


def lanes_of_row(width: int, chunk: int) -> int:
    """Lanes of a warp that share a short row, `chunk` values at a time: a power of two."""
    return min(LANES, next_power_of_two(-(-width // chunk)))


class Plan(NamedTuple):
    """`chunk` neighbouring values per thread; `load`, `store`... of them per access.

    `weight`, `fmt` and `plain` (what the norm is stored as) are empty if there is none. A block has
    `rows` rows: one that takes all of its threads, or several with a power of two of lanes each.
    """

    source: str
    width: int
    weight: str
    residual: bool
    plain: str
    fmt: str
    group: int
    layout: str
    round_sf: bool
    mega: bool
    batched: bool  # scales are in columns of batches
    chunk: int
    load: int
    load_weight: int
    store: int
    threads: int
    rows: int
    conversion: str  # the conversion to e2m1
    early: bool  # weights are loaded before the sum of squares


def plan(
    source: str,
    width: int,
    weight: str,
    residual: bool,
    plain: str,
    fmt: str,
    group: int,
    layout: str,
    round_sf: bool,
    mega: bool,
    batched: bool,
    alignment: int,
    weight_alignment: int,
    device: Device,
) -> Plan:
    """16-byte accesses where addresses and the width allow them."""
    chunk = CAST_CHUNK if fmt else PLAIN_CHUNK
    load = access(source, width, alignment, chunk)
    load_weight = access(weight, width, weight_alignment, chunk) if weight else 1
    store = access(fmt, width, 16, chunk) if fmt else 1
    if width <= WARP_WIDTH:
        threads = WARP_THREADS
        rows = threads // (LANES if fmt else lanes_of_row(width, chunk))
    else:
        threads, rows = threads_of_row(width, chunk, MAX_KEPT[source]), 1
    # H200, 8192 x 7168 to e4m3 in groups of 32: with a residual 102.9 us, late 106.2; without one
    # 54.3, late 51.2. Without a cast there is no difference.
    early = bool(fmt) and residual
    # Powers of two times bfloat16.
    conversion = e2m1_conversion(fmt, source == "bfloat16" and round_sf and store % 8 == 0, device)
    return Plan(
        source, width, weight, residual, plain, fmt, group, layout, round_sf, mega, batched,
        chunk, load, load_weight, store, threads, rows, conversion, early,
    )  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------

# Parts of the tokens, each with a sum of weight gradients: the same on every device, so that the
# bits of the gradient do not depend on it. H200, 8192 x 7168 bf16, sums included: 132 parts
# 95.9 us, 264 97.6, 528 103.8.
MAX_PARTS = 132
MAX_SHORT_PARTS = 264  # of rows that take a warp or less: there the sums are small
# Threads per multiprocessor: the rest of the registers holds rows, sums and weights.
RESIDENT = {"bfloat16": 896, "float32": 448}
# Rows that are prefetched. H200, 8192 x 7168 bf16: 2 94.9 us, 3 95.9.
MAX_STAGES = 2
# Rows between two barriers. H200, bf16: of 8192 x 4096 one 65.8 us, two 59.3; of 8192 x 7168 one
# 94.2, two 95.1. Two take the registers of two blocks.
PAIRED_WIDTH, PAIRED_RESIDENT = 4096, 448
SHORT_AT_ONCE = 2  # not compared with others
SHARED_SUMS = 8192  # sums that a block exchanges at the end, of rows that take a warp or less
MAX_ROW_THREADS = 512  # of a block with several rows


def max_parts(width: int) -> int:
    """The most parts of rows of that width."""
    return MAX_SHORT_PARTS if width <= WARP_WIDTH else MAX_PARTS


def count_parts(num_rows: int, width: int) -> int:
    """The parts of that many rows; part `p` of `n` starts at row `p * num_rows // n`."""
    return max(1, min(num_rows, max_parts(width)))


class BackwardPlan(NamedTuple):
    """`stages` rows are prefetched, 0 for none; `workers` blocks share the parts.

    `summed`: the gradient of the weight is wanted. A block takes `rows` rows side by side, several
    if lanes of a warp suffice for one, and `at_once` such rows between two barriers.
    """

    source: str
    width: int
    weight: str
    summed: bool
    residual: bool
    vector: int
    load_weight: int
    threads: int
    rows: int
    at_once: int
    stages: int
    workers: int
    per_sm: int


def plan_backward(
    source: str,
    width: int,
    weight: str,
    summed: bool,
    residual: bool,
    alignment: int,
    weight_alignment: int,
    device: Device,
) -> BackwardPlan:
    full = 8 if source == "bfloat16" else 4
    vector = access(source, width, alignment, full)
    load_weight = access(weight, width, weight_alignment, vector) if weight else 1
    itemsize = 16 // full
    if width <= WARP_WIDTH:
        lanes = lanes_of_row(width, vector)
        rows = max(LANES // lanes, min(MAX_ROW_THREADS // lanes, SHARED_SUMS // width))
        rows -= rows % (LANES // lanes)  # whole warps
        threads = rows * lanes
        per_sm = max(1, 1024 // threads)
        return BackwardPlan(
            source, width, weight, summed, residual, vector, load_weight, threads, rows,
            SHORT_AT_ONCE, 0, per_sm * device.num_sms, per_sm,
        )  # fmt: skip
    threads = threads_of_row(width, full, 16)
    row_bytes = (3 if residual else 2) * -(-width // (threads * full)) * threads * full * itemsize
    at_once = 2 if width <= PAIRED_WIDTH else 1
    row_bytes *= at_once
    room = device.smem_per_block - 2048
    resident = PAIRED_RESIDENT if at_once > 1 else RESIDENT[source]
    per_sm = max(1, min(resident // threads, room // (MAX_STAGES * row_bytes)))
    stages = min(MAX_STAGES, room // (per_sm * row_bytes)) if vector == full else 0
    return BackwardPlan(
        source, width, weight, summed, residual, vector, load_weight, threads, 1,
        at_once, stages, per_sm * device.num_sms, per_sm,
    )  # fmt: skip


SUM_WARPS = 24  # of a block that adds up parts: each takes every 24th


class SumPlan(NamedTuple):
    """`steps` parts of a warp at most."""

    width: int
    dtype: str
    accumulated: bool
    steps: int


def plan_sum(width: int, dtype: str, accumulated: bool, device: Device) -> SumPlan:
    return SumPlan(width, dtype, accumulated, -(-max_parts(width) // SUM_WARPS))
