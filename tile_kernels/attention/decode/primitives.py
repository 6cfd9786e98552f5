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

Rows of 576 channels have 64 more, which are part of keys but not of values. They come with the
second half that their warpgroup needs, and their memory takes the weights once scores are known.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.softmax_plan import Schedule

HEADS = 64  # of a block
TILE = 64  # rows
HALF = 256  # channels of the result of a warpgroup
TAIL = 64  # channels of a key that are not part of its value
WARPGROUP = 128  # threads
THREADS = 3 * WARPGROUP
# Of a thread. The kernel starts with 168 registers in each of 384 threads, and `setmaxnreg` divides
# these: two consumers and the producer may have 3 * 168 together, or a consumer waits for ever.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 88
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -3.0e38  # of a running maximum: finite, so that -inf minus it is no NaN
NAMED = 3  # named barriers, one for each consumer; TileLang uses low ones
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
    sum_even: Any
    sum_odd: Any
    mask: Any


@T.macro
def shared_memory(width):
    """The fields of `Tiles`. The result replaces `q` at the end."""
    q = T.alloc_shared((HEADS, 2 * HALF), T.bfloat16)
    q_tail = T.alloc_shared((HEADS, TAIL), T.bfloat16) if width > 2 * HALF else None
    halves = [T.alloc_shared((TILE, HALF), T.bfloat16) for _ in range(4)]
    weights = [T.alloc_shared((HEADS, TILE), T.bfloat16) for _ in range(2)]
    vectors = [T.alloc_shared((HEADS,), T.float32) for _ in range(4)]
    mask = T.alloc_shared((2, 2), T.uint32)
    return q, q_tail, *halves, *weights, *vectors, mask


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
    sums: Any


@T.macro
def barriers(row_arrivals):
    """The fields of `Barriers`; `row_arrivals`: arrivals for each half tile."""
    q = T.alloc_barrier(THREADS)
    ready = [T.alloc_barrier(row_arrivals) for _ in range(4)]
    rest = [T.alloc_barrier(WARPGROUP) for _ in range(9)]
    sums = T.alloc_barrier(2 * WARPGROUP)
    return q, *ready, *rest, sums


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


class Consumers(NamedTuple):
    """Macros of the two consumer warpgroups: `(tiles, gates, pairs, scale, *results)`.

    As an ending of consumers: `(r, tiles, *results)`, with the total of both warpgroups in `r`.
    """

    first: Any
    second: Any


def result_store(with_sink: bool) -> Any:
    """A macro that divides, and stores a warpgroup's channels. `total` is that of both."""

    @T.macro
    def finish(r, tiles, first_channel, barrier, sink, out, token, head, heads):
        for h in T.Parallel(HEADS):
            r.part[h] = r.total[h]
            if with_sink:
                if head + h < heads:
                    r.part[h] = r.total[h] + T.exp2(sink[head + h] * LOG2E - r.reference[h])
            r.factor[h] = T.if_then_else(r.total[h] == 0.0, 0.0, 1.0 / r.part[h])
        for h, c in T.Parallel(HEADS, HALF):
            r.out[h, c] *= r.factor[h]
        T.copy(r.out, tiles.q[:, first_channel : first_channel + HALF])
        T.fence_proxy_async()  # all writers, then the thread that starts the copy
        T.sync_threads(barrier, WARPGROUP)
        T.copy(
            tiles.q[:, first_channel : first_channel + HALF],
            out[token, head : head + HEADS, first_channel : first_channel + HALF],
        )

    return finish


def consumers(width: int, schedule: Schedule, ending: Consumers) -> Consumers:
    """The consumers for rows of `width` channels; `ending` stores what they have."""
    ahead, slack = schedule[:2]
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
    def score_even(tiles, gates, phase, r):
        """Start the scores of the even tile, as its halves come."""
        T.barrier_wait(gates.even_l, phase)
        T.wgmma_gemm(tiles.q[:, :HALF], tiles.even_l, r.scores, transpose_B=True, clear_accum=True)

    @T.macro
    def score_even_rest(tiles, gates, phase, r):
        T.barrier_wait(gates.even_r, phase)
        T.wgmma_gemm(tiles.q[:, HALF:], tiles.even_r, r.scores, transpose_B=True)
        if with_tail:
            T.wgmma_gemm(tiles.q_tail, tiles.weights_even, r.scores, transpose_B=True)

    @T.macro
    def leave_weights(r, place, barrier, ready):
        """Weights for the other warpgroup. The tails of keys that were there have been read by all
        warps of this one."""
        if with_tail:
            T.sync_threads(barrier, WARPGROUP)
        T.copy(r.weights, place)
        T.fence_proxy_async()
        T.barrier_arrive(ready)

    @T.macro
    def begin(gates, r):
        T.set_max_nreg(CONSUMER_REGISTERS, 1)
        T.fill(r.out, 0)
        T.fill(r.total, 0)
        T.fill(r.reference, LOWEST)
        if slack:
            T.fill(r.highest, LOWEST)
        T.barrier_wait(gates.q, 0)

    @T.macro
    def first(tiles, gates, pairs, scale, *results):
        r = Registers(*registers())
        grown = T.alloc_local((1,), T.int32)
        begin(gates, r)
        if ahead:
            if pairs > 0:
                score_even(tiles, gates, 0, r)
                score_even_rest(tiles, gates, 0, r)
                T.wait_wgmma(0)
        for i in T.serial(pairs):
            if not ahead:
                score_even(tiles, gates, i & 1, r)
                score_even_rest(tiles, gates, i & 1, r)
                T.wait_wgmma(0)
            T.barrier_wait(gates.mask, i & 1)
            mask_scores(tiles.mask, 0, r)
            advance(r.reference, scale, r)
            T.copy(r.reference, tiles.max_even)
            T.barrier_arrive(gates.max_even)
            exponentials(scale, r)
            rescale(r, grown)
            T.wgmma_gemm(r.weights, tiles.even_l, r.out)
            T.wait_wgmma(0)
            T.barrier_arrive(gates.even_l_free)

            # The reference after the odd tile: that of the weights for the other warpgroup.
            T.barrier_wait(gates.max_odd, i & 1)
            T.copy(tiles.max_odd, r.other)
            for h in T.Parallel(HEADS):
                r.factor[h] = T.exp2(r.reference[h] - r.other[h])
                r.total[h] = r.total[h] * r.factor[h]
                r.reference[h] = r.other[h]
            for h, j in T.Parallel(HEADS, TILE):
                r.weights[h, j] = r.scores[h, j] * r.factor[h]
            leave_weights(r, tiles.weights_even, NAMED, gates.weights_even)
            rescale(r, grown)
            T.barrier_wait(gates.weights_odd, i & 1)
            T.wgmma_gemm(tiles.weights_odd, tiles.odd_l, r.out)
            if ahead:
                if i + 1 < pairs:
                    score_even(tiles, gates, (i + 1) & 1, r)
                    T.wait_wgmma(1)
                    T.barrier_arrive(gates.odd_l_free)
                    score_even_rest(tiles, gates, (i + 1) & 1, r)
                    T.wait_wgmma(0)
                else:
                    T.wait_wgmma(0)
                    T.barrier_arrive(gates.odd_l_free)
            else:  # not left to the next pair: ptxas would serialise all wgmma
                T.wait_wgmma(0)
                T.barrier_arrive(gates.odd_l_free)
        T.copy(r.total, tiles.sum_even)
        T.barrier_arrive(gates.sums)
        T.barrier_wait(gates.sums, 0)
        T.copy(tiles.sum_odd, r.part)
        if slack:
            T.copy(tiles.max_odd, r.other)
        for h in T.Parallel(HEADS):
            r.total[h] = r.total[h] + r.part[h]
            if slack:
                r.highest[h] = T.max(r.highest[h], r.other[h])
            else:
                r.highest[h] = r.reference[h]
        ending.first(r, tiles, *results)

    @T.macro
    def second(tiles, gates, pairs, scale, *results):
        r = Registers(*registers())
        grown = T.alloc_local((1,), T.int32)
        begin(gates, r)
        for i in T.serial(pairs):
            T.barrier_wait(gates.odd_r, i & 1)
            T.wgmma_gemm(
                tiles.q[:, HALF:], tiles.odd_r, r.scores, transpose_B=True, clear_accum=True
            )
            T.barrier_wait(gates.odd_l, i & 1)
            T.wgmma_gemm(tiles.q[:, :HALF], tiles.odd_l, r.scores, transpose_B=True)
            if with_tail:
                T.wgmma_gemm(tiles.q_tail, tiles.weights_odd, r.scores, transpose_B=True)
            T.wait_wgmma(0)
            T.barrier_wait(gates.mask, i & 1)
            mask_scores(tiles.mask, 1, r)
            T.barrier_wait(gates.max_even, i & 1)
            T.copy(tiles.max_even, r.other)
            advance(r.other, scale, r)
            T.copy(r.reference, tiles.max_odd)
            T.barrier_arrive(gates.max_odd)
            exponentials(scale, r)
            rescale(r, grown)
            T.wgmma_gemm(r.weights, tiles.odd_r, r.out)
            leave_weights(r, tiles.weights_odd, NAMED + 1, gates.weights_odd)
            T.barrier_wait(gates.weights_even, i & 1)
            T.wgmma_gemm(tiles.weights_even, tiles.even_r, r.out)
            T.wait_wgmma(1)
            T.barrier_arrive(gates.odd_r_free)
            T.wait_wgmma(0)
            T.barrier_arrive(gates.even_r_free)
        T.copy(r.total, tiles.sum_odd)
        if slack:
            T.copy(r.highest, tiles.max_odd)
        T.barrier_arrive(gates.sums)
        T.barrier_wait(gates.sums, 0)
        T.copy(tiles.sum_even, r.part)
        for h in T.Parallel(HEADS):
            r.total[h] = r.total[h] + r.part[h]
        ending.second(r, tiles, *results)

    return Consumers(first, second)
