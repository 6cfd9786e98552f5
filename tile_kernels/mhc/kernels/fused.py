"""Several steps of a sublayer in one kernel, with the arithmetic of the single ones.

The macros are those of the single operators, so that results have the same bits.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.mhc.fused import LAYERS
from tile_kernels.mhc.kernels.common import (
    MOST_THREADS,
    MixPlan,
    access,
    columns_of,
    cut_row,
    load_columns,
    load_mixes,
    mix_access_bits,
    mix_plan,
    read_streams,
    resident,
    scaled_mix,
    sigmoid,
    store_columns,
    whole_row,
    widen,
    write_stream,
)
from tile_kernels.mhc.kernels.mixes import kind_of
from tile_kernels.mhc.kernels.projection import sum_of_products
from tile_kernels.mhc.kernels.sinkhorn import lanes_of, sinkhorn
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

# ---- from products to what a sublayer reads -----------------------------------------------------


class ReadPlan(NamedTuple):
    """`padded` columns and `splits` shares of the products; `near` as in `sinkhorn`.

    `saving`: what gradients need is written too.
    """

    streams: int
    hidden: int
    vector: int
    threads: int
    steps: int
    parts: int
    padded: int
    splits: int
    near: bool
    saving: bool


def read_plan(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    padded: int,
    splits: int,
    near: bool,
    saving: bool,
    device: Device,
) -> ReadPlan:
    """A block per token, which computes its mixes; a part of one, if there are few."""
    if num_tokens < 2 * device.num_sms:
        (threads, parts), steps = cut_row(hidden, num_tokens, device), 1
    else:
        (threads, steps), parts = whole_row(hidden), 1
    vector = access(columns_of(hidden), 2, alignment)
    return ReadPlan(streams, hidden, vector, threads, steps, parts, padded, splits, near, saving)


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
                    saved_pre[token, mix] = z
        elif mix < 2 * streams:
            if mine:
                results[token, mix - streams] = T.ieee_mul(sigmoid(z), post_mult)
        else:
            logits[slot, origin, target] = z
            if saving:
                if mine:
                    saved_logits[token, origin, target] = z

    return placed


@kernel(
    plan=read_plan,
    access_bits=read_access_bits,
    # All barriers are written out.
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def read_from_products(*static: Any) -> Any:
    """Mixes, their split, Sinkhorn and the weighted sum of the streams, for a token or a part."""
    plan = ReadPlan(*static)
    streams, hidden, threads = plan.streams, plan.hidden, plan.threads
    size, count = streams * hidden, streams * (streams + 2)
    columns = columns_of(hidden)
    lanes = lanes_of(streams)
    summed = sum_of_products(plan.splits, size)
    load = load_columns(columns, plan.vector)
    store = store_columns(columns, plan.vector)
    read = read_streams(streams, columns)
    normalized = sinkhorn(streams, plan.near)
    placed = place_mix(streams, plan.saving)
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def load_streams(residual, token, first, raw):
        if first < hidden:
            for i in T.unroll(streams):
                load(residual, token, i, first, raw, i)

    @T.prim_func
    def read_tokens(
        residual: T.Tensor[(num_tokens, streams, hidden), T.bfloat16],
        mul: T.Tensor[(plan.splits, num_tokens, plan.padded), T.float32],
        squares: T.Tensor[(plan.splits, num_tokens), T.float32],
        scale: T.Tensor[(3,), T.float32],
        base: T.Tensor[(count,), T.float32],
        post: T.Tensor[(num_tokens, streams), T.float32],
        comb: T.Tensor[(num_tokens, streams, streams), T.float32],
        out: T.Tensor[(num_tokens, 1, hidden), T.bfloat16],
        saved_mixes: T.Tensor[(num_tokens, count), T.float32],
        saved_mul: T.Tensor[(num_tokens, count), T.float32],
        saved_squares: T.Tensor[(num_tokens,), T.float32],
        saved_pre: T.Tensor[(num_tokens, streams), T.float32],
        saved_logits: T.Tensor[(num_tokens, streams, streams), T.float32],
        rms_eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
        repeat: T.int32,
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
                    summed(mul, squares, token, mix, rms_eps, totals)
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
                    store(total, out, token, 0, first)
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


# ---- several layers again -----------------------------------------------------------------------

SLOTS = tuple(range(LAYERS))


def recompute_plan(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    mix_alignment: int,
    device: Device,
) -> MixPlan:
    """That of other mixes, with smaller blocks for many streams, which take many registers."""
    plan = mix_plan(streams, hidden, num_tokens, alignment, mix_alignment, device)
    if streams <= 4:
        return plan
    threads, parts = cut_row(hidden, num_tokens, device, MOST_THREADS // 2)
    return plan._replace(threads=threads, parts=parts)


@kernel(plan=recompute_plan, access_bits=mix_access_bits, pass_configs=EXPLICIT_GUARDS)
def recompute(*static: int) -> Any:
    """Up to `LAYERS` layers of a token: what each reads, and the residual after it.

    The residual stays in registers, rounded after each layer; what a layer needs besides is loaded
    while the one before it is computed. `reads` layers are read and `writes` written; the tensors
    of those beyond are not touched.
    """
    plan = MixPlan(*static)
    streams, hidden, threads = plan.streams, plan.hidden, plan.threads
    columns = columns_of(hidden)
    load = load_columns(columns, plan.vector)
    store = store_columns(columns, plan.vector)
    load_one = load_mixes(streams, plan.mix_vector)
    load_comb = load_mixes(streams * streams, plan.mix_vector)
    widened = widen(columns)
    read = read_streams(streams, columns)
    write = write_stream(streams, columns)
    num_tokens = T.dynamic("num_tokens")

    # Made anew for each parameter, which would otherwise be one buffer.
    def rows() -> Any:
        return T.Tensor[(num_tokens, streams, hidden), T.bfloat16]

    def row() -> Any:
        return T.Tensor[(num_tokens, 1, hidden), T.bfloat16]

    def mix() -> Any:
        return T.Tensor[(num_tokens, streams), T.float32]

    def comb() -> Any:
        return T.Tensor[(num_tokens, streams * streams), T.float32]

    @T.prim_func
    def recompute_tokens(
        residual: rows(), reads: T.int32, writes: T.int32,
        a0: mix(), a1: mix(), a2: mix(), a3: mix(), a4: mix(),
        a5: mix(), a6: mix(), a7: mix(), a8: mix(), a9: mix(),
        y0: row(), y1: row(), y2: row(), y3: row(), y4: row(),
        y5: row(), y6: row(), y7: row(), y8: row(), y9: row(),
        b0: mix(), b1: mix(), b2: mix(), b3: mix(), b4: mix(),
        b5: mix(), b6: mix(), b7: mix(), b8: mix(), b9: mix(),
        c0: comb(), c1: comb(), c2: comb(), c3: comb(), c4: comb(),
        c5: comb(), c6: comb(), c7: comb(), c8: comb(), c9: comb(),
        x0: row(), x1: row(), x2: row(), x3: row(), x4: row(),
        x5: row(), x6: row(), x7: row(), x8: row(), x9: row(),
        r0: rows(), r1: rows(), r2: rows(), r3: rows(), r4: rows(),
        r5: rows(), r6: rows(), r7: rows(), r8: rows(), r9: rows(),
    ):  # fmt: skip
        with T.Kernel(num_tokens * plan.parts, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident(threads, streams, 128, 255))
            pre_mixes = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9)
            outputs = (y0, y1, y2, y3, y4, y5, y6, y7, y8, y9)
            post_mixes = (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9)
            comb_mixes = (c0, c1, c2, c3, c4, c5, c6, c7, c8, c9)
            inputs = (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9)
            residuals = (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9)
            token = block // plan.parts
            raw = T.alloc_local((streams, columns), T.bfloat16)
            next_raw = T.alloc_local((streams, columns), T.bfloat16)
            # Of a layer and of the next one.
            raw_y = [T.alloc_local((1, columns), T.bfloat16) for _ in range(2)]
            pre = [T.alloc_local((streams,), T.float32) for _ in range(2)]
            post = [T.alloc_local((streams,), T.float32) for _ in range(2)]
            combined = [T.alloc_local((streams * streams,), T.float32) for _ in range(2)]
            of_y = T.alloc_local((columns,), T.float32)
            total = T.alloc_local((columns,), T.float32)
            first = (block % plan.parts * threads + T.get_thread_binding()) * columns
            if first < hidden:
                for i in T.unroll(streams):
                    load(residual, token, i, first, raw, i)
                for layer in (-1, *SLOTS):
                    ahead, now = (layer + 1) % LAYERS, layer % 2
                    if layer < LAYERS - 1:
                        if ahead < reads:
                            load_one(pre_mixes[ahead], token, pre[ahead % 2])
                        if ahead < writes:
                            load(outputs[ahead], token, 0, first, raw_y[ahead % 2], 0)
                            load_one(post_mixes[ahead], token, post[ahead % 2])
                            load_comb(comb_mixes[ahead], token, combined[ahead % 2])
                    if layer >= 0 and layer < reads:
                        read(pre[now], raw, total)
                        store(total, inputs[layer], token, 0, first)
                    if layer >= 0 and layer < writes:
                        widened(raw_y[now], 0, of_y)
                        for j in T.unroll(streams):
                            write(j, of_y, post[now], combined[now], raw, total)
                            store(total, residuals[layer], token, j, first)
                            for v in T.vectorized(columns):
                                next_raw[j, v] = T.cast(total[v], T.bfloat16)
                        for j in T.unroll(streams):
                            for v in T.vectorized(columns):
                                raw[j, v] = next_raw[j, v]

    return recompute_tokens
