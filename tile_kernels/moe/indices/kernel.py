"""Expert indices: renumbered element by element, repeats removed row by row."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.indices.plan import WIDTHS
from tile_kernels.runtime.launch import kernel


def mask_access_bits(
    dtype: str, per_rank: int, num_tp_ranks: int, vector: int, *_: int
) -> tuple[int, int]:
    bits = 8 * WIDTHS[dtype] * vector
    return bits, bits


@kernel(access_bits=mask_access_bits)
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


def unique_access_bits(num_topk: int, vector: int, threads: int) -> tuple[int, int]:
    return 64 * vector, 64 * vector


@kernel(access_bits=unique_access_bits)
def unique_indices(num_topk: int, vector: int, threads: int) -> Any:
    """One thread per row: each index is compared with all before it; what did not change is not
    written."""
    chunks = num_topk // vector
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def unique(indices: T.Tensor[(num_tokens, num_topk), T.int64]):
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            row = T.alloc_local((num_topk,), T.int64)
            kept = T.alloc_local((vector,), T.int64)
            changed = T.alloc_var(T.bool)
            if token < num_tokens:
                for c in T.unroll(chunks):
                    for v in T.vectorized(vector):
                        row[c * vector + v] = indices[token, c * vector + v]
                for c in T.unroll(chunks):
                    changed = False
                    for v in T.unroll(vector):
                        kept[v] = row[c * vector + v]
                        for earlier in T.unroll(c * vector + v):
                            if row[earlier] == row[c * vector + v]:
                                kept[v] = T.int64(-1)
                        if kept[v] != row[c * vector + v]:
                            changed = True
                    if changed:
                        for v in T.vectorized(vector):
                            indices[token, c * vector + v] = kept[v]

    return unique
