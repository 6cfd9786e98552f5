"""The Engram gate. How rows are divided is in `common`."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.engram.kernels.common import PASS_CONFIGS, VECTOR, cuts, long_cut
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import (
    WARP,
    await_stages,
    close_stage,
    free_stage,
    stage,
    sum_over_block,
)
from tile_kernels.runtime.launch import kernel

MOST_STEPS = 4
FEWEST_THREADS = 128
RESIDENT = 512  # threads per multiprocessor: few with much each, since sums cost all the same
MOST_STAGES = 4
STREAMED = 3  # rows of x, k and v


class Plan(NamedTuple):
    """`stages` rows are copied ahead, 0 for none; `blocks` share a multiprocessor, `workers` the
    tokens of a stream.
    """

    streams: int
    hidden: int
    threads: int
    steps: int
    stages: int
    blocks: int
    workers: int
    saved: bool
    residual: bool


def plan(streams: int, hidden: int, saved: bool, residual: bool, device: Device) -> Plan:
    enough = [cut for cut in cuts(hidden) if cut[1] <= MOST_STEPS and cut[0] >= FEWEST_THREADS]
    threads, steps = enough[0] if enough else long_cut(hidden)
    row = STREAMED * threads * steps * VECTOR * 2
    room = device.smem_per_block - 2048
    blocks = max(1, min(RESIDENT // threads, room // (2 * row)))
    stages = min(MOST_STAGES, room // (blocks * row))
    workers = max(1, blocks * device.num_sms // streams)
    return Plan(streams, hidden, threads, steps, stages, blocks, workers, saved, residual)


def access_bits(*static: Any) -> tuple[int, tuple[int, ...]]:
    return 128, (32, 128) if Plan(*static).saved else (128,)


@T.macro
def gate_of(similarity, clamp):
    """`sigmoid(sign(s) * sqrt(max(|s|, clamp)))`: exactly a half at 0, NaN stays NaN."""
    compared = T.alloc_var(T.float32, init=similarity)
    root = T.alloc_var(T.float32, init=T.sqrt(T.max(T.abs(compared), clamp)))
    root = T.Select(compared < T.float32(0), -root, root)
    root = T.Select(compared == T.float32(0) or T.isnan(compared), compared, root)
    return T.ieee_fdiv(T.float32(1), T.float32(1) + T.exp(-root))


@kernel(plan=plan, access_bits=access_bits, pass_configs=PASS_CONFIGS)
def gate(
    streams: int,
    hidden: int,
    threads: int,
    steps: int,
    stages: int,
    blocks: int,
    workers: int,
    saved: bool,
    residual: bool,
) -> Any:
    """`out = x + sigmoid(u) * v`, where `u` compares `x` and `k`; a block per stream."""
    warps = threads // WARP
    held = stages > 0
    depth = max(1, stages)
    summed = sum_over_block(3, threads)
    tokens = T.dynamic("tokens")
    k_token, k_stream, v_token = T.dynamic("k_token k_stream v_token", "int64")
    saved_shape = (tokens, streams) if saved else (1, 1)

    @T.macro
    def fetch(places, turn, worker, stream, x, k, v):
        """Copy a row ahead: the one that this block comes to in its `turn`."""
        tx = T.get_thread_binding()
        token = T.alloc_var(T.int32, init=worker + turn * workers)
        slot = T.alloc_var(T.int32, init=turn % depth)
        if token < tokens:
            for s in T.unroll(steps):
                place = s * threads + tx
                if place * VECTOR < hidden:
                    stage(places[slot, 0, place, 0], x[token, stream, place * VECTOR], VECTOR)
                    stage(places[slot, 1, place, 0], k[token, stream, place * VECTOR], VECTOR)
                    stage(places[slot, 2, place, 0], v[token, place * VECTOR], VECTOR)
        close_stage()

    @T.prim_func
    def gate_rows(
        x: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        k: T.StridedTensor[(tokens, streams, hidden), (k_token, k_stream, 1), T.bfloat16],
        v: T.StridedTensor[(tokens, hidden), (v_token, 1), T.bfloat16],
        weight: T.Tensor[(streams, hidden), T.float32],
        out: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        dot: T.Tensor[saved_shape, T.float32],
        score: T.Tensor[saved_shape, T.float32],
        rstd_x: T.Tensor[saved_shape, T.float32],
        rstd_k: T.Tensor[saved_shape, T.float32],
        eps: T.float32,
        clamp: T.float32,
    ):
        with T.Kernel(streams, T.min(tokens, workers), threads=threads) as (stream, worker):
            T.annotate_min_blocks_per_sm(blocks)
            T.assume(k_token % VECTOR == 0)
            T.assume(k_stream % VECTOR == 0)
            T.assume(v_token % VECTOR == 0)
            tx = T.get_thread_binding()
            places = T.alloc_shared(
                (depth, STREAMED, steps * threads if held else 1, VECTOR), T.bfloat16
            )
            of_warps = T.alloc_shared((2, 3, warps), T.float32)
            weights = T.alloc_local(((steps if held else 1) * VECTOR,), T.float32)
            own_x = T.alloc_local((steps * VECTOR,), T.bfloat16)
            own_v = T.alloc_local((steps * VECTOR,), T.bfloat16)
            own_k = T.alloc_local((VECTOR,), T.bfloat16)
            values = T.alloc_local((VECTOR,), T.float32)
            written = T.alloc_local((VECTOR,), T.bfloat16)
            sums = T.alloc_local((3,), T.float32)
            if held:
                for s in T.unroll(steps):
                    place = s * threads + tx
                    if place * VECTOR < hidden:
                        for e in T.vectorized(VECTOR):
                            weights[s * VECTOR + e] = weight[stream, place * VECTOR + e]
                for ahead in T.unroll(depth):
                    fetch(places, ahead, worker, stream, x, k, v)
            for turn in T.serial(T.ceildiv(tokens - worker, workers)):
                token = T.alloc_var(T.int32, init=worker + turn * workers)
                slot = T.alloc_var(T.int32, init=turn % depth)
                for n in T.unroll(3):
                    sums[n] = T.float32(0)
                if held:
                    await_stages(depth - 1)
                for s in T.unroll(steps):
                    place = s * threads + tx
                    if place * VECTOR < hidden:
                        if held:
                            for e in T.vectorized(VECTOR):
                                own_x[s * VECTOR + e] = places[slot, 0, place, e]
                            for e in T.vectorized(VECTOR):
                                own_k[e] = places[slot, 1, place, e]
                            for e in T.vectorized(VECTOR):
                                own_v[s * VECTOR + e] = places[slot, 2, place, e]
                        else:
                            for e in T.vectorized(VECTOR):
                                weights[e] = weight[stream, place * VECTOR + e]
                            for e in T.vectorized(VECTOR):
                                own_x[s * VECTOR + e] = x[token, stream, place * VECTOR + e]
                            for e in T.vectorized(VECTOR):
                                own_k[e] = k[token, stream, place * VECTOR + e]
                            for e in T.vectorized(VECTOR):
                                own_v[s * VECTOR + e] = v[token, place * VECTOR + e]
                        for e in T.unroll(VECTOR):
                            of_x = T.alloc_var(T.float32)
                            of_k = T.alloc_var(T.float32)
                            of_x = T.cast(own_x[s * VECTOR + e], T.float32)
                            of_k = T.cast(own_k[e], T.float32)
                            of_w = weights[(s if held else 0) * VECTOR + e]
                            sums[0] = T.fma(of_x * of_w, of_k, sums[0])
                            sums[1] = T.fma(of_x, of_x, sums[1])
                            sums[2] = T.fma(of_k, of_k, sums[2])
                if held:
                    free_stage()
                    fetch(places, turn + depth, worker, stream, x, k, v)
                summed(sums, of_warps, turn)
                inverse_x = T.alloc_var(T.float32)
                inverse_k = T.alloc_var(T.float32)
                inverse_x = T.rsqrt(sums[1] * T.float32(1 / hidden) + eps)
                inverse_k = T.rsqrt(sums[2] * T.float32(1 / hidden) + eps)
                opening = T.alloc_var(T.float32)
                opening = gate_of(sums[0] * inverse_x * inverse_k * T.float32(hidden**-0.5), clamp)
                if saved:
                    if tx == 0:
                        dot[token, stream] = sums[0]
                        score[token, stream] = opening
                        rstd_x[token, stream] = inverse_x
                        rstd_k[token, stream] = inverse_k
                for s in T.unroll(steps):
                    place = s * threads + tx
                    if place * VECTOR < hidden:
                        for e in T.unroll(VECTOR):
                            values[e] = T.cast(own_v[s * VECTOR + e], T.float32)
                            if residual:
                                of_x = T.cast(own_x[s * VECTOR + e], T.float32)
                                values[e] = T.fma(opening, values[e], of_x)
                            else:
                                values[e] = opening * values[e]
                        for e in T.vectorized(VECTOR):
                            written[e] = T.cast(values[e], T.bfloat16)
                        for e in T.vectorized(VECTOR):
                            out[token, stream, place * VECTOR + e] = written[e]

    return gate_rows
