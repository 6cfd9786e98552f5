"""Momentum, and rows and columns of its matrix scaled to a norm in turn."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.sinkhorn.plan import PARTS, THREADS, WARPS, MomentumPlan, RowPlan
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

BITS = {"bfloat16": 16, "float32": 32}


def momentum_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = MomentumPlan(*static)
    grad, buffer = BITS[plan.grad] * plan.vector, BITS[plan.buffer] * plan.vector
    return tuple(sorted({grad, buffer})), tuple(sorted({buffer, 32 * plan.vector}))


@kernel(access_bits=momentum_access_bits, pass_configs=EXPLICIT_GUARDS)
def momentum(grad: str, buffer: str, nesterov: bool, vector: int) -> Any:
    """A thread per vector of elements."""
    count = T.dynamic("count")

    @T.prim_func
    def momentum_elements(
        grads: T.Tensor[(count,), grad],
        moments: T.Tensor[(count,), buffer],
        out: T.Tensor[(count,), T.float32],
        beta: T.float32,
        rest: T.float32,
    ):
        with T.Kernel(T.ceildiv(count, THREADS * vector), threads=THREADS) as block:
            T.assume(count % vector == 0)
            first = (block * THREADS + T.get_thread_binding()) * vector
            raw_grads = T.alloc_local((vector,), grad)
            raw = T.alloc_local((vector,), buffer)
            values = T.alloc_local((vector,), T.float32)
            if first < count:
                for v in T.vectorized(vector):
                    raw_grads[v] = grads[first + v]
                for v in T.vectorized(vector):
                    raw[v] = moments[first + v]
                for v in T.unroll(vector):
                    g = T.alloc_var(T.float32, init=T.cast(raw_grads[v], T.float32))
                    moment = T.alloc_var(T.float32)
                    moment = T.ieee_fmaf(T.cast(raw[v], T.float32), beta, T.ieee_mul(rest, g))
                    raw[v] = T.cast(moment, buffer)
                    if nesterov:
                        values[v] = T.ieee_fmaf(g, rest, T.ieee_mul(beta, moment))
                    else:
                        values[v] = moment
                for v in T.vectorized(vector):
                    moments[first + v] = raw[v]
                for v in T.vectorized(vector):
                    out[first + v] = values[v]

    return momentum_elements


# ---- rows ---------------------------------------------------------------------------------------


def row_macros(plan: RowPlan) -> Any:
    """Macros: a lane's columns of a vector of scales, and the scaled row with its norm."""
    columns, vector, accesses = plan.columns, plan.vector, plan.accesses

    @T.macro
    def load_scales(scales, lane, kept):
        for a in T.unroll(accesses):
            first = (a * WARP + lane) * vector
            for v in T.unroll(vector):
                kept[a * vector + v] = T.float32(0)
            if first < columns:
                for v in T.vectorized(vector):
                    kept[a * vector + v] = scales[first + v]

    @T.macro
    def scaled_row(matrix, row, lane, scale, column_scales, raw, values):
        """`(scale * row) * column_scales`, with the row in `raw`; returns its norm."""
        total = T.alloc_var(T.float32, init=T.float32(0))
        for a in T.unroll(accesses):
            first = (a * WARP + lane) * vector
            for v in T.unroll(vector):
                raw[a * vector + v] = T.float32(0)
            if first < columns:
                for v in T.vectorized(vector):
                    raw[a * vector + v] = matrix[row, first + v]
            for v in T.unroll(vector):
                i = a * vector + v
                values[i] = T.ieee_mul(T.ieee_mul(scale, raw[i]), column_scales[i])
                total = T.ieee_fmaf(values[i], values[i], total)
        for d in T.unroll(5):
            total = T.ieee_add(total, T.shfl_xor(total, T.shift_left(1, d)))
        return T.sqrt(total)

    return load_scales, scaled_row


def step_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(sorted({32, 32 * RowPlan(*static).vector})), (32,)


@kernel(access_bits=step_access_bits, pass_configs=EXPLICIT_GUARDS)
def step(*static: Any) -> Any:
    """A block per part of the rows, a warp per row; sums of columns are added warp by warp."""
    plan = RowPlan(*static)
    columns, vector, accesses = plan.columns, plan.vector, plan.accesses
    per_lane = accesses * vector
    load_scales, scaled_row = row_macros(plan)
    rows = T.dynamic("rows", "int64")

    @T.prim_func
    def step_rows(
        matrix: T.Tensor[(rows, columns), T.float32],
        row_scale: T.Tensor[(rows,), T.float32],
        col_scale: T.Tensor[(columns,), T.float32],
        norms: T.Tensor[(rows,), T.float32],
        partial: T.Tensor[(PARTS, columns), T.float32],
        eps: T.float32,
    ):
        with T.Kernel(PARTS, threads=WARPS * WARP) as part:
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            column_scales = T.alloc_local((per_lane,), T.float32)
            raw = T.alloc_local((per_lane,), T.float32)
            values = T.alloc_local((per_lane,), T.float32)
            sums = T.alloc_local((per_lane,), T.float32)
            shared = T.alloc_shared((WARPS, per_lane * WARP), T.float32)
            start = T.alloc_var(T.int64, init=T.cast(part, T.int64) * rows // PARTS)
            end = T.alloc_var(T.int64, init=(T.cast(part, T.int64) + 1) * rows // PARTS)
            load_scales(col_scale, lane, column_scales)
            for i in T.unroll(per_lane):
                sums[i] = T.float32(0)
            for iteration in T.serial(T.ceildiv(end - start, WARPS)):
                row = T.alloc_var(T.int64, init=start + iteration * WARPS + warp)
                if row < end:  # the same for the whole warp
                    scale = T.alloc_var(T.float32, init=row_scale[row])
                    norm = T.alloc_var(T.float32)
                    norm = scaled_row(matrix, row, lane, scale, column_scales, raw, values)
                    if norm != T.float32(0):  # a row of zeros has no scale to find
                        scale = T.ieee_mul(scale, T.ieee_frcp(T.ieee_add(norm, eps)))
                    if lane == 0:
                        norms[row] = norm
                        row_scale[row] = scale
                    for i in T.unroll(per_lane):
                        value = T.alloc_var(T.float32)
                        value = T.ieee_mul(T.ieee_mul(scale, raw[i]), column_scales[i])
                        sums[i] = T.ieee_fmaf(value, value, sums[i])
            for i in T.unroll(per_lane):
                shared[warp, i * WARP + lane] = sums[i]
            T.sync_threads()
            if warp == 0:
                for a in T.unroll(accesses):
                    first = (a * WARP + lane) * vector
                    if first < columns:
                        for v in T.unroll(vector):
                            i = a * vector + v
                            total = T.alloc_var(T.float32, init=shared[0, i * WARP + lane])
                            for w in T.unroll(WARPS - 1):
                                total = T.ieee_add(total, shared[w + 1, i * WARP + lane])
                            partial[part, first + v] = total

    return step_rows


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def step_reduce(columns: int) -> Any:
    """A thread per column."""
    parts = T.dynamic("parts")

    @T.prim_func
    def sum_columns(
        partial: T.Tensor[(parts, columns), T.float32],
        sums: T.Tensor[(columns,), T.float32],
    ):
        with T.Kernel(T.ceildiv(columns, WARP), threads=WARP) as block:
            column = block * WARP + T.get_thread_binding()
            total = T.alloc_var(T.float32, init=T.float32(0))
            if column < columns:
                for p in T.serial(parts):
                    total = T.ieee_add(total, partial[p, column])
                sums[column] = total

    return sum_columns


def finalize_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    width = 32 * RowPlan(*static).vector
    return tuple(sorted({32, width})), width


@kernel(access_bits=finalize_access_bits, pass_configs=EXPLICIT_GUARDS)
def finalize(*static: Any) -> Any:
    """A warp per row."""
    plan = RowPlan(*static)
    columns, vector, accesses = plan.columns, plan.vector, plan.accesses
    load_scales, scaled_row = row_macros(plan)
    rows = T.dynamic("rows", "int64")

    @T.prim_func
    def finalize_rows(
        matrix: T.Tensor[(rows, columns), T.float32],
        row_scale: T.Tensor[(rows,), T.float32],
        col_scale: T.Tensor[(columns,), T.float32],
        out: T.Tensor[(rows, columns), T.float32],
        eps: T.float32,
        alpha: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, WARPS), threads=WARPS * WARP) as block:
            lane = T.get_thread_binding() % WARP
            row = T.alloc_var(
                T.int64, init=T.cast(block, T.int64) * WARPS + T.get_thread_binding() // WARP
            )
            column_scales = T.alloc_local((accesses * vector,), T.float32)
            raw = T.alloc_local((accesses * vector,), T.float32)
            values = T.alloc_local((accesses * vector,), T.float32)
            if row < rows:  # the same for the whole warp
                load_scales(col_scale, lane, column_scales)
                norm = T.alloc_var(T.float32)
                norm = scaled_row(matrix, row, lane, row_scale[row], column_scales, raw, values)
                factor = T.alloc_var(T.float32, init=T.float32(0))
                if norm != T.float32(0):
                    factor = T.ieee_fdiv(alpha, T.ieee_add(norm, eps))
                for i in T.unroll(accesses * vector):
                    values[i] = T.ieee_mul(values[i], factor)
                for a in T.unroll(accesses):
                    first = (a * WARP + lane) * vector
                    if first < columns:
                        for v in T.vectorized(vector):
                            out[row, first + v] = values[a * vector + v]

    return finalize_rows
