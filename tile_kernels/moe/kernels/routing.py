"""Scored gates: score, choose, weigh, and number the experts as their ranks do."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.moe.kernels.common import (
    FULL_WARP,
    LANES,
    LOWEST_KEY,
    merge_lists,
    order_key,
    row_vector,
    sum_key,
    top2_of_lanes,
    warp_topk,
)
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.launch import kernel

SIGMOID, SQRTSOFTPLUS, SOFTMAX = 0, 1, 2  # as in ScoringFunc
REPLICA_STEP = 23333
MOST_PER_LANE = 16  # keys that a lane sorts in registers
PER_WARP = LANES * MOST_PER_LANE


def score_of(scoring: int) -> Any:
    """A macro: the score of one logit, bit for bit PyTorch's on CUDA; softmax's is unnormalised."""

    @T.macro
    def sigmoid(logit, top):
        return T.ieee_frcp(T.ieee_add(T.float32(1), T.exp(-logit)))

    @T.macro
    def sqrtsoftplus(logit, top):
        return T.sqrt(T.Select(logit > T.float32(20), logit, T.log1p(T.exp(logit))))

    @T.macro
    def exponential(logit, top):
        return T.exp(T.ieee_sub(logit, top))

    return (sigmoid, sqrtsoftplus, exponential)[scoring]


@T.macro
def warp_sum(value):
    """The sum of a float32 over the warp, in every lane, always in the same order."""
    total = T.alloc_var(T.float32, init=value)
    for d in T.unroll(5):
        total = T.ieee_add(total, T.shfl_xor(total, T.shift_left(1, d)))
    return total


@T.macro
def warp_max_float(value):
    """The largest number over the warp, in every lane; NaN only if there is no number."""
    most = T.alloc_var(T.float32, init=value)
    for d in T.unroll(5):
        most = T.max(most, T.shfl_xor(most, T.shift_left(1, d)))
    return most


class Gate(NamedTuple):
    """What the code of a gate depends on."""

    num_experts: int
    num_topk: int
    num_groups: int  # 0: not grouped
    num_topk_groups: int
    num_shared: int
    scoring: int
    has_mask: bool
    has_fixed: bool
    has_map: bool
    has_unmapped: bool
    vector: int


def plan(
    num_experts: int,
    num_topk: int,
    num_groups: int,
    num_topk_groups: int,
    num_shared: int,
    scoring: int,
    has_mask: bool,
    has_fixed: bool,
    has_map: bool,
    has_unmapped: bool,
    alignment: int,
    device: Device,
) -> Gate:
    vector = row_vector(num_experts // max(num_groups, 1), alignment)
    return Gate(
        num_experts, num_topk, num_groups, num_topk_groups, num_shared, scoring,
        has_mask, has_fixed, has_map, has_unmapped, vector,
    )  # fmt: skip


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
    maximum and sum; `ranks` makes the order keys, LOWEST_KEY beyond the lane's experts.
    """
    score = score_of(gate.scoring)

    @T.macro
    def load(logits, bias, token, first, count, logit, offset):
        for c in T.unroll(per_lane // gate.vector):
            if c * gate.vector < count:
                for v in T.vectorized(gate.vector):
                    logit[c * gate.vector + v] = logits[token, first + c * gate.vector + v]
                for v in T.vectorized(gate.vector):
                    offset[c * gate.vector + v] = bias[first + c * gate.vector + v]

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
    def ranks(count, logit, offset, keys):
        for i in T.unroll(per_lane):
            keys[i] = LOWEST_KEY
            if i < count:
                if gate.scoring == SOFTMAX:
                    keys[i] = order_key(T.ieee_add(logit[i], offset[i]))
                else:
                    keys[i] = order_key(T.ieee_add(score(logit[i], T.float32(0)), offset[i]))

    return load, largest, exponentials, ranks


def weigh(num_experts: int, num_topk: int, scoring: int) -> Any:
    """A macro: the weight of the expert that each lane holds.

    Lane `j` brings the expert of slot `j` in `expert[0]` (int64; outside the row: no expert).
    `top` and `denominator` are softmax's over the row.
    """
    score = score_of(scoring)

    @T.macro
    def weighed(lane, token, expert, top, denominator, logits, factor):
        value = T.alloc_var(T.float32, init=T.float32(0))
        total = T.alloc_var(T.float32, init=T.float32(1e-20))
        valid = T.alloc_var(
            T.bool, init=lane < num_topk and expert[0] >= 0 and expert[0] < num_experts
        )
        if valid:
            value = score(T.cast(logits[token, expert[0]], T.float32), top)
            if scoring == SOFTMAX:
                value = T.ieee_fdiv(value, denominator)
        for j in T.unroll(num_topk):
            total = T.ieee_add(total, T.shfl_sync(value, j))
        weight = T.alloc_var(T.float32, init=T.float32(0))
        if valid:
            weight = T.ieee_mul(T.ieee_fdiv(value, total), factor)
        return weight

    return weighed


def number(gate: Gate) -> Any:
    """A macro: the expert as its tensor-parallel rank counts it, or -1.

    `ranks` are this expert-parallel rank, the experts of one, this tensor-parallel rank, and how
    many of those there are.
    """

    @T.macro
    def numbered(logical, token, to_physical_map, logical_count, ranks):
        index = T.alloc_var(T.int32, init=logical)
        local = T.alloc_var(T.int64, init=T.int64(-1))
        if gate.has_map:
            index = -1
            if logical >= 0:
                replicas = T.alloc_var(T.int32, init=logical_count[logical])
                if replicas > 0:
                    turn = T.cast(ranks[0], T.int64) + T.cast(token, T.int64) * REPLICA_STEP
                    replica = T.alloc_var(
                        T.int32, init=T.cast(T.truncmod(turn, T.cast(replicas, T.int64)), T.int32)
                    )
                    if replica < to_physical_map.shape[1]:
                        index = to_physical_map[logical, replica]
        if ranks[3] == 1:  # every expert is here, under its own number: no divisions
            if index >= 0 and ranks[2] == 0:
                local = T.cast(index, T.int64)
        elif index >= 0:
            rank = T.alloc_var(T.int32, init=T.truncdiv(index, ranks[1]))
            if T.truncmod(rank, ranks[3]) == ranks[2]:
                local = T.cast(
                    T.truncdiv(rank, ranks[3]) * ranks[1] + T.truncmod(index, ranks[1]), T.int64
                )
        return local

    return numbered


def finish(gate: Gate) -> Any:
    """A macro: from the experts that lanes hold to a token's indices and weights.

    Shared experts follow the chosen ones.
    """
    weighed = weigh(gate.num_experts, gate.num_topk, gate.scoring)
    numbered = number(gate)

    @T.macro
    def finished(
        lane, token, expert, top, denominator, logits, to_physical_map, logical_count,
        topk_idx, topk_weights, ranks, factor,
    ):  # fmt: skip
        logical = T.alloc_var(T.int32, init=-1)
        weight = weighed(lane, token, expert, top, denominator, logits, factor)
        if lane < gate.num_topk:
            topk_weights[token, lane] = weight
            if expert[0] >= 0 and expert[0] < gate.num_experts:
                logical = T.cast(expert[0], T.int32)
            topk_idx[token, lane] = numbered(logical, token, to_physical_map, logical_count, ranks)
        if gate.num_shared > 0:
            if lane < gate.num_shared:
                topk_weights[token, gate.num_topk + lane] = T.float32(1)
                logical = gate.num_experts + lane
                topk_idx[token, gate.num_topk + lane] = numbered(
                    logical, token, to_physical_map, logical_count, ranks
                )

    return finished


def drop(gate: Gate) -> Any:
    """A macro: a token that does not route."""

    @T.macro
    def dropped(lane, token, unmapped, topk_idx, topk_weights):
        for j in T.serial(T.ceildiv(gate.num_topk + gate.num_shared, LANES)):
            if j * LANES + lane < gate.num_topk + gate.num_shared:
                topk_idx[token, j * LANES + lane] = T.int64(-1)
                topk_weights[token, j * LANES + lane] = T.float32(0)
        if gate.has_unmapped:
            if lane < gate.num_topk:
                unmapped[token, lane] = T.int64(-1)

    return dropped


def prim_func(gate: Gate, threads: int, tokens_per_block: int, body: Any) -> Any:
    """The kernel around `body`: signature and grid, the same for all gates."""
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
                block, num_tokens, logits, bias, mask, fixed, to_physical_map, logical_count,
                unmapped, topk_idx, topk_weights, ranks, factor,
            )  # fmt: skip

    return top2_sum_gate


WARPS = 4


def lanes_per_group(gate: Gate) -> int:
    """Neighbouring lanes that share a group, where a warp has lanes for all of them."""
    return 1 << (LANES // gate.num_groups).bit_length() - 1


def keys_per_lane(gate: Gate) -> int:
    """Keys of a lane if one warp holds a token."""
    if gate.num_groups == 0:
        return -(-gate.num_experts // (LANES * gate.vector)) * gate.vector
    group_size = gate.num_experts // gate.num_groups
    return -(-group_size // (lanes_per_group(gate) * gate.vector)) * gate.vector


@kernel(plan=plan, access_bits=access_bits)
def top2_sum_gate(*static: Any) -> Any:
    """One warp per token where its lanes can hold the keys, a block otherwise."""
    gate = Gate(*static)
    if gate.num_groups <= LANES and keys_per_lane(gate) <= MOST_PER_LANE:
        return warp_gate(gate)
    return block_gate(gate)


def warp_gate(gate: Gate) -> Any:
    """One warp per token, all keys in registers; the lanes of a group are neighbours."""
    per_lane = keys_per_lane(gate)
    grouped = gate.num_groups > 0
    lanes = lanes_per_group(gate) if grouped else LANES
    group_size = gate.num_experts // max(gate.num_groups, 1)
    load, largest, exponentials, rank_keys = row_of_lane(gate, per_lane)
    topk = warp_topk(per_lane, gate.num_topk)
    topk_groups = warp_topk(1, gate.num_topk_groups) if grouped else None
    finished, dropped = finish(gate), drop(gate)

    @T.macro
    def body(
        block, num_tokens, logits, bias, mask, fixed, to_physical_map, logical_count,
        unmapped, topk_idx, topk_weights, ranks, factor,
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
        if routes:  # the same for the whole warp
            load(logits, bias, token, first, count, logit, offset)
            if gate.scoring == SOFTMAX:
                top = warp_max_float(largest(count, logit))
                denominator = warp_sum(exponentials(count, logit, top))
            rank_keys(count, logit, offset, keys)
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
                    expert[0] = unmapped[token, lane]
            if gate.has_unmapped:
                if lane < gate.num_topk:
                    unmapped[token, lane] = expert[0]
            finished(
                lane, token, expert, top, denominator, logits, to_physical_map, logical_count,
                topk_idx, topk_weights, ranks, factor,
            )  # fmt: skip
        elif token < num_tokens:
            dropped(lane, token, unmapped, topk_idx, topk_weights)

    return prim_func(gate, WARPS * LANES, WARPS, body)


def block_gate(gate: Gate) -> Any:
    """One block per token: each warp has 512 experts; groups go through shared memory."""
    warps = -(-gate.num_experts // PER_WARP)
    grouped = gate.num_groups > 0
    group_size = gate.num_experts // max(gate.num_groups, 1)
    groups_per_lane = -(-gate.num_groups // LANES)
    load, largest, exponentials, rank_keys = row_of_lane(gate, MOST_PER_LANE)
    topk = warp_topk(MOST_PER_LANE, gate.num_topk)
    topk_groups = warp_topk(groups_per_lane, gate.num_topk_groups) if grouped else None
    finished, dropped = finish(gate), drop(gate)

    @T.macro
    def body(
        token, num_tokens, logits, bias, mask, fixed, to_physical_map, logical_count,
        unmapped, topk_idx, topk_weights, ranks, factor,
    ):  # fmt: skip
        lane = T.get_thread_binding() % LANES
        warp = T.get_thread_binding() // LANES
        first = warp * PER_WARP + lane * MOST_PER_LANE
        logit = T.alloc_local((MOST_PER_LANE,), T.float32)
        offset = T.alloc_local((MOST_PER_LANE,), T.float32)
        keys = T.alloc_local((MOST_PER_LANE,), T.int32)
        won = T.alloc_local((2,), T.int32)
        expert = T.alloc_local((1,), T.int64)
        list_keys = T.alloc_shared((warps, gate.num_topk), T.int32)
        list_experts = T.alloc_shared((warps, gate.num_topk), T.int32)
        chosen = T.alloc_shared((gate.num_topk,), T.int32)
        top = T.alloc_var(T.float32, init=-T.infinity(T.float32))
        denominator = T.alloc_var(T.float32, init=T.float32(0))
        count = T.max(T.min(gate.num_experts - first, MOST_PER_LANE), 0)
        load(logits, bias, token, first, count, logit, offset)
        if gate.scoring == SOFTMAX:
            of_warp = T.alloc_shared((2, warps), T.float32)
            top = warp_max_float(largest(count, logit))
            if lane == 0:
                of_warp[0, warp] = top
            T.sync_threads()
            for w in T.unroll(warps):
                top = T.max(top, of_warp[0, w])
            denominator = warp_sum(exponentials(count, logit, top))
            if lane == 0:
                of_warp[1, warp] = denominator
            T.sync_threads()
            denominator = T.float32(0)
            for w in T.unroll(warps):
                denominator = T.ieee_add(denominator, of_warp[1, w])
        rank_keys(count, logit, offset, keys)
        if grouped:
            all_keys = T.alloc_shared((gate.num_experts,), T.int32)
            group_keys = T.alloc_shared((groups_per_lane * LANES,), T.int32)
            kept = T.alloc_shared((gate.num_groups,), T.int32)
            best = T.alloc_local((2,), T.int32)
            mine = T.alloc_local((groups_per_lane,), T.int32)
            key = T.alloc_var(T.int32)
            for i in T.unroll(MOST_PER_LANE):
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
            for i in T.unroll(MOST_PER_LANE):
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
            routes = T.alloc_var(T.bool, init=T.bool(True))
            if gate.has_mask:
                routes = mask[token]
            if routes:
                expert[0] = T.int64(-1)
                if lane < gate.num_topk:
                    expert[0] = T.cast(chosen[lane], T.int64)
                    if gate.has_fixed:
                        if fixed[token]:
                            expert[0] = unmapped[token, lane]
                    if gate.has_unmapped:
                        unmapped[token, lane] = expert[0]
                finished(
                    lane, token, expert, top, denominator, logits, to_physical_map, logical_count,
                    topk_idx, topk_weights, ranks, factor,
                )  # fmt: skip
            else:
                dropped(lane, token, unmapped, topk_idx, topk_weights)

    return prim_func(gate, warps * LANES, 1, body)


# ---- weights of a given choice ------------------------------------------------------------------


def softmax_of_row(num_experts: int, vector: int) -> Any:
    """Macros: the largest logit of a token, by one warp, and the sum of exponentials below it."""
    score = score_of(SOFTMAX)
    steps = -(-num_experts // (LANES * vector))

    @T.macro
    def largest(lane, token, logits):
        logit = T.alloc_local((vector,), T.float32)
        top = T.alloc_var(T.float32, init=-T.infinity(T.float32))
        for step in T.serial(steps):
            e = (step * LANES + lane) * vector
            if e < num_experts:
                for v in T.vectorized(vector):
                    logit[v] = T.cast(logits[token, e + v], T.float32)
                for v in T.unroll(vector):
                    top = T.max(top, logit[v])
        return warp_max_float(top)

    @T.macro
    def exponentials(lane, token, logits, top):
        logit = T.alloc_local((vector,), T.float32)
        total = T.alloc_var(T.float32, init=T.float32(0))
        for step in T.serial(steps):
            e = (step * LANES + lane) * vector
            if e < num_experts:
                for v in T.vectorized(vector):
                    logit[v] = T.cast(logits[token, e + v], T.float32)
                for v in T.unroll(vector):
                    total = T.ieee_add(total, score(logit[v], top))
        return warp_sum(total)

    return largest, exponentials


class WeightsPlan(NamedTuple):
    num_experts: int
    num_topk: int
    scoring: int
    vector: int


def plan_weights(
    num_experts: int, num_topk: int, scoring: int, alignment: int, device: Device
) -> WeightsPlan:
    vector = row_vector(num_experts, alignment) if scoring == SOFTMAX else 1
    return WeightsPlan(num_experts, num_topk, scoring, vector)


def weights_access_bits(
    num_experts: int, num_topk: int, scoring: int, vector: int
) -> tuple[tuple[int, ...], int]:
    return tuple(sorted({32, 64, 32 * vector})), 32


@kernel(plan=plan_weights, access_bits=weights_access_bits)
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
                    top = largest(lane, token, logits)
                    denominator = exponentials(lane, token, logits, top)
                expert[0] = T.int64(-1)
                if lane < num_topk:
                    expert[0] = topk_idx[token, lane]
                weight = weighed(lane, token, expert, top, denominator, logits, factor)
                if lane < num_topk:
                    weights[token, lane] = weight

    return weights_of
