"""Renumbering expert indices, element by element."""

import math
from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.launch import kernel

ACCESS_BYTES = 16
WIDTHS = {"int32": 4, "int64": 8}


class Plan(NamedTuple):
    dtype: str
    per_rank: int
    num_tp_ranks: int
    vector: int
    threads: int


def plan(
    dtype: str,
    per_rank: int,
    num_tp_ranks: int,
    num_topk: int,
    num_indices: int,
    alignment: int,
    device: Device,
) -> Plan:
    """The divisors are static, so that the compiler turns the divisions into multiplications."""
    width = WIDTHS[dtype]
    vector = math.gcd(ACCESS_BYTES // width, num_indices, max(alignment // width, 1))
    return Plan(dtype, per_rank, num_tp_ranks, vector, threads=128)


def access_bits(
    dtype: str, per_rank: int, num_tp_ranks: int, vector: int, *_: int
) -> tuple[int, int]:
    bits = 8 * WIDTHS[dtype] * vector
    return bits, bits


@kernel(plan=plan, access_bits=access_bits)
def mask_indices_by_tp(
    dtype: str, per_rank: int, num_tp_ranks: int, vector: int, threads: int
) -> Any:
    """`vector` neighbouring indices per thread."""
    count = T.dynamic("count")

    @T.prim_func
    def mask(
        indices: T.Tensor[(count,), dtype], masked: T.Tensor[(count,), dtype], tp_rank: T.int32
    ):
        with T.Kernel(T.ceildiv(count, threads * vector), threads=threads) as block:
            T.assume(count % vector == 0)
            first = (block * threads + T.get_thread_binding()) * vector
            values = T.alloc_local((vector,), dtype)
            rank = T.alloc_var(dtype)
            if first < count:
                for v in T.vectorized(vector):
                    values[v] = indices[first + v]
                for v in T.unroll(vector):
                    rank = T.truncdiv(values[v], per_rank)
                    if values[v] >= 0 and T.truncmod(rank, num_tp_ranks) == tp_rank:
                        values[v] = T.truncdiv(rank, num_tp_ranks) * per_rank + T.truncmod(
                            values[v], per_rank
                        )
                    else:
                        values[v] = T.cast(-1, dtype)
                for v in T.vectorized(vector):
                    masked[first + v] = values[v]

    return mask
