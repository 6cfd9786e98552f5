"""RMS norm, with a cast of its result, and its gradient. How rows are divided is in `plan.py`."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.norm.plan import SUM_WARPS, BackwardPlan, Plan, SumPlan
from tile_kernels.quant.primitives import (
    e2m1_prelude,
    encode_and_store,
    exponent_of,
    fetch_values,
    group_amax,
    local_arrays,
    scale_of,
    store_values,
    unit_of_factors,
    widen_values,
    write_group_scales,
)
from tile_kernels.quant.storage import BITS, LANES, is_by_rows, is_packed, storage, units
from tile_kernels.runtime.kernels.common import (
    EXPLICIT_GUARDS,
    await_stages,
    close_stage,
    free_stage,
    stage,
    sum_over_block,
)
from tile_kernels.runtime.launch import kernel

# ---- forward ------------------------------------------------------------------------------------


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    wide = plan.load * BITS[plan.source]
    loads, stores = {wide}, {32}
    if plan.weight:
        loads.add(plan.load_weight * BITS[plan.weight])
    if plan.residual:
        stores.add(wide)
    if plan.plain:
        stores.add(plan.load * BITS[plan.plain])
    if plan.fmt:
        stores.add(plan.store * BITS[plan.fmt])
    return tuple(sorted(loads)), tuple(sorted(stores))


def fetch_weights(width: int, count: int, vector: int) -> Any:
    """A macro: `count` weights, from `first` on, to `raw` from `base` on; past the end anything."""

    @T.macro
    def fetch(weight, first, raw, base):
        for c in T.unroll(count // vector):
            if first + c * vector < width:
                for v in T.vectorized(vector):
                    raw[base + c * vector + v] = weight[(first // vector + c) * vector + v]

    return fetch


def load_weights(dtype: str, width: int, count: int, vector: int) -> Any:
    """A macro: `count` weights from `first` on as float32."""
    fetch = fetch_weights(width, count, vector)

    @T.macro
    def load(weight, first, weights, base):
        raw = T.alloc_local((count,), dtype)
        for v in T.vectorized(count):
            raw[v] = T.cast(T.float32(0), dtype)
        fetch(weight, first, raw, 0)
        for v in T.unroll(count) if vector == 1 else T.vectorized(count):
            weights[base + v] = T.cast(raw[v], T.float32)

    return load


def sum_over_row(rows: int, threads: int, count: int = 1) -> Any:
    """A macro: `count` sums over the threads of a row: lanes of a warp, or all of the block."""
    over_block = sum_over_block(count, threads)
    steps = (threads // rows).bit_length() - 1

    @T.macro
    def over_warp(values, warp_sums, iteration):
        for i in T.unroll(count):
            for d in T.unroll(steps):
                values[i] = values[i] + T.shfl_xor(values[i], T.shift_left(1, d))

    return over_warp if rows > 1 else over_block


@T.macro
def mega_row(token, block_m):
    """Where the scales of a token are, in blocks of `block_m` tokens padded to 128."""
    j = token % block_m
    start = token // block_m * ((block_m + 127) // 128 * 128)
    return start + j // 128 * 128 + j % 32 * 4 + j % 128 // 32


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def norm_rows(*static: Any) -> Any:
    """A row per block, or per warp where rows are short; it stays in registers."""
    plan = Plan(*static)
    width, chunk, source, group = plan.width, plan.chunk, plan.source, max(1, plan.group)
    dtype = storage(source)[0]
    lanes = plan.threads // plan.rows
    steps = -(-width // (chunk * lanes))
    fetch = fetch_values(source, width, chunk, plan.load)
    widen = widen_values(source, chunk, plan.load)
    weight_dtype = storage(plan.weight or "float32")[0]
    fetch_weight = fetch_weights(width, chunk, plan.load_weight)
    weighted, stored, casts = bool(plan.weight), bool(plan.plain), bool(plan.fmt)
    rounds = source == "bfloat16" and casts
    summed = sum_over_row(plan.rows, plan.threads)
    # Scales.
    fmt = plan.fmt or "e4m3"
    groups = -(-width // group)
    per_thread = max(1, chunk // group)
    group_lanes = max(1, group // chunk)
    columns = -(-groups // 4) if is_packed(plan.layout) else groups
    by_rows = is_by_rows(plan.layout)
    amax_of, scaled = group_amax(chunk, group), scale_of(fmt, plan.round_sf)
    encode = encode_and_store(fmt, width, chunk, plan.store, conversion=plan.conversion)
    unit_factor = unit_of_factors(plan.conversion)
    write_scales = write_group_scales(plan.layout, width, chunk, group, batched=True)
    store_plain = store_values(plan.plain or source, width, chunk, plan.load)
    rows, x_stride, residual_stride = T.dynamic("rows x_stride residual_stride")
    sf_columns, padded, mega_rows = T.dynamic("sf_columns padded mega_rows")
    sf_dtype = "int32" if is_packed(plan.layout) else "float32"
    sf_shape = (rows, columns) if by_rows else (sf_columns, padded)

    @T.macro
    def store_raw(raw, base, out, row, first):
        """A chunk in the dtype of the row."""
        for c in T.unroll(chunk // plan.load):
            if first + c * plan.load < width:
                for v in T.vectorized(plan.load):
                    out[row, (first + c * plan.load) // plan.load * plan.load + v] = raw[
                        base + c * plan.load + v
                    ]

    @T.macro
    def write_mega(scales, mega, row, block_m, first, lane):
        """The exponents of four groups, wherever the chunk and the groups meet, in a word."""
        word = T.alloc_var(T.int32, init=0)
        for i in T.unroll(per_thread):
            word = word | (exponent_of(scales[i]) << ((first // group + i) % 4 * 8))
        for d in T.unroll(max(0, (4 // per_thread).bit_length() - 1)):
            word = word | T.shfl_xor(word, T.shift_left(group_lanes, d))
        if lane % (4 * group_lanes // per_thread) == 0 and first < width:
            mega[first // group // 4, mega_row(row, block_m)] = word

    @T.macro
    def cast(values, exists, row, token, before, first, lane, data, sf, mega, clamp_min, block_m):
        scale, scales, inverse = local_arrays(T.float32, 2, per_thread, per_thread)
        for i in T.unroll(per_thread):
            scaled(amax_of(values, i), clamp_min, scale)
            scales[i] = scale[0]
            inverse[i] = scale[1]
            if unit_factor != 1:
                inverse[i] = T.ieee_mul(scale[1], T.float32(unit_factor))
        write_scales(sf, row if by_rows else token, first, lane, scales, exists, before)
        if exists:
            if plan.mega:
                write_mega(scales, mega, row, block_m, first, lane)
            encode(values, 0, inverse, chunk // per_thread, data, row, first)

    @T.prim_func
    def rms_norm(
        x: T.StridedTensor[(rows, width), (x_stride, 1), dtype],
        residual: T.StridedTensor[(rows, width), (residual_stride, 1), dtype],
        weight: T.Tensor[(width,), weight_dtype],
        plain: T.Tensor[(rows, width), storage(plan.plain or source)[0]],
        data: T.Tensor[(rows, units(fmt, width)), storage(fmt)[0]],
        sf: T.Tensor[sf_shape, sf_dtype],
        rstd: T.Tensor[(rows,), T.float32],
        total: T.Tensor[(rows, width), dtype],
        mega: T.Tensor[(max(1, width // 128), mega_rows), T.int32],
        eps: T.float32,
        out_scale: T.float32,
        clamp_min: T.float32,
        tokens: T.int32,
        to_write: T.int32,
        count: T.int32,
        block_m: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(count, plan.rows), threads=plan.threads, prelude=e2m1_prelude(plan.conversion)
        ) as block:
            T.assume(x_stride % plan.load == 0)
            if plan.residual:
                T.assume(residual_stride % plan.load == 0)
            lane = T.get_thread_binding() % lanes
            unit = block * plan.rows + T.get_thread_binding() // lanes
            token = T.alloc_var(T.int32, init=unit)
            row = T.alloc_var(T.int32, init=unit)
            before = T.alloc_var(T.int32, init=0)
            exists = T.alloc_var(T.bool, init=unit < count)
            if not by_rows:  # columns are padded
                exists = unit < tokens
            if plan.batched:  # of each batch by itself
                token = unit % to_write
                row = unit // to_write * tokens + token
                before = unit // to_write * columns
                exists = token < tokens
                if unit >= count:
                    exists = False
            raw, added = local_arrays(dtype, steps * chunk, steps * chunk if plan.residual else 1)
            raw_weights = T.alloc_local(((steps if plan.early else 1) * chunk,), weight_dtype)
            values, weights, sums = local_arrays(T.float32, chunk, chunk, 1)
            warp_sums = T.alloc_shared((2, 1, plan.threads // LANES), T.float32)
            sums[0] = T.float32(0)
            if exists:
                for s in T.unroll(steps):
                    fetch(x, row, (s * lanes + lane) * chunk, raw, s * chunk)
                if weighted and plan.early:  # global accesses keep their order: before the sum
                    for s in T.unroll(steps):
                        fetch_weight(weight, (s * lanes + lane) * chunk, raw_weights, s * chunk)
                if plan.residual:
                    for s in T.unroll(steps):
                        fetch(residual, row, (s * lanes + lane) * chunk, added, s * chunk)
                for s in T.unroll(steps):
                    widen(raw, s * chunk, values)
                    if plan.residual:
                        widen(added, s * chunk, weights)
                        for v in T.unroll(chunk):
                            values[v] = T.ieee_add(values[v], weights[v])
                        for v in T.vectorized(chunk):
                            raw[s * chunk + v] = T.cast(values[v], dtype)
                        store_raw(raw, s * chunk, total, row, (s * lanes + lane) * chunk)
                        widen(raw, s * chunk, values)
                    for v in T.unroll(chunk):
                        sums[0] = T.fma(values[v], values[v], sums[0])
            summed(sums, warp_sums, 0)
            inverse_root = T.alloc_var(
                T.float32,
                init=T.ieee_frsqrt(T.ieee_add(T.ieee_fdiv(sums[0], T.float32(width)), eps)),
            )
            if exists:
                if lane == 0:
                    rstd[row] = inverse_root
            if exists or (not by_rows and unit < count):
                for s in T.unroll(steps):
                    first = (s * lanes + lane) * chunk
                    for v in T.unroll(chunk):
                        values[v] = T.float32(0)
                    if exists:
                        widen(raw, s * chunk, values)
                        if weighted:
                            if not plan.early:
                                fetch_weight(weight, first, raw_weights, 0)
                            for v in (
                                T.unroll(chunk) if plan.load_weight == 1 else T.vectorized(chunk)
                            ):
                                weights[v] = T.cast(
                                    raw_weights[(s if plan.early else 0) * chunk + v], T.float32
                                )
                        for v in T.unroll(chunk):
                            values[v] = T.ieee_mul(values[v], inverse_root)
                            if weighted:
                                values[v] = T.ieee_mul(values[v], T.ieee_mul(weights[v], out_scale))
                            else:
                                values[v] = T.ieee_mul(values[v], out_scale)
                        if stored:
                            store_plain(values, 0, plain, row, first)
                        if rounds:
                            for v in T.vectorized(chunk):
                                raw[s * chunk + v] = T.cast(values[v], dtype)
                            widen(raw, s * chunk, values)
                    if casts:
                        cast(
                            values, exists, row, token, before, first, lane, data, sf, mega,
                            clamp_min, block_m,
                        )  # fmt: skip

    return rms_norm


# ---- backward -----------------------------------------------------------------------------------


def access_bits_backward(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = BackwardPlan(*static)
    wide = plan.vector * BITS[plan.source]
    loads, stores = {wide, 32}, {wide}
    if plan.weight:
        loads.add(plan.load_weight * BITS[plan.weight])
    if plan.summed:
        stores.add(32 if plan.rows > 1 else min(128, plan.vector * 32))
    return tuple(sorted(loads)), tuple(sorted(stores))


@kernel(
    access_bits=access_bits_backward,
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def norm_gradients(*static: Any) -> Any:
    """The gradient of the rows, and for each part of them a sum of the weight's.

    A block takes the rows of a part one after another, and prefetches the next ones to shared
    memory. Threads read what they have copied themselves. Short rows take a warp each; the sums of
    a block's warps are added up in their order.
    """
    plan = BackwardPlan(*static)
    source, width, vector, threads = plan.source, plan.width, plan.vector, plan.threads
    dtype = storage(source)[0]
    by_warps = plan.rows > 1
    lanes = threads // plan.rows
    steps = -(-width // (vector * lanes))
    count = steps * vector
    depth = max(1, plan.stages)
    staged = plan.stages > 0
    streams = 3 if plan.residual else 2
    weighted = bool(plan.weight)
    weight_dtype = storage(plan.weight or "float32")[0]
    weights_from = load_weights(plan.weight or "float32", width, vector, plan.load_weight)
    at_once = plan.at_once
    summed = sum_over_row(plan.rows, threads, at_once)
    widen = widen_values(source, vector, vector)
    rows, parts, x_stride, grad_stride = T.dynamic("rows parts x_stride grad_stride")
    residual_stride = T.dynamic("residual_stride")

    @T.macro
    def fetch(tiles, first, end, slot, grad, x, residual):
        """Prefetches `at_once` rows."""
        tx = T.get_thread_binding()
        for p in T.unroll(at_once):
            if first + p < end:
                for s in T.unroll(steps):
                    vec = s * threads + tx
                    if vec * vector < width:
                        row = first + p
                        stage(tiles[slot, p, 0, vec, 0], grad[row, vec * vector], vector)
                        stage(tiles[slot, p, 1, vec, 0], x[row, vec * vector], vector)
                        if plan.residual:
                            stage(tiles[slot, p, 2, vec, 0], residual[row, vec * vector], vector)
        close_stage()

    @T.macro
    def prefetch_factors(rstd, first, end, factors):
        """The factors of the rows that come next, an iteration before they are used."""
        for p in T.unroll(at_once):
            factors[p] = T.float32(0)
            if first + p * plan.rows < end:
                factors[p] = rstd[first + p * plan.rows]

    @T.macro
    def read(tiles, slot, p, stream, source, row, lane, raw):
        """A row, from shared memory or from `source`, to `raw`; zero past its end."""
        for s in T.unroll(steps):
            vec = s * lanes + lane
            base = p * count + s * vector
            for v in T.vectorized(vector):
                raw[base + v] = T.cast(T.float32(0), dtype)
            if vec * vector < width:
                if staged:
                    for v in T.vectorized(vector):
                        raw[base + v] = tiles[slot, p, stream, vec, v]
                else:
                    for v in T.vectorized(vector):
                        raw[base + v] = source[row, vec * vector + v]

    @T.prim_func
    def rms_norm_gradients(
        grad: T.StridedTensor[(rows, width), (grad_stride, 1), dtype],
        x: T.StridedTensor[(rows, width), (x_stride, 1), dtype],
        weight: T.Tensor[(width,), weight_dtype],
        rstd: T.Tensor[(rows,), T.float32],
        residual: T.StridedTensor[(rows, width), (residual_stride, 1), dtype],
        x_grad: T.Tensor[(rows, width), dtype],
        partial: T.Tensor[(parts, width), T.float32],
        out_scale: T.float32,
        num_parts: T.int32,
    ):
        with T.Kernel(T.min(num_parts, plan.workers), threads=threads) as block:
            T.annotate_min_blocks_per_sm(plan.per_sm)
            T.assume(x_stride % vector == 0)
            T.assume(grad_stride % vector == 0)
            if plan.residual:
                T.assume(residual_stride % vector == 0)
            tx = T.get_thread_binding()
            lane = tx % lanes
            tiles = T.alloc_shared(
                (depth, at_once, streams, steps * threads if staged else 1, vector), dtype
            )
            warp_sums = T.alloc_shared((2, at_once, threads // LANES), T.float32)
            totals = T.alloc_shared(
                (plan.rows, width) if by_warps and plan.summed else (1, 1), T.float32
            )
            raw_grad, raw_x, raw_residual = local_arrays(
                dtype, at_once * count, at_once * count, at_once * count if plan.residual else 1
            )
            rounded = T.alloc_local((vector,), dtype)
            weights, acc = local_arrays(T.float32, count, count)
            grads, values, residuals = local_arrays(T.float32, vector, vector, vector)
            sums, factors, next_factors = local_arrays(T.float32, at_once, at_once, at_once)
            for s in T.unroll(steps):
                for v in T.unroll(vector):
                    weights[s * vector + v] = out_scale
                if weighted:
                    weights_from(weight, (s * lanes + lane) * vector, weights, s * vector)
                    for v in T.unroll(vector):
                        weights[s * vector + v] = weights[s * vector + v] * out_scale
            for cycle in T.serial(T.ceildiv(num_parts - block, plan.workers)):
                part = T.alloc_var(T.int32, init=block + cycle * plan.workers)
                start = T.alloc_var(
                    T.int32,
                    init=T.cast(T.cast(part, T.int64) * rows // num_parts, T.int32),
                )
                end = T.alloc_var(
                    T.int32,
                    init=T.cast(T.cast(part + 1, T.int64) * rows // num_parts, T.int32),
                )
                for v in T.unroll(count):
                    acc[v] = T.float32(0)
                if staged:
                    for ahead in T.unroll(depth):
                        fetch(tiles, start + ahead * at_once, end, ahead, grad, x, residual)
                prefetch_factors(rstd, start + tx // lanes, end, next_factors)
                for iteration in T.serial(T.ceildiv(end - start, plan.rows * at_once)):
                    first = T.alloc_var(
                        T.int32, init=start + iteration * (plan.rows * at_once) + tx // lanes
                    )
                    slot = T.alloc_var(T.int32, init=iteration % depth)
                    if staged:
                        await_stages(depth - 1)
                    for p in T.unroll(at_once):
                        row = first + p * plan.rows
                        sums[p] = T.float32(0)
                        factors[p] = next_factors[p]
                        if row < end:
                            read(tiles, slot, p, 0, grad, row, lane, raw_grad)
                            read(tiles, slot, p, 1, x, row, lane, raw_x)
                            if plan.residual:
                                read(tiles, slot, p, 2, residual, row, lane, raw_residual)
                    if staged:
                        free_stage()
                        fetch(tiles, first + depth * at_once, end, slot, grad, x, residual)
                    prefetch_factors(rstd, first + plan.rows * at_once, end, next_factors)
                    for p in T.unroll(at_once):
                        if first + p * plan.rows < end:
                            for s in T.unroll(steps):
                                widen(raw_grad, p * count + s * vector, grads)
                                widen(raw_x, p * count + s * vector, values)
                                for v in T.unroll(vector):
                                    sums[p] = T.fma(
                                        values[v] * factors[p],
                                        grads[v] * weights[s * vector + v],
                                        sums[p],
                                    )
                    summed(sums, warp_sums, iteration)
                    for p in T.unroll(at_once):
                        row = first + p * plan.rows
                        mean = T.alloc_var(T.float32, init=T.ieee_fdiv(sums[p], T.float32(width)))
                        if row < end:
                            for s in T.unroll(steps):
                                widen(raw_grad, p * count + s * vector, grads)
                                widen(raw_x, p * count + s * vector, values)
                                if plan.residual:
                                    widen(raw_residual, p * count + s * vector, residuals)
                                for v in T.unroll(vector):
                                    values[v] = values[v] * factors[p]
                                    if plan.summed:
                                        acc[s * vector + v] = T.fma(
                                            values[v], grads[v] * out_scale, acc[s * vector + v]
                                        )
                                    values[v] = (
                                        T.fma(-values[v], mean, grads[v] * weights[s * vector + v])
                                        * factors[p]
                                    )
                                    if plan.residual:
                                        values[v] = values[v] + residuals[v]
                                if (s * lanes + lane) * vector < width:
                                    for v in T.vectorized(vector):
                                        rounded[v] = T.cast(values[v], dtype)
                                    for v in T.vectorized(vector):
                                        x_grad[row, (s * lanes + lane) * vector + v] = rounded[v]
                if plan.summed:
                    if by_warps:
                        T.sync_threads()  # the sums of the last part were read
                        for s in T.unroll(steps):
                            for v in T.unroll(vector):
                                if (s * lanes + lane) * vector < width:
                                    totals[tx // lanes, (s * lanes + lane) * vector + v] = acc[
                                        s * vector + v
                                    ]
                        T.sync_threads()
                        for c in T.serial(T.ceildiv(width, threads)):
                            if c * threads + tx < width:
                                total = T.alloc_var(T.float32, init=totals[0, c * threads + tx])
                                for w in T.unroll(plan.rows - 1):
                                    total = total + totals[w + 1, c * threads + tx]
                                partial[part, c * threads + tx] = total
                    else:
                        for s in T.unroll(steps):
                            if (s * lanes + lane) * vector < width:
                                for v in T.vectorized(vector):
                                    partial[part, (s * lanes + lane) * vector + v] = acc[
                                        s * vector + v
                                    ]

    return rms_norm_gradients


def access_bits_sum(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = SumPlan(*static)
    bits = BITS[plan.dtype]
    return tuple(sorted({32, bits} if plan.accumulated else {32})), bits


@kernel(access_bits=access_bits_sum, pass_configs=EXPLICIT_GUARDS)
def sum_parts(*static: Any) -> Any:
    """Adds up the parts of a weight gradient, and what the buffer had before; 32 columns a block.

    Warp `w` adds the parts `w`, `w + 24`, ... in this order; then the warps' sums are added.
    """
    plan = SumPlan(*static)
    width, dtype = plan.width, storage(plan.dtype)[0]
    parts = T.dynamic("parts")

    @T.prim_func
    def sum_weight_gradients(
        partial: T.Tensor[(parts, width), T.float32],
        old: T.Tensor[(width,), dtype],
        out: T.Tensor[(width,), dtype],
    ):
        with T.Kernel(T.ceildiv(width, LANES), threads=SUM_WARPS * LANES) as block:
            lane = T.get_thread_binding() % LANES
            warp = T.get_thread_binding() // LANES
            column = block * LANES + lane
            warp_sums = T.alloc_shared((SUM_WARPS, LANES), T.float32)
            values = T.alloc_local((plan.steps,), T.float32)
            total = T.alloc_var(T.float32, init=T.float32(0))
            for i in T.unroll(plan.steps):
                values[i] = T.float32(0)
                if i * SUM_WARPS + warp < parts and column < width:
                    values[i] = partial[i * SUM_WARPS + warp, column]
            for i in T.unroll(plan.steps):
                total = total + values[i]
            warp_sums[warp, lane] = total
            T.sync_threads()
            if warp == 0 and column < width:
                for w in T.unroll(SUM_WARPS - 1):
                    total = total + warp_sums[w + 1, lane]
                if plan.accumulated:
                    total = total + T.cast(old[column], T.float32)
                out[column] = T.cast(total, dtype)

    return sum_weight_gradients
