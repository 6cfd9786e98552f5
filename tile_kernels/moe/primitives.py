"""TileLang macros that several kernels of the family use: top-k, scores, weights, numbering."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.plan import REPLICA_STEP, SOFTMAX, Gate
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.philox import below, philox, uniform

LANES = WARP
FULL_WARP = 0xFFFFFFFF
LOWEST_KEY = -(1 << 31)  # below the key of every number: padding, and what was taken already
WARPS = 4  # of a block in which every warp serves one token


@T.macro
def order_key(score):
    """float32 -> int32 that compares alike: NaN above +inf, both zeros equal, never LOWEST_KEY.

    Adding zero does both: -0.0 becomes +0.0, and a NaN of any sign or payload becomes the one NaN
    (0x7FFFFFFF) that the hardware's arithmetic returns, which is the largest key.
    """
    bits = T.alloc_var(T.int32, init=T.reinterpret(T.ieee_add(score, T.float32(0)), T.int32))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@T.macro
def score_of_key(key):
    """The score that `order_key` made into `key`; a NaN comes back as the one NaN, zero as +0.0."""
    return T.reinterpret(key ^ ((key >> 31) & 0x7FFFFFFF), T.float32)


@T.macro
def warp_max(value):
    """The largest int32 of the warp, in every lane: one `redux.sync`."""
    return T.call_extern(T.int32, "__reduce_max_sync", T.uint32(FULL_WARP), value)


@T.macro
def first_lane(mask):
    """The lowest lane whose bit is set in an int32 mask."""
    return T.__ffs(mask) - 1


@T.macro
def last_lane(mask):
    """The highest lane whose bit is set in an int32 mask; -1 if there is none."""
    return 31 - T.call_extern(T.int32, "__clz", mask)


def load_part_of(count: int, vector: int, lanes: int, steps: int) -> Any:
    """A macro that loads one part of a row of `count` vectors into registers `[steps, vector]`.

    Each of `lanes` threads takes `steps` vectors of the part, `lanes` apart.
    """

    @T.macro
    def load(regs, x, row: T.Ref, part, lane):
        for s in T.unroll(steps):
            i = (part * steps + s) * lanes + lane
            if i < count:
                for v in T.vectorized(vector):
                    regs[s, v] = x[row, i * vector + v]

    return load


def sorting_network(size: int) -> list[tuple[int, int]]:
    """Comparators (Batcher's odd-even merge sort) that bring `size` values into order."""
    pairs: list[tuple[int, int]] = []
    span = 1
    while span < size:
        step = span
        while step:
            for first in range(step % span, size - step, 2 * step):
                pairs += [
                    (low, low + step)
                    for low in range(first, min(first + step, size - step))
                    if low // (2 * span) == (low + step) // (2 * span)
                ]
            step //= 2
        span *= 2
    return pairs


def warp_topk(per_lane: int, num_topk: int) -> Any:
    """A macro: the `num_topk` (at most 32) largest of a warp's `LANES * per_lane` keys, in order.

    Lane `l` brings the keys of positions `l * per_lane ...` in `keys`. Afterwards lane `p` holds
    pick `p`: its key in `won[0]` and its position in `won[1]`; ties go to the smaller position.

    Each lane sorts its keys into a queue. A pick is one warp maximum over the heads of the queues;
    the first lane whose head it is pops it. Which position of that lane it was is found once at
    the end, for all picks together, in the unsorted keys.
    """
    network = sorting_network(per_lane)

    @T.macro
    def topk(lane, keys, won):
        queue = T.alloc_local((per_lane,), T.int32)
        larger = T.alloc_var(T.int32)
        best = T.alloc_var(T.int32)
        holders = T.alloc_var(T.int32)  # a bit for each lane whose head is the best
        won_holders = T.alloc_var(T.int32)
        won_lane = T.alloc_var(T.int32)
        hits = T.alloc_var(T.int32)  # a bit for each key of the winning lane that is the pick's
        for i in T.unroll(per_lane):
            queue[i] = keys[i]
        for low, high in network:
            larger = T.max(queue[low], queue[high])
            queue[high] = T.min(queue[low], queue[high])
            queue[low] = larger

        for p in T.unroll(num_topk):
            best = warp_max(queue[0])
            holders = T.cast(T.ballot(queue[0] == best), T.int32)
            if lane == p:
                won[0] = best
                won_holders = holders
            if queue[0] == best and (holders & (T.shift_left(1, lane) - 1)) == 0:
                for i in T.unroll(per_lane - 1):
                    queue[i] = queue[i + 1]
                queue[per_lane - 1] = LOWEST_KEY

        won_lane = first_lane(won_holders)
        hits = 0
        for i in T.unroll(per_lane):
            if T.shfl_sync(keys[i], won_lane) == won[0]:
                hits = hits | T.shift_left(1, i)
        if T.ballot((hits & (hits - 1)) != 0 and lane < num_topk) != T.uint64(0):
            # Equal keys in one lane are picked one after the other: the n-th pick of such a run is
            # the n-th of them. A run starts where the lane or the key changes.
            starts = T.ballot(
                (T.shfl_up(won[0], 1) != won[0])
                | (T.shfl_up(won_lane, 1) != won_lane)
                | (lane == 0)
            )
            before = T.cast(starts, T.int32) & (T.shift_left(2, lane) - 1)
            for _ in T.serial(lane - (last_lane(before))):
                hits = hits & (hits - 1)
        won[1] = won_lane * per_lane + first_lane(hits)

    return topk


def load_keys(num_experts: int, per_lane: int, vector: int) -> Any:
    """A macro: a lane's `per_lane` order keys from expert `first` on, past the row LOWEST_KEY.

    `vector` scores come with one load; it divides `num_experts` and `per_lane`.
    """

    @T.macro
    def load(scores, token, first, keys):
        score = T.alloc_local((vector,), T.float32)
        for c in T.unroll(per_lane // vector):
            if first + c * vector < num_experts:
                for v in T.vectorized(vector):
                    score[v] = scores[token, first + c * vector + v]
                for v in T.unroll(vector):
                    keys[c * vector + v] = order_key(score[v])
            else:
                for v in T.unroll(vector):
                    keys[c * vector + v] = LOWEST_KEY

    return load


@T.macro
def top2_of_lanes(lanes, best):
    """The two largest keys (`best[0] >= best[1]`) over `lanes` neighbouring lanes, in each."""
    other = T.alloc_var(T.int32)
    for d in T.unroll(lanes.bit_length() - 1):
        other = T.shfl_xor(best[0], T.shift_left(1, d))
        best[1] = T.max(best[1], T.shfl_xor(best[1], T.shift_left(1, d)))
        best[1] = T.max(best[1], T.min(best[0], other))
        best[0] = T.max(best[0], other)


@T.macro
def sum_key(best):
    """The key of the float32 sum of the two scores behind `best`."""
    return order_key(T.ieee_add(score_of_key(best[0]), score_of_key(best[1])))


@T.macro
def merge_lists(lane, lists, num_topk, list_keys, list_experts, chosen):
    """`chosen[p]` = pick `p` of `lists` sorted lists of `num_topk` keys, by one warp.

    Lane `w` walks down list `w`. Lists are in the order of their experts, so the first lane wins a
    tie.
    """
    taken = T.alloc_var(T.int32, init=0)
    head = T.alloc_var(T.int32, init=LOWEST_KEY)
    best = T.alloc_var(T.int32)
    if lane < lists:
        head = list_keys[lane, 0]
    for p in T.serial(num_topk):
        best = warp_max(head)
        if lane == first_lane(T.cast(T.ballot(head == best), T.int32)):
            chosen[p] = list_experts[lane, taken]
            taken = taken + 1
            head = LOWEST_KEY
            if taken < num_topk:
                head = list_keys[lane, taken]


# ---- scores, weights and numbers of the chosen experts -------------------------------------------


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


def warp_butterfly(combine: Any) -> Any:
    """A macro: float32 values of the warp combined, in every lane, always in the same order."""

    @T.macro
    def combined(value):
        result = T.alloc_var(T.float32, init=value)
        for d in T.unroll(5):
            result = combine(result, T.shfl_xor(result, T.shift_left(1, d)))
        return result

    return combined


warp_sum = warp_butterfly(T.ieee_add)
warp_max_float = warp_butterfly(T.max)  # NaN only if there is no number


def softmax_of_row(num_experts: int, vector: int) -> Any:
    """Macros: the largest logit of a token, by one warp, and the sum of exponentials below it.

    Both take the largest logit, which the first ignores.
    """
    score = score_of(SOFTMAX)
    steps = -(-num_experts // (LANES * vector))

    def reduce_row(initial: Any, add: Any, reduce_warp: Any) -> Any:
        @T.macro
        def reduced(lane, token, logits, top):
            logit = T.alloc_local((vector,), T.float32)
            result = T.alloc_var(T.float32, init=initial)
            for step in T.serial(steps):
                e = (step * LANES + lane) * vector
                if e < num_experts:
                    for v in T.vectorized(vector):
                        logit[v] = T.cast(logits[token, e + v], T.float32)
                    for v in T.unroll(vector):
                        result = add(result, logit[v], top)
            return reduce_warp(result)

        return reduced

    largest = reduce_row(
        -T.infinity(T.float32), lambda result, logit, _: T.max(result, logit), warp_max_float
    )
    exponentials = reduce_row(
        T.float32(0), lambda result, logit, top: T.ieee_add(result, score(logit, top)), warp_sum
    )
    return largest, exponentials


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
                    sequence = T.cast(ranks[0], T.int64) + T.cast(token, T.int64) * REPLICA_STEP
                    replica = T.alloc_var(
                        T.int32,
                        init=T.cast(T.truncmod(sequence, T.cast(replicas, T.int64)), T.int32),
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
            topk_idx[token, lane] = T.cast(
                numbered(logical, token, to_physical_map, logical_count, ranks), gate.index_dtype
            )
        if gate.num_shared > 0:
            if lane < gate.num_shared:
                topk_weights[token, gate.num_topk + lane] = T.float32(1)
                logical = gate.num_experts + lane
                topk_idx[token, gate.num_topk + lane] = T.cast(
                    numbered(logical, token, to_physical_map, logical_count, ranks),
                    gate.index_dtype,
                )

    return finished


def drop(gate: Gate) -> Any:
    """A macro: a token that does not route."""

    @T.macro
    def dropped(lane, token, unmapped, topk_idx, topk_weights):
        for j in T.serial(T.ceildiv(gate.num_topk + gate.num_shared, LANES)):
            if j * LANES + lane < gate.num_topk + gate.num_shared:
                topk_idx[token, j * LANES + lane] = T.cast(T.int64(-1), gate.index_dtype)
                topk_weights[token, j * LANES + lane] = T.float32(0)
        if gate.has_unmapped:
            if lane < gate.num_topk:
                unmapped[token, lane] = T.cast(T.int64(-1), gate.index_dtype)

    return dropped


def draw(gate: Gate) -> Any:
    """A macro: random experts and weights of a token, by one warp; lane `j` has slot `j`.

    The slots are the first ones of a shuffled list of all physical experts (Fisher-Yates): slot `j`
    exchanges its entry with a random one behind it or itself. Lane `k` remembers its exchange: the
    position, and the value that went there.
    """
    num_logical = gate.num_experts + gate.num_shared
    slots = gate.num_topk + gate.num_shared

    @T.macro
    def drawn(lane, token, logical_count, topk_idx, topk_weights, ranks):
        words = T.alloc_local((4,), T.uint32)
        experts = T.alloc_var(T.int32, init=num_logical)
        if gate.has_map:
            experts = 0
            for i in T.serial(T.ceildiv(num_logical, LANES)):
                if i * LANES + lane < num_logical:
                    experts = experts + T.max(logical_count[i * LANES + lane], 0)
            experts = T.call_extern(T.int32, "__reduce_add_sync", T.uint32(FULL_WARP), experts)
        seed = T.cast(ranks[0], T.int64)
        philox(seed, T.cast(token, T.int64) * LANES + T.cast(lane, T.int64), words)
        position = T.alloc_var(T.int32, init=-1)
        if lane < slots and lane < experts:
            position = lane + below(words[1], experts - lane)
        chosen = T.alloc_var(T.int32, init=-1)
        moved = T.alloc_var(T.int32, init=-1)
        at = T.alloc_var(T.int32)
        value = T.alloc_var(T.int32)
        other = T.alloc_var(T.int32)
        same = T.alloc_var(T.int32)
        for j in T.unroll(slots):
            at = T.shfl_sync(position, j)
            same = T.cast(T.ballot(lane < j and position == at), T.int32)
            value = T.shfl_sync(moved, last_lane(same) & (LANES - 1))
            if same == 0:
                value = at
            same = T.cast(T.ballot(lane < j and position == j), T.int32)
            other = T.shfl_sync(moved, last_lane(same) & (LANES - 1))
            if same == 0:
                other = j
            if lane == j:
                chosen = value
                moved = other
        if position >= 0:
            topk_idx[token, lane] = T.cast(T.cast(chosen, T.int64), gate.index_dtype)
            topk_weights[token, lane] = uniform(words[0])

    return drawn
