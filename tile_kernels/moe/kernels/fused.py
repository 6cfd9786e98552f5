"""Tokens to the fused layout and back: rows are copied to, or summed from, their positions.

A row is cut into vectors of up to 16 bytes. A group of `lanes` threads (whole warps) works on one
part of a row; each thread takes `steps` vectors of it, `lanes` apart. The lanes of a warp read the
slots of a token together, then take the valid ones one by one: a bit each in a mask, whose position
comes by a shuffle.
"""

import math
from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.moe.kernels.common import first_lane
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

ACCESS_BYTES = 16
MOST_LANES = 256
MOST_STEPS = 4
FEW_LANES = 128  # a row's part, where there are too few tokens to fill the machine


class Split(NamedTuple):
    """How a row is cut: `parts` blocks of `lanes` threads with `steps` vectors each."""

    lanes: int
    steps: int
    parts: int


def split(vectors: int, num_tokens: int, device: Device) -> Split:
    """As few parts as possible, then as few idle threads, then as few threads.

    With few tokens a row is spread over as many threads as it has vectors instead.
    """
    if num_tokens < 2 * device.num_sms:
        lanes = min(FEW_LANES, -(-vectors // WARP) * WARP)
        return Split(lanes, 1, -(-vectors // lanes))
    cuts = [
        Split(lanes, steps, -(-vectors // (lanes * steps)))
        for lanes in range(WARP, MOST_LANES + 1, WARP)
        for steps in range(1, MOST_STEPS + 1)
    ]
    return min(cuts, key=lambda cut: (cut.parts, cut.parts * cut.lanes * cut.steps, cut.lanes))


def spread(vectors: int, num_tokens: int, num_positions: int, device: Device) -> Split:
    """A thread for each vector, if a block has as many: more of them where a token is written
    often, for a whole row in one stroke is what memory takes best. Else `split`."""
    lanes = -(-vectors // WARP) * WARP
    most = WIDE_LANES if num_positions >= WRITTEN_OFTEN * num_tokens else EXPAND_LANES
    if num_tokens < 2 * device.num_sms or lanes > most:
        return split(vectors, num_tokens, device)
    return Split(lanes, 1, 1)


# ---- expand -------------------------------------------------------------------------------------

EXPAND_LANES, WIDE_LANES = 512, 1024
WRITTEN_OFTEN = 4  # positions of a token
EXPAND_THREADS = 512  # about; also what makes finding the uncovered positions quick
# Blocks that fill what no slot names, a power of two: enough to write at the memory's speed, few
# enough that each may read all slots. By the number of positions.
FEW_FILLS, MOST_FILLS = 4, 32
MANY_POSITIONS = 128
MARKED = 8192  # positions that one block marks at a time
SLOTS_IN_FLIGHT = 16  # per thread, while marking


class ExpandPlan(NamedTuple):
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


def expand_plan(
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
) -> ExpandPlan:
    """`alignment` is what divides the address of `x`, in bytes; `sf_dtype` is empty without."""
    vector = math.gcd(ACCESS_BYTES // width, hidden, max(alignment // width, 1))
    scan = math.gcd(4, num_topk, max(slots_alignment // 4, 1))
    run = max(n for n in range(scan, SLOTS_IN_FLIGHT + 1, scan) if num_topk % n == 0)
    cut = spread(hidden // vector, num_tokens, num_positions, device)
    rows = 1 if num_tokens < 2 * device.num_sms else max(1, EXPAND_THREADS // cut.lanes)
    fills = FEW_FILLS if num_positions < MANY_POSITIONS else MOST_FILLS
    return ExpandPlan(
        dtype, width, hidden, num_topk, vector, scan, run, *cut, rows, fills,
        sf_dtype, num_scales, column_major,
    )  # fmt: skip


def expand_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = ExpandPlan(*static)
    row = 8 * plan.width * plan.vector
    scales = (32,) if plan.sf_dtype else ()
    return (row, 32, 32 * plan.scan), (row, *scales)


@kernel(
    plan=expand_plan,
    access_bits=expand_access_bits,
    # A barrier before each atomic is what TileLang would add.
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def expand(
    dtype: str,
    width: int,
    hidden: int,
    num_topk: int,
    vector: int,
    scan: int,
    run: int,
    lanes: int,
    steps: int,
    parts: int,
    rows: int,
    fills: int,
    sf_dtype: str,
    num_scales: int,
    column_major: bool,
) -> Any:
    """`out[slots[t, k]] = x[t]`, and zero where no slot points; scales alike.

    One launch with two kinds of blocks, which write different rows. Most take `rows` tokens each:
    a token is read once and written to its positions. The first ones, `fills` of them, fill the
    rest with zeros: each reads all slots, marks which of its own positions (every `fills`-th) are
    covered in a bitmap in shared memory, and fills the others. That work is small, starts first
    and is done long before the copies are.
    """
    threads = lanes * rows
    vectors = hidden // vector
    log2 = fills.bit_length() - 1
    scaled, scale_dtype = bool(sf_dtype), sf_dtype or "float32"
    together = max(1, SLOTS_IN_FLIGHT // num_topk)  # tokens in flight while marking
    scale_steps = -(-num_scales // (lanes * parts))  # in each part
    words = MARKED // 32
    num_tokens, num_positions, padded = T.dynamic("num_tokens num_positions padded")
    token_stride, scale_stride = T.dynamic("token_stride scale_stride", "int64")
    if scaled:
        sf_strides = (token_stride, scale_stride)
        sf_type = T.StridedTensor[(num_tokens, num_scales), sf_strides, scale_dtype]
        out_sf_shape = (num_scales, padded) if column_major else (num_positions, num_scales)
        out_sf_type = T.Tensor[out_sf_shape, scale_dtype]
    else:
        sf_type = out_sf_type = T.Tensor[(1,), T.float32]
    to_fill = padded if column_major else num_positions

    @T.macro
    def put_scale(out_sf, position, i, scale):
        if column_major:
            out_sf[i, position] = scale
        else:
            out_sf[position, i] = scale

    @T.macro
    def mark(slots, covered, block, first):
        """Set the bit of each position of this block, from its `first` on, that a slot names."""
        tx = T.get_thread_binding()
        named = T.alloc_local((together, run), T.int32)
        for turn in T.serial(T.ceildiv(num_tokens, together * threads)):
            for k in T.serial(num_topk // run):
                for u in T.unroll(together):
                    token = (turn * together + u) * threads + tx
                    for c in T.unroll(run // scan):
                        if token < num_tokens:
                            for v in T.vectorized(scan):
                                named[u, c * scan + v] = slots[token, k * run + c * scan + v]
                        else:
                            for v in T.unroll(scan):
                                named[u, c * scan + v] = -1
                for u in T.unroll(together):
                    for c in T.unroll(run):
                        position = T.alloc_var(T.int32, init=named[u, c])
                        index = T.alloc_var(T.int32, init=(position >> log2) - first)
                        if (
                            position >= 0
                            and position < num_positions
                            and (position & (fills - 1)) == block
                            and index >= 0
                            and index < MARKED
                        ):
                            # TileLang's own atomic_or is for global memory only.
                            T.call_extern(
                                "int32",
                                "atomicOr",
                                T.address_of(covered[index >> 5]),
                                T.shift_left(1, index & 31),
                            )

    @T.macro
    def fill(slots, out, out_sf, block):
        """Zero the positions `block`, `block + fills`, ... that no slot names."""
        tx = T.get_thread_binding()
        group = T.alloc_var(T.int32, init=tx // lanes)
        lane = tx % lanes
        covered = T.alloc_shared((words,), T.int32)
        uncovered = T.alloc_var(T.int32)
        position = T.alloc_var(T.int32)
        zeros = T.alloc_local((vector,), dtype)
        for v in T.unroll(vector):
            zeros[v] = T.cast(0, dtype)
        mine = T.alloc_var(T.int32, init=(to_fill - block + fills - 1) >> log2)
        for turn in T.serial(T.ceildiv(mine, MARKED)):
            first = T.alloc_var(T.int32, init=turn * MARKED)
            for c in T.serial(T.ceildiv(words, threads)):
                word = c * threads + tx
                if word < words:  # what lies beyond the last position counts as covered
                    left = mine - first - word * 32
                    past = T.shift_left(-1, T.min(T.max(left, 0), 31))
                    covered[word] = T.if_then_else(left >= 32, 0, past)
            T.sync_threads()
            mark(slots, covered, block, first)
            T.sync_threads()
            for c in T.serial(T.ceildiv(T.min(T.ceildiv(mine - first, 32), words), rows)):
                word = c * rows + group
                uncovered = 0
                if word < words:
                    uncovered = ~covered[word]
                while uncovered != 0:
                    position = ((first + word * 32 + first_lane(uncovered)) << log2) + block
                    if position < num_positions:
                        for s in T.serial(T.ceildiv(vectors, lanes)):
                            if s * lanes + lane < vectors:
                                for v in T.vectorized(vector):
                                    out[position, (s * lanes + lane) * vector + v] = zeros[v]
                    if scaled:
                        for s in T.serial(T.ceildiv(num_scales, lanes)):
                            if s * lanes + lane < num_scales:
                                put_scale(
                                    out_sf, position, s * lanes + lane, T.cast(0, scale_dtype)
                                )
                    uncovered = uncovered & (uncovered - 1)
            T.sync_threads()

    @T.macro
    def copy(x, slots, out, sf, out_sf, block):
        """Rows `block // parts * rows ...` of `x` to their positions."""
        tx = T.get_thread_binding()
        lane = tx % lanes
        token = T.alloc_var(T.int32, init=block // parts * rows + tx // lanes)
        part = block % parts
        row = T.alloc_local((steps, vector), dtype)
        scales = T.alloc_local((max(scale_steps, 1),), scale_dtype)
        slot = T.alloc_var(T.int32)
        valid = T.alloc_var(T.int32)
        if token < num_tokens:
            for s in T.unroll(steps):
                i = (part * steps + s) * lanes + lane
                if i < vectors:
                    for v in T.vectorized(vector):
                        row[s, v] = x[token, i * vector + v]
            if scaled:
                for s in T.unroll(scale_steps):
                    i = (part * scale_steps + s) * lanes + lane
                    if i < num_scales:
                        scales[s] = sf[token, i]
            for c in T.serial(T.ceildiv(num_topk, WARP)):
                k = c * WARP + tx % WARP
                slot = -1
                if k < num_topk:
                    slot = slots[token, k]
                valid = T.cast(T.ballot(slot >= 0 and slot < num_positions), T.int32)
                while valid != 0:
                    position = T.shfl_sync(slot, first_lane(valid))
                    valid = valid & (valid - 1)
                    for s in T.unroll(steps):
                        i = (part * steps + s) * lanes + lane
                        if i < vectors:
                            for v in T.vectorized(vector):
                                out[position, i * vector + v] = row[s, v]
                    if scaled:
                        for s in T.unroll(scale_steps):
                            i = (part * scale_steps + s) * lanes + lane
                            if i < num_scales:
                                put_scale(out_sf, position, i, scales[s])

    @T.prim_func
    def expanded(
        x: T.Tensor[(num_tokens, hidden), dtype],
        slots: T.Tensor[(num_tokens, num_topk), T.int32],
        out: T.Tensor[(num_positions, hidden), dtype],
        sf: sf_type,
        out_sf: out_sf_type,
    ):
        with T.Kernel(fills + T.ceildiv(num_tokens, rows) * parts, threads=threads) as block:
            if block < fills:
                fill(slots, out, out_sf, block)
            else:
                copy(x, slots, out, sf, out_sf, block - fills)

    return expanded


# ---- reduce -------------------------------------------------------------------------------------

REDUCE_THREADS = 256  # about
SLOTS_AT_ONCE = 1  # rows of a token that are loaded before the first is added


class ReducePlan(NamedTuple):
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


def reduce_plan(
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
) -> ReducePlan:
    """Widths of elements and what divides the addresses are in bytes."""
    vector = math.gcd(
        ACCESS_BYTES // max(x_width, out_width),
        hidden,
        max(x_alignment // x_width, 1),
        max(out_alignment // out_width, 1),
    )
    cut = split(hidden // vector, num_tokens, device)
    rows = 1 if num_tokens < 2 * device.num_sms else max(1, REDUCE_THREADS // cut.lanes)
    return ReducePlan(
        dtype, out_dtype, hidden, num_topk, vector, 8 * x_width * vector, 8 * out_width * vector,
        *cut, rows, weighted, x_scaled, out_scaled,
    )  # fmt: skip


def reduce_access_bits(*static: Any) -> tuple[tuple[int, int], int]:
    plan = ReducePlan(*static)
    return (plan.x_bits, 32), plan.out_bits


@kernel(plan=reduce_plan, access_bits=reduce_access_bits, pass_configs=EXPLICIT_GUARDS)
def reduce(
    dtype: str,
    out_dtype: str,
    hidden: int,
    num_topk: int,
    vector: int,
    x_bits: int,
    out_bits: int,
    lanes: int,
    steps: int,
    parts: int,
    rows: int,
    weighted: bool,
    x_scaled: bool,
    out_scaled: bool,
) -> Any:
    """`out[t] = sum of x[slots[t, k]] * scale` over the valid slots, in their order.

    Each step is one fused multiply-add, so the bits do not depend on the cut of the row. The rows
    of up to `SLOTS_AT_ONCE` slots are loaded before the first of them is added.
    """
    threads = lanes * rows
    vectors = hidden // vector
    at_once = min(SLOTS_AT_ONCE, num_topk)
    num_tokens, num_positions = T.dynamic("num_tokens num_positions")

    @T.prim_func
    def reduced(
        x: T.Tensor[(num_positions, hidden), dtype],
        slots: T.Tensor[(num_tokens, num_topk), T.int32],
        out: T.Tensor[(num_tokens, hidden), out_dtype],
        weights: T.Tensor[(num_tokens, num_topk), T.float32],
        x_sf: T.Tensor[(num_positions,), T.float32],
        sf: T.Tensor[(1,), T.float32],
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows) * parts, threads=threads) as block:
            tx = T.get_thread_binding()
            first = block % parts * steps * lanes + tx % lanes
            token = T.alloc_var(T.int32, init=block // parts * rows + tx // lanes)
            slot = T.alloc_var(T.int32)
            scale = T.alloc_var(T.float32)
            valid = T.alloc_var(T.int32)
            position = T.alloc_local((at_once,), T.int32)
            lane_of = T.alloc_local((at_once,), T.int32)
            factor = T.alloc_var(T.float32)
            loaded = T.alloc_local((at_once, steps, vector), dtype)
            wide = T.alloc_local((vector,), T.float32)
            total = T.alloc_local((steps, vector), T.float32)
            rounded = T.alloc_local((vector,), out_dtype)
            if token < num_tokens:
                for s in T.unroll(steps):
                    for v in T.unroll(vector):
                        total[s, v] = 0.0
                for c in T.serial(T.ceildiv(num_topk, WARP)):
                    k = c * WARP + tx % WARP
                    slot = -1
                    scale = 1.0
                    if k < num_topk:
                        slot = slots[token, k]
                        if weighted:
                            scale = weights[token, k]
                    if slot >= num_positions:
                        slot = -1
                    if x_scaled:
                        if slot >= 0:
                            scale = T.fmul(scale, x_sf[slot])
                    valid = T.cast(T.ballot(slot >= 0), T.int32)
                    while valid != 0:
                        for n in T.unroll(at_once):
                            position[n] = -1
                            if valid != 0:
                                lane_of[n] = first_lane(valid)
                                position[n] = T.shfl_sync(slot, lane_of[n])
                                valid = valid & (valid - 1)
                                for s in T.unroll(steps):
                                    if first + s * lanes < vectors:
                                        for v in T.vectorized(vector):
                                            loaded[n, s, v] = x[
                                                position[n], (first + s * lanes) * vector + v
                                            ]
                        for n in T.unroll(at_once):
                            if position[n] >= 0:
                                factor = T.shfl_sync(scale, lane_of[n])  # not before: it may wait
                                for s in T.unroll(steps):
                                    for v in T.vectorized(vector):
                                        wide[v] = T.cast(loaded[n, s, v], T.float32)
                                    for v in T.unroll(vector):
                                        total[s, v] = T.fma(wide[v], factor, total[s, v])
                for s in T.unroll(steps):
                    if first + s * lanes < vectors:
                        if out_scaled:
                            for v in T.unroll(vector):
                                total[s, v] = T.fmul(total[s, v], sf[0])
                        for v in T.vectorized(vector):
                            rounded[v] = T.cast(total[s, v], out_dtype)
                        for v in T.vectorized(vector):
                            out[token, (first + s * lanes) * vector + v] = rounded[v]

    return reduced
