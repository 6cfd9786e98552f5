"""One stream to several copies, and the sum of several streams."""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.expand.plan import Plan
from tile_kernels.mhc.primitives import column_macros, stream_types
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: int) -> tuple[int, int]:
    width = 16 * Plan(*static).vector
    return width, width


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def expand(streams: int, hidden: int, vector: int, threads: int, parts: int) -> Any:
    """Every stream of `out` is the one of `x`."""
    columns, load, _, _ = column_macros(hidden, vector)
    types = stream_types(streams, hidden)

    @T.prim_func
    def expanded(x: types.row(), out: types.streams()):
        with T.Kernel(types.num_tokens * parts, threads=threads) as block:
            token = block // parts
            raw = T.alloc_local((1, columns), T.bfloat16)
            first = (block % parts * threads + T.get_thread_binding()) * columns
            if first < hidden:
                load(types.as_streams(x), token, 0, first, raw, 0)
                for i in T.unroll(streams):
                    for c in T.unroll(columns // vector):
                        for v in T.vectorized(vector):
                            out[token, i, first + c * vector + v] = raw[0, c * vector + v]

    return expanded


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def expand_backward(streams: int, hidden: int, vector: int, threads: int, parts: int) -> Any:
    """The sum of the streams of `grad`, in order."""
    columns, load, store, widened = column_macros(hidden, vector)
    types = stream_types(streams, hidden)

    @T.prim_func
    def summed(grad: types.streams(), out: types.row()):
        with T.Kernel(types.num_tokens * parts, threads=threads) as block:
            token = block // parts
            raw = T.alloc_local((streams, columns), T.bfloat16)
            wide = T.alloc_local((columns,), T.float32)
            total = T.alloc_local((columns,), T.float32)
            first = (block % parts * threads + T.get_thread_binding()) * columns
            if first < hidden:
                for i in T.unroll(streams):
                    load(grad, token, i, first, raw, i)
                widened(raw, 0, total)
                for i in T.unroll(streams - 1):
                    widened(raw, i + 1, wide)
                    for v in T.unroll(columns):
                        total[v] = T.ieee_add(total[v], wide[v])
                store(total, types.as_streams(out), token, 0, first)

    return summed
