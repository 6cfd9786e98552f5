"""The causal convolution of normed rows, and its gradients. See `plan.py` for the division."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.convolution.plan import (
    CHUNK,
    GRADIENT_VECTOR,
    NORM_WARPS,
    ROW_THREADS,
    VECTOR,
    Plan,
    RowPlan,
    num_tiles,
)
from tile_kernels.engram.weight.plan import BITS
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

AT_ONCE = 4  # vectors of a lane that are loaded before any is used
PASS_CONFIGS = {**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True}


@kernel(access_bits=lambda *_: (128, 32), pass_configs=PASS_CONFIGS)
def row_norms(hidden: int) -> Any:
    """`1 / sqrt(mean(y * y) + eps)` of each row; a warp per row."""
    rows = T.dynamic("rows")
    steps = -(-hidden // (VECTOR * WARP * AT_ONCE))

    @T.prim_func
    def norms(
        y: T.Tensor[(rows, hidden), T.bfloat16], rstd: T.Tensor[(rows,), T.float32], eps: T.float32
    ):
        with T.Kernel(T.ceildiv(rows, NORM_WARPS), threads=NORM_WARPS * WARP) as block:
            lane = T.get_thread_binding() % WARP
            row = T.alloc_var(T.int32, init=block * NORM_WARPS + T.get_thread_binding() // WARP)
            total = T.alloc_var(T.float32, init=T.float32(0))
            y_regs = T.alloc_local((AT_ONCE, VECTOR), T.bfloat16)
            if row < rows:
                for s in T.serial(steps):
                    for i in T.unroll(AT_ONCE):
                        first = ((s * AT_ONCE + i) * WARP + lane) * VECTOR
                        if first < hidden:
                            for e in T.vectorized(VECTOR):
                                y_regs[i, e] = y[row, first + e]
                        else:
                            for e in T.unroll(VECTOR):
                                y_regs[i, e] = T.bfloat16(0)
                    for i in T.unroll(AT_ONCE):
                        for e in T.unroll(VECTOR):
                            value = T.cast(y_regs[i, e], T.float32)
                            total = T.ieee_fmaf(value, value, total)
            for d in T.unroll(5):
                total = total + T.shfl_xor(total, T.shift_left(1, d))
            if row < rows and lane == 0:
                rstd[row] = T.rsqrt(total / T.float32(hidden) + eps)

    return norms


def convolve_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = Plan(*static)
    return tuple(sorted({32, 128, min(128, VECTOR * BITS[plan.dtype])})), 128


@kernel(access_bits=convolve_access_bits, pass_configs=PASS_CONFIGS)
def convolve(*static: Any) -> Any:
    """`silu(sum_j tap_j n[t - j * dilation])`; with streams, these plus `y` plus that."""
    plan = Plan(*static)
    streams, hidden, taps, dilation = plan.streams, plan.hidden, plan.taps, plan.dilation
    tiles = num_tiles(hidden, VECTOR)
    at_once = min(VECTOR, 128 // BITS[plan.dtype])  # weights of a load
    tokens = T.dynamic("tokens")
    streams_shape = (tokens, streams, hidden) if plan.summed else (1, 1, 1)

    @T.prim_func
    def convolve_columns(
        y: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        rstd: T.Tensor[(tokens, streams), T.float32],
        weight: T.Tensor[(streams, hidden), plan.dtype],
        tap: T.Tensor[(taps, streams, hidden), plan.dtype],
        starts: T.Tensor[(tokens,), T.int32],
        x: T.Tensor[streams_shape, T.bfloat16],
        out: T.Tensor[(tokens, streams, hidden), T.bfloat16],
    ):
        with T.Kernel(
            tiles * streams * T.ceildiv(tokens, dilation * CHUNK), dilation, threads=plan.threads
        ) as (block, series):
            part = block // (tiles * streams)
            tile = block % (tiles * streams)
            stream = tile // tiles
            column = (tile % tiles * plan.threads + T.get_thread_binding()) * VECTOR
            weight_regs = T.alloc_local((VECTOR,), plan.dtype)
            tap_regs = T.alloc_local((taps, VECTOR), plan.dtype)
            y_regs = T.alloc_local((VECTOR,), T.bfloat16)
            x_regs = T.alloc_local((VECTOR,), T.bfloat16)
            out_regs = T.alloc_local((VECTOR,), T.bfloat16)
            normed = T.alloc_local((taps, VECTOR), T.float32)  # of the last tokens of the series
            if column < hidden:
                for p in T.unroll(VECTOR // at_once):
                    for e in T.vectorized(at_once):
                        weight_regs[p * at_once + e] = weight[stream, column + p * at_once + e]
                for j in T.unroll(taps):
                    for p in T.unroll(VECTOR // at_once):
                        for e in T.vectorized(at_once):
                            tap_regs[j, p * at_once + e] = tap[j, stream, column + p * at_once + e]
                for j in T.unroll(taps):
                    for e in T.unroll(VECTOR):
                        normed[j, e] = T.float32(0)
                for i in T.serial(CHUNK + taps - 1):
                    token = T.alloc_var(
                        T.int32, init=(part * CHUNK + i - (taps - 1)) * dilation + series
                    )
                    if token >= 0 and token < tokens:
                        scale = T.alloc_var(T.float32, init=rstd[token, stream])
                        for e in T.vectorized(VECTOR):
                            y_regs[e] = y[token, stream, column + e]
                        for j in T.unroll(taps - 1):
                            for e in T.unroll(VECTOR):
                                normed[taps - 1 - j, e] = normed[taps - 2 - j, e]
                        for e in T.unroll(VECTOR):
                            normed[0, e] = (
                                T.cast(y_regs[e], T.float32)
                                * scale
                                * T.cast(weight_regs[e], T.float32)
                            )
                        if i >= taps - 1:
                            start = T.alloc_var(T.int32, init=starts[token])
                            if plan.summed:
                                for e in T.vectorized(VECTOR):
                                    x_regs[e] = x[token, stream, column + e]
                            for e in T.unroll(VECTOR):
                                total = T.alloc_var(
                                    T.float32, init=normed[0, e] * T.cast(tap_regs[0, e], T.float32)
                                )
                                for j in T.unroll(taps - 1):
                                    if token - (j + 1) * dilation >= start:
                                        total = total + normed[j + 1, e] * T.cast(
                                            tap_regs[j + 1, e], T.float32
                                        )
                                out_regs[e] = T.cast(
                                    total / (T.float32(1) + T.exp(-total)), T.bfloat16
                                )
                                if plan.summed:
                                    added = T.cast(
                                        T.cast(y_regs[e], T.float32)
                                        + T.cast(out_regs[e], T.float32),
                                        T.bfloat16,
                                    )
                                    out_regs[e] = T.cast(
                                        T.cast(x_regs[e], T.float32) + T.cast(added, T.float32),
                                        T.bfloat16,
                                    )
                            for e in T.vectorized(VECTOR):
                                out[token, stream, column + e] = out_regs[e]

    return convolve_columns


def gradients_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    weights = min(128, GRADIENT_VECTOR * BITS[Plan(*static).dtype])
    return tuple(sorted({32, 64, weights})), (32, 128)


@kernel(access_bits=gradients_access_bits, pass_configs=PASS_CONFIGS)
def convolve_gradients(*static: Any) -> Any:
    """Gradients of normed rows and their products with the rows; sums over tokens of a chunk.

    A token's gradient is complete when the last tap that reads it was seen: `taps - 1` steps later.
    """
    plan = Plan(*static)
    streams, hidden, taps, dilation = plan.streams, plan.hidden, plan.taps, plan.dilation
    width = GRADIENT_VECTOR
    tiles, warps = num_tiles(hidden, width), plan.threads // WARP
    tokens, parts = T.dynamic("tokens parts")
    last = taps - 1

    @T.macro
    def fetch(grad, y, rstd, starts, first, stream, column, i, next_y, next_grad, ahead, begin):
        """Load what step `i` needs, a step before it is used."""
        token = T.alloc_var(T.int32, init=first + i * dilation)
        if i < CHUNK + 2 * last and token >= 0 and token < tokens and column < hidden:
            ahead[0] = rstd[token, stream]
            begin[0] = starts[token]
            for e in T.vectorized(width):
                next_y[e] = y[token, stream, column + e]
            if i >= last:
                for e in T.vectorized(width):
                    next_grad[e] = grad[token, stream, column + e]

    @T.prim_func
    def gradients_of_columns(
        grad: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        y: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        rstd: T.Tensor[(tokens, streams), T.float32],
        weight: T.Tensor[(streams, hidden), plan.dtype],
        tap: T.Tensor[(taps, streams, hidden), plan.dtype],
        starts: T.Tensor[(tokens,), T.int32],
        normed_grad: T.Tensor[(tokens, streams, hidden), T.float32],
        sums: T.Tensor[(tokens, streams, tiles * warps), T.float32],
        partial: T.Tensor[(parts, taps + 1, streams, hidden), T.float32],
    ):
        with T.Kernel(
            tiles * streams * T.ceildiv(tokens, dilation * CHUNK), dilation, threads=plan.threads
        ) as (block, series):
            part = block // (tiles * streams)
            tile = block % (tiles * streams)
            tx = T.get_thread_binding()
            stream = tile // tiles
            column = (tile % tiles * plan.threads + tx) * width
            raw_weight = T.alloc_local((width,), plan.dtype)
            raw_tap = T.alloc_local((taps, width), plan.dtype)
            y_regs = T.alloc_local((width,), T.bfloat16)
            grad_regs = T.alloc_local((width,), T.bfloat16)
            out_regs = T.alloc_local((width,), T.float32)
            next_y = T.alloc_local((width,), T.bfloat16)
            next_grad = T.alloc_local((width,), T.bfloat16)
            ahead = T.alloc_local((1,), T.float32)
            begin = T.alloc_local((1,), T.int32)
            # Of the last tokens of the series, the newest first.
            rows = T.alloc_local((taps, width), T.float32)  # y / rms(y)
            slopes = T.alloc_local((taps, width), T.float32)  # gradients before the SiLU
            start = T.alloc_local((taps,), T.int32)
            tap_sums = T.alloc_local((taps, width), T.float32)
            weight_sums = T.alloc_local((width,), T.float32)
            for e in T.unroll(width):
                raw_weight[e] = T.cast(T.float32(0), plan.dtype)
                next_y[e] = T.bfloat16(0)
                next_grad[e] = T.bfloat16(0)
                weight_sums[e] = T.float32(0)
                for j in T.unroll(taps):
                    raw_tap[j, e] = T.cast(T.float32(0), plan.dtype)
                    rows[j, e] = T.float32(0)
                    slopes[j, e] = T.float32(0)
                    tap_sums[j, e] = T.float32(0)
            ahead[0] = T.float32(0)
            begin[0] = 0
            for j in T.unroll(taps):
                start[j] = 0
            if column < hidden:
                for e in T.vectorized(width):
                    raw_weight[e] = weight[stream, column + e]
                for j in T.unroll(taps):
                    for e in T.vectorized(width):
                        raw_tap[j, e] = tap[j, stream, column + e]
            first = T.alloc_var(T.int32, init=(part * CHUNK - last) * dilation + series)
            fetch(grad, y, rstd, starts, first, stream, column, 0, next_y, next_grad, ahead, begin)
            for i in T.serial(CHUNK + 2 * last):
                token = T.alloc_var(T.int32, init=first + i * dilation)
                scale = T.alloc_var(T.float32, init=ahead[0])
                newest = T.alloc_var(T.int32, init=begin[0])
                for e in T.unroll(width):
                    y_regs[e] = next_y[e]
                    grad_regs[e] = next_grad[e]
                fetch(
                    grad, y, rstd, starts, first, stream, column, i + 1, next_y, next_grad, ahead,
                    begin,
                )  # fmt: skip
                for j in T.unroll(last):
                    start[last - j] = start[last - 1 - j]
                    for e in T.unroll(width):
                        rows[last - j, e] = rows[last - 1 - j, e]
                        slopes[last - j, e] = slopes[last - 1 - j, e]
                start[0] = 0
                for e in T.unroll(width):
                    rows[0, e] = T.float32(0)
                    slopes[0, e] = T.float32(0)
                if token >= 0 and token < tokens and column < hidden:
                    start[0] = newest
                    for e in T.unroll(width):
                        rows[0, e] = T.cast(y_regs[e], T.float32) * scale
                    if i >= last:
                        for e in T.unroll(width):
                            total = T.alloc_var(
                                T.float32, init=rows[0, e] * T.cast(raw_tap[0, e], T.float32)
                            )
                            for j in T.unroll(last):
                                if token - (j + 1) * dilation >= start[0]:
                                    total = total + rows[j + 1, e] * T.cast(
                                        raw_tap[j + 1, e], T.float32
                                    )
                            total = total * T.cast(raw_weight[e], T.float32)
                            share = T.alloc_var(
                                T.float32, init=T.float32(1) / (T.float32(1) + T.exp(-total))
                            )
                            slopes[0, e] = (
                                T.cast(grad_regs[e], T.float32)
                                * share
                                * (T.float32(1) + total * (T.float32(1) - share))
                            )
                        if i < CHUNK + last:
                            for e in T.unroll(width):
                                tap_sums[0, e] = tap_sums[0, e] + slopes[0, e] * rows[0, e]
                                for j in T.unroll(last):
                                    if token - (j + 1) * dilation >= start[0]:
                                        tap_sums[j + 1, e] = (
                                            tap_sums[j + 1, e] + slopes[0, e] * rows[j + 1, e]
                                        )
                done = T.alloc_var(T.int32, init=token - last * dilation)
                if i >= 2 * last and done < tokens:
                    product = T.alloc_var(T.float32, init=T.float32(0))
                    for e in T.unroll(width):
                        value = T.alloc_var(
                            T.float32, init=slopes[last, e] * T.cast(raw_tap[0, e], T.float32)
                        )
                        for j in T.unroll(last):
                            if start[last - 1 - j] <= done:
                                value = value + slopes[last - 1 - j, e] * T.cast(
                                    raw_tap[j + 1, e], T.float32
                                )
                        weight_sums[e] = weight_sums[e] + value * rows[last, e]
                        value = value * T.cast(raw_weight[e], T.float32)
                        product = product + value * rows[last, e]
                        out_regs[e] = value
                    if column < hidden:
                        for e in T.vectorized(width):
                            normed_grad[done, stream, column + e] = out_regs[e]
                    for d in T.unroll(5):
                        product = product + T.shfl_xor(product, T.shift_left(1, d))
                    if tx % WARP == 0:
                        sums[done, stream, tile % tiles * warps + tx // WARP] = product
            if column < hidden:
                for j in T.unroll(taps):
                    for e in T.unroll(width):
                        tap_sums[j, e] = tap_sums[j, e] * T.cast(raw_weight[e], T.float32)
                    for e in T.vectorized(width):
                        partial[part * dilation + series, j, stream, column + e] = tap_sums[j, e]
                for e in T.vectorized(width):
                    partial[part * dilation + series, taps, stream, column + e] = weight_sums[e]

    return gradients_of_columns


@kernel(access_bits=lambda *_: ((32, 128), 128), pass_configs=PASS_CONFIGS)
def row_gradients(*static: Any) -> Any:
    """`rstd * (g - normed * mean(g * normed))`, with the gradient of the result if `direct`."""
    plan = RowPlan(*static)
    streams, hidden, sums_of_row = plan.streams, plan.hidden, plan.sums
    tokens = T.dynamic("tokens")
    grad_shape = (tokens, streams, hidden) if plan.direct else (1, 1, 1)

    @T.prim_func
    def gradients_of_rows(
        grad: T.Tensor[grad_shape, T.bfloat16],
        y: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        rstd: T.Tensor[(tokens, streams), T.float32],
        normed_grad: T.Tensor[(tokens, streams, hidden), T.float32],
        sums: T.Tensor[(tokens, streams, sums_of_row), T.float32],
        y_grad: T.Tensor[(tokens, streams, hidden), T.bfloat16],
    ):
        with T.Kernel(tokens * streams, threads=ROW_THREADS) as row:
            tx = T.get_thread_binding()
            token = row // streams
            stream = row % streams
            scale = T.alloc_var(T.float32, init=rstd[token, stream])
            mean = T.alloc_var(T.float32, init=T.float32(0))
            for s in T.serial(T.ceildiv(sums_of_row, WARP)):
                if s * WARP + tx % WARP < sums_of_row:
                    mean = mean + sums[token, stream, s * WARP + tx % WARP]
            for d in T.unroll(5):
                mean = mean + T.shfl_xor(mean, T.shift_left(1, d))
            mean = mean / T.float32(hidden)
            y_regs = T.alloc_local((VECTOR,), T.bfloat16)
            normed_regs = T.alloc_local((VECTOR,), T.float32)
            grad_regs = T.alloc_local((VECTOR,), T.bfloat16)
            for s in T.serial(T.ceildiv(hidden, ROW_THREADS * VECTOR)):
                column = (s * ROW_THREADS + tx) * VECTOR
                if column < hidden:
                    for e in T.vectorized(VECTOR):
                        y_regs[e] = y[token, stream, column + e]
                    for half in T.unroll(2):
                        first = half * (VECTOR // 2)
                        for e in T.vectorized(VECTOR // 2):
                            normed_regs[first + e] = normed_grad[token, stream, column + first + e]
                    if plan.direct:
                        for e in T.vectorized(VECTOR):
                            grad_regs[e] = grad[token, stream, column + e]
                    for e in T.unroll(VECTOR):
                        value = T.alloc_var(
                            T.float32,
                            init=scale
                            * (normed_regs[e] - T.cast(y_regs[e], T.float32) * scale * mean),
                        )
                        if plan.direct:
                            value = value + T.cast(grad_regs[e], T.float32)
                        y_regs[e] = T.cast(value, T.bfloat16)
                    for e in T.vectorized(VECTOR):
                        y_grad[token, stream, column + e] = y_regs[e]

    return gradients_of_rows
