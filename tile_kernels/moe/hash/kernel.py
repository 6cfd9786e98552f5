"""The hash gate: a token's experts from the table, then as the scored gate does."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.hash.plan import BITS, Plan
from tile_kernels.moe.plan import SOFTMAX
from tile_kernels.moe.primitives import LANES, WARPS, drop, finish, softmax_of_row
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    p = Plan(*static)
    logit = BITS[p.logit_dtype]
    loads = {logit, logit * p.vector, BITS[p.id_dtype], BITS[p.table_dtype]}
    loads |= {8} if p.has_mask else set()
    loads |= {32} if p.has_map else set()
    return tuple(sorted(loads)), (32, 64)


@kernel(access_bits=access_bits)
def hash_gate(*static: Any) -> Any:
    """One warp per token, lane `j` with slot `j`; only softmax reads the row."""
    p = Plan(*static)
    gate = p.gate
    finished, dropped = finish(gate), drop(gate)
    largest, exponentials = softmax_of_row(p.num_experts, p.vector)
    num_logical, slots = p.num_experts + p.num_shared, p.num_topk + p.num_shared
    num_tokens, vocabulary, columns = T.dynamic("num_tokens vocabulary columns")
    stride = T.dynamic("stride", "int64")

    @T.prim_func
    def gate_by_id(
        logits: T.StridedTensor[(num_tokens, p.num_experts), (stride, 1), p.logit_dtype],
        token_ids: T.Tensor[(num_tokens,), p.id_dtype],
        table: T.Tensor[(vocabulary, p.num_topk), p.table_dtype],
        mask: T.Tensor[(num_tokens,), T.bool],
        to_physical_map: T.Tensor[(num_logical, columns), T.int32],
        logical_count: T.Tensor[(num_logical,), T.int32],
        topk_idx: T.Tensor[(num_tokens, slots), T.int64],
        topk_weights: T.Tensor[(num_tokens, slots), T.float32],
        factor: T.float32,
        ep_rank: T.int32,
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * LANES) as block:
            T.assume(stride % p.vector == 0)
            lane = T.get_thread_binding() % LANES
            token = block * WARPS + T.get_thread_binding() // LANES
            ranks = T.alloc_local((4,), T.int32)
            ranks[0] = ep_rank
            ranks[1] = per_rank
            ranks[2] = tp_rank
            ranks[3] = num_tp_ranks
            expert = T.alloc_local((1,), T.int64)
            top = T.alloc_var(T.float32, init=T.float32(0))
            denominator = T.alloc_var(T.float32, init=T.float32(0))
            row = T.alloc_var(T.int64, init=T.int64(-1))
            if token < num_tokens:  # the same for the whole warp, as is all below
                row = T.cast(token_ids[token], T.int64)
                if p.has_mask:
                    if not mask[token]:
                        row = T.int64(-1)
                if row >= 0 and row < vocabulary:
                    expert[0] = T.int64(-1)
                    if lane < p.num_topk:
                        expert[0] = T.cast(table[row, lane], T.int64)
                    if p.scoring == SOFTMAX:
                        top = largest(lane, token, logits, top)
                        denominator = exponentials(lane, token, logits, top)
                    finished(
                        lane, token, expert, top, denominator, logits, to_physical_map,
                        logical_count, topk_idx, topk_weights, ranks, factor,
                    )  # fmt: skip
                else:
                    dropped(lane, token, topk_idx, topk_idx, topk_weights)

    return gate_by_id
