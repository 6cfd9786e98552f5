"""The best entries of a stream, exactly, in shared memory.

A list holds entries (key, index) in the order of their indices. A key is a float32 as an unsigned
integer that sorts as the number does. What comes is appended if its key is above the list's bound;
when the list is nearly full, the `topk` best are kept, of equal keys the first ones, and the least
of them is the new bound: what has an equal key and a larger index can never enter any more. So all
values are treated alike, equal ones too, and nothing depends on the order of threads.

All barriers are written out, in the kernels that use these macros too.
"""

import math
from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer_plan import BIN_BITS, BINS
from tile_kernels.runtime.kernels.common import KEY_BITS, WARP

NO_TYPED_SYNC = {"tl.disable_thread_storage_sync": True}
LOWEST = 0x007FFFFF  # the key of -inf
FOUND = 3  # numbers that a thread tells the others: the bin, keys above it, keys in it


def key_of(value: Any) -> Any:
    """float32 as an integer in the order of numbers, above 0; NaN as -inf, one zero of two.

    An expression without variables, which would tie the keys of a thread to each other.
    """
    number = T.ieee_add(T.max(value, -T.infinity(T.float32)), T.float32(0))
    bits = T.reinterpret(number, T.int32)
    return T.reinterpret(bits ^ ((bits >> 31) | T.int32(-(2**31))), T.uint32)


def key_of_bits(word: Any) -> Any:
    """The key of a float32 that is given as a word."""
    return key_of(T.reinterpret(word, T.float32))


@T.macro
def number_of(key):
    """The float32 of a key; of one below that of -inf, -inf."""
    bits = T.alloc_var(T.uint32, init=T.max(key, T.uint32(LOWEST)))
    flip = T.alloc_var(T.uint32, init=T.uint32(0xFFFFFFFF))
    if bits >= T.uint32(0x80000000):
        flip = T.uint32(0x80000000)
    return T.reinterpret(bits ^ flip, T.float32)


def bit(number: Any) -> Any:
    """Of a word, the one of this number, counted on from word to word."""
    return T.shift_left(T.uint32(1), T.cast(number % 32, T.uint32))


def prefix_over_block(threads: int) -> Any:
    """A macro: the sum of `value` over all threads before this one, and over all, into `out`.

    `sums` is shared, one for each warp. Contains one barrier; another must come before the next
    call with these sums.
    """
    warps = threads // WARP

    @T.macro
    def prefix(value, sums, out):
        lane = T.get_thread_binding() % WARP
        warp = T.get_thread_binding() // WARP
        running = T.alloc_var(T.int32, init=value)
        other = T.alloc_var(T.int32)
        for d in T.unroll(5):
            other = T.shfl_up(running, T.shift_left(1, d))
            if lane >= T.shift_left(1, d):
                running = running + other
        if lane == WARP - 1:
            sums[warp] = running
        T.sync_threads()
        other = 0
        if lane < warps:
            other = sums[lane]
        out[1] = T.warp_reduce_sum(other)
        if lane >= warp:
            other = 0
        out[0] = T.warp_reduce_sum(other) + running - value

    return prefix


def least_of_best(entries: int, threads: int) -> Any:
    """A macro: the largest number that `rank` of a block's keys are not below, or a smaller one
    with no key between, or with at most `spare` keys from it on beside those of the rank.

    A thread has `entries` keys, in `own`, 0 for none. `low` is above 0, and at least `rank` keys
    are not below it; the others do not count. Keys are counted in bins of equal width, from `low`
    to the largest; then those in the bin with the number, in narrower ones, until all keys of a bin
    are among the best, or nearly all, or it holds one number. `bins` are shared and 0 before and
    after, `found` and `sums` are shared. Whoever calls has a barrier before.
    """
    per = BINS // threads
    warps = threads // WARP
    prefix = prefix_over_block(threads)

    @T.macro
    def find(own, rank, spare, low, bins, found, sums):
        tx = T.get_thread_binding()
        counts = T.alloc_local((per,), T.int32)
        before = T.alloc_local((2,), T.int32)
        smallest = T.alloc_var(T.uint32, init=low)
        last = T.alloc_var(T.uint32, init=T.uint32(0))  # the largest distance from `smallest`
        need = T.alloc_var(T.int32, init=rank)
        shift = T.alloc_var(T.int32)
        mine = T.alloc_var(T.int32)
        for j in T.unroll(entries):
            last = T.max(last, own[j])
        last = T.warp_reduce_max(last)
        if tx % WARP == 0:
            sums[tx // WARP] = T.reinterpret(last, T.int32)
        T.sync_threads()
        last = T.uint32(0)
        if tx % WARP < warps:
            last = T.reinterpret(sums[tx % WARP], T.uint32)
        last = T.warp_reduce_max(last) - smallest
        shift = KEY_BITS - BIN_BITS - T.call_extern(T.int32, "__clz", T.reinterpret(last, T.int32))
        shift = T.max(shift, 0)
        done = T.alloc_var(T.bool, init=T.bool(False))
        for _ in T.serial(-(-KEY_BITS // BIN_BITS)):
            if not done:  # the same for all threads
                for j in T.unroll(entries):
                    if own[j] - smallest <= last:
                        index = T.cast((own[j] - smallest) >> T.cast(shift, T.uint32), T.int32)
                        T.atomic_add(bins[index], 1)
                T.sync_threads()
                mine = 0
                for i in T.unroll(per):  # the highest bins first
                    counts[i] = bins[BINS - 1 - (tx * per + i)]
                    bins[BINS - 1 - (tx * per + i)] = 0
                    mine = mine + counts[i]
                prefix(mine, sums, before)
                for i in T.unroll(per):
                    if before[0] < need and before[0] + counts[i] >= need:
                        found[0] = BINS - 1 - (tx * per + i)
                        found[1] = before[0]
                        found[2] = counts[i]
                    before[0] = before[0] + counts[i]
                T.sync_threads()
                smallest = smallest + (T.cast(found[0], T.uint32) << T.cast(shift, T.uint32))
                last = (T.uint32(1) << T.cast(shift, T.uint32)) - T.uint32(1)
                need = need - found[1]
                done = found[2] <= need + spare or shift == 0
                shift = T.max(shift - BIN_BITS, 0)
        return smallest

    return find


def entries_to_keep(entries: int, threads: int) -> Any:
    """A macro: which entries are kept, those above a bound and, of those equal to it, the first
    ones, `limit` in all.

    A thread has `entries` keys, in `own`, in the order of all entries. It gets a bit for each in
    `stays`, where its first entry goes in `first[0]`, and in `kept[0]` how many all threads keep.
    `sums` is shared. Contains one barrier; another must come before the next use of `sums`.
    """
    prefix = prefix_over_block(threads)
    above_of = T.int32(1)  # counts of both kinds in one number: those above in the low half
    equal_of = T.int32(1 << 16)

    @T.macro
    def choose(own, bound, limit, sums, stays, first, kept):
        before = T.alloc_local((2,), T.int32)
        mine = T.alloc_var(T.int32, init=0)
        for j in T.unroll(entries):
            if own[j] > bound:
                mine = mine + above_of
            elif own[j] == bound:
                mine = mine + equal_of
        prefix(mine, sums, before)
        equal = T.alloc_var(T.int32, init=before[0] // equal_of)
        room = T.alloc_var(T.int32, init=limit - before[1] % equal_of)  # for equal ones
        kept[0] = before[1] % equal_of + T.min(before[1] // equal_of, room)
        first[0] = before[0] % equal_of + T.min(equal, room)
        for w in T.unroll(-(-entries // 32)):
            stays[w] = T.uint32(0)
        for j in T.unroll(entries):
            if own[j] > bound or (own[j] == bound and equal < room):
                stays[j // 32] = stays[j // 32] | bit(j)
            if own[j] == bound:
                equal = equal + 1

    return choose


def keep_best(topk: int, capacity: int, threads: int, key: Any, id_dtype: str = "int32") -> Any:
    """A macro: keep the `topk` best of `count` entries of a list, which has more, and at most
    `spare` others; the new bound, into `kept[0]` how many there are.

    `words` and `ids` are shared, `[lists, capacity]`; `key(word)` is the key of a word. What is
    below `low` is not kept, which leaves `topk` entries or more. For the rest see `least_of_best`.
    Whoever calls has a barrier before and after.
    """
    entries = capacity // threads
    vector = math.gcd(4, entries)
    find = least_of_best(entries, threads)
    choose = entries_to_keep(entries, threads)

    @T.macro
    def load(source, which, regs):
        first = T.get_thread_binding() * entries
        for c in T.unroll(entries // vector):
            for e in T.vectorized(vector):
                regs[c * vector + e] = source[which, first + c * vector + e]

    @T.macro
    def keep(words, ids, which, count, spare, low, bins, found, sums, kept):
        tx = T.get_thread_binding()
        own = T.alloc_local((entries,), T.uint32)
        own_ids = T.alloc_local((entries,), id_dtype)
        bound = T.alloc_var(T.uint32)
        first = T.alloc_local((1,), T.int32)
        stays = T.alloc_local((-(-entries // 32),), T.uint32)  # a bit for each entry
        load(words, which, own)
        for j in T.unroll(entries):
            if tx * entries + j < count:
                own[j] = key(own[j])
            else:
                own[j] = T.uint32(0)
        bound = find(own, topk, spare, T.max(low, T.uint32(1)), bins, found, sums)
        choose(own, bound, topk + spare, sums, stays, first, kept)
        index = T.alloc_var(T.int32, init=first[0])
        load(words, which, own)
        load(ids, which, own_ids)
        T.sync_threads()
        for j in T.unroll(entries):
            if (stays[j // 32] & bit(j)) != T.uint32(0):
                words[which, index] = own[j]
                ids[which, index] = own_ids[j]
                index = index + 1
        return bound

    return keep


def sort_entries(topk: int, threads: int, key: Any) -> Any:
    """A macro: the first `count` entries of a list by key, the largest first, then by index.

    `key(word)` is the key of a word; the list has keys instead afterwards.
    A bitonic network over the next power of two; whoever calls has a barrier before and after.
    """
    steps = max(1, (topk - 1).bit_length())
    size = 1 << steps
    pairs = -(-size // (2 * threads))

    @T.macro
    def sort(keys, ids, which, count):
        tx = T.get_thread_binding()
        for c in T.serial(-(-size // threads)):
            index = c * threads + tx
            if index < count:
                keys[which, index] = key(keys[which, index])
            elif index < size:
                keys[which, index] = T.uint32(0)
                ids[which, index] = -1
        T.sync_threads()
        low_key = T.alloc_var(T.uint32)
        high_key = T.alloc_var(T.uint32)
        low_id = T.alloc_var(T.int32)
        high_id = T.alloc_var(T.int32)
        for stage in T.serial(steps):
            for step in T.serial(stage + 1):
                distance = T.shift_left(1, stage - step)
                for c in T.unroll(pairs):
                    pair = c * threads + tx
                    if pair < size // 2:
                        low = pair // distance * (2 * distance) + pair % distance
                        descending = low // T.shift_left(2, stage) % 2 == 0
                        low_key = keys[which, low]
                        high_key = keys[which, low + distance]
                        low_id = ids[which, low]
                        high_id = ids[which, low + distance]
                        worse = low_key < high_key or (low_key == high_key and low_id > high_id)
                        if worse == descending:
                            keys[which, low] = high_key
                            keys[which, low + distance] = low_key
                            ids[which, low] = high_id
                            ids[which, low + distance] = low_id
                T.sync_threads()

    return sort
