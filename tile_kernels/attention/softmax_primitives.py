"""Attention of 64 heads of a query over tiles of rows, on the tensor cores of Hopper (wgmma).

    s[h, j] = q[h] . row[j]        o[h] = sum_j exp2(scale * s[h, j] - m[h]) * row[j]

64 heads times 512 channels of float32 sums do not fit into the registers of one warpgroup. Two
consumer warpgroups share every tile of 64 rows and have 256 channels of the result each. Tiles come
in pairs: warpgroup 0 computes the scores of the even tile, warpgroup 1 those of the odd one. Each
multiplies its own weights from registers, and leaves them in shared memory for the other. Running
maxima go from warpgroup 0 to warpgroup 1 and back, so that the weights of a pair have the same
reference; while one warpgroup computes exponentials, the tensor cores work for the other.

A third warpgroup, the producer, copies rows. Tiles come and go in halves of 256 channels, in the
order even-left, odd-right, even-right, odd-left: each half is released by one warpgroup, as soon as
its own products are done. Every wait is on an mbarrier; TileLang's own block barriers are off.

A block computes several results, one after the other: rows and heads of the next one are copied
while the last products of this one run and while it is stored, from the half tiles that are needed
last.

Rows of 576 channels have 64 more, which are part of keys but not of values. They come with the
second half that their warpgroup needs, and their memory takes the weights once scores are known.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.runtime.device import WARP

HEADS = 64  # of a block
TILE = 64  # rows
HALF = 256  # channels of the result of a warpgroup
TAIL = 64  # channels of a key that are not part of its value
WARPGROUP = 128  # threads
THREADS = 3 * WARPGROUP
VECTOR = 8  # bfloat16 values of a copy
LANES = 8  # threads that copy a row, 128 bytes at a time
ROWS = WARPGROUP // LANES  # that the producer copies at a time
ROUNDS = TILE // ROWS  # rows of a thread
# A block starts with 168 registers for each of its 384 threads, 65,536 rounded down to multiples of
# 8. Warpgroups exchange these: with more in sum, the request for them would wait for ever.
CONSUMER_REGISTERS = 216
PRODUCER_REGISTERS = 3 * 168 - 2 * CONSUMER_REGISTERS
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -3.0e38  # of a running maximum: finite, so that -inf minus it is no NaN
NAMED = 3  # named barriers, one for each consumer; TileLang uses low ones
WORK = 8  # numbers that describe a result: token, first head, pairs of tiles, and more
ALL_ROWS = 0xFFFFFFFF  # 32 bits of a mask

# All barriers are written out. TileLang would add one before each access to shared memory.
PASS_CONFIGS = {
    "tl.enable_fast_math": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
}


class Tiles(NamedTuple):
    """Shared memory of a block.

    `weights_even` and `weights_odd` are `[64, 64]`: weights for the other warpgroup, and the tails
    of keys before. `mask` has a bit for each row of a pair of tiles, 1 if it is a key.
    """

    q: Any
    q_tail: Any
    even_l: Any
    even_r: Any
    odd_l: Any
    odd_r: Any
    weights_even: Any
    weights_odd: Any
    max_even: Any
    max_odd: Any
    sum_even: Any  # these are double buffers
    sum_odd: Any
    highest_odd: Any
    mask: Any


@T.macro
def shared_memory(width):
    """The fields of `Tiles`."""
    q = T.alloc_shared((HEADS, 2 * HALF), T.bfloat16)
    q_tail = T.alloc_shared((HEADS, TAIL), T.bfloat16) if width > 2 * HALF else None
    halves = [T.alloc_shared((TILE, HALF), T.bfloat16) for _ in range(4)]
    weights = [T.alloc_shared((HEADS, TILE), T.bfloat16) for _ in range(2)]
    maxima = [T.alloc_shared((HEADS,), T.float32) for _ in range(2)]
    last = [T.alloc_shared((2, HEADS), T.float32) for _ in range(3)]
    mask = T.alloc_shared((2, 2), T.uint32)
    return q, q_tail, *halves, *weights, *maxima, *last, mask


class Barriers(NamedTuple):
    """mbarriers of a block: what is ready, and what is free again."""

    q: Any
    even_l: Any
    even_r: Any
    odd_l: Any
    odd_r: Any
    mask: Any
    even_l_free: Any
    even_r_free: Any
    odd_l_free: Any
    odd_r_free: Any
    max_even: Any
    max_odd: Any
    weights_even: Any
    weights_odd: Any
    q_free: Any
    sums: Any


def free_barriers(cluster: int) -> Any:
    """Of the four half tiles; the warps of a consumer arrive, in all blocks of a cluster."""
    make = T.alloc_cluster_barrier if cluster > 1 else T.alloc_barrier
    return [make(WARPGROUP // WARP * cluster) for _ in range(4)]


@T.macro
def barriers(chunk, cluster):
    """The fields of `Barriers`. All threads of a warpgroup arrive, or of both consumers. Half tiles
    have a barrier for each `chunk` of channels."""
    q = T.alloc_barrier(WARPGROUP)
    ready = [T.alloc_barrier([WARPGROUP] * (HALF // chunk)) for _ in range(4)]
    mask = T.alloc_barrier(WARPGROUP)
    free = free_barriers(cluster)
    found = [T.alloc_barrier(WARPGROUP) for _ in range(4)]
    consumed = [T.alloc_barrier(2 * WARPGROUP) for _ in range(2)]
    return q, *ready, mask, *free, *found, *consumed


@T.macro
def copy_vectors(source, row, is_row, target, target_row, offset, first_channel, channels):
    """The part of a thread of the producer of one row: 16 bytes at a time, 128 by its neighbours.

    `channels` from `first_channel` on of `target` get those of `source` that are `offset` further.
    Zeros are written where `is_row` does not hold; nothing is read then.
    """
    lane_channel = T.get_thread_binding() % LANES * VECTOR
    for c in T.unroll(channels // (LANES * VECTOR)):
        channel = first_channel + c * LANES * VECTOR + lane_channel
        T.ptx_cp_async(
            T.access_ptr(target[target_row, channel], "w", VECTOR),
            T.access_ptr(source[row, offset + channel], "r", VECTOR),
            VECTOR,
            is_row,
        )


@T.macro
def copy_rows(source, first_row, count, target, offset, first_channel, channels):
    """Channels of `count` rows that follow each other into a tile, zeros into the rest of it."""
    producer_row = (T.get_thread_binding() - 2 * WARPGROUP) // LANES
    for r in T.unroll(ROUNDS):
        row = T.alloc_var(T.int32, init=r * ROWS + producer_row)
        at = T.alloc_var(T.int64, init=T.int64(0))
        if row < count:
            at = T.cast(first_row + row, T.int64)
        copy_vectors(source, at, row < count, target, row, offset, first_channel, channels)


class Registers(NamedTuple):
    """Fragments of a consumer warpgroup."""

    scores: Any
    weights: Any
    out: Any
    reference: Any  # what the weights of a head are relative to: scaled, base 2
    highest: Any  # the largest logit of a head so far: scaled, base 2
    other: Any
    factor: Any
    total: Any
    part: Any


@T.macro
def registers():
    """The fields of `Registers`."""
    scores = T.alloc_fragment((HEADS, TILE), T.float32)
    weights = T.alloc_fragment((HEADS, TILE), T.bfloat16)
    out = T.alloc_fragment((HEADS, HALF), T.float32)
    vectors = [T.alloc_fragment((HEADS,), T.float32) for _ in range(6)]
    return scores, weights, out, *vectors


class Steps(NamedTuple):
    """Macros of both consumers: what happens to the scores and weights of a tile."""

    mask_scores: Any
    advance: Any
    exponentials: Any
    rescale: Any
    leave_weights: Any


def steps(width: int, slack: int) -> Steps:
    """The steps for rows of `width` channels; `slack` is that of the schedule."""
    with_tail = width > 2 * HALF

    @T.macro
    def mask_scores(mask, tile, r):
        """Rows that are no keys get the logit -inf. Most tiles have none."""
        if (mask[tile, 0] & mask[tile, 1]) != T.uint32(ALL_ROWS):
            for h, j in T.Parallel(HEADS, TILE):
                r.scores[h, j] = T.if_then_else(
                    (mask[tile, j // 32] >> T.cast(j % 32, T.uint32)) & T.uint32(1) != T.uint32(0),
                    r.scores[h, j],
                    -T.infinity(T.float32),
                )

    @T.macro
    def advance(before, scale, r):
        """The reference of this tile from the scores and the reference `before`, and the factor
        from what sums were relative to."""
        T.reduce_max(r.scores, r.part, dim=1)
        for h in T.Parallel(HEADS):
            r.part[h] = r.part[h] * scale
            if slack:
                r.highest[h] = T.max(r.highest[h], r.part[h])
                r.part[h] = T.if_then_else(r.part[h] > before[h] + slack, r.part[h], before[h])
            else:
                r.part[h] = T.max(before[h], r.part[h])
            r.factor[h] = T.exp2(r.reference[h] - r.part[h])
            r.reference[h] = r.part[h]

    @T.macro
    def exponentials(scale, r):
        """Weights of the tile from its scores, also in bfloat16; their sum is added."""
        for h, j in T.Parallel(HEADS, TILE):
            r.scores[h, j] = T.exp2(r.scores[h, j] * scale - r.reference[h])
        T.reduce_sum(r.scores, r.part, dim=1)
        for h in T.Parallel(HEADS):
            r.total[h] = r.total[h] * r.factor[h] + r.part[h]
        T.copy(r.scores, r.weights)

    @T.macro
    def rescale(r, grown):
        """The output so far, relative to the new reference."""
        if slack:
            grown[0] = 0
            for h in T.Parallel(HEADS):
                grown[0] = grown[0] | T.cast(r.factor[h] != 1.0, T.int32)
            if T.ballot(grown[0] != 0) != 0:
                for h, c in T.Parallel(HEADS, HALF):
                    r.out[h, c] *= r.factor[h]
        else:
            for h, c in T.Parallel(HEADS, HALF):
                r.out[h, c] *= r.factor[h]

    @T.macro
    def leave_weights(r, target, barrier, ready):
        """Weights for the other warpgroup. The tails of keys that were there have been read by all
        warps of this one."""
        if with_tail:
            T.sync_threads(barrier, WARPGROUP)
        T.copy(r.weights, target)
        T.fence_proxy_async()
        T.barrier_arrive(ready)

    return Steps(mask_scores, advance, exponentials, rescale, leave_weights)


def divider(with_sink: bool) -> Any:
    """A macro that divides a warpgroup's channels by `total`, that of both, and the sink."""

    @T.macro
    def divide(r, sink, head, heads):
        for h in T.Parallel(HEADS):
            r.part[h] = r.total[h]
            if with_sink:
                if head + h < heads:
                    r.part[h] = r.total[h] + T.exp2(sink[head + h] * LOG2E - r.reference[h])
            r.factor[h] = T.if_then_else(r.total[h] == 0.0, 0.0, 1.0 / r.part[h])
        for h, c in T.Parallel(HEADS, HALF):
            r.out[h, c] *= r.factor[h]

    return divide


def releaser(cluster: int) -> Any:
    """A macro: the warp has read a half tile, for which the producers of a cluster wait."""

    @T.macro
    def release(free):
        T.sync_warp()
        lane = T.get_thread_binding() % WARP
        if cluster > 1:
            if lane < cluster:
                T.mbarrier_arrive(free, cta_id=lane)
        elif lane == 0:
            T.mbarrier_arrive(free)

    return release


class Consumers(NamedTuple):
    """Macros: what the two consumer warpgroups do for all results of a block."""

    first: Any
    second: Any


def consumers(width: int, with_sink: bool, schedule: Schedule) -> Consumers:
    """The consumers for rows of `width` channels."""
    ahead, slack, chunk, early, cluster = schedule
    chunks = HALF // chunk
    with_tail = width > 2 * HALF
    mask_scores, advance, exponentials, rescale, leave_weights = steps(width, slack)
    divide, release = divider(with_sink), releaser(cluster)

    @T.macro
    def score(q, first_channel, half, ready, phase, r, is_first):
        """Start the part of scores of a half tile, as its channels come."""
        for c in range(chunks):
            T.barrier_wait(ready[c], phase)
            T.wgmma_gemm(
                q[:, first_channel + c * chunk : first_channel + (c + 1) * chunk],
                half[:, c * chunk : (c + 1) * chunk],
                r.scores,
                transpose_B=True,
                clear_accum=is_first and c == 0,
            )

    @T.macro
    def score_tail(tiles, weights, r):
        if with_tail:
            T.wgmma_gemm(tiles.q_tail, weights, r.scores, transpose_B=True)

    @T.macro
    def begin(r):
        T.fill(r.out, 0)
        T.fill(r.total, 0)
        T.fill(r.reference, LOWEST)
        if slack:
            T.fill(r.highest, LOWEST)

    @T.macro
    def finish(r, half, first_channel, barrier, free, sink, out, token, head, heads, pairs):
        """Divide, and store this warpgroup's channels through `half`, which it frees afterwards.

        `total` is that of both.
        """
        divide(r, sink, head, heads)
        if pairs > 0:
            T.sync_threads(barrier, WARPGROUP)  # all warps have read the half
            T.copy(r.out, half)
            T.fence_proxy_async()  # all writers, then the thread that starts the copy
            T.sync_threads(barrier, WARPGROUP)
            T.copy(
                half, out[token, head : head + HEADS, first_channel : first_channel + HALF]
            )  # returns when it has been read
            release(free)
        else:  # the half may be in use for the next result
            for h, c in T.Parallel(HEADS, HALF):
                if head + h < heads:
                    out[token, head + h, first_channel + c] = T.bfloat16(0)

    @T.macro
    def first(tiles, gates, items, scale, sink, out, max_logits, lse, heads):
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        r = Registers(*registers())
        grown = T.alloc_local((1,), T.int32)
        work = T.alloc_local((WORK,), T.int32)  # token, first head, pairs of tiles
        done = T.alloc_var(T.int32, init=0)  # pairs of the results before
        token = T.alloc_var(T.int32)
        head = T.alloc_var(T.int32)
        pairs = T.alloc_var(T.int32)
        items.find(0, work)
        for n in T.serial(items.count):
            token = work[0]
            head = work[1]
            pairs = work[2]
            begin(r)
            T.barrier_wait(gates.q, n & 1)
            if ahead:
                if pairs > 0:
                    score(tiles.q, 0, tiles.even_l, gates.even_l, done & 1, r, True)
                    score(tiles.q, HALF, tiles.even_r, gates.even_r, done & 1, r, False)
                    score_tail(tiles, tiles.weights_even, r)
                    T.wait_wgmma(0)
            for i in T.serial(pairs):
                phase = (done + i) & 1
                if not ahead:
                    score(tiles.q, 0, tiles.even_l, gates.even_l, phase, r, True)
                    score(tiles.q, HALF, tiles.even_r, gates.even_r, phase, r, False)
                    score_tail(tiles, tiles.weights_even, r)
                    T.wait_wgmma(0)
                if i + 1 == pairs:
                    T.barrier_arrive(gates.q_free)
                T.barrier_wait(gates.mask, phase)
                mask_scores(tiles.mask, 0, r)
                advance(r.reference, scale, r)
                T.copy(r.reference, tiles.max_even)
                T.barrier_arrive(gates.max_even)
                exponentials(scale, r)
                rescale(r, grown)
                T.wgmma_gemm(r.weights, tiles.even_l, r.out)
                T.wait_wgmma(0)
                release(gates.even_l_free)

                # The reference after the odd tile: that of the weights for the other warpgroup.
                T.barrier_wait(gates.max_odd, phase)
                T.copy(tiles.max_odd, r.other)
                for h in T.Parallel(HEADS):
                    r.factor[h] = T.exp2(r.reference[h] - r.other[h])
                    r.total[h] = r.total[h] * r.factor[h]
                    r.reference[h] = r.other[h]
                for h, j in T.Parallel(HEADS, TILE):
                    r.weights[h, j] = r.scores[h, j] * r.factor[h]
                leave_weights(r, tiles.weights_even, NAMED, gates.weights_even)
                rescale(r, grown)
                T.barrier_wait(gates.weights_odd, phase)
                T.wgmma_gemm(tiles.weights_odd, tiles.odd_l, r.out)
                if ahead:
                    if i + 1 < pairs:
                        score(tiles.q, 0, tiles.even_l, gates.even_l, phase ^ 1, r, True)
                        T.wait_wgmma(chunks)
                        release(gates.odd_l_free)
                        score(tiles.q, HALF, tiles.even_r, gates.even_r, phase ^ 1, r, False)
                        score_tail(tiles, tiles.weights_even, r)
                        T.wait_wgmma(0)
                    else:
                        T.wait_wgmma(0)
                else:  # not left to the next pair: ptxas would serialise all wgmma
                    T.wait_wgmma(0)
                    if i + 1 < pairs:
                        release(gates.odd_l_free)
            if pairs == 0:
                T.barrier_arrive(gates.q_free)
            done = done + pairs
            if n + 1 < items.count:
                items.find(n + 1, work)
            T.copy(r.total, tiles.sum_even[n & 1, :])
            T.barrier_arrive(gates.sums)
            T.barrier_wait(gates.sums, n & 1)
            T.copy(tiles.sum_odd[n & 1, :], r.part)
            if slack:
                T.copy(tiles.highest_odd[n & 1, :], r.other)
            for h in T.Parallel(HEADS):
                r.total[h] = r.total[h] + r.part[h]
                if slack:
                    r.highest[h] = T.max(r.highest[h], r.other[h])
                else:
                    r.highest[h] = r.reference[h]
            finish(r, tiles.odd_l, 0, NAMED, gates.odd_l_free, sink, out, token, head, heads, pairs)
            for h in T.Parallel(HEADS):
                if head + h < heads:
                    max_logits[token, head + h] = T.if_then_else(
                        r.total[h] == 0.0, -T.infinity(T.float32), r.highest[h] * LN2
                    )
                    lse[token, head + h] = T.if_then_else(
                        r.total[h] == 0.0,
                        T.infinity(T.float32),
                        (T.log2(r.total[h]) + r.reference[h]) * LN2,
                    )

    @T.macro
    def second(tiles, gates, items, scale, sink, out, heads):
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        r = Registers(*registers())
        grown = T.alloc_local((1,), T.int32)
        work = T.alloc_local((WORK,), T.int32)
        done = T.alloc_var(T.int32, init=0)
        token = T.alloc_var(T.int32)
        head = T.alloc_var(T.int32)
        pairs = T.alloc_var(T.int32)
        items.find(0, work)
        for n in T.serial(items.count):
            token = work[0]
            head = work[1]
            pairs = work[2]
            begin(r)
            T.barrier_wait(gates.q, n & 1)
            for i in T.serial(pairs):
                phase = (done + i) & 1
                score(tiles.q, HALF, tiles.odd_r, gates.odd_r, phase, r, True)
                score(tiles.q, 0, tiles.odd_l, gates.odd_l, phase, r, False)
                score_tail(tiles, tiles.weights_odd, r)
                T.wait_wgmma(0)
                if i + 1 == pairs:
                    T.barrier_arrive(gates.q_free)
                T.barrier_wait(gates.mask, phase)
                mask_scores(tiles.mask, 1, r)
                T.barrier_wait(gates.max_even, phase)
                T.copy(tiles.max_even, r.other)
                advance(r.other, scale, r)
                T.copy(r.reference, tiles.max_odd)
                T.barrier_arrive(gates.max_odd)
                exponentials(scale, r)
                rescale(r, grown)
                if early:
                    leave_weights(r, tiles.weights_odd, NAMED + 1, gates.weights_odd)
                    T.barrier_wait(gates.weights_even, phase)
                    T.wgmma_gemm(tiles.weights_even, tiles.even_r, r.out)
                    T.wgmma_gemm(r.weights, tiles.odd_r, r.out)
                    T.wait_wgmma(1)
                    release(gates.even_r_free)
                    T.wait_wgmma(0)
                    if i + 1 < pairs:
                        release(gates.odd_r_free)
                else:
                    T.wgmma_gemm(r.weights, tiles.odd_r, r.out)
                    leave_weights(r, tiles.weights_odd, NAMED + 1, gates.weights_odd)
                    T.barrier_wait(gates.weights_even, phase)
                    T.wgmma_gemm(tiles.weights_even, tiles.even_r, r.out)
                    T.wait_wgmma(1)
                    release(gates.odd_r_free)
                    T.wait_wgmma(0)
                    if i + 1 < pairs:
                        release(gates.even_r_free)
            if pairs == 0:
                T.barrier_arrive(gates.q_free)
            done = done + pairs
            if n + 1 < items.count:
                items.find(n + 1, work)
            T.copy(r.total, tiles.sum_odd[n & 1, :])
            if slack:
                T.copy(r.highest, tiles.highest_odd[n & 1, :])
            T.barrier_arrive(gates.sums)
            T.barrier_wait(gates.sums, n & 1)
            T.copy(tiles.sum_even[n & 1, :], r.part)
            for h in T.Parallel(HEADS):
                r.total[h] = r.total[h] + r.part[h]
            if early:
                finish(
                    r, tiles.odd_r, HALF, NAMED + 1, gates.odd_r_free, sink, out, token, head,
                    heads, pairs,
                )  # fmt: skip
            else:
                finish(
                    r, tiles.even_r, HALF, NAMED + 1, gates.even_r_free, sink, out, token, head,
                    heads, pairs,
                )  # fmt: skip

    return Consumers(first, second)


class Items(NamedTuple):
    """The results of a block: how many, and a macro `find(n, work)` for token, first head and pairs
    of tiles of the n-th."""

    count: Any
    find: Any


@T.macro
def copy_queries(q, token, head, n, tiles, gates):
    """Heads of the n-th result of a block, by the producer."""
    T.barrier_wait(gates.q_free, (n & 1) ^ 1)
    T.tma_copy(q[token, head : head + HEADS, : 2 * HALF], tiles.q, barrier=gates.q)
    if tiles.q_tail is not None:
        T.tma_copy(q[token, head : head + HEADS, 2 * HALF :], tiles.q_tail, barrier=gates.q)
    T.barrier_arrive(gates.q)
