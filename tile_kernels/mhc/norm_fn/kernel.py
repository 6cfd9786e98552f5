"""The projection of the streams to mixes, on tensor cores, and its gradients.

A TF32 number has 11 bits, which are two bfloat16: its rounding to 8 bits, and the rest. So products
with bfloat16 streams are two products of bfloat16, exact before they are summed, at the full speed
of the matrix units and without widening the streams. Where two TF32 numbers meet, in the gradient
of the streams, the product of the two rests is left out: 2**-18 of the whole.
"""

from typing import Any

from tilelang import language as T
from tilelang.layout import make_swizzled_layout

from tile_kernels.mhc.norm_fn.plan import (
    GRADIENT_ROWS,
    VECTOR,
    ProductPlan,
    cut_columns,
    gradient_columns,
)
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

WEIGHTS = 4  # float32 of 16 bytes
WARPGROUP = 128  # threads
BUFFERS = 2  # steps that weights are loaded ahead; a leaf is a multiple of them


# ---- weights as two parts -----------------------------------------------------------------------


@T.macro
def tf32(value):
    """float32 rounded to TF32, to nearest, ties away from zero; infinities and NaN stay."""
    bits = T.alloc_var(T.uint32, init=T.reinterpret(value, T.uint32))
    if (bits & T.uint32(0x7F800000)) != T.uint32(0x7F800000):
        bits = (bits + T.uint32(0x1000)) & T.uint32(0xFFFFE000)
    return T.reinterpret(bits, T.float32)


@T.macro
def in_two(value, high, low, index):
    """`tf32(value) = high + low`, both exact; what is not finite in bfloat16 has no low part."""
    rounded = T.alloc_var(T.float32, init=tf32(value))
    high[index] = T.cast(rounded, T.bfloat16)
    low[index] = T.cast(T.ieee_sub(rounded, T.cast(high[index], T.float32)), T.bfloat16)
    if (T.reinterpret(T.cast(high[index], T.float32), T.uint32) & T.uint32(0x7F800000)) == T.uint32(
        0x7F800000
    ):
        low[index] = T.bfloat16(0)


def cut_weights(mixes: int, padded: int, columns: int, size: int, threads: int) -> Any:
    """A macro: `columns` of the weights to `parts`, first one part of all, then the other.

    They are those of `source[slot]` from `column` on, of `size`; what is beyond is zero, and so are
    rows of padding.
    """
    accesses = columns // WEIGHTS  # of a row

    @T.macro
    def cut(source, slot, column, parts):
        weights = T.alloc_local((WEIGHTS,), T.float32)
        high = T.alloc_local((WEIGHTS,), T.bfloat16)
        low = T.alloc_local((WEIGHTS,), T.bfloat16)
        for iteration in T.unroll(-(-padded * accesses // threads)):
            index = iteration * threads + T.get_thread_binding()
            row = index // accesses
            first = index % accesses * WEIGHTS
            if index < padded * accesses:
                for e in T.vectorized(WEIGHTS):
                    weights[e] = T.float32(0)
                if row < mixes and column + first < size:
                    for e in T.vectorized(WEIGHTS):
                        weights[e] = source[slot, row, column + first + e]
                for e in T.unroll(WEIGHTS):
                    in_two(weights[e], high, low, e)
                for e in T.vectorized(WEIGHTS):
                    parts[row, first + e] = high[e]
                for e in T.vectorized(WEIGHTS):
                    parts[padded + row, first + e] = low[e]

    return cut


def weight_vectors(mixes: int, depth: int, threads: int) -> int:
    """How many vectors of `depth` columns of the weights a thread has."""
    return -(-mixes * depth // WEIGHTS // threads)


def weight_step(mixes: int, padded: int, size: int, depth: int, stages: int, threads: int) -> Any:
    """Macros: `depth` columns of the weights to registers; from there in two parts to a stage.

    Registers are `weights[buffer]`. A third macro clears the rows of padding of all stages.
    """
    accesses = depth // WEIGHTS  # of a row
    num_vectors = weight_vectors(mixes, depth, threads)

    @T.macro
    def load(fn, column, tx, weights, buffer):
        for iteration in T.unroll(num_vectors):
            index = iteration * threads + tx
            inside = column + index % accesses * WEIGHTS
            for e in T.vectorized(WEIGHTS):
                weights[buffer, iteration, e] = T.float32(0)
            if index < mixes * accesses and inside < size:
                for e in T.vectorized(WEIGHTS):
                    weights[buffer, iteration, e] = fn[index // accesses, inside + e]

    @T.macro
    def store(weights, buffer, tx, weight_tile, slot):
        high = T.alloc_local((WEIGHTS,), T.bfloat16)
        low = T.alloc_local((WEIGHTS,), T.bfloat16)
        for iteration in T.unroll(num_vectors):
            index = iteration * threads + tx
            row = index // accesses
            first = index % accesses * WEIGHTS
            if index < mixes * accesses:
                for e in T.unroll(WEIGHTS):
                    in_two(weights[buffer, iteration, e], high, low, e)
                for e in T.vectorized(WEIGHTS):
                    weight_tile[slot, row, first + e] = high[e]
                for e in T.vectorized(WEIGHTS):
                    weight_tile[slot, padded + row, first + e] = low[e]

    @T.macro
    def clear_padding(tx, weight_tile):
        rows = padded - mixes
        if rows > 0:
            for iteration in T.serial(-(-2 * stages * rows * accesses // threads)):
                index = iteration * threads + tx
                if index < 2 * stages * rows * accesses:
                    slot = index // (2 * rows * accesses)
                    part = index // (rows * accesses) % 2
                    row = index // accesses % rows
                    for e in T.vectorized(WEIGHTS):
                        weight_tile[
                            slot, part * padded + mixes + row, index % accesses * WEIGHTS + e
                        ] = T.bfloat16(0)

    return load, store, clear_padding


# ---- products -----------------------------------------------------------------------------------


def fetch_rows(size: int, tile: int, depth: int, threads: int) -> Any:
    """A macro: starts the copies of `depth` columns of the streams to `slot`.

    Of `x` the rows from `row` on; zeros where there are none, and beyond the last column.
    """
    accesses = depth // VECTOR  # of a row

    @T.macro
    def fetch(x, x_tile, row, rows, column, slot):
        tx = T.get_thread_binding()
        for iteration in T.unroll(tile * accesses // threads):
            line = iteration * (threads // accesses) + tx // accesses
            inside = tx % accesses * VECTOR
            T.ptx_cp_async(
                T.access_ptr(x_tile[slot, line, inside], "w", VECTOR),
                T.access_ptr(x[row + line, column + inside], "r", VECTOR),
                VECTOR, row + line < rows and column + inside < size,
            )  # fmt: skip

    return fetch


def fetch_step(mixes: int, size: int, tile: int, depth: int) -> Any:
    """A macro: starts the copies of a step to `slot`, streams and weights, as one group."""
    threads = 2 * tile
    weight_tile = depth // WEIGHTS  # accesses
    fetch_streams = fetch_rows(size, tile, depth, threads)

    @T.macro
    def fetch(x, fn, x_tile, fn_tile, row, rows, column, slot):
        tx = T.get_thread_binding()
        fetch_streams(x, x_tile, row, rows, column, slot)
        for iteration in T.unroll(-(-mixes * weight_tile // threads)):
            line = (iteration * threads + tx) // weight_tile
            inside = (iteration * threads + tx) % weight_tile * WEIGHTS
            if line < mixes:
                T.ptx_cp_async(
                    T.access_ptr(fn_tile[slot, line, inside], "w", WEIGHTS),
                    T.access_ptr(fn[line, column + inside], "r", WEIGHTS),
                    WEIGHTS, column + inside < size,
                )  # fmt: skip
        T.ptx_commit_group()

    return fetch


def multiply_step(padded: int, tile: int, depth: int, unit: int) -> Any:
    """A macro: products and squares of a step, `unit` columns at a time, whatever its depth.

    A warp has whole rows of them in registers, for both.
    """

    @T.macro
    def multiply(x_tile, slot, parts, x_regs, sums, squared):
        for first in tuple(range(0, depth, unit)):
            columns = slice(first, first + unit)
            T.copy(x_tile[slot, :, columns], x_regs)
            for part in (0, padded):
                T.gemm(
                    x_regs, parts[part : part + padded, columns], sums, transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )  # fmt: skip
            for i, j in T.Parallel(tile, unit):
                squared[i, j] = T.fma(
                    T.cast(x_regs[i, j], T.float32), T.cast(x_regs[i, j], T.float32), squared[i, j]
                )

    return multiply


def multiply_stage(padded: int, tile: int, depth: int, unit: int) -> Any:
    """Like `multiply_step`, by some warpgroups of a block; the squares while wgmma runs."""

    @T.macro
    def multiply(x_tile, weight_tile, slot, x_regs, sums, squared):
        for first in tuple(range(0, depth, unit)):
            columns = slice(first, first + unit)
            T.copy(x_tile[slot, :, columns], x_regs)
            for part in (0, padded):
                T.wgmma_gemm(
                    x_regs, weight_tile[slot, part : part + padded, columns], sums,
                    transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
                )  # fmt: skip
            for i, j in T.Parallel(tile, unit):
                squared[i, j] = T.fma(
                    T.cast(x_regs[i, j], T.float32), T.cast(x_regs[i, j], T.float32), squared[i, j]
                )
            T.wait_wgmma(0)

    return multiply


def fold_leaf(tile: int, padded: int) -> Any:
    """A macro: adds the sums of a leaf to those of its part, of which it is number `leaf`."""

    @T.macro
    def fold(leaf, sums, squared, row_sums, total, row_totals):
        T.reduce_sum(squared, row_sums, dim=1)
        if leaf == 0:
            T.copy(sums, total)
            T.copy(row_sums, row_totals)
        else:
            for i, j in T.Parallel(tile, padded):
                total[i, j] = total[i, j] + sums[i, j]
            for i in T.Parallel(tile):
                row_totals[i] = row_totals[i] + row_sums[i]
        T.clear(sums)
        T.clear(squared)

    return fold


def write_part(tile: int, padded: int) -> Any:
    """A macro: the sums of a part to memory, for rows that exist."""

    @T.macro
    def write(mul, squares, part, row, rows, total, row_totals):
        for i, j in T.Parallel(tile, padded):
            if row + i < rows:
                mul[part, row + i, j] = total[i, j]
        for i in T.Parallel(tile):
            if row + i < rows:
                squares[part, row + i] = row_totals[i]

    return write


@kernel(
    access_bits=lambda *static: (
        () if ProductPlan(*static).kind == "copied" else (128,),
        (32, 64),
    ),
    # All barriers are written out.
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def products(*static: Any) -> Any:
    """`mul` and `s` of a share of the columns, for each share: the products and the squares.

    See `cut_columns` for the shares. A block computes `run` parts, each the sum of `fold` leaves.
    Streams and weights are copied some steps ahead; the weights of a step are cut in two when they
    have arrived.
    """
    plan = ProductPlan(*static)
    return KINDS[plan.kind](plan)


def copied_products(plan: ProductPlan) -> Any:
    """Every thread copies and multiplies; a barrier before and after weights are cut in two."""
    mixes, padded, size, tile = plan.mixes, plan.padded, plan.size, plan.tile
    depth, unit, stages = plan.depth, plan.unit, plan.stages
    leaf_steps = plan.leaf // depth
    leaves = -(-size // plan.leaf)
    rows, parts = T.dynamic("rows parts")
    fetch = fetch_step(mixes, size, tile, depth)
    cut = cut_weights(mixes, padded, depth, depth, 2 * tile)
    multiply = multiply_step(padded, tile, depth, unit)
    fold_sums, write = fold_leaf(tile, padded), write_part(tile, padded)

    @T.prim_func
    def product_tiles(
        x: T.Tensor[(rows, size), T.bfloat16],
        fn: T.Tensor[(mixes, size), T.float32],
        mul: T.Tensor[(parts, rows, padded), T.float32],
        squares: T.Tensor[(parts, rows), T.float32],
        run: T.int32,
        fold: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, tile), T.ceildiv(parts, run), threads=2 * tile) as (
            block,
            share,
        ):
            x_tile = T.alloc_shared((stages, tile, depth), T.bfloat16)
            fn_tile = T.alloc_shared((stages, mixes, depth), T.float32)
            weight_tile = T.alloc_shared((2 * padded, depth), T.bfloat16)
            x_regs = T.alloc_fragment((tile, unit), T.bfloat16)
            sums = T.alloc_fragment((tile, padded), T.float32)
            squared = T.alloc_fragment((tile, unit), T.float32)
            row_sums = T.alloc_fragment((tile,), T.float32)
            total = T.alloc_fragment((tile, padded), T.float32)
            row_totals = T.alloc_fragment((tile,), T.float32)
            T.annotate_layout({x_tile: make_swizzled_layout(x_tile)})
            row = block * tile
            first = share * run * fold  # leaf
            num_leaves = T.min(run * fold, leaves - first)
            start, steps = first * plan.leaf, num_leaves * leaf_steps
            T.clear(sums)
            T.clear(squared)
            for ahead in T.serial(stages - 1):
                if ahead < steps:
                    fetch(x, fn, x_tile, fn_tile, row, rows, start + ahead * depth, ahead)
                else:
                    T.ptx_commit_group()
            for leaf in T.serial(num_leaves):
                for inner in T.serial(leaf_steps):
                    step = leaf * leaf_steps + inner
                    T.ptx_wait_group(stages - 2)
                    T.sync_threads()  # the step is here, and all are done with the one before
                    ahead = step + stages - 1
                    if ahead < steps:
                        column = start + ahead * depth
                        fetch(x, fn, x_tile, fn_tile, row, rows, column, ahead % stages)
                    else:
                        T.ptx_commit_group()
                    cut(fn_tile, step % stages, 0, weight_tile)
                    if plan.fenced:
                        T.fence_proxy_async()
                    T.sync_threads()
                    multiply(x_tile, step % stages, weight_tile, x_regs, sums, squared)
                fold_sums(leaf % fold, sums, squared, row_sums, total, row_totals)
                if leaf % fold == fold - 1 or leaf == num_leaves - 1:
                    write(mul, squares, share * run + leaf // fold, row, rows, total, row_totals)

    return product_tiles


def streamed_products(plan: ProductPlan) -> Any:
    """A warp copies streams by TMA, others cut weights, and warpgroups multiply 64 rows each.

    A stage of the ring has an mbarrier that counts what arrives (`full`), and one at which the
    warps arrive that have read it (`empty`). No barrier of the whole block: while a warpgroup loads
    operands or squares, the tensor cores work for another.
    """
    mixes, padded, size, tile = plan.mixes, plan.padded, plan.size, plan.tile
    depth, unit, stages = plan.depth, plan.unit, plan.stages
    leaf_steps = plan.leaf // depth
    leaves = -(-size // plan.leaf)
    rows, parts = T.dynamic("rows parts")
    threads = 2 * tile
    fold_sums, write = fold_leaf(tile, padded), write_part(tile, padded)
    multiply = multiply_stage(padded, tile, depth, unit)
    cutters = plan.threads - threads - WARP
    load, store, clear_padding = weight_step(mixes, padded, size, depth, stages, cutters)
    num_vectors = weight_vectors(mixes, depth, cutters)

    @T.macro
    def copy_streams(x, x_tile, full, empty, row, start, steps):
        for step in T.serial(steps):
            slot = step % stages
            column = start + step * depth
            T.mbarrier_wait_parity(empty[slot], step // stages % 2 ^ 1)
            T.tma_copy(
                x[row : row + tile, column : column + depth], x_tile[slot, :, :], barrier=full[slot]
            )
            T.mbarrier_arrive(full[slot])  # all 32 lanes, the one that copies among them

    @T.macro
    def bring_weights(fn, weight_tile, full, empty, start, steps):
        tx = T.get_thread_binding() - threads
        weights = T.alloc_local((BUFFERS, num_vectors, WEIGHTS), T.float32)
        for buffer in tuple(range(BUFFERS)):
            load(fn, start + buffer * depth, tx, weights, buffer)
        clear_padding(tx, weight_tile)
        for first in T.serial(steps // BUFFERS):
            for buffer in tuple(range(BUFFERS)):
                step = first * BUFFERS + buffer
                slot = step % stages
                T.mbarrier_wait_parity(empty[slot], step // stages % 2 ^ 1)
                store(weights, buffer, tx, weight_tile, slot)
                T.fence_proxy_async()  # the matrix units read what these threads wrote
                T.mbarrier_arrive(full[slot])
                if step + BUFFERS < steps:
                    load(fn, start + (step + BUFFERS) * depth, tx, weights, buffer)

    @T.prim_func
    def product_streams(
        x: T.Tensor[(rows, size), T.bfloat16],
        fn: T.Tensor[(mixes, size), T.float32],
        mul: T.Tensor[(parts, rows, padded), T.float32],
        squares: T.Tensor[(parts, rows), T.float32],
        run: T.int32,
        fold: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, tile), T.ceildiv(parts, run), threads=plan.threads) as (
            block,
            share,
        ):
            x_tile = T.alloc_shared((stages, tile, depth), T.bfloat16)
            weight_tile = T.alloc_shared((stages, 2 * padded, depth), T.bfloat16)
            full = T.alloc_barrier([cutters + WARP] * stages)
            empty = T.alloc_barrier([threads // WARP] * stages)
            T.annotate_layout({x_tile: make_swizzled_layout(x_tile)})
            row = block * tile
            first = share * run * fold  # leaf
            num_leaves = T.min(run * fold, leaves - first)
            start, steps = first * plan.leaf, num_leaves * leaf_steps
            if T.get_thread_binding() >= threads:
                if T.get_thread_binding() >= threads + cutters:
                    copy_streams(x, x_tile, full, empty, row, start, steps)
                else:
                    bring_weights(fn, weight_tile, full, empty, start, steps)
            else:
                x_regs = T.alloc_fragment((tile, unit), T.bfloat16)
                sums = T.alloc_fragment((tile, padded), T.float32)
                squared = T.alloc_fragment((tile, unit), T.float32)
                row_sums = T.alloc_fragment((tile,), T.float32)
                total = T.alloc_fragment((tile, padded), T.float32)
                row_totals = T.alloc_fragment((tile,), T.float32)
                part = T.alloc_var(T.int32, init=share * run)
                folded = T.alloc_var(T.int32, init=0)  # leaves of the part
                T.clear(sums)
                T.clear(squared)
                for leaf in T.serial(num_leaves):
                    for inner in T.serial(leaf_steps):
                        step = leaf * leaf_steps + inner
                        slot = step % stages
                        T.mbarrier_wait_parity(full[slot], step // stages % 2)
                        multiply(x_tile, weight_tile, slot, x_regs, sums, squared)
                        T.sync_warp()
                        if T.get_thread_binding() % WARP == 0:
                            T.mbarrier_arrive(empty[slot])
                    T.warpgroup_fence_operand(sums, num_regs=tile * padded // threads)
                    fold_sums(folded, sums, squared, row_sums, total, row_totals)
                    folded = folded + 1
                    if folded == fold or leaf == num_leaves - 1:
                        write(mul, squares, part, row, rows, total, row_totals)
                        part = part + 1
                        folded = 0

    return product_streams


def single_products(plan: ProductPlan) -> Any:
    """A leaf for a block, which copies all of it at once: for few rows, whose latency counts.

    All threads cut weights, the first warpgroup multiplies. `run` and `fold` must be 1.
    """
    mixes, padded, size, tile, leaf = plan.mixes, plan.padded, plan.size, plan.tile, plan.leaf
    rows, parts = T.dynamic("rows parts")
    fetch = fetch_rows(size, tile, leaf, plan.threads)
    load, store, clear_padding = weight_step(mixes, padded, size, leaf, 1, plan.threads)
    num_vectors = weight_vectors(mixes, leaf, plan.threads)
    multiply, write = multiply_stage(padded, tile, leaf, plan.unit), write_part(tile, padded)

    @T.prim_func
    def product_leaf(
        x: T.Tensor[(rows, size), T.bfloat16],
        fn: T.Tensor[(mixes, size), T.float32],
        mul: T.Tensor[(parts, rows, padded), T.float32],
        squares: T.Tensor[(parts, rows), T.float32],
        run: T.int32,
        fold: T.int32,
    ):
        with T.Kernel(T.ceildiv(rows, tile), T.ceildiv(parts, run), threads=plan.threads) as (
            block,
            share,
        ):
            x_tile = T.alloc_shared((1, tile, leaf), T.bfloat16)
            weight_tile = T.alloc_shared((1, 2 * padded, leaf), T.bfloat16)
            T.annotate_layout({x_tile: make_swizzled_layout(x_tile)})
            tx = T.get_thread_binding()
            part = share * run * fold
            weights = T.alloc_local((1, num_vectors, WEIGHTS), T.float32)
            load(fn, part * leaf, tx, weights, 0)
            fetch(x, x_tile, block * tile, rows, part * leaf, 0)
            T.ptx_commit_group()
            clear_padding(tx, weight_tile)
            store(weights, 0, tx, weight_tile, 0)
            T.fence_proxy_async()  # the matrix units read what these threads wrote
            T.ptx_wait_group(0)
            T.sync_threads()
            if tx < WARPGROUP:
                x_regs = T.alloc_fragment((tile, plan.unit), T.bfloat16)
                sums = T.alloc_fragment((tile, padded), T.float32)
                squared = T.alloc_fragment((tile, plan.unit), T.float32)
                row_sums = T.alloc_fragment((tile,), T.float32)
                T.clear(sums)
                T.clear(squared)
                multiply(x_tile, weight_tile, 0, x_regs, sums, squared)
                T.warpgroup_fence_operand(sums, num_regs=tile * padded // WARPGROUP)
                T.reduce_sum(squared, row_sums, dim=1)
                write(mul, squares, part, block * tile, rows, sums, row_sums)

    return product_leaf


KINDS = {"single": single_products, "copied": copied_products, "streamed": streamed_products}


# ---- mixes from products ------------------------------------------------------------------------


@T.macro
def inverse_norm(square, size, eps):
    """What divides by the norm of a token."""
    return T.rsqrt(T.ieee_fmaf(square, T.float32(1 / size), eps))


def sum_of_products(size: int) -> Any:
    """A macro: `totals` of a token are `mul` of one mix, `s`, and what divides by the norm.

    Parts are groups of leaves (`fold` > 1) or single leaves. The leaves of a group are added in
    order, then the groups, wherever this is called and whichever the parts are.
    """
    columns = cut_columns(size)
    half = -(-columns.groups // 2) * columns.fold  # leaves of a pass

    @T.macro
    def summed(mul, squares, token, mix, fold, eps, totals):
        if fold == columns.fold:
            totals[0] = mul[0, token, mix]
            totals[1] = squares[0, token]
            for i in T.unroll(columns.groups - 1):
                totals[0] = T.ieee_add(totals[0], mul[i + 1, token, mix])
                totals[1] = T.ieee_add(totals[1], squares[i + 1, token])
        else:
            group = T.alloc_local((2,), T.float32)
            # Two passes: the loads of all leaves at once take more registers than there are.
            for iteration in T.serial(2):
                for i in tuple(range(half)):
                    leaf = iteration * half + i
                    if leaf < columns.leaves:
                        if i % columns.fold == 0:
                            group[0] = mul[leaf, token, mix]
                            group[1] = squares[leaf, token]
                        else:
                            group[0] = T.ieee_add(group[0], mul[leaf, token, mix])
                            group[1] = T.ieee_add(group[1], squares[leaf, token])
                        if i % columns.fold == columns.fold - 1 or leaf == columns.leaves - 1:
                            if leaf < columns.fold:
                                totals[0] = group[0]
                                totals[1] = group[1]
                            else:
                                totals[0] = T.ieee_add(totals[0], group[0])
                                totals[1] = T.ieee_add(totals[1], group[1])
        totals[2] = inverse_norm(totals[1], size, eps)

    return summed


def sum_of_splits(size: int) -> Any:
    """As `sum_of_products`, of any number of parts, which are added in order; `fold` is ignored."""

    @T.macro
    def summed(mul, squares, token, mix, fold, eps, totals):
        totals[0] = mul[0, token, mix]
        totals[1] = squares[0, token]
        for i in T.serial(mul.shape[0] - 1):
            totals[0] = T.ieee_add(totals[0], mul[i + 1, token, mix])
            totals[1] = T.ieee_add(totals[1], squares[i + 1, token])
        totals[2] = inverse_norm(totals[1], size, eps)

    return summed


MIX_THREADS = 128


@kernel(
    access_bits=lambda *_: (32, 32),
    pass_configs=EXPLICIT_GUARDS,
)
def mixes_of_products(mixes: int, padded: int, size: int) -> Any:
    """A thread per mix: the shares summed, and divided by the norm of the token."""
    rows, parts = T.dynamic("rows parts")
    slots = MIX_THREADS // mixes  # tokens of a block
    summed = sum_of_products(size)

    @T.prim_func
    def mix_entries(
        mul: T.Tensor[(parts, rows, padded), T.float32],
        squares: T.Tensor[(parts, rows), T.float32],
        out: T.Tensor[(rows, mixes), T.float32],
        products_out: T.Tensor[(rows, mixes), T.float32],
        squares_out: T.Tensor[(rows,), T.float32],
        fold: T.int32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, slots), threads=MIX_THREADS) as block:
            token = block * slots + T.get_thread_binding() // mixes
            mix = T.get_thread_binding() % mixes
            totals = T.alloc_local((3,), T.float32)
            if T.get_thread_binding() < slots * mixes and token < rows:
                summed(mul, squares, token, mix, fold, eps, totals)
                out[token, mix] = T.ieee_mul(totals[0], totals[2])
                products_out[token, mix] = totals[0]
                if mix == 0:
                    squares_out[token] = totals[1]

    return mix_entries


# ---- backward -----------------------------------------------------------------------------------

GRADIENT_WARPS = 4
# That matrix units sum by themselves. They cut off what they add to a sum instead of rounding it:
# over a hundred thousand rows the third digit would be wrong.
GRADIENT_TILES = 16


@kernel(
    access_bits=lambda *_: (32, (16, 32)),
    pass_configs=EXPLICIT_GUARDS,
)
def mix_gradients(mixes: int, padded: int, size: int) -> Any:
    """A warp per token: the gradient of its products in two parts, and twice that of its squares.

    With `r` the inverse norm: `g r`, rounded to TF32, and `-(sum of g mul) r / (s + eps K)`.
    """
    rows = T.dynamic("rows")
    steps = -(-padded // WARP)

    @T.prim_func
    def mix_gradient_rows(
        grad: T.Tensor[(rows, mixes), T.float32],
        mul: T.Tensor[(rows, mixes), T.float32],
        squares: T.Tensor[(rows,), T.float32],
        parts: T.Tensor[(2, rows, padded), T.bfloat16],
        square_grads: T.Tensor[(rows,), T.float32],
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows, GRADIENT_WARPS), threads=GRADIENT_WARPS * WARP) as block:
            row = block * GRADIENT_WARPS + T.get_thread_binding() // WARP
            lane = T.get_thread_binding() % WARP
            high = T.alloc_local((1,), T.bfloat16)
            low = T.alloc_local((1,), T.bfloat16)
            total = T.alloc_var(T.float32, init=T.float32(0))
            if row < rows:
                square = T.alloc_var(T.float32, init=squares[row])
                inverse = T.alloc_var(T.float32)
                # In float64 and rounded once: a step of it would move ties of TF32.
                mean = T.cast(square, T.float64) / T.float64(size)
                inverse = T.cast(T.float64(1) / T.sqrt(mean + T.cast(eps, T.float64)), T.float32)
                for i in T.unroll(steps):
                    mix = i * WARP + lane
                    if mix < padded:
                        incoming = T.alloc_var(T.float32, init=T.float32(0))
                        if mix < mixes:
                            incoming = grad[row, mix]
                            total = T.ieee_fmaf(incoming, mul[row, mix], total)
                        in_two(T.ieee_mul(incoming, inverse), high, low, 0)
                        parts[0, row, mix] = high[0]
                        parts[1, row, mix] = low[0]
                for d in T.unroll(5):
                    total = T.ieee_add(total, T.shfl_xor(total, T.shift_left(1, d)))
                if lane == 0:
                    square_grads[row] = T.ieee_fdiv(
                        -total * inverse, T.ieee_fmaf(eps, T.float32(size), square)
                    )

    return mix_gradient_rows


@kernel(access_bits=lambda *_: (128, (32, 128)))
def product_gradients(mixes: int, padded: int, size: int, accumulate: bool, stages: int) -> Any:
    """The gradients of streams and weights from one reading of the streams."""
    rows, splits = T.dynamic("rows splits")
    height, width = GRADIENT_ROWS, gradient_columns(padded)
    cut = cut_weights(mixes, padded, width, size, 128)
    copies = 5 if accumulate else 4  # for a tile

    @T.macro
    def fetch(sources, tiles_shared, chunk, first, tile, tiles):
        """Start the copies of a tile, each a group."""
        x, parts, square_grads, grad_x = sources
        x_tile, high, low, squared, old = tiles_shared
        if tile < tiles:
            row = (first + tile) * height
            slot = tile % stages
            columns = slice(chunk * width, (chunk + 1) * width)
            T.async_copy(x[row : row + height, columns], x_tile[slot, :, :])
            T.async_copy(parts[0, row : row + height, 0:padded], high[slot, :, :])
            T.async_copy(parts[1, row : row + height, 0:padded], low[slot, :, :])
            T.async_copy(square_grads[row : row + height], squared[slot, :])
            if accumulate:
                T.async_copy(grad_x[row : row + height, columns], old[slot, :, :])
        else:
            for _ in T.unroll(copies):
                T.ptx_commit_group()

    @T.prim_func
    def gradient_tiles(
        x: T.Tensor[(rows, size), T.bfloat16],
        fn: T.Tensor[(mixes, size), T.float32],
        parts: T.Tensor[(2, rows, padded), T.bfloat16],
        square_grads: T.Tensor[(rows,), T.float32],
        grad_x: T.Tensor[(rows, size), T.bfloat16],
        grad_fn: T.Tensor[(splits, mixes, size), T.float32],
        tiles: T.int32,
    ):
        with T.Kernel(-(-size // width), splits, threads=128) as (chunk, split):
            weight_tile = T.alloc_shared((2 * padded, width), T.bfloat16)
            x_tile = T.alloc_shared((stages, height, width), T.bfloat16)
            old = T.alloc_shared((stages, height, width if accumulate else 1), T.bfloat16)
            high = T.alloc_shared((stages, height, padded), T.bfloat16)
            low = T.alloc_shared((stages, height, padded), T.bfloat16)
            squared = T.alloc_shared((stages, height), T.float32)
            new_x = T.alloc_fragment((height, width), T.float32)
            sums = T.alloc_fragment((width, padded), T.float32)
            total = T.alloc_fragment((width, padded), T.float32)
            sources = (x, parts, square_grads, grad_x)
            tiles_shared = (x_tile, high, low, squared, old)
            T.clear(sums)
            T.clear(total)
            cut(T.reshape(fn, (1, mixes, size)), 0, chunk * width, weight_tile)
            for ahead in T.serial(stages - 1):
                fetch(sources, tiles_shared, chunk, split * tiles, ahead, tiles)
            for tile in T.serial(tiles):
                fetch(sources, tiles_shared, chunk, split * tiles, tile + stages - 1, tiles)
                T.ptx_wait_group(copies * (stages - 1))
                T.sync_threads()
                slot = tile % stages
                T.clear(new_x)
                T.gemm(high[slot, :, :], weight_tile[0:padded, :], new_x)
                T.gemm(low[slot, :, :], weight_tile[0:padded, :], new_x)
                T.gemm(high[slot, :, :], weight_tile[padded : 2 * padded, :], new_x)
                T.gemm(x_tile[slot, :, :], high[slot, :, :], sums, transpose_A=True)
                T.gemm(x_tile[slot, :, :], low[slot, :, :], sums, transpose_A=True)
                for i, j in T.Parallel(height, width):
                    new_x[i, j] = T.fma(
                        T.cast(x_tile[slot, i, j], T.float32), squared[slot, i], new_x[i, j]
                    )
                if accumulate:
                    for i, j in T.Parallel(height, width):
                        new_x[i, j] = T.cast(old[slot, i, j], T.float32) + new_x[i, j]
                T.copy(new_x, x_tile[slot, :, :])  # which all have read by now
                row = (split * tiles + tile) * height
                columns = slice(chunk * width, (chunk + 1) * width)
                T.copy(x_tile[slot, :, :], grad_x[row : row + height, columns], disable_tma=True)
                T.sync_threads()
                if tile % GRADIENT_TILES == GRADIENT_TILES - 1 or tile == tiles - 1:
                    for i, j in T.Parallel(width, padded):
                        total[i, j] = total[i, j] + sums[i, j]
                    T.clear(sums)
            for i, j in T.Parallel(width, padded):
                if chunk * width + i < size and j < mixes:
                    grad_fn[split, j, chunk * width + i] = total[i, j]

    return gradient_tiles
