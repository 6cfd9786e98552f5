"""The fused layout back to tokens: rows are summed from their positions.

The tiling of rows is that of `moe/expand/kernel.py`.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.primitives import first_lane
from tile_kernels.moe.reduce.plan import SLOTS_AT_ONCE, Plan
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, int], int]:
    plan = Plan(*static)
    return (plan.x_bits, 32), plan.out_bits


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
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
