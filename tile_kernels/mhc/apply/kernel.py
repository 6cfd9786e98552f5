"""What a sublayer reads: the weighted sum of the streams, and its gradients."""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.primitives import (
    add_products,
    read_streams,
    stream_macros,
    sum_of_warps,
    sum_to_shared,
)
from tile_kernels.mhc.tiling import GradientPlan, MixPlan, resident
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=MixPlan.access_bits, pass_configs=EXPLICIT_GUARDS)
def apply_mix(*static: int) -> Any:
    """`out = sum_i mix[i] * x[i]`."""
    plan = MixPlan(*static)
    streams, hidden, threads, parts = plan.streams, plan.hidden, plan.threads, plan.parts
    columns, load, store, _, load_mix, _, types = stream_macros(plan)
    read = read_streams(streams, columns)

    @T.prim_func
    def applied(x: types.streams(), mix: types.mix(), out: types.row()):
        with T.Kernel(types.num_tokens * parts, threads=threads) as block:
            token = block // parts
            raw = T.alloc_local((streams, columns), T.bfloat16)
            weights = T.alloc_local((streams,), T.float32)
            total = T.alloc_local((columns,), T.float32)
            load_mix(types.as_rows(mix), token, weights)
            first = (block % parts * threads + T.get_thread_binding()) * columns
            if first < hidden:
                for i in T.unroll(streams):
                    load(x, token, i, first, raw, i)
                read(weights, raw, total)
                store(total, types.as_streams(out), token, 0, first)

    return applied


@kernel(access_bits=GradientPlan.access_bits, pass_configs=EXPLICIT_GUARDS)
def apply_mix_backward(*static: Any) -> Any:
    """`grad_x[i] (+)= mix[i] * grad` and `grad_mix[i] = sum over columns of grad * x[i]`."""
    plan = GradientPlan(*static)
    streams, hidden, threads = plan.streams, plan.hidden, plan.threads
    columns, load, store, widened, load_mix, _, types = stream_macros(plan)
    warps = threads // WARP
    summed = sum_to_shared(streams, threads)

    @T.prim_func
    def gradients(
        grad: types.row(),
        x: types.streams(),
        mix: types.mix(),
        grad_x: types.streams(),
        grad_mix: types.mix(),
    ):
        with T.Kernel(types.num_tokens, threads=threads) as token:
            T.annotate_min_blocks_per_sm(resident(threads, streams, 72, 128))
            tx = T.get_thread_binding()
            raw_grad = T.alloc_local((1, columns), T.bfloat16)
            raw = T.alloc_local((streams, columns), T.bfloat16)
            there = T.alloc_local((streams if plan.added else 1, columns), T.bfloat16)
            weights = T.alloc_local((streams,), T.float32)
            grad_regs = T.alloc_local((columns,), T.float32)
            wide = T.alloc_local((columns,), T.float32)
            sums = T.alloc_local((streams,), T.float32)
            warp_sums = T.alloc_shared((streams, warps), T.float32)
            load_mix(types.as_rows(mix), token, weights)
            for i in T.unroll(streams):
                sums[i] = T.float32(0)
            # Not unrolled, which would take twice the registers.
            for s in T.unroll(plan.steps, unroll_factor=1):
                first = (s * threads + tx) * columns
                if first < hidden:
                    load(types.as_streams(grad), token, 0, first, raw_grad, 0)
                    for i in T.unroll(streams):
                        load(x, token, i, first, raw, i)
                    if plan.added:
                        for i in T.unroll(streams):
                            load(grad_x, token, i, first, there, i)
                    widened(raw_grad, 0, grad_regs)
                    for i in T.unroll(streams):
                        widened(raw, i, wide)
                        add_products(grad_regs, wide, sums, i, columns)
                        if plan.added:
                            widened(there, i, wide)
                            for v in T.unroll(columns):
                                wide[v] = T.ieee_fmaf(grad_regs[v], weights[i], wide[v])
                        else:
                            for v in T.unroll(columns):
                                wide[v] = T.ieee_mul(grad_regs[v], weights[i])
                        store(wide, grad_x, token, i, first)
            summed(sums, warp_sums)
            if tx < streams:
                grad_mix[token, tx, 0] = sum_of_warps(warp_sums, tx, warps)

    return gradients
