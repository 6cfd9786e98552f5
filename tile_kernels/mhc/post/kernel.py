"""What a sublayer writes: the next residual, and the gradients of its inputs."""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.primitives import (
    add_products,
    add_weighted,
    stream_macros,
    sum_of_warps,
    sum_to_shared,
    write_stream,
)
from tile_kernels.mhc.tiling import GradientPlan, MixPlan, resident
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=MixPlan.access_bits, pass_configs=EXPLICIT_GUARDS)
def post(*static: int) -> Any:
    """`out[j] = post[j] * x + sum_i comb[i, j] * residual[i]`."""
    plan = MixPlan(*static)
    streams, hidden, threads, parts = plan.streams, plan.hidden, plan.threads, plan.parts
    columns, load, store, widened, load_post, load_comb, types = stream_macros(plan)
    write = write_stream(streams, columns)

    @T.prim_func
    def written(
        x: types.row(), residual: types.streams(), post_mix: types.mix(), comb_mix: types.matrix(),
        out: types.streams(),
    ):  # fmt: skip
        with T.Kernel(types.num_tokens * parts, threads=threads) as block:
            T.annotate_min_blocks_per_sm(resident(threads, streams, 72, 128))
            token = block // parts
            raw_x = T.alloc_local((1, columns), T.bfloat16)
            raw = T.alloc_local((streams, columns), T.bfloat16)
            post_regs = T.alloc_local((streams,), T.float32)
            comb_regs = T.alloc_local((streams * streams,), T.float32)
            output = T.alloc_local((columns,), T.float32)
            total = T.alloc_local((columns,), T.float32)
            load_post(types.as_rows(post_mix), token, post_regs)
            load_comb(types.as_rows(comb_mix), token, comb_regs)
            first = (block % parts * threads + T.get_thread_binding()) * columns
            if first < hidden:
                load(types.as_streams(x), token, 0, first, raw_x, 0)
                for i in T.unroll(streams):
                    load(residual, token, i, first, raw, i)
                widened(raw_x, 0, output)
                for j in T.unroll(streams):
                    write(j, output, post_regs, comb_regs, raw, total)
                    store(total, out, token, j, first)

    return written


@kernel(access_bits=GradientPlan.access_bits, pass_configs=EXPLICIT_GUARDS)
def post_backward(*static: Any) -> Any:
    """With `g` the gradient: `d_x = sum_j post[j] * g[j]`, `d_residual[i] = sum_j comb[i, j] *
    g[j]`, and over the columns `d_post[j] = sum x * g[j]`, `d_comb[i, j] = sum residual[i] * g[j]`.
    """
    plan = GradientPlan(*static)
    streams, hidden, threads = plan.streams, plan.hidden, plan.threads
    columns, load, store, widened, load_post, load_comb, types = stream_macros(plan)
    warps = threads // WARP
    count = streams * (streams + 1)  # sums of a token: those of `post`, then those of `comb`
    summed = sum_to_shared(count, threads)

    @T.prim_func
    def gradients(
        x: types.row(), residual: types.streams(), post_mix: types.mix(), comb_mix: types.matrix(),
        grad: types.streams(), d_x: types.row(), d_residual: types.streams(), d_post: types.mix(),
        d_comb: types.matrix(),
    ):  # fmt: skip
        with T.Kernel(types.num_tokens, threads=threads) as token:
            T.annotate_min_blocks_per_sm(resident(threads, streams, 96, 255))
            tx = T.get_thread_binding()
            raw_x = T.alloc_local((1, columns), T.bfloat16)
            raw = T.alloc_local((streams, columns), T.bfloat16)
            raw_grad = T.alloc_local((streams, columns), T.bfloat16)
            post_regs = T.alloc_local((streams,), T.float32)
            comb_regs = T.alloc_local((streams * streams,), T.float32)
            total = T.alloc_local((columns,), T.float32)
            wide = T.alloc_local((columns,), T.float32)
            grad_regs = T.alloc_local((columns,), T.float32)
            sums = T.alloc_local((count,), T.float32)
            warp_sums = T.alloc_shared((count, warps), T.float32)
            load_post(types.as_rows(post_mix), token, post_regs)
            load_comb(types.as_rows(comb_mix), token, comb_regs)
            for i in T.unroll(count):
                sums[i] = T.float32(0)
            for s in T.serial(plan.steps):
                first = (s * threads + tx) * columns
                if first < hidden:
                    for j in T.unroll(streams):
                        load(grad, token, j, first, raw_grad, j)
                    load(types.as_streams(x), token, 0, first, raw_x, 0)
                    for i in T.unroll(streams):
                        load(residual, token, i, first, raw, i)
                    for v in T.unroll(columns):
                        total[v] = T.float32(0)
                    widened(raw_x, 0, wide)
                    for j in T.unroll(streams):
                        widened(raw_grad, j, grad_regs)
                        add_weighted(post_regs[j], grad_regs, total, columns)
                        add_products(wide, grad_regs, sums, j, columns)
                    store(total, types.as_streams(d_x), token, 0, first)
                    for i in T.unroll(streams):
                        for v in T.unroll(columns):
                            total[v] = T.float32(0)
                        widened(raw, i, wide)
                        for j in T.unroll(streams):
                            widened(raw_grad, j, grad_regs)
                            add_weighted(comb_regs[i * streams + j], grad_regs, total, columns)
                            add_products(wide, grad_regs, sums, (i + 1) * streams + j, columns)
                        store(total, d_residual, token, i, first)
            summed(sums, warp_sums)
            if tx < streams:
                d_post[token, tx, 0] = sum_of_warps(warp_sums, tx, warps)
            for step in T.unroll(-(-streams * streams // threads)):
                index = step * threads + tx
                if index < streams * streams:
                    d_comb[token, index // streams, index % streams] = sum_of_warps(
                        warp_sums, streams + index, warps
                    )

    return gradients
