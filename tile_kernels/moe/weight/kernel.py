"""Weights of the chosen experts: by their logits, one warp per token, and normalised."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.plan import SIGMOID, SOFTMAX
from tile_kernels.moe.primitives import LANES, WARPS, score_of, softmax_of_row, weigh
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


def slope_of(scoring: int) -> Any:
    """A macro: the derivative of a score by its logit; not for softmax."""
    sigmoid = score_of(SIGMOID)

    @T.macro
    def sigmoid_slope(logit, value):
        return T.ieee_mul(sigmoid(logit, logit), sigmoid(-logit, logit))

    @T.macro
    def sqrtsoftplus_slope(logit, value):
        slope = T.alloc_var(T.float32)
        if logit < T.float32(-80):  # where the quotient is 0 by 0
            slope = T.ieee_mul(T.exp(T.ieee_mul(logit, T.float32(0.5))), T.float32(0.5))
        else:
            slope = T.ieee_fdiv(sigmoid(logit, logit), T.ieee_mul(T.float32(2), value))
        return slope

    return sigmoid_slope if scoring == SIGMOID else sqrtsoftplus_slope


def backward_access_bits(
    num_experts: int, num_topk: int, scoring: int, vector: int
) -> tuple[tuple[int, ...], int]:
    rows = 32 * vector if scoring == SOFTMAX else 32
    return tuple(sorted({32, 64, rows})), 32 * vector


@kernel(access_bits=backward_access_bits)
def topk_weights_backward(num_experts: int, num_topk: int, scoring: int, vector: int) -> Any:
    """One warp per token. Each lane adds what the slots give to its experts, in slot order."""
    score = score_of(scoring)
    slope_of_score = slope_of(scoring)
    largest, exponentials = softmax_of_row(num_experts, vector)
    steps = -(-num_experts // (LANES * vector))
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def sum_of_slots(value):
        total = T.alloc_var(T.float32, init=T.float32(0))
        for j in T.unroll(num_topk):
            total = T.ieee_add(total, T.shfl_sync(value, j))
        return total

    @T.prim_func
    def gradient_of_logits(
        grad_weights: T.Tensor[(num_tokens, num_topk), T.float32],
        logits: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, num_topk), T.int64],
        grad: T.Tensor[(num_tokens, num_experts), T.float32],
        factor: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * LANES) as block:
            lane = T.get_thread_binding() % LANES
            token = block * WARPS + T.get_thread_binding() // LANES
            top = T.alloc_var(T.float32, init=T.float32(0))
            denominator = T.alloc_var(T.float32, init=T.float32(1))
            expert = T.alloc_var(T.int64, init=T.int64(-1))
            slot = T.alloc_var(T.int32, init=-1)  # the expert, or -1
            incoming = T.alloc_var(T.float32, init=T.float32(0))
            logit = T.alloc_var(T.float32, init=T.float32(0))
            value = T.alloc_var(T.float32, init=T.float32(0))
            slot_grad = T.alloc_var(T.float32, init=T.float32(0))
            row = T.alloc_local((vector,), T.float32)
            sums = T.alloc_local((vector,), T.float32)
            if token < num_tokens:  # the same for the whole warp
                if scoring == SOFTMAX:
                    top = largest(lane, token, logits, top)
                    denominator = exponentials(lane, token, logits, top)
                if lane < num_topk:
                    expert = topk_idx[token, lane]
                if expert >= 0 and expert < num_experts:
                    slot = T.cast(expert, T.int32)
                    incoming = grad_weights[token, lane]
                    logit = logits[token, slot]
                    value = score(logit, top)
                    if scoring == SOFTMAX:
                        value = T.ieee_fdiv(value, denominator)
                total = T.alloc_var(
                    T.float32, init=T.ieee_add(T.float32(1e-20), sum_of_slots(value))
                )
                weighted = T.alloc_var(T.float32, init=T.ieee_mul(incoming, value))
                shared = T.alloc_var(T.float32, init=T.ieee_fdiv(sum_of_slots(weighted), total))
                if slot >= 0:
                    slot_grad = T.ieee_fdiv(T.ieee_mul(factor, T.ieee_sub(incoming, shared)), total)
                    if scoring != SOFTMAX:
                        slot_grad = T.ieee_mul(slot_grad, slope_of_score(logit, value))
                common = T.alloc_var(T.float32, init=T.float32(0))
                if scoring == SOFTMAX:
                    weighted = T.ieee_mul(slot_grad, value)
                    common = sum_of_slots(weighted)
                chosen = T.alloc_var(T.uint64, init=T.ballot(slot >= 0))
                for step in T.serial(steps):
                    first = (step * LANES + lane) * vector
                    for v in T.unroll(vector):
                        sums[v] = T.float32(0)
                    for j in T.unroll(num_topk):
                        named = T.alloc_var(T.int32, init=T.shfl_sync(slot, j))
                        given = T.alloc_var(T.float32, init=T.shfl_sync(slot_grad, j))
                        for v in T.unroll(vector):
                            if named == first + v:
                                sums[v] = T.ieee_add(sums[v], given)
                    if first < num_experts:
                        if scoring == SOFTMAX:
                            for v in T.vectorized(vector):
                                row[v] = logits[token, first + v]
                            for v in T.unroll(vector):
                                row[v] = T.ieee_fdiv(score(row[v], top), denominator)
                                sums[v] = T.ieee_mul(row[v], T.ieee_sub(sums[v], common))
                                if chosen == T.uint64(0):
                                    sums[v] = T.float32(0)
                        for v in T.vectorized(vector):
                            grad[token, first + v] = sums[v]

    return gradient_of_logits


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
