"""From the products of a projection to the input of a sublayer, in one kernel.

The macros are those of the single operators, so that results have the same bits.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.mix.kernel import kind_of
from tile_kernels.mhc.norm_fn.kernel import sum_of_products, sum_of_splits
from tile_kernels.mhc.pre.plan import ReadPlan
from tile_kernels.mhc.primitives import (
    column_macros,
    read_streams,
    scaled_mix,
    sigmoid,
    stream_types,
)
from tile_kernels.mhc.sinkhorn.kernel import lanes_of, sinkhorn
from tile_kernels.mhc.tiling import resident
from tile_kernels.quant.primitives import (
    encode_and_store,
    group_amax,
    scale_of,
    write_group_scales,
)
from tile_kernels.quant.storage import ROW, storage
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, sum_over_block
from tile_kernels.runtime.launch import kernel


def read_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = ReadPlan(*static)
    row = 16 * plan.vector
    loads, stores = {32, row}, {32, 8 * plan.vector if plan.group else row}
    if plan.norm:
        loads.add(plan.norm_vector * (32 if plan.norm == "float32" else 16))
    return tuple(sorted(loads)), tuple(sorted(stores))


def place_mix(streams: int, saving: bool) -> Any:
    """A macro: a mix, from its sum and that of the squares, scaled and where it belongs.

    `pre` and `logits` are shared, in row `slot`; the rest is written if `mine`.
    """
    kind = kind_of(streams, head=False)

    @T.macro
    def placed(totals, token, mix, mine, numbers, given, results, saved, pre, logits, slot):
        pre_eps, post_mult = numbers
        scale, base = given
        saved_mixes, saved_mul, saved_squares, saved_pre, saved_logits = saved
        z = T.alloc_var(T.float32, init=T.ieee_mul(totals[0], totals[2]))
        if saving:
            if mine:
                saved_mixes[token, mix] = z
                saved_mul[token, mix] = totals[0]
                if mix == 0:
                    saved_squares[token] = totals[1]
        z = scaled_mix(z, scale[kind(mix)], base[mix])
        origin = (mix - 2 * streams) // streams
        target = (mix - 2 * streams) % streams
        if mix < streams:
            z = T.ieee_add(sigmoid(z), pre_eps)
            pre[slot, mix] = z
            if saving:
                if mine:
                    saved_pre[token, mix, 0] = z
        elif mix < 2 * streams:
            if mine:
                results[token, mix - streams, 0] = T.ieee_mul(sigmoid(z), post_mult)
        else:
            logits[slot, origin, target] = z
            if saving:
                if mine:
                    saved_logits[token, origin, target] = z

    return placed


@kernel(
    access_bits=read_access_bits,
    # All barriers are written out.
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def read_from_products(*static: Any) -> Any:
    """Mixes, their split, Sinkhorn and the weighted sum of the streams, for a token or a part."""
    plan = ReadPlan(*static)
    streams, hidden, threads = plan.streams, plan.hidden, plan.threads
    size, count = streams * hidden, streams * (streams + 2)
    columns, load, store, _ = column_macros(hidden, plan.vector)
    lanes = lanes_of(streams)
    summed = sum_of_splits(size) if plan.splits else sum_of_products(size)
    read = read_streams(streams, columns)
    keeps = bool(plan.norm) or plan.group > 0  # the row, rounded
    finish = finish_row(plan)
    normalized = sinkhorn(streams, plan.near)
    placed = place_mix(streams, plan.saving)
    types = stream_types(streams, hidden)
    num_tokens = types.num_tokens
    parts = T.dynamic("parts")

    @T.macro
    def load_streams(residual, token, first, raw):
        if first < hidden:
            for i in T.unroll(streams):
                load(residual, token, i, first, raw, i)

    @T.prim_func
    def read_tokens(
        residual: types.streams(),
        mul: T.Tensor[(parts, num_tokens, plan.padded), T.float32],
        squares: T.Tensor[(parts, num_tokens), T.float32],
        scale: T.Tensor[(3,), T.float32],
        base: T.Tensor[(count,), T.float32],
        post: types.mix(),
        comb: T.Tensor[(num_tokens, streams, streams), T.float32],
        out: types.row(),
        saved_mixes: T.Tensor[(num_tokens, count), T.float32],
        saved_mul: T.Tensor[(num_tokens, count), T.float32],
        saved_squares: T.Tensor[(num_tokens,), T.float32],
        saved_pre: types.mix(),
        saved_logits: T.Tensor[(num_tokens, streams, streams), T.float32],
        rms_eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        repeat: T.int32,
        fold: T.int32,
        norm_weight: T.Tensor[(hidden,), storage(plan.norm or "float32")[0]],
        data: T.Tensor[(num_tokens, hidden), T.float8_e4m3fn],
        sf: T.Tensor[(num_tokens, -(-hidden // max(1, plan.group))), T.float32],
        norm_eps: T.float32,
        clamp_min: T.float32,
    ):
        with T.Kernel(num_tokens * plan.parts, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident(threads, streams, 64, 128))
            tx = T.get_thread_binding()
            token = block // plan.parts
            part = block % plan.parts
            totals = T.alloc_local((3,), T.float32)
            weights = T.alloc_local((streams,), T.float32)
            raw = T.alloc_local((streams, columns), T.bfloat16)
            total = T.alloc_local((columns,), T.float32)
            matrix = T.alloc_local((streams,), T.float32)
            kept = T.alloc_local((plan.steps * columns if keeps else 1,), T.bfloat16)
            pre = T.alloc_shared((1, streams), T.float32)
            logits = T.alloc_shared((1, streams, streams), T.float32)
            saved = (saved_mixes, saved_mul, saved_squares, saved_pre, saved_logits)
            # The first loads, while the mixes are made.
            load_streams(residual, token, (part * plan.steps * threads + tx) * columns, raw)
            for iteration in T.unroll(-(-count // threads)):
                mix = iteration * threads + tx
                if mix < count:
                    summed(mul, squares, token, mix, fold, rms_eps, totals)
                    placed(
                        totals, token, mix, part == 0, (pre_eps, post_mult), (scale, base), post,
                        saved, pre, logits, 0,
                    )  # fmt: skip
            T.sync_threads()
            for i in T.unroll(streams):
                weights[i] = pre[0, i]
            for s in T.unroll(plan.steps) if keeps else T.serial(plan.steps):
                first = ((part * plan.steps + s) * threads + tx) * columns
                if keeps:
                    for v in T.unroll(columns):
                        kept[s * columns + v] = T.bfloat16(0)
                if first < hidden:
                    read(weights, raw, total)
                    if keeps:
                        for v in T.vectorized(columns):
                            kept[s * columns + v] = T.cast(total[v], T.bfloat16)
                    else:
                        store(total, types.as_streams(out), token, 0, first)
                if s + 1 < plan.steps:
                    load_streams(residual, token, first + threads * columns, raw)
            if part == 0 and tx < WARP:
                row = tx % lanes
                for c in T.unroll(streams):
                    matrix[c] = T.float32(0)
                    if row < streams:
                        matrix[c] = logits[0, row, c]
                normalized(matrix, row, repeat, sinkhorn_eps)
                if tx < streams:
                    for c in T.unroll(streams):
                        comb[token, row, c] = matrix[c]
            if keeps:
                finish(
                    kept, token, norm_weight, norm_eps, clamp_min, types.as_streams(out), data, sf
                )

    return read_tokens


def finish_row(plan: ReadPlan) -> Any:
    """A macro: the RMS norm of a row that a block has in registers, its cast to e4m3, or both.

    As `norm_forward` and `per_token_cast` of the row; the sum of the squares is that of a block.
    """
    hidden, threads, steps = plan.hidden, plan.threads, plan.steps
    columns, _, store, _ = column_macros(hidden, plan.vector)
    summed = sum_over_block(1, threads)
    weight_dtype = storage(plan.norm or "float32")[0]
    group = max(1, plan.group)
    amax_of, scaled = group_amax(columns, group), scale_of("e4m3", plan.round_sf)
    write_scales = write_group_scales(ROW, hidden, columns, group)
    encode = encode_and_store("e4m3", hidden, columns, plan.vector)

    @T.macro
    def finish(kept, token, norm_weight, eps, clamp_min, out, data, sf):
        tx = T.get_thread_binding()
        values = T.alloc_local((columns,), T.float32)
        weights = T.alloc_local((columns,), weight_dtype)
        rounded = T.alloc_local((columns,), T.bfloat16)
        sums = T.alloc_local((1,), T.float32)
        scale = T.alloc_local((2,), T.float32)
        warp_sums = T.alloc_shared((2, 1, threads // WARP), T.float32)
        inverse_root = T.alloc_var(T.float32, init=T.float32(1))
        if plan.norm:
            sums[0] = T.float32(0)
            for v in T.unroll(steps * columns):
                sums[0] = T.fma(T.cast(kept[v], T.float32), T.cast(kept[v], T.float32), sums[0])
            summed(sums, warp_sums, 0)
            inverse_root = T.ieee_frsqrt(T.ieee_add(T.ieee_fdiv(sums[0], T.float32(hidden)), eps))
        for s in T.unroll(steps):
            first = (s * threads + tx) * columns
            for v in T.vectorized(columns):
                values[v] = T.cast(kept[s * columns + v], T.float32)
            if plan.norm and first < hidden:
                for c in T.unroll(columns // plan.norm_vector):
                    for v in T.vectorized(plan.norm_vector):
                        weights[c * plan.norm_vector + v] = norm_weight[
                            first + c * plan.norm_vector + v
                        ]
                for v in T.unroll(columns):
                    values[v] = T.ieee_mul(
                        T.ieee_mul(values[v], inverse_root), T.cast(weights[v], T.float32)
                    )
            if plan.group == 0:
                if first < hidden:
                    store(values, out, token, 0, first)
            else:
                for v in T.vectorized(columns):
                    rounded[v] = T.cast(values[v], T.bfloat16)
                for v in T.vectorized(columns):
                    values[v] = T.cast(rounded[v], T.float32)
                scaled(amax_of(values, 0), clamp_min, scale)
                write_scales(sf, token, first, tx % WARP, scale, True)
                scale[0] = scale[1]
                encode(values, 0, scale, columns, data, token, first)

    return finish
