"""The best entries of a stream, exactly, in shared memory.

A list holds entries (key, index) in the order of their indices. A key is a float32 as an unsigned
integer that sorts as the number does. What comes is appended if its key is above the list's bound;
when the list is nearly full, the `topk` best are kept, of equal keys the first ones, and the least
of them is the new bound: what has an equal key and a larger index can never enter any more. So any
values take the same road, all equal ones too, and nothing depends on the order of threads.

All barriers are written out, in the kernels that use these macros too.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.kernels.common import WARP

NO_TYPED_SYNC = {"tl.disable_thread_storage_sync": True}
VECTOR = 4  # entries of 4 bytes that a thread moves at once
KEY_BITS = 32
COUNTERS = 3 * KEY_BITS // 2  # for three numbers of two bits


@T.macro
def key_of(value):
    """float32 as an integer in the order of numbers, above 0; NaN as -inf, one zero of two."""
    bits = T.alloc_var(T.uint32, init=T.reinterpret(value, T.uint32))
    if (bits & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000):
        bits = T.uint32(0xFF800000)
    if bits == T.uint32(0x80000000):
        bits = T.uint32(0)
    flip = T.alloc_var(T.uint32, init=T.uint32(0x80000000))
    if bits >= T.uint32(0x80000000):
        flip = T.uint32(0xFFFFFFFF)
    return bits ^ flip


def prefix_over_block(threads: int) -> Any:
    """A macro: the sum of `value` over all threads before this one, and over all, into `out`.

    `sums` is shared, one for each warp. Contains one barrier; another must come before the next
    call.
    """
    warps = threads // WARP

    @T.macro
    def prefix(value, sums, out):
        tx = T.get_thread_binding()
        running = T.alloc_var(T.int32, init=value)
        other = T.alloc_var(T.int32)
        for d in T.unroll(5):
            other = T.shfl_up(running, T.shift_left(1, d))
            if tx % WARP >= T.shift_left(1, d):
                running = running + other
        if tx % WARP == WARP - 1:
            sums[tx // WARP] = running
        T.sync_threads()
        out[0] = running - value
        out[1] = 0
        for w in T.unroll(warps):
            if w < tx // WARP:
                out[0] = out[0] + sums[w]
            out[1] = out[1] + sums[w]

    return prefix


def keep_best(topk: int, capacity: int, threads: int) -> Any:
    """A macro: keep the `topk` best of `count` entries of a list, which has more; the new bound.

    `keys` and `ids` are shared, `[lists, capacity]`; `counters` is shared, `COUNTERS` of them. The
    bound may be less than the least key that stays: then an equal one can come later, and go again.
    Whoever calls has a barrier before and after.
    """
    own_entries = capacity // threads
    prefix = prefix_over_block(threads)
    # The entries of a warp that reach a number, for as many numbers as fit, are one integer.
    bits = (own_entries * WARP).bit_length()
    rounds = ((1, 2, 3),) if 3 * bits < 32 else ((1, 2), (3,))

    @T.macro
    def keep(keys, ids, which, count, counters, sums):
        tx = T.get_thread_binding()
        own = T.alloc_local((own_entries,), T.uint32)
        own_ids = T.alloc_local((own_entries,), T.int32)
        before = T.alloc_local((2,), T.int32)
        bound = T.alloc_var(T.uint32, init=T.uint32(0))
        trial = T.alloc_var(T.uint32)
        mine = T.alloc_var(T.int32)
        if tx < COUNTERS:
            counters[tx] = 0
        for c in T.unroll(own_entries // VECTOR):
            for e in T.vectorized(VECTOR):
                own[c * VECTOR + e] = keys[which, tx * own_entries + c * VECTOR + e]
        for j in T.unroll(own_entries):
            if tx * own_entries + j >= count:
                own[j] = T.uint32(0)
        T.sync_threads()
        # The least key that stays is the largest number that `topk` keys are not below. Two bits at
        # a time, until one number has just as many.
        found = T.alloc_var(T.bool, init=T.bool(False))
        for step in T.serial(KEY_BITS // 2):
            if not found:  # the same for all threads
                lowest = T.alloc_var(T.uint32)
                lowest = T.shift_left(T.uint32(1), T.cast(KEY_BITS - 2 - 2 * step, T.uint32))
                for digits in rounds:
                    mine = 0
                    for digit in digits:
                        trial = bound + lowest * T.uint32(digit)
                        for j in T.unroll(own_entries):
                            if own[j] >= trial:
                                mine = mine + (1 << (bits * (digit - digits[0])))
                    mine = T.warp_reduce_sum(mine)
                    if tx % WARP < len(digits):
                        T.atomic_add(
                            counters[3 * step + digits[0] - 1 + tx % WARP],
                            (mine >> (bits * (tx % WARP))) & ((1 << bits) - 1),
                        )
                T.sync_threads()
                base = T.alloc_var(T.uint32, init=bound)
                for digit in (1, 2, 3):
                    if counters[3 * step + digit - 1] >= topk:
                        bound = base + lowest * T.uint32(digit)
                        found = counters[3 * step + digit - 1] == topk
                if found:
                    bound = bound - T.uint32(1)
        mine = 0
        for j in T.unroll(own_entries):
            if own[j] > bound:
                mine = mine + 1
            elif own[j] == bound:
                mine = mine + 65536
        for c in T.unroll(own_entries // VECTOR):
            for e in T.vectorized(VECTOR):
                own_ids[c * VECTOR + e] = ids[which, tx * own_entries + c * VECTOR + e]
        prefix(mine, sums, before)
        above = T.alloc_var(T.int32, init=before[0] % 65536)
        equal = T.alloc_var(T.int32, init=before[0] // 65536)
        room = T.alloc_var(T.int32, init=topk - before[1] % 65536)  # for equal ones
        for j in T.unroll(own_entries):
            if own[j] > bound:
                keys[which, above + T.min(equal, room)] = own[j]
                ids[which, above + T.min(equal, room)] = own_ids[j]
                above = above + 1
            elif own[j] == bound:
                if equal < room:
                    keys[which, above + equal] = own[j]
                    ids[which, above + equal] = own_ids[j]
                equal = equal + 1
        return bound

    return keep


def sort_entries(topk: int, threads: int) -> Any:
    """A macro: the first `count` entries of a list by key, the largest first, then by index.

    A bitonic network over the next power of two; whoever calls has a barrier before and after.
    """
    steps = (topk - 1).bit_length()
    size = 1 << steps
    pairs = -(-size // (2 * threads))

    @T.macro
    def sort(keys, ids, which, count):
        tx = T.get_thread_binding()
        for c in T.serial(-(-size // threads)):
            place = c * threads + tx
            if place >= count and place < size:
                keys[which, place] = T.uint32(0)
                ids[which, place] = -1
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
