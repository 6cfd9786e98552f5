"""Top-k kernels: a warp, several warps or a whole block per token, by the number of experts."""

from typing import Any

from tilelang import language as T

from tile_kernels.moe.primitives import (
    FULL_WARP,
    LANES,
    LOWEST_KEY,
    load_keys,
    merge_lists,
    order_key,
    sum_key,
    top2_of_lanes,
    warp_topk,
)
from tile_kernels.moe.topk.plan import WIDE_PER_LANE
from tile_kernels.runtime.kernels.common import KEY_BITS
from tile_kernels.runtime.launch import kernel


def access_bits(num_experts: int, num_topk: int, vector: int, *_: int) -> tuple[int, int]:
    return 32 * vector, 64


@kernel(access_bits=access_bits)
def topk_gate_warp(num_experts: int, num_topk: int, vector: int, warps: int) -> Any:
    """One warp per token, `warps` tokens per block, all scores in registers."""
    per_lane = -(-num_experts // (LANES * vector)) * vector
    load, topk = load_keys(num_experts, per_lane, vector), warp_topk(per_lane, num_topk)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def topk_gate(
        scores: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, num_topk), T.int64],
    ):
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * LANES) as block:
            lane = T.get_thread_binding() % LANES
            token = block * warps + T.get_thread_binding() // LANES
            keys = T.alloc_local((per_lane,), T.int32)
            won = T.alloc_local((2,), T.int32)
            if token < num_tokens:  # the same for the whole warp
                load(scores, token, lane * per_lane, keys)
                topk(lane, keys, won)
                if lane < num_topk:
                    topk_idx[token, lane] = T.cast(won[1], T.int64)

    return topk_gate


@kernel(access_bits=access_bits)
def topk_gate_wide(num_experts: int, num_topk: int, vector: int) -> Any:
    """One block per token: each warp finds the best of its 512 experts, one warp merges the lists.

    In the merge lane `w` stands for warp `w` and walks down that warp's list. Warps are in the
    order of the experts, so here too the first lane wins a tie.
    """
    per_warp = LANES * WIDE_PER_LANE
    warps = -(-num_experts // per_warp)
    load = load_keys(num_experts, WIDE_PER_LANE, vector)
    topk = warp_topk(WIDE_PER_LANE, num_topk)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def topk_gate(
        scores: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, num_topk), T.int64],
    ):
        with T.Kernel(num_tokens, threads=warps * LANES) as token:
            lane = T.get_thread_binding() % LANES
            warp = T.get_thread_binding() // LANES
            keys = T.alloc_local((WIDE_PER_LANE,), T.int32)
            won = T.alloc_local((2,), T.int32)
            list_keys = T.alloc_shared((warps, num_topk), T.int32)
            list_experts = T.alloc_shared((warps, num_topk), T.int32)
            chosen = T.alloc_shared((num_topk,), T.int32)
            load(scores, token, warp * per_warp + lane * WIDE_PER_LANE, keys)
            topk(lane, keys, won)
            if lane < num_topk:
                list_keys[warp, lane] = won[0]
                list_experts[warp, lane] = warp * per_warp + won[1]
            T.sync_threads()
            if warp == 0:
                merge_lists(lane, warps, num_topk, list_keys, list_experts, chosen)
                T.sync_warp()
                if lane < num_topk:
                    topk_idx[token, lane] = T.cast(chosen[lane], T.int64)

    return topk_gate


# Pairs of one step are disjoint, which TileLang cannot see: it would put barriers between the
# loads and stores of each. All barriers that are needed are written out.
EXPLICIT_BARRIERS = {"tl.disable_thread_storage_sync": True}


def sort_pairs(levels: int, threads: int) -> Any:
    """A macro: a bitonic sort of `1 << levels` distinct int64 in shared memory, largest first.

    `threads` is a power of two. A thread holds neighbouring pairs. It compares them with each
    other, with those of other lanes, and in shared memory where they are those of other warps. It
    ends with a barrier.
    """
    size = 1 << levels
    pairs_per_thread = max(1, size // threads)
    thread_bits = pairs_per_thread.bit_length() - 1  # bits of an index within a thread,
    warp_bits = thread_bits + LANES.bit_length() - 1  # and within a warp
    neighbours = [
        (shift, low, low + (1 << shift))
        for shift in reversed(range(thread_bits))
        for low in range(pairs_per_thread)
        if not low >> shift & 1
    ]

    @T.macro
    def exchange_in_memory(pairs, level):
        tx = T.get_thread_binding()
        low = T.alloc_var(T.int64)
        high = T.alloc_var(T.int64)
        for sub in T.serial(level - warp_bits + 1):
            shift = level - sub
            stride = T.shift_left(1, shift)
            for step in T.serial(T.ceildiv(size // 2, threads)):
                i = step * threads + tx
                if i < size // 2:
                    index = T.shift_left(T.shift_right(i, shift), shift + 1) + (i & (stride - 1))
                    low = pairs[index]
                    high = pairs[index + stride]
                    descending = (index & T.shift_left(2, level)) == 0
                    if (low < high) == descending:
                        pairs[index] = high
                        pairs[index + stride] = low
            T.sync_threads()

    @T.macro
    def exchange_by_lanes(mine, first, level):
        other = T.alloc_var(T.int64)
        top = T.min(level, warp_bits - 1)
        for sub in T.serial(T.max(top - thread_bits + 1, 0)):
            shift = top - sub
            for r in T.unroll(pairs_per_thread):
                other = T.shfl_xor(mine[r], T.shift_left(1, shift - thread_bits))
                descending = ((first + r) & T.shift_left(2, level)) == 0
                is_low = ((first + r) & T.shift_left(1, shift)) == 0
                if (mine[r] < other) == (descending == is_low):
                    mine[r] = other

    @T.macro
    def exchange_in_thread(mine, first, level):
        moved = T.alloc_var(T.int64)
        for shift, low, high in neighbours:
            if shift <= level:
                descending = ((first + low) & T.shift_left(2, level)) == 0
                if (mine[low] < mine[high]) == descending:
                    moved = mine[low]
                    mine[low] = mine[high]
                    mine[high] = moved

    @T.macro
    def sort(pairs):
        mine = T.alloc_local((pairs_per_thread,), T.int64)
        first = T.alloc_var(T.int32, init=T.get_thread_binding() * pairs_per_thread)
        for r in T.unroll(pairs_per_thread):
            mine[r] = T.int64(0)
        for level in T.serial(levels):  # runs of 2 << level become sorted, in turns
            if level >= warp_bits:
                exchange_in_memory(pairs, level)
            if first < size and (level == 0 or level >= warp_bits):
                for r in T.unroll(pairs_per_thread):
                    mine[r] = pairs[first + r]
            exchange_by_lanes(mine, first, level)
            exchange_in_thread(mine, first, level)
            if level >= warp_bits - 1 or level == levels - 1:
                if first < size:
                    for r in T.unroll(pairs_per_thread):
                        pairs[first + r] = mine[r]
                T.sync_threads()

    return sort


@T.macro
def rank_pair(key, expert, num_experts):
    """Compares like the key; of equal keys, the smaller index makes the larger pair."""
    return T.cast(key, T.int64) * (1 << 32) + (num_experts - 1 - expert)


def write_ranked(num_experts: int, num_topk: int, threads: int) -> Any:
    """A macro: the experts of the first pairs."""

    @T.macro
    def write(pairs, token, topk_idx):
        for step in T.serial(T.ceildiv(num_topk, threads)):
            p = step * threads + T.get_thread_binding()
            if p < num_topk:
                topk_idx[token, p] = (num_experts - 1) - (pairs[p] & T.int64(0xFFFFFFFF))

    return write


@kernel(access_bits=lambda *_: (32, 64), pass_configs=EXPLICIT_BARRIERS)
def topk_gate_block(num_experts: int, num_topk: int, threads: int) -> Any:
    """One block per token: a sort of all (key, index) pairs in shared memory, for any top-k."""
    levels = max(1, (num_experts - 1).bit_length())
    size = 1 << levels
    sort, write = sort_pairs(levels, threads), write_ranked(num_experts, num_topk, threads)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def topk_gate(
        scores: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, num_topk), T.int64],
    ):
        with T.Kernel(num_tokens, threads=threads) as token:
            pairs = T.alloc_shared((size,), T.int64)
            tx = T.get_thread_binding()
            for step in T.serial(T.ceildiv(size, threads)):
                e = step * threads + tx
                if e < num_experts:
                    pairs[e] = rank_pair(order_key(scores[token, e]), e, num_experts)
                elif e < size:
                    pairs[e] = T.int64(-(1 << 63))
            T.sync_threads()
            sort(pairs)
            write(pairs, token, topk_idx)

    return topk_gate


@kernel(access_bits=lambda *_: (32, 64), pass_configs=EXPLICIT_BARRIERS)
def topk_gate_select(num_experts: int, num_topk: int, threads: int) -> Any:
    """One block per token: the keys stay in registers, and only those that are chosen are sorted.

    The bits of the smallest chosen key are found one by one, by counting the keys that are not
    smaller, until as many are left as are wanted. If more keys are equal to the smallest than are
    wanted, the bits of the last index among them are found in the same way.
    """
    per_thread = -(-num_experts // threads)
    index_bits = max(1, (num_experts - 1).bit_length())
    levels = max(1, (num_topk - 1).bit_length())
    size = 1 << levels
    steps = KEY_BITS + index_bits
    sort, write = sort_pairs(levels, threads), write_ranked(num_experts, num_topk, threads)
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def total(count, counts, step):
        """The sum of `count` over the block: `counts[step]`, which was 0."""
        warp_sum = T.alloc_var(
            T.int32, init=T.call_extern(T.int32, "__reduce_add_sync", T.uint32(FULL_WARP), count)
        )
        if T.get_thread_binding() % LANES == 0:
            T.atomic_add(counts[step], warp_sum)
        T.sync_threads()
        return counts[step]

    @T.prim_func
    def topk_gate(
        scores: T.Tensor[(num_tokens, num_experts), T.float32],
        topk_idx: T.Tensor[(num_tokens, num_topk), T.int64],
    ):
        with T.Kernel(num_tokens, threads=threads) as token:
            pairs = T.alloc_shared((size,), T.int64)
            counts = T.alloc_shared((steps + 1,), T.int32)
            keys = T.alloc_local((per_thread,), T.uint32)
            count = T.alloc_var(T.int32)
            found = T.alloc_var(T.int32)
            index = T.alloc_var(T.int32)
            threshold = T.alloc_var(T.uint32, init=T.uint32(0))
            candidate = T.alloc_var(T.uint32)
            above = T.alloc_var(T.int32, init=0)  # keys larger than `threshold`
            reached = T.alloc_var(T.int32, init=num_experts)  # keys that are not smaller than it
            last = T.alloc_var(T.int32, init=0)  # of an index counted from the end
            tx = T.get_thread_binding()
            for i in T.unroll(per_thread):
                e = i * threads + tx
                keys[i] = T.uint32(0)  # no key of a score is that small
                if e < num_experts:
                    keys[i] = T.reinterpret(order_key(scores[token, e]), T.uint32) ^ T.uint32(
                        0x80000000
                    )
            for step in T.serial(T.ceildiv(T.max(size, steps + 1), threads)):
                i = step * threads + tx
                if i < size:
                    pairs[i] = T.int64(-(1 << 63))
                if i < steps + 1:
                    counts[i] = 0
            T.sync_threads()
            for step in T.serial(KEY_BITS):
                if reached != num_topk:  # the same for the whole block
                    candidate = threshold | T.shift_left(
                        T.uint32(1), T.cast(KEY_BITS - 1 - step, T.uint32)
                    )
                    count = 0
                    for i in T.unroll(per_thread):
                        count = count + T.if_then_else(keys[i] >= candidate, 1, 0)
                    found = total(count, counts, step)
                    if found >= num_topk:
                        threshold = candidate
                        reached = found
                    else:
                        above = found
            if reached != num_topk:
                for step in T.serial(index_bits):
                    index = last | T.shift_left(1, index_bits - 1 - step)
                    count = 0
                    for i in T.unroll(per_thread):
                        from_end = num_experts - 1 - (i * threads + tx)
                        count = count + T.if_then_else(
                            keys[i] == threshold and from_end >= index, 1, 0
                        )
                    found = total(count, counts, KEY_BITS + step)
                    if found >= num_topk - above:
                        last = index
            for i in T.unroll(per_thread):
                e = i * threads + tx
                if keys[i] > threshold or (keys[i] == threshold and num_experts - 1 - e >= last):
                    if e < num_experts:
                        index = T.atomic_add(counts[steps], 1, return_prev=True)
                        pairs[index] = rank_pair(
                            T.reinterpret(keys[i] ^ T.uint32(0x80000000), T.int32), e, num_experts
                        )
            T.sync_threads()
            sort(pairs)
            write(pairs, token, topk_idx)

    return topk_gate


def group_access_bits(
    num_groups: int, group_size: int, num_topk_sum: int, num_topk_groups: int, vector: int, *_: int
) -> tuple[int, int]:
    return 32 * vector, 64


@kernel(access_bits=group_access_bits)
def topk_group(
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    vector: int,
    warps: int,
) -> Any:
    """One warp per token: the two largest keys of each group, then the best groups.

    Up to 32 groups, `lanes` neighbouring lanes share a group; beyond, a lane has several
    neighbouring groups. In both cases lanes are in the order of the groups.
    """
    lanes = 1 << (LANES // num_groups).bit_length() - 1 if num_groups <= LANES else 1
    groups_per_lane = -(-num_groups // LANES)
    steps = -(-group_size // (lanes * vector))  # loads of a lane in one group
    topk = warp_topk(groups_per_lane, num_topk_groups)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def group_idx(
        scores: T.Tensor[(num_tokens, num_groups, group_size), T.float32],
        topk_group_idx: T.Tensor[(num_tokens, num_topk_groups), T.int64],
    ):
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * LANES) as block:
            lane = T.get_thread_binding() % LANES
            token = block * warps + T.get_thread_binding() // LANES
            score = T.alloc_local((vector,), T.float32)
            keys = T.alloc_local((groups_per_lane,), T.int32)
            won = T.alloc_local((2,), T.int32)
            best = T.alloc_local((2,), T.int32)
            key = T.alloc_var(T.int32)
            if token < num_tokens:  # the same for the whole warp
                for g in T.unroll(groups_per_lane):
                    group = lane // lanes * groups_per_lane + g
                    best[0] = LOWEST_KEY
                    best[1] = LOWEST_KEY
                    if group < num_groups:
                        for step in T.unroll(steps) if steps <= 8 else T.serial(steps):
                            expert = (step * lanes + lane % lanes) * vector
                            if expert < group_size:
                                for v in T.vectorized(vector):
                                    score[v] = scores[token, group, expert + v]
                                for v in T.unroll(vector):
                                    key = order_key(score[v])
                                    best[1] = T.max(best[1], T.min(best[0], key))
                                    best[0] = T.max(best[0], key)
                    top2_of_lanes(lanes, best)
                    keys[g] = LOWEST_KEY
                    if group < num_groups and lane % lanes == 0:
                        if num_topk_sum == 1:
                            keys[g] = best[0]
                        else:
                            keys[g] = sum_key(best)
                topk(lane, keys, won)
                if lane < num_topk_groups:
                    topk_group_idx[token, lane] = T.cast(
                        won[1] // lanes if groups_per_lane == 1 else won[1], T.int64
                    )

    return group_idx
