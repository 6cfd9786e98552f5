"""The consumers of attention while decoding: one result, or a part of one, for a block.

They work as `tile_kernels.attention.softmax_primitives` describes it. Half tiles come whole,
because the producer converts them, and the result replaces the queries at the end.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.attention.softmax_primitives import (
    HALF,
    HEADS,
    LOWEST,
    NAMED,
    TAIL,
    THREADS,
    TILE,
    WARPGROUP,
    Registers,
    divider,
    free_barriers,
    registers,
    releaser,
    steps,
)

# Of a thread. The kernel starts with 168 registers in each of 384 threads, and `setmaxnreg` divides
# these: two consumers and the producer may have 3 * 168 together, or a consumer waits for ever.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 88
COPY_ROWS, COPY_CHANNELS = 8, 64  # of a copy to the other block of a cluster: 1024 bytes
COPIES = TILE // 2 * HALF // (COPY_ROWS * COPY_CHANNELS)  # of half the rows of a half tile


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


def ready_barriers(cluster: int) -> Any:
    """Of the four half tiles: the producer arrives, and each copy from the other block."""
    if cluster > 1:
        return [T.alloc_cluster_barrier(WARPGROUP + COPIES) for _ in range(4)]
    return [T.alloc_barrier(WARPGROUP) for _ in range(4)]


@T.macro
def barriers(cluster):
    """The fields of `Barriers`."""
    q = T.alloc_barrier(THREADS)
    ready = ready_barriers(cluster)
    mask = T.alloc_barrier(WARPGROUP)
    free = free_barriers(cluster)
    found = [T.alloc_barrier(WARPGROUP) for _ in range(4)]
    sums = T.alloc_barrier(2 * WARPGROUP)
    return q, *ready, mask, *free, *found, sums


class Consumers(NamedTuple):
    """Macros of the two consumer warpgroups: `(tiles, gates, pairs, scale, *results)`.

    As an ending of consumers: `(r, tiles, *results)`, with the total of both warpgroups in `r`.
    """

    first: Any
    second: Any


def result_store(with_sink: bool) -> Any:
    """A macro that divides, and stores a warpgroup's channels. `total` is that of both."""
    divide = divider(with_sink)

    @T.macro
    def finish(r, tiles, first_channel, barrier, sink, out, token, head, heads):
        divide(r, sink, head, heads)
        T.copy(r.out, tiles.q[:, first_channel : first_channel + HALF])
        T.fence_proxy_async()  # all writers, then the thread that starts the copy
        T.sync_threads(barrier, WARPGROUP)
        T.copy(
            tiles.q[:, first_channel : first_channel + HALF],
            out[token, head : head + HEADS, first_channel : first_channel + HALF],
        )

    return finish


def consumers(width: int, schedule: Schedule, cluster: int, ending: Consumers) -> Consumers:
    """The consumers for rows of `width` channels; `ending` stores what they have."""
    ahead, slack = schedule[:2]
    release = releaser(cluster)
    with_tail = width > 2 * HALF
    mask_scores, advance, exponentials, rescale, leave_weights = steps(width, slack)

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
            release(gates.even_l_free)

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
                    release(gates.odd_l_free)
                    score_even_rest(tiles, gates, (i + 1) & 1, r)
                    T.wait_wgmma(0)
                else:
                    T.wait_wgmma(0)
                    release(gates.odd_l_free)
            else:  # not left to the next pair: ptxas would serialise all wgmma
                T.wait_wgmma(0)
                release(gates.odd_l_free)
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
            release(gates.odd_r_free)
            T.wait_wgmma(0)
            release(gates.even_r_free)
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
