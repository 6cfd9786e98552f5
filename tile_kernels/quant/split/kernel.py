"""A float32 matrix as the sum of bfloat16 matrices."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.split.plan import THREADS, Plan
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[int, int]:
    vector = Plan(*static).vector
    return 32 * vector, 16 * vector


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def split(columns: int, parts: str, vector: int) -> Any:
    """A thread splits `vector` values of a row."""
    chunks = columns // vector
    order = [int(part) for part in parts]
    levels = tuple(range(max(order) + 1))
    positions = tuple(range(len(order)))
    rows = T.dynamic("rows")

    @T.prim_func
    def split_rows(
        x: T.Tensor[(rows, columns), T.float32],
        out: T.Tensor[(rows, len(order) * columns), T.bfloat16],
    ):
        with T.Kernel(T.ceildiv(T.cast(rows, T.int64) * chunks, THREADS), threads=THREADS) as block:
            entry = T.alloc_var(T.int64)
            entry = T.cast(block, T.int64) * THREADS + T.get_thread_binding()
            rest = T.alloc_local((vector,), T.float32)
            part = T.alloc_local((vector,), T.bfloat16)
            if entry < T.cast(rows, T.int64) * chunks:
                row = T.cast(entry // chunks, T.int32)
                first = T.cast(entry % chunks, T.int32) * vector
                for e in T.vectorized(vector):
                    rest[e] = x[row, first + e]
                for level in levels:
                    for e in T.unroll(vector):
                        part[e] = T.cast(rest[e], T.bfloat16)
                        rounded = T.alloc_var(T.float32, init=T.cast(part[e], T.float32))
                        if T.abs(rounded) < T.infinity(T.float32):
                            rest[e] = T.ieee_sub(rest[e], rounded)
                        else:
                            rest[e] = T.float32(0)
                    for position in positions:
                        if order[position] == level:
                            for e in T.vectorized(vector):
                                out[row, position * columns + first + e] = part[e]

    return split_rows
