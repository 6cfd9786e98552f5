"""One stream to several copies, and the sum of several streams."""

from typing import Any

from tilelang import language as T

from tile_kernels.mhc.expand.plan import Plan
from tile_kernels.mhc.primitives import load_columns, store_columns, widen
from tile_kernels.mhc.tiling import columns_of
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: int) -> tuple[int, int]:
    width = 16 * Plan(*static).vector
    return width, width


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def expand(streams: int, hidden: int, vector: int, threads: int, parts: int) -> Any:
    """Every stream of `out` is the one of `x`."""
    columns = columns_of(hidden)
    load = load_columns(columns, vector)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def expanded(
        x: T.Tensor[(num_tokens, 1, hidden), T.bfloat16],
        out: T.Tensor[(num_tokens, streams, hidden), T.bfloat16],
    ):
        with T.Kernel(num_tokens * parts, threads=threads) as block:
            token = block // parts
            raw = T.alloc_local((1, columns), T.bfloat16)
            first = (block % parts * threads + T.get_thread_binding()) * columns
            if first < hidden:
                load(x, token, 0, first, raw, 0)
                for i in T.unroll(streams):
                    for c in T.unroll(columns // vector):
                        for v in T.vectorized(vector):
                            out[token, i, first + c * vector + v] = raw[0, c * vector + v]

    return expanded


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def expand_backward(streams: int, hidden: int, vector: int, threads: int, parts: int) -> Any:
    """The sum of the streams of `grad`, in order."""
    columns = columns_of(hidden)
    load = load_columns(columns, vector)
    store = store_columns(columns, vector)
    widened = widen(columns)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def summed(
        grad: T.Tensor[(num_tokens, streams, hidden), T.bfloat16],
        out: T.Tensor[(num_tokens, 1, hidden), T.bfloat16],
    ):
        with T.Kernel(num_tokens * parts, threads=threads) as block:
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
                store(total, out, token, 0, first)

    return summed
