"""The gate with a bias for image tokens, and the gradient of its logits."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.moe_topk.plan import BackwardPlan
from tile_kernels.moe.plan import SIGMOID, SOFTMAX, Gate
from tile_kernels.moe.primitives import LANES, WARPS, warp_sum
from tile_kernels.moe.top2_sum.kernel import Extras, access_bits, scored_gate
from tile_kernels.runtime.launch import kernel

INDEX_BITS = {"int32": 32, "int64": 64}


def gate_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    gate = Gate(*static)
    loads, _ = access_bits(*static)
    stores = {32, INDEX_BITS[gate.index_dtype]}
    if gate.has_fixed and gate.index_dtype == "int32":
        loads = tuple(set(loads) - {64})
    if gate.has_image or gate.has_random:
        loads = (*loads, 8)
    if gate.has_scores:
        stores.add(32 * gate.vector)
    return tuple(sorted(set(loads))), tuple(sorted(stores))


def prim_func(gate: Gate, threads: int, tokens_per_block: int, body: Any) -> Any:
    """The kernel around the body of the scored gate: signature and grid."""
    num_tokens, columns, unmapped_stride = T.dynamic("num_tokens columns unmapped_stride")
    num_logical = gate.num_experts + gate.num_shared
    slots = gate.num_topk + gate.num_shared
    index_dtype = gate.index_dtype

    @T.prim_func
    def moe_topk_gate(
        logits: T.Tensor[(num_tokens, gate.num_experts), T.float32],
        mask: T.Tensor[(num_tokens,), T.bool],
        bias: T.Tensor[(gate.num_experts,), T.float32],
        image_bias: T.Tensor[(gate.num_experts,), T.float32],
        image_mask: T.Tensor[(num_tokens,), T.bool],
        fixed: T.Tensor[(num_tokens,), T.bool],
        to_physical_map: T.Tensor[(num_logical, columns), T.int32],
        logical_count: T.Tensor[(num_logical,), T.int32],
        unmapped: T.StridedTensor[(num_tokens, gate.num_topk), (unmapped_stride, 1), index_dtype],
        random_mask: T.Tensor[(num_tokens,), T.bool],
        scores: T.Tensor[(num_tokens, gate.num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, slots), index_dtype],
        topk_weights: T.Tensor[(num_tokens, slots), T.float32],
        factor: T.float32,
        ep_rank: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tokens_per_block), threads=threads) as block:
            ranks = T.alloc_local((4,), T.int32)
            ranks[0] = ep_rank
            ranks[1] = 1
            ranks[2] = 0
            ranks[3] = 1
            body(
                block, num_tokens, logits, mask, fixed, to_physical_map, logical_count, unmapped,
                topk_idx, topk_weights, ranks, factor,
                Extras(bias, image_bias, image_mask, random_mask, scores),
            )  # fmt: skip

    return moe_topk_gate


@kernel(access_bits=gate_access_bits)
def moe_topk_gate(*static: Any) -> Any:
    """One warp per token where its lanes can hold the keys, a block otherwise."""
    return scored_gate(Gate(*static), prim_func)


# ---- gradient -----------------------------------------------------------------------------------


def slope_of(scoring: int) -> Any:
    """A macro: the derivative of a score by its logit, from the score; not for softmax."""

    @T.macro
    def sigmoid_slope(score):
        return T.ieee_mul(score, T.ieee_sub(T.float32(1), score))

    @T.macro
    def sqrtsoftplus_slope(score):
        slope = T.alloc_var(T.float32, init=T.ieee_mul(score, T.float32(0.5)))
        if not score < T.float32(2.0**-12):  # below, the next term of the series is lost
            square = T.ieee_mul(score, score)
            below_one = T.call_extern(T.float32, "expm1f", -square)
            slope = T.ieee_fdiv(-below_one, T.ieee_mul(T.float32(2), score))
        return slope

    return sigmoid_slope if scoring == SIGMOID else sqrtsoftplus_slope


def backward_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = BackwardPlan(*static)
    loads = {32, INDEX_BITS[plan.index_dtype]}
    loads |= {8} if plan.has_mask else set()
    loads |= {32 * plan.vector} if plan.reads_row else set()
    return tuple(sorted(loads)), (32 * plan.vector,)


@kernel(access_bits=backward_access_bits)
def moe_topk_gate_backward(*static: Any) -> Any:
    """One warp per token. Each lane adds what the slots give to its experts, in slot order.

    The sums over a row come from a first pass, which a row that fits in registers stays in.
    """
    plan = BackwardPlan(*static)
    num_experts, vector, steps = plan.num_experts, plan.vector, plan.steps
    softmax = plan.scoring == SOFTMAX
    slope_of_score = slope_of(plan.scoring)
    sums_row = plan.has_sums or (softmax and plan.has_scores)  # a first pass
    kept = steps if plan.keeps_row and sums_row else 1
    num_tokens, sequences = T.dynamic("num_tokens sequences")
    weight_stride, grad_stride = T.dynamic("weight_stride grad_stride")

    @T.macro
    def sum_of_slots(value, initial):
        total = T.alloc_var(T.float32, init=initial)
        for j in T.unroll(plan.num_topk):
            total = T.ieee_add(total, T.shfl_sync(value, j))
        return total

    @T.prim_func
    def gradient_of_logits(
        scores: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, plan.num_topk), plan.index_dtype],
        weights: T.StridedTensor[(num_tokens, plan.num_topk), (weight_stride, 1), T.float32],
        grad_weights: T.StridedTensor[(num_tokens, plan.num_topk), (grad_stride, 1), T.float32],
        mask: T.Tensor[(num_tokens,), T.bool],
        grad_sums: T.Tensor[(sequences, num_experts), T.float32],
        grad_scores: T.Tensor[(num_tokens, num_experts), T.float32],
        grad: T.Tensor[(num_tokens, num_experts), T.float32],
        factor: T.float32,
        per_sequence: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * LANES) as block:
            lane = T.get_thread_binding() % LANES
            token = block * WARPS + T.get_thread_binding() // LANES
            expert = T.alloc_var(T.int64, init=T.int64(-1))
            slot = T.alloc_var(T.int32, init=-1)  # the expert, or -1
            incoming = T.alloc_var(T.float32, init=T.float32(0))
            chosen = T.alloc_var(T.float32, init=T.float32(0))
            weighted = T.alloc_var(T.float32, init=T.float32(0))
            slot_grad = T.alloc_var(T.float32, init=T.float32(0))
            inverse = T.alloc_var(T.float32, init=T.float32(0))
            row_sum = T.alloc_var(T.float32, init=T.float32(0))
            h_sum = T.alloc_var(T.float32, init=T.float32(0))
            s_sum = T.alloc_var(T.float32, init=T.float32(0))
            common = T.alloc_var(T.float32, init=T.float32(0))
            row = T.alloc_local((kept, vector), T.float32)
            h = T.alloc_local((vector,), T.float32)
            s = T.alloc_local((vector,), T.float32)
            sums = T.alloc_local((vector,), T.float32)
            routes = T.alloc_var(T.bool, init=token < num_tokens)
            if plan.has_mask:
                if routes:
                    routes = mask[token]
            if routes:  # the same for the whole warp
                if lane < plan.num_topk:
                    expert = T.cast(topk_idx[token, lane], T.int64)
                if expert >= 0 and expert < num_experts:
                    slot = T.cast(expert, T.int32)
                    incoming = grad_weights[token, lane]
                    chosen = scores[token, slot]
                    weighted = T.ieee_mul(incoming, weights[token, lane])
                total = T.alloc_var(T.float32, init=sum_of_slots(chosen, T.float32(1e-20)))
                shared = T.alloc_var(T.float32, init=sum_of_slots(weighted, T.float32(0)))
                if slot >= 0:
                    slot_grad = T.ieee_fdiv(T.ieee_sub(T.ieee_mul(factor, incoming), shared), total)
                    if not plan.reads_row:
                        slot_grad = T.ieee_mul(slot_grad, slope_of_score(chosen))
                if sums_row:
                    for step in T.unroll(steps) if kept > 1 else T.serial(steps):
                        first = (step * LANES + lane) * vector
                        if first < num_experts:
                            for v in T.vectorized(vector):
                                row[step if kept > 1 else 0, v] = scores[token, first + v]
                            if plan.has_sums:
                                for v in T.vectorized(vector):
                                    h[v] = grad_sums[T.truncdiv(token, per_sequence), first + v]
                                for v in T.unroll(vector):
                                    score = row[step if kept > 1 else 0, v]
                                    row_sum = T.ieee_add(row_sum, score)
                                    h_sum = T.ieee_add(h_sum, T.ieee_mul(h[v], score))
                            if softmax and plan.has_scores:
                                for v in T.vectorized(vector):
                                    s[v] = grad_scores[token, first + v]
                                for v in T.unroll(vector):
                                    score = row[step if kept > 1 else 0, v]
                                    s_sum = T.ieee_add(s_sum, T.ieee_mul(s[v], score))
                    if plan.has_sums:
                        row_sum = warp_sum(row_sum)
                        h_sum = warp_sum(h_sum)
                        if row_sum != T.float32(0):
                            inverse = T.ieee_frcp(row_sum)
                            h_sum = T.ieee_mul(h_sum, inverse)
                if softmax:
                    # A row of scores times a number has the same normalised scores: these add
                    # nothing but rounding errors to the sum.
                    weighted = T.ieee_mul(slot_grad, chosen)
                    common = sum_of_slots(weighted, T.float32(0))
                    if plan.has_scores:
                        common = T.ieee_add(common, warp_sum(s_sum))
                for step in T.unroll(steps) if kept > 1 else T.serial(steps):
                    first = (step * LANES + lane) * vector
                    for v in T.unroll(vector):
                        sums[v] = T.float32(0)
                    for j in T.unroll(plan.num_topk):
                        named = T.alloc_var(T.int32, init=T.shfl_sync(slot, j))
                        given = T.alloc_var(T.float32, init=T.shfl_sync(slot_grad, j))
                        for v in T.unroll(vector):
                            if named == first + v:
                                sums[v] = T.ieee_add(sums[v], given)
                    if first < num_experts:
                        if plan.reads_row:
                            if kept == 1:
                                for v in T.vectorized(vector):
                                    row[0, v] = scores[token, first + v]
                            if plan.has_sums:
                                for v in T.vectorized(vector):
                                    h[v] = grad_sums[T.truncdiv(token, per_sequence), first + v]
                                for v in T.unroll(vector):
                                    sums[v] = T.ieee_add(
                                        sums[v], T.ieee_mul(T.ieee_sub(h[v], h_sum), inverse)
                                    )
                            if plan.has_scores:
                                for v in T.vectorized(vector):
                                    s[v] = grad_scores[token, first + v]
                                for v in T.unroll(vector):
                                    sums[v] = T.ieee_add(sums[v], s[v])
                            for v in T.unroll(vector):
                                score = row[step if kept > 1 else 0, v]
                                if softmax:
                                    sums[v] = T.ieee_mul(score, T.ieee_sub(sums[v], common))
                                else:
                                    sums[v] = T.ieee_mul(sums[v], slope_of_score(score))
                        for v in T.vectorized(vector):
                            grad[token, first + v] = sums[v]
            elif token < num_tokens:
                for v in T.unroll(vector):
                    sums[v] = T.float32(0)
                for step in T.serial(steps):
                    first = (step * LANES + lane) * vector
                    if first < num_experts:
                        for v in T.vectorized(vector):
                            grad[token, first + v] = sums[v]

    return gradient_of_logits
