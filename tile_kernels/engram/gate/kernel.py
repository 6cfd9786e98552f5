"""The Engram gate and its gradients. How rows are divided is in `plan.py`."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.gate.plan import ROWS, STREAMED, VECTOR, BackwardPlan, Plan
from tile_kernels.runtime.kernels.common import (
    EXPLICIT_GUARDS,
    WARP,
    await_stages,
    close_stage,
    free_stage,
    stage,
    sum_over_block,
)
from tile_kernels.runtime.launch import kernel

# Every access stands under the conditions it needs, barriers are written out.
PASS_CONFIGS = {**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True}


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    return (8, 128) if plan.masked else (128,), (32, 128) if plan.saved else (128,)


def backward_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    return (8, 32, 128) if BackwardPlan(*static).masked else (32, 128), 128


@T.macro
def gate_of(similarity, clamp):
    """`sigmoid(sign(s) * sqrt(max(|s|, clamp)))`: exactly a half at 0, NaN stays NaN."""
    compared = T.alloc_var(T.float32, init=similarity)
    root = T.alloc_var(T.float32, init=T.sqrt(T.max(T.abs(compared), clamp)))
    root = T.Select(compared < T.float32(0), -root, root)
    root = T.Select(compared == T.float32(0) or T.isnan(compared), compared, root)
    return T.ieee_fdiv(T.float32(1), T.float32(1) + T.exp(-root))


@kernel(access_bits=access_bits, pass_configs=PASS_CONFIGS)
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
    masked: bool,
) -> Any:
    """`out = x + sigmoid(u) * v`, where `u` compares `x` and `k`; a block per stream.

    Tokens of the mask have no value: their rows are copied. `out` may be `x`: a block reads a row
    before it writes it, and no other reads it.
    """
    warps = threads // WARP
    staged = stages > 0
    depth = max(1, stages)
    summed = sum_over_block(3, threads)
    tokens = T.dynamic("tokens")
    k_token, k_stream, v_token = T.dynamic("k_token k_stream v_token", "int64")
    saved_shape = (tokens, streams) if saved else (1, 1)

    @T.macro
    def fetch(tiles, iteration, worker, stream, x, k, v):
        """Prefetch the row that this block reads in `iteration`."""
        tx = T.get_thread_binding()
        token = T.alloc_var(T.int32, init=worker + iteration * workers)
        slot = T.alloc_var(T.int32, init=iteration % depth)
        if token < tokens:
            for s in T.unroll(steps):
                vec = s * threads + tx
                if vec * VECTOR < hidden:
                    stage(tiles[slot, 0, vec, 0], x[token, stream, vec * VECTOR], VECTOR)
                    stage(tiles[slot, 1, vec, 0], k[token, stream, vec * VECTOR], VECTOR)
                    stage(tiles[slot, 2, vec, 0], v[token, vec * VECTOR], VECTOR)
        close_stage()

    @T.prim_func
    def gate_rows(
        x: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        k: T.StridedTensor[(tokens, streams, hidden), (k_token, k_stream, 1), T.bfloat16],
        v: T.StridedTensor[(tokens, hidden), (v_token, 1), T.bfloat16],
        weight: T.Tensor[(streams, hidden), T.float32],
        mask: T.Tensor[(tokens,), T.bool],
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
            tiles = T.alloc_shared(
                (depth, STREAMED, steps * threads if staged else 1, VECTOR), T.bfloat16
            )
            warp_sums = T.alloc_shared((2, 3, warps), T.float32)
            weights = T.alloc_local(((steps if staged else 1) * VECTOR,), T.float32)
            x_regs = T.alloc_local((steps * VECTOR,), T.bfloat16)
            v_regs = T.alloc_local((steps * VECTOR,), T.bfloat16)
            k_regs = T.alloc_local((VECTOR,), T.bfloat16)
            values = T.alloc_local((VECTOR,), T.float32)
            written = T.alloc_local((VECTOR,), T.bfloat16)
            sums = T.alloc_local((3,), T.float32)
            if staged:
                for s in T.unroll(steps):
                    vec = s * threads + tx
                    if vec * VECTOR < hidden:
                        for e in T.vectorized(VECTOR):
                            weights[s * VECTOR + e] = weight[stream, vec * VECTOR + e]
                for ahead in T.unroll(depth):
                    fetch(tiles, ahead, worker, stream, x, k, v)
            for iteration in T.serial(T.ceildiv(tokens - worker, workers)):
                token = T.alloc_var(T.int32, init=worker + iteration * workers)
                slot = T.alloc_var(T.int32, init=iteration % depth)
                for n in T.unroll(3):
                    sums[n] = T.float32(0)
                if staged:
                    await_stages(depth - 1)
                for s in T.unroll(steps):
                    vec = s * threads + tx
                    if vec * VECTOR < hidden:
                        if staged:
                            for e in T.vectorized(VECTOR):
                                x_regs[s * VECTOR + e] = tiles[slot, 0, vec, e]
                            for e in T.vectorized(VECTOR):
                                k_regs[e] = tiles[slot, 1, vec, e]
                            for e in T.vectorized(VECTOR):
                                v_regs[s * VECTOR + e] = tiles[slot, 2, vec, e]
                        else:
                            for e in T.vectorized(VECTOR):
                                weights[e] = weight[stream, vec * VECTOR + e]
                            for e in T.vectorized(VECTOR):
                                x_regs[s * VECTOR + e] = x[token, stream, vec * VECTOR + e]
                            for e in T.vectorized(VECTOR):
                                k_regs[e] = k[token, stream, vec * VECTOR + e]
                            for e in T.vectorized(VECTOR):
                                v_regs[s * VECTOR + e] = v[token, vec * VECTOR + e]
                        for e in T.unroll(VECTOR):
                            x_value = T.alloc_var(T.float32)
                            k_value = T.alloc_var(T.float32)
                            x_value = T.cast(x_regs[s * VECTOR + e], T.float32)
                            k_value = T.cast(k_regs[e], T.float32)
                            w_value = weights[(s if staged else 0) * VECTOR + e]
                            sums[0] = T.fma(x_value * w_value, k_value, sums[0])
                            sums[1] = T.fma(x_value, x_value, sums[1])
                            sums[2] = T.fma(k_value, k_value, sums[2])
                if staged:
                    free_stage()
                    fetch(tiles, iteration + depth, worker, stream, x, k, v)
                summed(sums, warp_sums, iteration)
                inverse_x = T.alloc_var(T.float32)
                inverse_k = T.alloc_var(T.float32)
                inverse_x = T.rsqrt(sums[1] * T.float32(1 / hidden) + eps)
                inverse_k = T.rsqrt(sums[2] * T.float32(1 / hidden) + eps)
                gate_value = T.alloc_var(T.float32)
                gate_value = gate_of(
                    sums[0] * inverse_x * inverse_k * T.float32(hidden**-0.5), clamp
                )
                is_image = T.alloc_var(T.bool, init=T.bool(False))
                if masked:
                    is_image = mask[token]
                    if is_image:
                        sums[0] = T.float32(0)
                        gate_value = T.float32(0)
                        inverse_x = T.float32(0)
                        inverse_k = T.float32(0)
                if saved:
                    if tx == 0:
                        dot[token, stream] = sums[0]
                        score[token, stream] = gate_value
                        rstd_x[token, stream] = inverse_x
                        rstd_k[token, stream] = inverse_k
                for s in T.unroll(steps):
                    vec = s * threads + tx
                    if vec * VECTOR < hidden:
                        for e in T.unroll(VECTOR):
                            values[e] = T.cast(v_regs[s * VECTOR + e], T.float32)
                            if residual:
                                x_value = T.cast(x_regs[s * VECTOR + e], T.float32)
                                values[e] = T.fma(gate_value, values[e], x_value)
                            else:
                                values[e] = gate_value * values[e]
                        for e in T.vectorized(VECTOR):
                            written[e] = T.cast(values[e], T.bfloat16)
                        if masked:
                            if is_image:
                                for e in T.vectorized(VECTOR):
                                    written[e] = (
                                        x_regs[s * VECTOR + e] if residual else T.bfloat16(0)
                                    )
                        for e in T.vectorized(VECTOR):
                            out[token, stream, vec * VECTOR + e] = written[e]

    return gate_rows


# ---- gradients -----------------------------------------------------------------------------------


@T.macro
def dot_gradient(products, dot, score, rstd_x, rstd_k, scale, clamp):
    """The gradient of the raw dot product; 0 where the clamp holds, and where the dot is 0."""
    magnitude = T.alloc_var(T.float32, init=T.abs(dot))
    norms = T.alloc_var(T.float32, init=scale * rstd_x * rstd_k)
    slope = score * (T.float32(1) - score) * T.float32(0.5)
    gradient = T.alloc_var(T.float32)
    gradient = products * slope * T.sqrt(T.ieee_fdiv(norms, magnitude))
    if magnitude * norms < clamp or magnitude == T.float32(0):
        gradient = T.float32(0)
    return gradient


@kernel(access_bits=backward_access_bits, pass_configs=PASS_CONFIGS)
def gate_gradients(
    streams: int,
    group: int,
    hidden: int,
    threads: int,
    steps: int,
    staged: bool,
    blocks: int,
    residual: bool,
    masked: bool,
    packed: bool,
) -> Any:
    """Gradients of x, k and v; sums of the weight's, one per part.

    A token takes two passes over its vectors: the products of gradient and `v` are summed, then the
    sums are used. The second pass prefetches each vector of the next token to where it has
    just read. Where a block has not all streams, more blocks take the gradient of v. Packed, the
    gradient of v is the last row of that of k.
    """
    warps = threads // WARP
    groups = streams // group
    whole = groups == 1
    units = steps * group  # vectors of a thread in a row of each kind
    # Loops over these are written out here, since the copies to wait for are counted.
    all_steps, all_streams = tuple(range(steps)), tuple(range(group))
    row = steps * threads if staged else 1
    summed = sum_over_block(group, threads)
    tokens, parts = T.dynamic("tokens parts")
    k_token, k_stream, v_token = T.dynamic("k_token k_stream v_token", "int64")

    @T.macro
    def fetch_value(v_tile, token, end, v):
        tx = T.get_thread_binding()
        if token < end:
            for s in T.unroll(steps):
                vec = s * threads + tx
                if vec * VECTOR < hidden:
                    stage(v_tile[vec, 0], v[token, vec * VECTOR], VECTOR)
        close_stage()

    @T.macro
    def fetch_unit(tiles, n, vec, token, end, stream, grad_out, x, k):
        """A vector of the gradient, of x and of k."""
        if token < end and vec * VECTOR < hidden:
            stage(tiles[0, n, vec, 0], grad_out[token, stream, vec * VECTOR], VECTOR)
            stage(tiles[1, n, vec, 0], x[token, stream, vec * VECTOR], VECTOR)
            stage(tiles[2, n, vec, 0], k[token, stream, vec * VECTOR], VECTOR)
        close_stage()

    @T.macro
    def store_value_gradient(grad_k, grad_v, token, column, rounded):
        for e in T.vectorized(VECTOR):
            if packed:
                grad_k[token, streams, column + e] = rounded[e]
            else:
                grad_v[token, column + e] = rounded[e]

    @T.macro
    def value_gradient(start, end, grad_out, score, mask, grad_k, grad_v):
        """The gradient of v from all streams, by blocks of their own."""
        tx = T.get_thread_binding()
        read = T.alloc_local((streams * VECTOR,), T.bfloat16)
        sums = T.alloc_local((VECTOR,), T.float32)
        rounded = T.alloc_local((VECTOR,), T.bfloat16)
        for iteration in T.serial(end - start):
            token = start + iteration
            for s in T.serial(steps):
                column = (s * threads + tx) * VECTOR
                if column < hidden:
                    for n in T.unroll(streams):
                        for e in T.vectorized(VECTOR):
                            read[n * VECTOR + e] = grad_out[token, n, column + e]
                    for e in T.unroll(VECTOR):
                        sums[e] = T.float32(0)
                        for n in T.unroll(streams):
                            sums[e] = T.fma(
                                T.cast(read[n * VECTOR + e], T.float32), score[token, n], sums[e]
                            )
                    for e in T.vectorized(VECTOR):
                        rounded[e] = T.cast(sums[e], T.bfloat16)
                    if masked:
                        if mask[token]:
                            for e in T.vectorized(VECTOR):
                                rounded[e] = T.bfloat16(0)
                    store_value_gradient(grad_k, grad_v, token, column, rounded)

    @T.macro
    def unit_gradients(grads, x_regs, k_regs, weights, scalars, n, totals, base, new_x, new_k):
        """Eight columns of a stream: their gradients, and what they add to the weight's."""
        slope = T.alloc_var(T.float32, init=T.shfl_sync(scalars[0], n))
        by_x = T.alloc_var(T.float32, init=T.shfl_sync(scalars[1], n))
        by_k = T.alloc_var(T.float32, init=T.shfl_sync(scalars[2], n))
        for e in T.unroll(VECTOR):
            plain_x = T.alloc_var(T.float32)
            plain_k = T.alloc_var(T.float32)
            scaled_x = T.alloc_var(T.float32)
            scaled_k = T.alloc_var(T.float32)
            plain_x = T.cast(x_regs[e], T.float32)
            plain_k = T.cast(k_regs[e], T.float32)
            scaled_x = slope * plain_x
            scaled_k = slope * plain_k
            totals[base + e] = T.fma(scaled_x, plain_k, totals[base + e])
            new_x[e] = T.fma(scaled_k, weights[e], -(scaled_x * by_x))
            new_k[e] = T.fma(scaled_x, weights[e], -(scaled_k * by_k))
            if residual:
                new_x[e] = new_x[e] + T.cast(grads[e], T.float32)

    @T.prim_func
    def gate_gradient_rows(
        grad_out: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        x: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        k: T.StridedTensor[(tokens, streams, hidden), (k_token, k_stream, 1), T.bfloat16],
        v: T.StridedTensor[(tokens, hidden), (v_token, 1), T.bfloat16],
        weight: T.Tensor[(streams, hidden), T.float32],
        dot: T.Tensor[(tokens, streams), T.float32],
        score: T.Tensor[(tokens, streams), T.float32],
        rstd_x: T.Tensor[(tokens, streams), T.float32],
        rstd_k: T.Tensor[(tokens, streams), T.float32],
        mask: T.Tensor[(tokens,), T.bool],
        grad_x: T.Tensor[(tokens, streams, hidden), T.bfloat16],
        grad_k: T.Tensor[(tokens, streams + packed, hidden), T.bfloat16],
        grad_v: T.Tensor[(tokens, hidden), T.bfloat16],
        partial: T.Tensor[(parts, streams, hidden), T.float32],
        clamp: T.float32,
    ):
        with T.Kernel(groups + (not whole), T.min(parts, blocks), threads=threads) as (
            group_index,
            block,
        ):
            T.assume(k_token % VECTOR == 0)
            T.assume(k_stream % VECTOR == 0)
            T.assume(v_token % VECTOR == 0)
            tx = T.get_thread_binding()
            first = group_index * group
            tiles = T.alloc_shared((ROWS, group, row, VECTOR), T.bfloat16)
            v_tile = T.alloc_shared((row, VECTOR), T.bfloat16)
            warp_sums = T.alloc_shared((2, group, warps), T.float32)
            totals = T.alloc_local((units * VECTOR,), T.float32)
            grads = T.alloc_local((VECTOR,), T.bfloat16)
            values = T.alloc_local((VECTOR,), T.bfloat16)
            x_regs = T.alloc_local((VECTOR,), T.bfloat16)
            k_regs = T.alloc_local((VECTOR,), T.bfloat16)
            weights = T.alloc_local((VECTOR,), T.float32)
            new_x = T.alloc_local((VECTOR,), T.float32)
            new_k = T.alloc_local((VECTOR,), T.float32)
            written = T.alloc_local((VECTOR,), T.bfloat16)
            products = T.alloc_local((group,), T.float32)
            # A lane has those of one stream: the gradient of its dot product, and what x and k are
            # scaled by.
            scalars = T.alloc_local((3,), T.float32)
            stream = first + tx % WARP % group
            sums_taken = T.alloc_var(T.int32, init=0)
            for p in T.serial(T.ceildiv(parts - block, blocks)):
                part = T.alloc_var(T.int32, init=block + p * blocks)
                start = T.alloc_var(T.int32)
                end = T.alloc_var(T.int32)
                start = T.cast(T.cast(part, T.int64) * tokens // parts, T.int32)
                end = T.cast((T.cast(part, T.int64) + 1) * tokens // parts, T.int32)
                if group_index < groups:
                    for i in T.unroll(units * VECTOR):
                        totals[i] = T.float32(0)
                    if staged:
                        fetch_value(v_tile, start, end, v)
                        for s in T.unroll(steps):
                            for n in T.unroll(group):
                                fetch_unit(
                                    tiles, n, s * threads + tx, start, end, first + n, grad_out, x,
                                    k,
                                )  # fmt: skip
                    for iteration in T.serial(end - start):
                        token = T.alloc_var(T.int32, init=start + iteration)
                        for n in T.unroll(group):
                            products[n] = T.float32(0)
                        is_image = T.alloc_var(T.bool, init=T.bool(False))
                        if masked:
                            is_image = mask[token]
                        gate_score = T.alloc_var(T.float32, init=score[token, stream])
                        raw = T.alloc_var(T.float32, init=dot[token, stream])
                        inverse_x = T.alloc_var(T.float32, init=rstd_x[token, stream])
                        inverse_k = T.alloc_var(T.float32, init=rstd_k[token, stream])
                        for s in all_steps:
                            vec = s * threads + tx
                            for e in T.unroll(VECTOR):
                                new_x[e] = T.float32(0)
                            for n in all_streams:
                                if staged:
                                    await_stages(units - 1 - (s * group + n))
                                gate_value = T.alloc_var(T.float32, init=T.shfl_sync(gate_score, n))
                                if vec * VECTOR < hidden:
                                    if n == 0:
                                        for e in T.vectorized(VECTOR):
                                            values[e] = (
                                                v_tile[vec, e]
                                                if staged
                                                else v[token, vec * VECTOR + e]
                                            )
                                    for e in T.vectorized(VECTOR):
                                        grads[e] = (
                                            tiles[0, n, vec, e]
                                            if staged
                                            else grad_out[token, first + n, vec * VECTOR + e]
                                        )
                                    for e in T.unroll(VECTOR):
                                        grad = T.alloc_var(T.float32)
                                        grad = T.cast(grads[e], T.float32)
                                        products[n] = T.fma(
                                            grad, T.cast(values[e], T.float32), products[n]
                                        )
                                        if whole:
                                            new_x[e] = T.fma(grad, gate_value, new_x[e])
                            if whole:
                                if vec * VECTOR < hidden:
                                    for e in T.vectorized(VECTOR):
                                        written[e] = T.cast(new_x[e], T.bfloat16)
                                    if masked:
                                        if is_image:
                                            for e in T.vectorized(VECTOR):
                                                written[e] = T.bfloat16(0)
                                    store_value_gradient(
                                        grad_k, grad_v, token, vec * VECTOR, written
                                    )
                        if staged:
                            free_stage()
                            fetch_value(v_tile, token + 1, end, v)
                        summed(products, warp_sums, sums_taken)
                        sums_taken = sums_taken + 1
                        for n in T.unroll(group):
                            if tx % WARP % group == n:
                                scalars[0] = products[n]
                        scalars[0] = dot_gradient(
                            scalars[0], raw, gate_score, inverse_x, inverse_k,
                            T.float32(hidden**-0.5), clamp,
                        )  # fmt: skip
                        scalars[1] = raw * inverse_x * inverse_x * T.float32(1 / hidden)
                        scalars[2] = raw * inverse_k * inverse_k * T.float32(1 / hidden)
                        for s in T.unroll(steps):
                            vec = s * threads + tx
                            column = vec * VECTOR
                            for n in T.unroll(group):
                                if column < hidden:
                                    for e in T.vectorized(VECTOR):
                                        weights[e] = weight[first + n, column + e]
                                    if staged:
                                        for e in T.vectorized(VECTOR):
                                            grads[e] = tiles[0, n, vec, e]
                                        for e in T.vectorized(VECTOR):
                                            x_regs[e] = tiles[1, n, vec, e]
                                        for e in T.vectorized(VECTOR):
                                            k_regs[e] = tiles[2, n, vec, e]
                                    else:
                                        for e in T.vectorized(VECTOR):
                                            grads[e] = grad_out[token, first + n, column + e]
                                        for e in T.vectorized(VECTOR):
                                            x_regs[e] = x[token, first + n, column + e]
                                        for e in T.vectorized(VECTOR):
                                            k_regs[e] = k[token, first + n, column + e]
                                if staged:
                                    free_stage()
                                    fetch_unit(
                                        tiles, n, vec, token + 1, end, first + n, grad_out, x, k
                                    )
                                if not is_image:
                                    unit_gradients(
                                        grads, x_regs, k_regs, weights, scalars, n, totals,
                                        (s * group + n) * VECTOR, new_x, new_k,
                                    )  # fmt: skip
                                if column < hidden:
                                    for e in T.vectorized(VECTOR):
                                        written[e] = T.cast(new_x[e], T.bfloat16)
                                    if masked:
                                        if is_image:
                                            for e in T.vectorized(VECTOR):
                                                written[e] = grads[e] if residual else T.bfloat16(0)
                                    for e in T.vectorized(VECTOR):
                                        grad_x[token, first + n, column + e] = written[e]
                                    for e in T.vectorized(VECTOR):
                                        written[e] = T.cast(new_k[e], T.bfloat16)
                                    if masked:
                                        if is_image:
                                            for e in T.vectorized(VECTOR):
                                                written[e] = T.bfloat16(0)
                                    for e in T.vectorized(VECTOR):
                                        grad_k[token, first + n, column + e] = written[e]
                    for s in T.unroll(steps):
                        column = (s * threads + tx) * VECTOR
                        if column < hidden:
                            for n in T.unroll(group):
                                for e in T.vectorized(VECTOR):
                                    partial[part, first + n, column + e] = totals[
                                        (s * group + n) * VECTOR + e
                                    ]
                else:
                    value_gradient(start, end, grad_out, score, mask, grad_k, grad_v)

    return gate_gradient_rows
