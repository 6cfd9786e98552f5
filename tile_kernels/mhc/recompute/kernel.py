"""Several layers again in one kernel: what each reads, and the residuals between them.

The macros are those of the single operators, so that results have the same bits.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.primitives import (
    read_streams,
    stream_macros,
    write_stream,
)
from tile_kernels.mhc.recompute.plan import LAYERS
from tile_kernels.mhc.tiling import MixPlan, resident
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

SLOTS = tuple(range(LAYERS))


@kernel(access_bits=MixPlan.access_bits, pass_configs=EXPLICIT_GUARDS)
def recompute(*static: int) -> Any:
    """Up to `LAYERS` layers of a token: what each reads, and the residual after it.

    The residual stays in registers, rounded after each layer; what a layer needs besides is loaded
    while the one before it is computed. `reads` layers are read and `writes` written; the tensors
    of those beyond are not touched.
    """
    plan = MixPlan(*static)
    streams, hidden, threads = plan.streams, plan.hidden, plan.threads
    columns, load, store, widened, load_one, load_comb, types = stream_macros(plan)
    num_tokens, rows, row, mix, comb, as_streams, as_rows = types
    read = read_streams(streams, columns)
    write = write_stream(streams, columns)

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
            pre_mixes = [as_rows(each) for each in (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9)]
            outputs = [as_streams(each) for each in (y0, y1, y2, y3, y4, y5, y6, y7, y8, y9)]
            post_mixes = [as_rows(each) for each in (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9)]
            comb_mixes = [as_rows(each) for each in (c0, c1, c2, c3, c4, c5, c6, c7, c8, c9)]
            inputs = [as_streams(each) for each in (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9)]
            residuals = (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9)
            token = block // plan.parts
            raw = T.alloc_local((streams, columns), T.bfloat16)
            next_raw = T.alloc_local((streams, columns), T.bfloat16)
            # Of a layer and of the next one.
            raw_y = [T.alloc_local((1, columns), T.bfloat16) for _ in range(2)]
            pre = [T.alloc_local((streams,), T.float32) for _ in range(2)]
            post = [T.alloc_local((streams,), T.float32) for _ in range(2)]
            combined = [T.alloc_local((streams * streams,), T.float32) for _ in range(2)]
            y_regs = T.alloc_local((columns,), T.float32)
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
                        widened(raw_y[now], 0, y_regs)
                        for j in T.unroll(streams):
                            write(j, y_regs, post[now], combined[now], raw, total)
                            store(total, residuals[layer], token, j, first)
                            for v in T.vectorized(columns):
                                next_raw[j, v] = T.cast(total[v], T.bfloat16)
                        for j in T.unroll(streams):
                            for v in T.vectorized(columns):
                                raw[j, v] = next_raw[j, v]

    return recompute_tokens
