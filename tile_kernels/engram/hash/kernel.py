"""The hash of n-grams: rows of the embedding tables. All integers."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.hash.plan import THREADS, Plan
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


@T.macro
def floor_modulo(value, divisor):
    """`value mod divisor` with the sign of the divisor, which is not 0: a table without rows has 0.

    By quotients in float64, which are much faster than a division of int64. The first leaves less
    than the divisor and 2**12, as each of three roundings is off by 2**-53 of at most 2**63; the
    second, of what is left, is off by at most 1.
    """
    rest = T.alloc_var(T.int64, init=T.int64(0))
    size = T.alloc_var(T.int64, init=T.cast(divisor, T.int64))
    if size < 0:
        size = -size
    if size > 1:
        inverse = T.alloc_var(T.float64, init=T.float64(1) / T.cast(size, T.float64))
        rest = value - T.cast(T.cast(value, T.float64) * inverse, T.int64) * size
        rest = rest - T.cast(T.floor(T.cast(rest, T.float64) * inverse), T.int64) * size
        if rest < 0:
            rest = rest + size
        if rest >= size:
            rest = rest - size
        if divisor < 0 and rest != 0:
            rest = rest - size
    return rest


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = Plan(*static)
    return (8, 32, 64) if plan.masked else (32, 64), 64 if plan.dtype == "int64" else 32


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def hashes(window: int, tables: int, dtype: str, masked: bool) -> Any:
    """A thread per entry of the result, so that a division is all it waits for."""
    columns = (window - 1) * tables
    tokens, layers = T.dynamic("tokens layers")

    @T.prim_func
    def hash_entries(
        ids: T.Tensor[(tokens, window), T.int32],
        multipliers: T.Tensor[(layers, window), T.int64],
        sizes: T.Tensor[(layers, columns), T.int32],
        offsets: T.Tensor[(layers, columns), dtype],
        mask: T.Tensor[(tokens,), T.bool],
        out: T.Tensor[(layers, tokens, columns), dtype],
    ):
        with T.Kernel(
            T.ceildiv(T.cast(tokens, T.int64) * columns, THREADS), layers, threads=THREADS
        ) as (block, layer):
            entry = T.alloc_var(T.int64)
            entry = T.cast(block, T.int64) * THREADS + T.get_thread_binding()
            token = T.alloc_var(T.int32, init=T.cast(entry // columns, T.int32))
            column = T.alloc_var(T.int32, init=T.cast(entry % columns, T.int32))
            if token < tokens:
                hashed = T.alloc_var(T.int64)
                hashed = T.cast(ids[token, 0], T.int64) * multipliers[layer, 0]
                for i in T.unroll(window - 1):
                    if i * tables <= column:
                        hashed = hashed ^ (
                            T.cast(ids[token, i + 1], T.int64) * multipliers[layer, i + 1]
                        )
                size = T.alloc_var(T.int32, init=sizes[layer, column])
                hashed = floor_modulo(hashed, size) + T.cast(offsets[layer, column], T.int64)
                if masked:
                    if mask[token]:
                        hashed = T.int64(-1)
                out[layer, token, column] = T.cast(hashed, dtype)

    return hash_entries
