"""Rows to the memory of peers.

A row is cut into vectors of up to 16 bytes; a group of `lanes` threads (whole warps) works on one
part of a row. The lanes of a warp read the slots of a row together and take the valid ones one by
one. Nothing waits for a peer: the stream orders these kernels with what the peers do.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.ep.peers.plan import PutPlan, SumPlan
from tile_kernels.moe.primitives import first_lane, load_part_of
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

ROWS, SCALES, WORDS = 0, 1, 2  # rows of the table of addresses


def put_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = PutPlan(*static)
    size = {"int32": 32, "uint8": 8}[plan.dtype] * plan.vector
    return (size, 32, 64), (size, 32)


@kernel(access_bits=put_access_bits, pass_configs=EXPLICIT_GUARDS)
def put_rows(
    dtype: str,
    width: int,
    num_topk: int,
    vector: int,
    lanes: int,
    steps: int,
    parts: int,
    rows: int,
    num_scales: int,
    num_words: int,
) -> Any:
    """`peer[ranks[t, k]][slots[t, k]] = x[t]`, scales alike, and words at `items[t, k]`."""
    threads = lanes * rows
    vectors = width // vector
    num_tokens, num_ranks = T.dynamic("num_tokens num_ranks")
    token_stride, scale_stride = T.dynamic("token_stride scale_stride", "int64")
    scale_steps = -(-num_scales // (lanes * parts))  # in each part
    word_steps = -(-num_words // lanes)
    load_row = load_part_of(vectors, vector, lanes, steps)
    load_scales = load_part_of(num_scales, 1, lanes, scale_steps)
    if num_scales:
        strides = (token_stride, scale_stride)
        sf_type = T.StridedTensor[(num_tokens, num_scales), strides, T.int32]
    else:
        sf_type = T.Tensor[(1,), T.int32]
    if num_words:
        words_type = T.Tensor[(num_tokens, num_words), T.int32]
        items_type = T.Tensor[(num_tokens, num_topk), T.int32]
    else:
        words_type = items_type = T.Tensor[(1,), T.int32]

    @T.prim_func
    def put(
        x: T.Tensor[(num_tokens, width), dtype],
        ranks: T.Tensor[(num_tokens, num_topk), T.int32],
        slots: T.Tensor[(num_tokens, num_topk), T.int32],
        peers: T.Tensor[(3, num_ranks), T.ptr],
        sf: sf_type,
        items: items_type,
        words: words_type,
        capacity: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows) * parts, threads=threads) as block:
            tx = T.get_thread_binding()
            lane = tx % lanes
            token = T.alloc_var(T.int32, init=block // parts * rows + tx // lanes)
            part = block % parts
            row = T.alloc_local((steps, vector), dtype)
            scales = T.alloc_local((max(scale_steps, 1), 1), T.int32)
            rank, slot = T.alloc_var(T.int32), T.alloc_var(T.int32)
            peer, position = T.alloc_var(T.int32), T.alloc_var(T.int32)
            valid = T.alloc_var(T.int32)
            if token < num_tokens:
                load_row(row, x, token, part, lane)
                if num_scales:
                    load_scales(scales, sf, token, part, lane)
                for c in T.serial(T.ceildiv(num_topk, WARP)):
                    k = c * WARP + tx % WARP
                    slot = -1
                    rank = 0
                    if k < num_topk:
                        slot = slots[token, k]
                        rank = ranks[token, k]
                    valid = T.cast(T.ballot(slot >= 0), T.int32)
                    while valid != 0:
                        position = T.shfl_sync(slot, first_lane(valid))
                        peer = T.shfl_sync(rank, first_lane(valid))
                        valid = valid & (valid - 1)
                        out = T.make_tensor(peers[ROWS, peer], (capacity, width), dtype)
                        for s in T.unroll(steps):
                            i = (part * steps + s) * lanes + lane
                            if i < vectors:
                                for v in T.vectorized(vector):
                                    out[position, i * vector + v] = row[s, v]
                        if num_scales:
                            out_sf = T.make_tensor(
                                peers[SCALES, peer], (capacity, num_scales), T.int32
                            )
                            for s in T.unroll(scale_steps):
                                i = (part * scale_steps + s) * lanes + lane
                                if i < num_scales:
                                    out_sf[position, i] = scales[s, 0]
                    if num_words:
                        if part == 0:
                            slot = -1
                            if k < num_topk:
                                slot = items[token, k]
                            valid = T.cast(T.ballot(slot >= 0), T.int32)
                            while valid != 0:
                                position = T.shfl_sync(slot, first_lane(valid))
                                peer = T.shfl_sync(rank, first_lane(valid))
                                valid = valid & (valid - 1)
                                out_words = T.make_tensor(
                                    peers[WORDS, peer], (capacity, num_words), T.int32
                                )
                                for s in T.unroll(word_steps):
                                    if s * lanes + lane < num_words:
                                        out_words[position, s * lanes + lane] = words[
                                            token, s * lanes + lane
                                        ]

    return put


def sum_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = SumPlan(*static)
    return (plan.bits, 32, 64), (plan.bits, 32)


@kernel(access_bits=sum_access_bits, pass_configs=EXPLICIT_GUARDS)
def put_sums(
    dtype: str,
    hidden: int,
    num_topk: int,
    vector: int,
    bits: int,
    lanes: int,
    steps: int,
    parts: int,
    rows: int,
    num_words: int,
) -> Any:
    """`peer[ranks[n]][slots[n]] = sum of x[positions[n, k]]` over the valid ones, in their order.

    In float32, from +0.0, rounded once: the additions of `moe.reduce_fused`.
    """
    del bits
    threads = lanes * rows
    vectors = hidden // vector
    num_rows, num_positions, num_ranks = T.dynamic("num_rows num_positions num_ranks")
    word_steps = -(-num_words // lanes)
    words_shape = (num_rows, num_words) if num_words else (1,)

    @T.prim_func
    def put(
        x: T.Tensor[(num_positions, hidden), dtype],
        positions: T.Tensor[(num_rows, num_topk), T.int32],
        ranks: T.Tensor[(num_rows,), T.int32],
        slots: T.Tensor[(num_rows,), T.int32],
        peers: T.Tensor[(3, num_ranks), T.ptr],
        words: T.Tensor[words_shape, T.int32],
        capacity: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, rows) * parts, threads=threads) as block:
            tx = T.get_thread_binding()
            lane = tx % lanes
            part = block % parts
            first = part * steps * lanes + lane
            number = T.alloc_var(T.int32, init=block // parts * rows + tx // lanes)
            slot, position = T.alloc_var(T.int32), T.alloc_var(T.int32)
            valid = T.alloc_var(T.int32)
            loaded = T.alloc_local((vector,), dtype)
            total = T.alloc_local((steps, vector), T.float32)
            rounded = T.alloc_local((vector,), dtype)
            if number < num_rows:
                for s in T.unroll(steps):
                    for v in T.unroll(vector):
                        total[s, v] = 0.0
                for c in T.serial(T.ceildiv(num_topk, WARP)):
                    k = c * WARP + tx % WARP
                    slot = -1
                    if k < num_topk:
                        slot = positions[number, k]
                    valid = T.cast(T.ballot(slot >= 0 and slot < num_positions), T.int32)
                    while valid != 0:
                        position = T.shfl_sync(slot, first_lane(valid))
                        valid = valid & (valid - 1)
                        for s in T.unroll(steps):
                            if first + s * lanes < vectors:
                                for v in T.vectorized(vector):
                                    loaded[v] = x[position, (first + s * lanes) * vector + v]
                                for v in T.unroll(vector):
                                    total[s, v] = T.ieee_add(
                                        total[s, v], T.cast(loaded[v], T.float32)
                                    )
                out = T.make_tensor(peers[ROWS, ranks[number]], (capacity, hidden), dtype)
                for s in T.unroll(steps):
                    if first + s * lanes < vectors:
                        for v in T.unroll(vector):
                            rounded[v] = T.cast(total[s, v], dtype)
                        for v in T.vectorized(vector):
                            out[slots[number], (first + s * lanes) * vector + v] = rounded[v]
                if num_words:
                    if part == 0:
                        out_words = T.make_tensor(
                            peers[WORDS, ranks[number]], (capacity, num_words), T.int32
                        )
                        for s in T.unroll(word_steps):
                            if s * lanes + lane < num_words:
                                out_words[slots[number], s * lanes + lane] = words[
                                    number, s * lanes + lane
                                ]

    return put
