"""The next streams, and their projection to mixes while they are on the chip."""

from typing import Any

from tilelang import language as T
from tilelang.layout import make_swizzled_layout

from tile_kernels.mhc.norm_fn.kernel import WEIGHTS, in_two
from tile_kernels.mhc.norm_fn.plan import VECTOR, MixPlan
from tile_kernels.mhc.post_pre.plan import DEPTH, TILE, WritePlan
from tile_kernels.mhc.primitives import widen, write_stream
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

CUT_THREADS = 256  # other values were not compared
MIX_VECTOR = 4  # float32 of 16 bytes
CHUNKS = DEPTH // VECTOR  # accesses of a row of a tile
# Of a thread. A block starts with 96 for all.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 112


@kernel(access_bits=lambda *_: (128, 64), pass_configs=EXPLICIT_GUARDS)
def cut_weights(*static: Any) -> Any:
    """Weights in two bfloat16 parts, rows of zeros between them: `[2 * padded, size]`."""
    plan = MixPlan(*static)
    accesses = plan.size // WEIGHTS

    @T.prim_func
    def cut_rows(
        fn: T.Tensor[(plan.mixes, plan.size), T.float32],
        parts: T.Tensor[(2 * plan.padded, plan.size), T.bfloat16],
    ):
        with T.Kernel(T.ceildiv(plan.padded * accesses, CUT_THREADS), threads=CUT_THREADS) as block:
            index = block * CUT_THREADS + T.get_thread_binding()
            row = index // accesses
            first = index % accesses * WEIGHTS
            weights = T.alloc_local((WEIGHTS,), T.float32)
            high = T.alloc_local((WEIGHTS,), T.bfloat16)
            low = T.alloc_local((WEIGHTS,), T.bfloat16)
            if row < plan.padded:
                for e in T.vectorized(WEIGHTS):
                    weights[e] = T.float32(0)
                if row < plan.mixes:
                    for e in T.vectorized(WEIGHTS):
                        weights[e] = fn[row, first + e]
                for e in T.unroll(WEIGHTS):
                    in_two(weights[e], high, low, e)
                for e in T.vectorized(WEIGHTS):
                    parts[row, first + e] = high[e]
                for e in T.vectorized(WEIGHTS):
                    parts[plan.padded + row, first + e] = low[e]

    return cut_rows


@kernel(
    access_bits=lambda *_: (32, (32, 64)),
    # All barriers are written out.
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def write_and_project(*static: Any) -> Any:
    """`mhc_post` of a tile of tokens, and the products and squares of what it writes.

    A warp copies by TMA. A warpgroup for each stream computes its next values, in the registers
    from which the matrix units read them, and stores them by TMA. Leaves, and the order of what is
    added in them, are those of `mhc_norm_fn_fwd`.
    """
    plan = WritePlan(*static)
    streams, hidden, padded = plan.streams, plan.hidden, plan.padded
    stages, weight_stages = plan.stages, plan.weight_stages
    size, height = streams * hidden, streams * TILE
    leaf_steps, leaves = plan.leaf // DEPTH, hidden // plan.leaf
    consumers = plan.consumers
    lag = stages - weight_stages
    mix_pitch = -(-streams * (streams + 1) // MIX_VECTOR) * MIX_VECTOR
    items = -(-TILE * CHUNKS // consumers)  # accesses of a thread to a tile
    rows, parts = T.dynamic("rows parts")

    @T.macro
    def copy_tiles(sources, targets, barriers, row, start, steps):
        """Streams of a step as soon as their stage is free, weights some steps later."""
        x, residual, weights = sources
        x_tile, tiles, weight_tile = targets
        full, empty, weights_full, weights_empty = barriers
        for step in T.serial(steps + lag):
            if step < steps:
                slot = step % stages
                column = start + step * DEPTH
                T.mbarrier_wait_parity(empty[slot], step // stages % 2 ^ 1)
                for s in T.unroll(streams):
                    T.tma_copy(
                        residual[
                            row : row + TILE, s * hidden + column : s * hidden + column + DEPTH
                        ],
                        tiles[slot, s * TILE : (s + 1) * TILE, :], barrier=full[slot],
                    )  # fmt: skip
                T.tma_copy(
                    x[row : row + TILE, column : column + DEPTH], x_tile[slot, :, :],
                    barrier=full[slot],
                )  # fmt: skip
                T.mbarrier_arrive(full[slot])
            if step >= lag:
                late = step - lag
                at = late % weight_stages
                column_late = start + late * DEPTH
                T.mbarrier_wait_parity(weights_empty[at], late // weight_stages % 2 ^ 1)
                for s in T.unroll(streams):
                    T.tma_copy(
                        weights[
                            :, s * hidden + column_late : s * hidden + column_late + DEPTH
                        ],
                        weight_tile[at * streams + s, :, :], barrier=weights_full[at],
                    )  # fmt: skip
                T.mbarrier_arrive(weights_full[at])

    write = write_stream(streams, VECTOR)
    widened = widen(VECTOR)

    @T.macro
    def load_mixes(post_mix, comb_mix, row, mixes):
        """The mixes of the tile to shared memory; 0 for tokens that do not exist."""
        for step in T.unroll(-(-TILE * mix_pitch // consumers)):
            index = step * consumers + T.get_thread_binding()
            token = row + index // mix_pitch
            mix = index % mix_pitch
            if index < TILE * mix_pitch:
                mixes[index // mix_pitch, mix] = T.float32(0)
                if token < rows and mix < streams * (streams + 1):
                    if mix < streams:
                        mixes[index // mix_pitch, mix] = post_mix[token, mix]
                    else:
                        mixes[index // mix_pitch, mix] = comb_mix[token, mix - streams]

    @T.macro
    def compute(x_tile, tiles, slot, mixes):
        """The next streams of the columns of a thread, in the place of those that it has read."""
        raw_x = T.alloc_local((1, VECTOR), T.bfloat16)
        raw = T.alloc_local((streams, VECTOR), T.bfloat16)
        output = T.alloc_local((VECTOR,), T.float32)
        value = T.alloc_local((VECTOR,), T.float32)
        rounded = T.alloc_local((VECTOR,), T.bfloat16)
        mix_regs = T.alloc_local((mix_pitch,), T.float32)
        post_regs = T.alloc_local((streams,), T.float32)
        comb_regs = T.alloc_local((streams * streams,), T.float32)
        for i in T.unroll(items):
            item = i * consumers + T.get_thread_binding()
            token = item // CHUNKS
            first = item % CHUNKS * VECTOR
            if item < TILE * CHUNKS:
                for step in T.unroll(mix_pitch // MIX_VECTOR):
                    for v in T.vectorized(MIX_VECTOR):
                        mix_regs[step * MIX_VECTOR + v] = mixes[token, step * MIX_VECTOR + v]
                for j in T.unroll(streams):
                    post_regs[j] = mix_regs[j]
                for j in T.unroll(streams * streams):
                    comb_regs[j] = mix_regs[streams + j]
                for v in T.vectorized(VECTOR):
                    raw_x[0, v] = x_tile[slot, token, first + v]
                for s in T.unroll(streams):
                    for v in T.vectorized(VECTOR):
                        raw[s, v] = tiles[slot, s * TILE + token, first + v]
                widened(raw_x, 0, output)
                for j in T.unroll(streams):
                    write(j, output, post_regs, comb_regs, raw, value)
                    for v in T.vectorized(VECTOR):
                        rounded[v] = T.cast(value[v], T.bfloat16)
                    for v in T.vectorized(VECTOR):
                        tiles[slot, j * TILE + token, first + v] = rounded[v]

    @T.prim_func
    def write_tiles(
        x: T.Tensor[(rows, hidden), T.bfloat16],
        residual: T.Tensor[(rows, size), T.bfloat16],
        post_mix: T.Tensor[(rows, streams), T.float32],
        comb_mix: T.Tensor[(rows, streams * streams), T.float32],
        weights: T.Tensor[(2 * padded, size), T.bfloat16],
        out: T.Tensor[(rows, size), T.bfloat16],
        mul: T.Tensor[(parts, rows, padded), T.float32],
        squares: T.Tensor[(parts, rows), T.float32],
        run: T.int32,
        fold: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(rows, TILE), T.ceildiv(parts // streams, run), threads=plan.threads
        ) as (block, share):
            x_tile = T.alloc_shared((stages, TILE, DEPTH), T.bfloat16)
            tiles = T.alloc_shared((stages, height, DEPTH), T.bfloat16)
            weight_tile = T.alloc_shared((weight_stages * streams, 2 * padded, DEPTH), T.bfloat16)
            mixes = T.alloc_shared((TILE, mix_pitch), T.float32)
            row_totals = T.alloc_shared((height,), T.float32)
            full = T.alloc_barrier([WARP] * stages)
            empty = T.alloc_barrier([consumers // WARP] * stages)
            weights_full = T.alloc_barrier([WARP] * weight_stages)
            weights_empty = T.alloc_barrier([consumers // WARP] * weight_stages)
            T.annotate_layout(
                {tile: make_swizzled_layout(tile) for tile in (x_tile, tiles, weight_tile)}
            )
            row = block * TILE
            first = share * run * fold  # leaf
            num_leaves = T.min(run * fold, leaves - first)
            start, steps = first * plan.leaf, num_leaves * leaf_steps
            tx = T.get_thread_binding()
            if tx >= consumers:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                if tx < consumers + WARP:
                    copy_tiles(
                        (x, residual, weights), (x_tile, tiles, weight_tile),
                        (full, empty, weights_full, weights_empty), row, start, steps,
                    )  # fmt: skip
            else:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                values = T.alloc_fragment((height, DEPTH), T.bfloat16)
                sums = T.alloc_fragment((height, padded), T.float32)
                squared = T.alloc_fragment((height, DEPTH), T.float32)
                row_sums = T.alloc_fragment((height,), T.float32)
                total = T.alloc_fragment((height, padded), T.float32)
                load_mixes(post_mix, comb_mix, row, mixes)
                T.sync_threads(1, consumers)
                T.clear(sums)
                T.clear(squared)
                for leaf in T.serial(num_leaves):
                    for inner in T.serial(leaf_steps):
                        step = leaf * leaf_steps + inner
                        slot = step % stages
                        T.mbarrier_wait_parity(full[slot], step // stages % 2)
                        compute(x_tile, tiles, slot, mixes)
                        T.fence_proxy_async()  # all writers, then the thread that starts the copy
                        T.sync_threads(1, consumers)
                        column = start + step * DEPTH
                        for s in T.unroll(streams):
                            T.tma_copy(
                                tiles[slot, s * TILE : (s + 1) * TILE, :],
                                out[
                                    row : row + TILE,
                                    s * hidden + column : s * hidden + column + DEPTH,
                                ],
                            )
                        T.copy(tiles[slot, :, :], values)
                        at = step % weight_stages
                        T.mbarrier_wait_parity(weights_full[at], step // weight_stages % 2)
                        mine = at * streams + tx // 128
                        for low in (0, padded):
                            T.wgmma_gemm(
                                values, weight_tile[mine, low : low + padded, :], sums,
                                transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
                            )  # fmt: skip
                        for i, c in T.Parallel(height, DEPTH):
                            squared[i, c] = T.fma(
                                T.cast(values[i, c], T.float32), T.cast(values[i, c], T.float32),
                                squared[i, c],
                            )  # fmt: skip
                        T.wait_wgmma(0)
                        T.tma_store_wait()  # the warp that stored: its copies have been read
                        T.sync_warp()
                        if tx % WARP == 0:
                            T.mbarrier_arrive(weights_empty[at])
                            T.mbarrier_arrive(empty[slot])
                    T.warpgroup_fence_operand(sums, num_regs=height * padded // consumers)
                    T.reduce_sum(squared, row_sums, dim=1)
                    if leaf % fold == 0:
                        T.copy(sums, total)
                    else:
                        for i, j in T.Parallel(height, padded):
                            total[i, j] = total[i, j] + sums[i, j]
                        for i in T.Parallel(height):
                            row_sums[i] = row_totals[i] + row_sums[i]
                    T.sync_warp()
                    for i in T.Parallel(height):
                        if tx % 4 == 0:  # one of the lanes that have the sum of a row
                            row_totals[i] = row_sums[i]
                    T.sync_warp()
                    T.clear(sums)
                    T.clear(squared)
                    if leaf % fold == fold - 1 or leaf == num_leaves - 1:
                        stream_parts = parts // streams
                        part = share * run + leaf // fold  # of each stream
                        for i, j in T.Parallel(height, padded):
                            if row + i % TILE < rows:
                                mul[i // TILE * stream_parts + part, row + i % TILE, j] = total[
                                    i, j
                                ]
                        for i in T.Parallel(height):
                            if row + i % TILE < rows:
                                squares[i // TILE * stream_parts + part, row + i % TILE] = row_sums[
                                    i
                                ]
                T.tma_store_wait()

    return write_tiles
