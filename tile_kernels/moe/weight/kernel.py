"""Weights of the chosen experts: by their logits, one warp per token, and normalised."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.plan import SOFTMAX
from tile_kernels.moe.primitives import LANES, WARPS, softmax_of_row, weigh
from tile_kernels.moe.weight.plan import MAX_IN_REGISTERS
from tile_kernels.runtime.launch import kernel


def topk_access_bits(
    num_experts: int, num_topk: int, scoring: int, vector: int
) -> tuple[tuple[int, ...], int]:
    return tuple(sorted({32, 64, 32 * vector})), 32


@kernel(access_bits=topk_access_bits)
def topk_weights(num_experts: int, num_topk: int, scoring: int, vector: int) -> Any:
    """One warp per token; only softmax reads the row."""
    weighed = weigh(num_experts, num_topk, scoring)
    largest, exponentials = softmax_of_row(num_experts, vector)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def weights_of(
        logits: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, num_topk), T.int64],
        weights: T.Tensor[(num_tokens, num_topk), T.float32],
        factor: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * LANES) as block:
            lane = T.get_thread_binding() % LANES
            token = block * WARPS + T.get_thread_binding() // LANES
            expert = T.alloc_local((1,), T.int64)
            top = T.alloc_var(T.float32, init=T.float32(0))
            denominator = T.alloc_var(T.float32, init=T.float32(0))
            if token < num_tokens:  # the same for the whole warp
                if scoring == SOFTMAX:
                    top = largest(lane, token, logits, top)
                    denominator = exponentials(lane, token, logits, top)
                expert[0] = T.int64(-1)
                if lane < num_topk:
                    expert[0] = topk_idx[token, lane]
                weight = weighed(lane, token, expert, top, denominator, logits, factor)
                if lane < num_topk:
                    weights[token, lane] = weight

    return weights_of


def normalize_access_bits(num_topk: int, vector: int, threads: int) -> tuple[int, tuple[int, int]]:
    return 32 * vector, (32, 32 * vector)  # the denominator is a single number


@kernel(access_bits=normalize_access_bits)
def normalize_weight(num_topk: int, vector: int, threads: int) -> Any:
    """One thread per token. The sum has the order and roundings of the reference, hence its bits.

    A row is kept in registers between the two passes; a long one is read again instead.
    """
    chunks = num_topk // vector
    keep = num_topk <= MAX_IN_REGISTERS
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def normalize(
        weights: T.Tensor[(num_tokens, num_topk), T.float32],
        denominator: T.Tensor[(num_tokens,), T.float32],
        normalized: T.Tensor[(num_tokens, num_topk), T.float32],
    ):
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            row = T.alloc_local((chunks if keep else 1, vector), T.float32)
            quotient = T.alloc_local((vector,), T.float32)
            total = T.alloc_var(T.float32, init=T.float32(1e-20))
            if token < num_tokens:
                for c in T.unroll(chunks) if keep else T.serial(chunks):
                    for v in T.vectorized(vector):
                        row[c if keep else 0, v] = weights[token, c * vector + v]
                    for v in T.unroll(vector):
                        total = T.ieee_add(total, row[c if keep else 0, v])
                denominator[token] = total
                for c in T.unroll(chunks) if keep else T.serial(chunks):
                    if not keep:
                        for v in T.vectorized(vector):
                            row[0, v] = weights[token, c * vector + v]
                    for v in T.unroll(vector):
                        quotient[v] = T.ieee_fdiv(row[c if keep else 0, v], total)
                    for v in T.vectorized(vector):
                        normalized[token, c * vector + v] = quotient[v]

    return normalize
