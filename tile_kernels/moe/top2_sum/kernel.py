"""The scored gate: score, choose, weigh, and number the experts as their ranks do."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.plan import SOFTMAX, Gate
from tile_kernels.moe.primitives import (
    FULL_WARP,
    LANES,
    LOWEST_KEY,
    WARPS,
    draw,
    drop,
    finish,
    merge_lists,
    order_key,
    score_of,
    sum_key,
    top2_of_lanes,
    warp_max_float,
    warp_sum,
    warp_topk,
)
from tile_kernels.moe.top2_sum.plan import MAX_PER_LANE, PER_WARP, keys_per_lane, lanes_per_group
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    gate = Gate(*static)
    loads = {32, 32 * gate.vector}
    if gate.has_mask or gate.has_fixed:
        loads.add(8)
    if gate.has_fixed:
        loads.add(64)
    return tuple(sorted(loads)), (32, 64)


def row_of_lane(gate: Gate, per_lane: int) -> Any:
    """Macros on a lane's experts `first .. first + count - 1`, of at most `per_lane`.

    `load` brings logits and biases; `largest` and `exponentials` are the lane's part of softmax's
    maximum and sum; `ranks` makes the order keys, LOWEST_KEY beyond the lane's experts. Where
    scores are a result, `ranks` leaves them in `logit`, and `store` writes them.
    """
    score = score_of(gate.scoring)

    @T.macro
    def load(logits, extras, token, first, count, logit, offset):
        is_image = T.alloc_var(T.bool, init=T.bool(False))
        if gate.has_image:
            is_image = extras.image_mask[token]
        for c in T.unroll(per_lane // gate.vector):
            if c * gate.vector < count:
                at = first + c * gate.vector
                for v in T.vectorized(gate.vector):
                    logit[c * gate.vector + v] = logits[token, at + v]
                if gate.has_bias:
                    for v in T.vectorized(gate.vector):
                        offset[c * gate.vector + v] = extras.bias[at + v]
                else:
                    for v in T.unroll(gate.vector):
                        offset[c * gate.vector + v] = T.float32(0)
                if gate.has_image:
                    if is_image:
                        for v in T.vectorized(gate.vector):
                            offset[c * gate.vector + v] = extras.image_bias[at + v]

    @T.macro
    def largest(count, logit):
        top = T.alloc_var(T.float32, init=-T.infinity(T.float32))
        for i in T.unroll(per_lane):
            if i < count:
                top = T.max(top, logit[i])
        return top

    @T.macro
    def exponentials(count, logit, top):
        total = T.alloc_var(T.float32, init=T.float32(0))
        for i in T.unroll(per_lane):
            if i < count:
                total = T.ieee_add(total, score(logit[i], top))
        return total

    @T.macro
    def ranks(count, logit, offset, keys, top, denominator):
        for i in T.unroll(per_lane):
            keys[i] = LOWEST_KEY
            if i < count:
                if gate.scoring == SOFTMAX:
                    keys[i] = order_key(T.ieee_add(logit[i], offset[i]))
                    if gate.has_scores:
                        logit[i] = T.ieee_fdiv(score(logit[i], top), denominator)
                elif gate.has_scores:
                    logit[i] = score(logit[i], T.float32(0))
                    keys[i] = order_key(T.ieee_add(logit[i], offset[i]))
                else:
                    keys[i] = order_key(T.ieee_add(score(logit[i], T.float32(0)), offset[i]))

    @T.macro
    def store(token, first, count, values, extras):
        for c in T.unroll(per_lane // gate.vector):
            if c * gate.vector < count:
                for v in T.vectorized(gate.vector):
                    extras.scores[token, first + c * gate.vector + v] = values[c * gate.vector + v]

    return load, largest, exponentials, ranks, store


class Extras:
    """Buffers that not all gates have; `bias` is that of tokens without another one."""

    def __init__(
        self,
        bias: Any,
        image_bias: Any = None,
        image_mask: Any = None,
        random_mask: Any = None,
        scores: Any = None,
    ) -> None:
        self.bias, self.image_bias, self.image_mask = bias, image_bias, image_mask
        self.random_mask, self.scores = random_mask, scores


def prim_func(gate: Gate, threads: int, tokens_per_block: int, body: Any) -> Any:
    """The kernel around `body`: signature and grid."""
    num_tokens, columns, unmapped_stride = T.dynamic("num_tokens columns unmapped_stride")
    num_logical = gate.num_experts + gate.num_shared
    slots = gate.num_topk + gate.num_shared

    @T.prim_func
    def top2_sum_gate(
        logits: T.Tensor[(num_tokens, gate.num_experts), T.float32],
        bias: T.Tensor[(gate.num_experts,), T.float32],
        mask: T.Tensor[(num_tokens,), T.bool],
        fixed: T.Tensor[(num_tokens,), T.bool],
        to_physical_map: T.Tensor[(num_logical, columns), T.int32],
        logical_count: T.Tensor[(num_logical,), T.int32],
        unmapped: T.StridedTensor[(num_tokens, gate.num_topk), (unmapped_stride, 1), T.int64],
        topk_idx: T.Tensor[(num_tokens, slots), T.int64],
        topk_weights: T.Tensor[(num_tokens, slots), T.float32],
        factor: T.float32,
        ep_rank: T.int32,
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tokens_per_block), threads=threads) as block:
            ranks = T.alloc_local((4,), T.int32)
            ranks[0] = ep_rank
            ranks[1] = per_rank
            ranks[2] = tp_rank
            ranks[3] = num_tp_ranks
            body(
                block, num_tokens, logits, mask, fixed, to_physical_map, logical_count,
                unmapped, topk_idx, topk_weights, ranks, factor, Extras(bias),
            )  # fmt: skip

    return top2_sum_gate


@kernel(access_bits=access_bits)
def top2_sum_gate(*static: Any) -> Any:
    """One warp per token where its lanes can hold the keys, a block otherwise."""
    return scored_gate(Gate(*static), prim_func)


def scored_gate(gate: Gate, around: Any) -> Any:
    """The kernel that `around(gate, threads, tokens_per_block, body)` makes of the gate's body."""
    if gate.num_groups <= LANES and keys_per_lane(gate) <= MAX_PER_LANE:
        return warp_gate(gate, around)
    return block_gate(gate, around)


def warp_gate(gate: Gate, around: Any) -> Any:
    """One warp per token, all keys in registers; the lanes of a group are neighbours."""
    per_lane = keys_per_lane(gate)
    grouped = gate.num_groups > 0
    lanes = lanes_per_group(gate) if grouped else LANES
    group_size = gate.num_experts // max(gate.num_groups, 1)
    load, largest, exponentials, rank_keys, store_scores = row_of_lane(gate, per_lane)
    topk = warp_topk(per_lane, gate.num_topk)
    topk_groups = warp_topk(1, gate.num_topk_groups) if grouped else None
    finished, dropped, drawn = finish(gate), drop(gate), draw(gate)

    @T.macro
    def body(
        block, num_tokens, logits, mask, fixed, to_physical_map, logical_count,
        unmapped, topk_idx, topk_weights, ranks, factor, extras,
    ):  # fmt: skip
        lane = T.get_thread_binding() % LANES
        token = block * WARPS + T.get_thread_binding() // LANES
        within = lane % lanes * per_lane  # of the lane's first expert, in its group
        first = lane // lanes * group_size + within
        count = T.alloc_var(T.int32, init=0)  # experts of this lane
        if first < gate.num_experts:
            count = T.max(T.min(group_size - within, per_lane), 0)
        logit = T.alloc_local((per_lane,), T.float32)
        offset = T.alloc_local((per_lane,), T.float32)
        keys = T.alloc_local((per_lane,), T.int32)
        won = T.alloc_local((2,), T.int32)
        expert = T.alloc_local((1,), T.int64)
        top = T.alloc_var(T.float32, init=-T.infinity(T.float32))
        denominator = T.alloc_var(T.float32, init=T.float32(0))
        routes = T.alloc_var(T.bool, init=token < num_tokens)
        if gate.has_mask:
            if token < num_tokens:
                routes = mask[token]
        is_random = T.alloc_var(T.bool, init=T.bool(False))
        if gate.has_random:
            if routes:
                is_random = extras.random_mask[token]
                routes = not is_random
        if routes:  # the same for the whole warp
            load(logits, extras, token, first, count, logit, offset)
            if gate.scoring == SOFTMAX:
                top = warp_max_float(largest(count, logit))
                denominator = warp_sum(exponentials(count, logit, top))
            rank_keys(count, logit, offset, keys, top, denominator)
            if gate.has_scores:
                store_scores(token, first, count, logit, extras)
            if grouped:
                best = T.alloc_local((2,), T.int32)
                group_key = T.alloc_local((1,), T.int32)
                best[0] = LOWEST_KEY
                best[1] = LOWEST_KEY
                for i in T.unroll(per_lane):
                    best[1] = T.max(best[1], T.min(best[0], keys[i]))
                    best[0] = T.max(best[0], keys[i])
                top2_of_lanes(lanes, best)
                group_key[0] = LOWEST_KEY
                if lane % lanes == 0 and lane // lanes < gate.num_groups:
                    group_key[0] = sum_key(best) if group_size > 1 else best[0]
                topk_groups(lane, group_key, won)
                chosen = T.alloc_var(T.int32, init=0)  # a bit for each group that is kept
                if lane < gate.num_topk_groups:
                    chosen = T.shift_left(1, won[1] // lanes)
                chosen = T.call_extern(T.int32, "__reduce_or_sync", T.uint32(FULL_WARP), chosen)
                if (T.shift_right(chosen, lane // lanes) & 1) == 0:
                    for i in T.unroll(per_lane):
                        keys[i] = LOWEST_KEY
            topk(lane, keys, won)
            expert[0] = T.cast(
                won[1] // (lanes * per_lane) * group_size + won[1] % (lanes * per_lane), T.int64
            )
            if gate.has_fixed:
                if fixed[token] and lane < gate.num_topk:
                    expert[0] = T.cast(unmapped[token, lane], T.int64)
            if gate.has_unmapped:
                if lane < gate.num_topk:
                    unmapped[token, lane] = T.cast(expert[0], gate.index_dtype)
            finished(
                lane, token, expert, top, denominator, logits, to_physical_map, logical_count,
                topk_idx, topk_weights, ranks, factor,
            )  # fmt: skip
        elif token < num_tokens:
            dropped(lane, token, unmapped, topk_idx, topk_weights)
            if gate.has_random:
                if is_random:
                    drawn(lane, token, logical_count, topk_idx, topk_weights, ranks)
            if gate.has_scores:
                for i in T.unroll(per_lane):
                    logit[i] = T.float32(0)
                store_scores(token, first, count, logit, extras)

    return around(gate, WARPS * LANES, WARPS, body)


def block_gate(gate: Gate, around: Any) -> Any:
    """One block per token: each warp has 512 experts; groups go through shared memory."""
    warps = -(-gate.num_experts // PER_WARP)
    grouped = gate.num_groups > 0
    group_size = gate.num_experts // max(gate.num_groups, 1)
    groups_per_lane = -(-gate.num_groups // LANES)
    load, largest, exponentials, rank_keys, store_scores = row_of_lane(gate, MAX_PER_LANE)
    topk = warp_topk(MAX_PER_LANE, gate.num_topk)
    topk_groups = warp_topk(groups_per_lane, gate.num_topk_groups) if grouped else None
    finished, dropped, drawn = finish(gate), drop(gate), draw(gate)

    @T.macro
    def body(
        token, num_tokens, logits, mask, fixed, to_physical_map, logical_count,
        unmapped, topk_idx, topk_weights, ranks, factor, extras,
    ):  # fmt: skip
        lane = T.get_thread_binding() % LANES
        warp = T.get_thread_binding() // LANES
        first = warp * PER_WARP + lane * MAX_PER_LANE
        logit = T.alloc_local((MAX_PER_LANE,), T.float32)
        offset = T.alloc_local((MAX_PER_LANE,), T.float32)
        keys = T.alloc_local((MAX_PER_LANE,), T.int32)
        won = T.alloc_local((2,), T.int32)
        expert = T.alloc_local((1,), T.int64)
        list_keys = T.alloc_shared((warps, gate.num_topk), T.int32)
        list_experts = T.alloc_shared((warps, gate.num_topk), T.int32)
        chosen = T.alloc_shared((gate.num_topk,), T.int32)
        top = T.alloc_var(T.float32, init=-T.infinity(T.float32))
        denominator = T.alloc_var(T.float32, init=T.float32(0))
        count = T.max(T.min(gate.num_experts - first, MAX_PER_LANE), 0)
        routes = T.alloc_var(T.bool, init=T.bool(True))
        if gate.has_mask:
            routes = mask[token]
        is_random = T.alloc_var(T.bool, init=T.bool(False))
        if gate.has_random:
            if routes:
                is_random = extras.random_mask[token]
                routes = not is_random
        load(logits, extras, token, first, count, logit, offset)
        if gate.scoring == SOFTMAX:
            warp_values = T.alloc_shared((2, warps), T.float32)
            top = warp_max_float(largest(count, logit))
            if lane == 0:
                warp_values[0, warp] = top
            T.sync_threads()
            for w in T.unroll(warps):
                top = T.max(top, warp_values[0, w])
            denominator = warp_sum(exponentials(count, logit, top))
            if lane == 0:
                warp_values[1, warp] = denominator
            T.sync_threads()
            denominator = T.float32(0)
            for w in T.unroll(warps):
                denominator = T.ieee_add(denominator, warp_values[1, w])
        rank_keys(count, logit, offset, keys, top, denominator)
        if gate.has_scores:
            if not routes:
                for i in T.unroll(MAX_PER_LANE):
                    logit[i] = T.float32(0)
            store_scores(token, first, count, logit, extras)
        if grouped:
            all_keys = T.alloc_shared((gate.num_experts,), T.int32)
            group_keys = T.alloc_shared((groups_per_lane * LANES,), T.int32)
            kept = T.alloc_shared((gate.num_groups,), T.int32)
            best = T.alloc_local((2,), T.int32)
            mine = T.alloc_local((groups_per_lane,), T.int32)
            key = T.alloc_var(T.int32)
            for i in T.unroll(MAX_PER_LANE):
                if i < count:
                    all_keys[first + i] = keys[i]
            T.sync_threads()
            for step in T.serial(T.ceildiv(groups_per_lane * LANES, warps)):
                group = step * warps + warp
                if group < gate.num_groups:
                    best[0] = LOWEST_KEY
                    best[1] = LOWEST_KEY
                    for j in T.serial(T.ceildiv(group_size, LANES)):
                        if j * LANES + lane < group_size:
                            key = all_keys[group * group_size + j * LANES + lane]
                            best[1] = T.max(best[1], T.min(best[0], key))
                            best[0] = T.max(best[0], key)
                    top2_of_lanes(LANES, best)
                    if lane == 0:
                        group_keys[group] = sum_key(best) if group_size > 1 else best[0]
                        kept[group] = 0
                elif group < groups_per_lane * LANES and lane == 0:
                    group_keys[group] = LOWEST_KEY
            T.sync_threads()
            if warp == 0:
                for g in T.unroll(groups_per_lane):
                    mine[g] = group_keys[lane * groups_per_lane + g]
                topk_groups(lane, mine, won)
                if lane < gate.num_topk_groups:
                    kept[won[1]] = 1
            T.sync_threads()
            for i in T.unroll(MAX_PER_LANE):
                if i < count:
                    if kept[(first + i) // group_size] == 0:
                        keys[i] = LOWEST_KEY
        topk(lane, keys, won)
        if lane < gate.num_topk:
            list_keys[warp, lane] = won[0]
            list_experts[warp, lane] = warp * PER_WARP + won[1]
        T.sync_threads()
        if warp == 0:
            merge_lists(lane, warps, gate.num_topk, list_keys, list_experts, chosen)
            T.sync_warp()
            if routes:
                expert[0] = T.int64(-1)
                if lane < gate.num_topk:
                    expert[0] = T.cast(chosen[lane], T.int64)
                    if gate.has_fixed:
                        if fixed[token]:
                            expert[0] = T.cast(unmapped[token, lane], T.int64)
                    if gate.has_unmapped:
                        unmapped[token, lane] = T.cast(expert[0], gate.index_dtype)
                finished(
                    lane, token, expert, top, denominator, logits, to_physical_map, logical_count,
                    topk_idx, topk_weights, ranks, factor,
                )  # fmt: skip
            else:
                dropped(lane, token, unmapped, topk_idx, topk_weights)
                if gate.has_random:
                    if is_random:
                        drawn(lane, token, logical_count, topk_idx, topk_weights, ranks)

    return around(gate, warps * LANES, 1, body)
