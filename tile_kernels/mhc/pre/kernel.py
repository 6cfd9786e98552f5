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
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def read_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    row = 16 * ReadPlan(*static).vector
    return tuple(sorted({32, row})), tuple(sorted({32, row}))


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
            pre = T.alloc_shared((1, streams), T.float32)
            logits = T.alloc_shared((1, streams, streams), T.float32)
            saved = (saved_mixes, saved_mul, saved_squares, saved_pre, saved_logits)
            # The first loads, while the mixes are made.
            load_streams(residual, token, (part * plan.steps * threads + tx) * columns, raw)
            for turn in T.unroll(-(-count // threads)):
                mix = turn * threads + tx
                if mix < count:
                    summed(mul, squares, token, mix, fold, rms_eps, totals)
                    placed(
                        totals, token, mix, part == 0, (pre_eps, post_mult), (scale, base), post,
                        saved, pre, logits, 0,
                    )  # fmt: skip
            T.sync_threads()
            for i in T.unroll(streams):
                weights[i] = pre[0, i]
            for s in T.serial(plan.steps):
                first = ((part * plan.steps + s) * threads + tx) * columns
                if first < hidden:
                    read(weights, raw, total)
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

    return read_tokens
