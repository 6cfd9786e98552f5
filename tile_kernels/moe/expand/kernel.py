"""Tokens to the fused layout: rows are copied to their positions.

A row is cut into vectors of up to 16 bytes. A group of `lanes` threads (whole warps) works on one
part of a row; each thread takes `steps` vectors of it, `lanes` apart. The lanes of a warp read the
slots of a token together, then take the valid ones one by one: a bit each in a mask, whose position
comes by a shuffle.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.expand.plan import MARKED_POSITIONS, SLOTS_IN_FLIGHT, Plan
from tile_kernels.moe.primitives import first_lane, load_part_of
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    row = 8 * plan.width * plan.vector
    scales = (32,) if plan.sf_dtype else ()
    return (row, 32, 32 * plan.scan), (row, *scales)


@kernel(
    access_bits=access_bits,
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
    words = MARKED_POSITIONS // 32
    load_row = load_part_of(vectors, vector, lanes, steps)
    load_scales = load_part_of(num_scales, 1, lanes, scale_steps)
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
        slot_regs = T.alloc_local((together, run), T.int32)
        for iteration in T.serial(T.ceildiv(num_tokens, together * threads)):
            for k in T.serial(num_topk // run):
                for u in T.unroll(together):
                    token = (iteration * together + u) * threads + tx
                    for c in T.unroll(run // scan):
                        if token < num_tokens:
                            for v in T.vectorized(scan):
                                slot_regs[u, c * scan + v] = slots[token, k * run + c * scan + v]
                        else:
                            for v in T.unroll(scan):
                                slot_regs[u, c * scan + v] = -1
                for u in T.unroll(together):
                    for c in T.unroll(run):
                        position = T.alloc_var(T.int32, init=slot_regs[u, c])
                        index = T.alloc_var(T.int32, init=(position >> log2) - first)
                        if (
                            position >= 0
                            and position < num_positions
                            and (position & (fills - 1)) == block
                            and index >= 0
                            and index < MARKED_POSITIONS
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
        for iteration in T.serial(T.ceildiv(mine, MARKED_POSITIONS)):
            first = T.alloc_var(T.int32, init=iteration * MARKED_POSITIONS)
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
        scales = T.alloc_local((max(scale_steps, 1), 1), scale_dtype)
        slot = T.alloc_var(T.int32)
        valid = T.alloc_var(T.int32)
        if token < num_tokens:
            load_row(row, x, token, part, lane)
            if scaled:
                load_scales(scales, sf, token, part, lane)
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
                                put_scale(out_sf, position, i, scales[s, 0])

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
