"""Attention while decoding: the producer reads rows of paged caches and converts them to bfloat16.

A block has 64 heads of a query, and some pairs of tiles of its keys. The consumers are those of
`softmax_primitives`. The producer has half a tile in registers while it waits for the consumers
to release memory, then converts it row by row, and loads the following half tile into the registers
that this leaves.

An e4m3 code `s eeee mmm` becomes bfloat16 without a conversion instruction: `s 0000eeee mmm0000` is
the value times 2**-120, subnormal numbers included, which one product with the scale corrects.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.attention.cache.kernel import (
    assume_aligned,
    data_word,
    pages_type,
    rotated_word,
    scale_word,
)
from tile_kernels.attention.cache_layout import LAYOUTS, Layout
from tile_kernels.attention.decode.plan import (
    CANDIDATES,
    COMBINE_COST,
    FIXED_COST,
    PLAN_THREADS,
    AttendPlan,
)
from tile_kernels.attention.decode.primitives import (
    COPY_CHANNELS,
    COPY_ROWS,
    PRODUCER_REGISTERS,
    Barriers,
    Consumers,
    Tiles,
    barriers,
    consumers,
    result_store,
    shared_memory,
)
from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.attention.softmax_primitives import (
    HALF,
    HEADS,
    LN2,
    LOG2E,
    NAMED,
    PASS_CONFIGS,
    THREADS,
    TILE,
    WARPGROUP,
)
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

LANES = 4  # threads of a row: 64 codes with one load each of 16 bytes
ROWS = WARPGROUP // LANES  # of a tile at a time
ROUNDS = TILE // ROWS
WORDS = 4  # int32 in 16 bytes
LOADS = 5  # of 16 bytes: a row of half a tile
GROUP = 64  # channels of a row that its threads load at once
LARGEST_FACTOR = 134  # exponent of a scale that one product takes, with 2**120
PLAN_STEPS = (PLAN_THREADS - 1).bit_length()
COMBINE_ROWS = 4  # heads of a block, a warp each; other numbers were not compared

PRELUDE = """
#ifdef __CUDACC__
__device__ __forceinline__ unsigned bf16x2_product(unsigned a, unsigned b) {
  unsigned d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ unsigned bf16x2_rounded(float low, float high) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
#define DEVICE __device__ __forceinline__
#else
#define DEVICE inline
DEVICE unsigned bf16_bits(float x) {
  unsigned u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}
DEVICE unsigned bf16x2_rounded(float low, float high) {
  return bf16_bits(low) | bf16_bits(high) << 16;
}
DEVICE unsigned bf16x2_product(unsigned a, unsigned b) {
  return bf16x2_rounded(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                        __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u));
}
#endif
// Two e4m3 codes, bytes of `word` that `select` puts above zeros, as bfloat16 times 2**-120.
DEVICE unsigned e4m3x2_shifted(unsigned word, unsigned select) {
  unsigned y = __byte_perm(word, 0u, select);
  return ((y >> 4) & 0x07f007f0u) | (y & 0x80008000u);
}
// Those codes times a factor of two bfloat16.
DEVICE unsigned e4m3x2_times(unsigned word, unsigned select, unsigned factor) {
  return bf16x2_product(e4m3x2_shifted(word, select), factor);
}
// Those codes times a float32, rounded once. 0x7b80 is 2**120.
DEVICE unsigned e4m3x2_scaled(unsigned word, unsigned select, float factor) {
  unsigned y = bf16x2_product(e4m3x2_shifted(word, select), 0x7b807b80u);
  return bf16x2_rounded(__uint_as_float(y << 16) * factor,
                        __uint_as_float(y & 0xffff0000u) * factor);
}
// Not zero if one of four codes is NaN.
DEVICE unsigned e4m3_nan(unsigned word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}
#undef DEVICE
"""
LOW_CODES, HIGH_CODES = T.uint32(0x1404), T.uint32(0x3424)  # of `e4m3x2_shifted`
NAN_PAIR = 0x7FFF7FFF


def _extern(name: str, *arguments: Any) -> Any:
    return T.call_extern(T.uint32, name, *arguments)


@T.macro
def pairs_of(length, extra_length):
    """Pairs of tiles of a request: extra keys begin with a new tile."""
    return (T.ceildiv(length, TILE) + T.ceildiv(extra_length, TILE) + 1) // 2


# ---- the producer -------------------------------------------------------------------------------


@T.macro
def thread_row():
    """The first row of a tile that this thread of the producer has."""
    return (T.get_thread_binding() - 2 * WARPGROUP) // LANES


@T.macro
def thread_lane():
    """The part of its rows that this thread has."""
    return T.get_thread_binding() % LANES


def first_row_of(r: Any, rank: Any) -> Any:
    """The first row of a round: the first round of a block of a cluster is what it converts."""
    return (r ^ rank) * ROWS


@T.macro
def locate(found, t, size, end, page, offset):
    """Pages and offsets of this thread's rows of a tile; page -1 if the slot is none."""
    for r in T.unroll(ROUNDS):
        page[t, r] = -1
        offset[t, r] = 0
        if found[t, r] >= 0 and found[t, r] < end:
            page[t, r] = found[t, r] // size
            offset[t, r] = found[t, r] - page[t, r] * size


@T.macro
def write_mask(page, rank, mask):
    """A bit for each row of a pair. A warp has 8 rows of each round, with 4 lanes each."""
    lane = T.get_thread_binding() % WARP
    warp = T.get_thread_binding() // WARP % (WARPGROUP // WARP)
    octets = T.view(mask, (2, 2, 4), T.uint8)
    for t in T.unroll(2):
        for r in T.unroll(ROUNDS):
            bits = T.alloc_var(T.uint32, init=T.cast(T.ballot(page[t, r] >= 0), T.uint32))
            bits = bits & T.uint32(0x11111111)
            bits = (bits | bits >> T.uint32(3)) & T.uint32(0x03030303)
            bits = (bits | bits >> T.uint32(6)) & T.uint32(0x000F000F)
            bits = (bits | bits >> T.uint32(12)) & T.uint32(0xFF)
            if lane == 0:
                octets[t, r ^ rank, warp] = T.cast(bits, T.uint8)


@T.macro
def word_of(x):
    return T.reinterpret(x, T.uint32)


@T.macro
def is_nan(raw, r, n):
    """Whether one of 16 codes is NaN."""
    found = T.alloc_var(T.uint32, init=_extern("e4m3_nan", word_of(raw[r, n, 0])))
    for v in T.unroll(WORDS - 1):
        found = found | _extern("e4m3_nan", word_of(raw[r, n, v + 1]))
    return found != T.uint32(0)


@T.macro
def times_exponent(raw, r, n, exponent, wide):
    """16 codes times `2**(exponent - 127)`, as 8 pairs of bfloat16."""
    factor = T.alloc_var(T.uint32, init=T.uint32(NAN_PAIR))
    if not is_nan(raw, r, n):
        factor = T.cast((T.min(exponent, LARGEST_FACTOR) + 120) << 7, T.uint32) * T.uint32(0x10001)
    for v in T.unroll(WORDS):
        wide[2 * v] = _extern("e4m3x2_times", word_of(raw[r, n, v]), LOW_CODES, factor)
        wide[2 * v + 1] = _extern("e4m3x2_times", word_of(raw[r, n, v]), HIGH_CODES, factor)
    if exponent > LARGEST_FACTOR:  # a scale above 2**7
        rest = T.alloc_var(T.int32, init=exponent - LARGEST_FACTOR + 127)
        if exponent == 255:
            rest = 255
        for v in T.unroll(2 * WORDS):
            wide[v] = _extern(
                "bf16x2_product", wide[v], T.cast(rest << 7, T.uint32) * T.uint32(0x10001)
            )


@T.macro
def times_float(raw, r, n, scale, wide):
    """16 codes times a float32, as 8 pairs of bfloat16."""
    factor = T.alloc_var(T.float32, init=scale)
    if is_nan(raw, r, n):
        factor = T.reinterpret(T.uint32(0x7FFFFFFF), T.float32)
    for v in T.unroll(WORDS):
        wide[2 * v] = _extern("e4m3x2_scaled", word_of(raw[r, n, v]), LOW_CODES, factor)
        wide[2 * v + 1] = _extern("e4m3x2_scaled", word_of(raw[r, n, v]), HIGH_CODES, factor)


class HalfTile(NamedTuple):
    """Macros for a row of half a tile, 256 channels, of which a thread has 16 bytes of each group.

    `load(pages, page_size, page, offset, t, r, raw, scales)` to registers, and
    `store(raw, scales, r, rank, half)` to shared memory, converted.
    """

    load: Any
    store: Any


def half_tile(layout: Layout, right: bool) -> HalfTile:
    """Half a tile, of the first or of the last channels."""
    v4 = layout.name == "v4"
    groups = 3 if v4 and right else 4  # of 64 codes; the rest of "v4" is bfloat16
    first_word = 64 if right else 0
    with_rotated = v4 and right
    num_scales = 1 if v4 else 2  # words of half a row
    first_scale = num_scales if right else 0

    @T.macro
    def load(pages, page_size, page, offset, t, r, raw, scales):
        lane = thread_lane()
        for v in T.vectorized(num_scales):
            scales[r, v] = pages[
                page[t, r], scale_word(layout, offset[t, r], page_size) + first_scale + v
            ]
        for n in T.unroll(groups):
            for v in T.vectorized(WORDS):
                raw[r, n, v] = pages[
                    page[t, r],
                    data_word(layout, offset[t, r]) + first_word + n * 16 + lane * WORDS + v,
                ]
        if with_rotated:
            for n in T.unroll(2):
                for v in T.vectorized(WORDS):
                    raw[r, groups + n, v] = pages[
                        page[t, r],
                        rotated_word(layout, offset[t, r]) + n * 16 + lane * WORDS + v,
                    ]

    @T.macro
    def store(raw, scales, r, rank, half):
        lane = thread_lane()
        row = first_row_of(r, rank) + thread_row()
        pairs = T.alloc_local((2 * WORDS,), T.uint32)
        values = T.view(pairs, (4 * WORDS,), T.bfloat16)
        for n in T.unroll(groups):
            if v4:
                exponent = T.alloc_var(T.int32, init=(scales[r, 0] >> (n * 8)) & 255)
                times_exponent(raw, r, n, exponent, pairs)
            else:
                scale = T.reinterpret(scales[r, n // 2], T.float32)
                times_float(raw, r, n, scale, pairs)
            for part in T.unroll(2):
                for v in T.vectorized(8):
                    half[row, n * GROUP + lane * 16 + part * 8 + v] = values[part * 8 + v]
        if with_rotated:
            for n in T.unroll(2):
                for v in T.unroll(WORDS):
                    pairs[v] = word_of(raw[r, groups + n, v])
                for v in T.vectorized(8):
                    half[row, groups * GROUP + n * 32 + lane * 8 + v] = values[v]

    return HalfTile(load, store)


def tail_copy(layout: Layout) -> Any:
    """A macro: the rotated channels of "v3.2", which keys have and values have not."""

    @T.macro
    def copy(pages, page, offset, t, rank, tail):
        lane = thread_lane()
        words = T.alloc_local((WORDS,), T.int32)
        values = T.view(words, (2 * WORDS,), T.bfloat16)
        for r in T.unroll(ROUNDS):
            for n in T.unroll(2):
                for v in T.unroll(WORDS):
                    words[v] = 0
                if page[t, r] >= 0:
                    for v in T.vectorized(WORDS):
                        words[v] = pages[
                            page[t, r],
                            rotated_word(layout, offset[t, r]) + n * 16 + lane * WORDS + v,
                        ]
                for v in T.vectorized(8):
                    tail[first_row_of(r, rank) + thread_row(), n * 32 + lane * 8 + v] = values[v]

    return copy


@T.macro
def copy_half(pages, page, offset, t, first_channel, half):
    """Half a tile of rows in bfloat16, by asynchronous copies."""
    lane = thread_lane()
    for r in T.unroll(ROUNDS):
        for c in T.unroll(HALF // (LANES * 8)):
            channel = c * LANES * 8 + lane * 8
            T.ptx_cp_async(
                T.access_ptr(half[r * ROWS + thread_row(), channel], "w", 8),
                T.access_ptr(
                    pages[T.max(page[t, r], 0), offset[t, r] * 512 + first_channel + channel],
                    "r", 8,
                ),
                8,
                page[t, r] >= 0,
            )  # fmt: skip


def producer(p: AttendPlan) -> Any:
    """A macro: the producer. `caches` are pages, their page size and their number of slots."""
    layout = LAYOUTS[p.layout]
    left, right = half_tile(layout, False), half_tile(layout, True)
    tail = tail_copy(layout) if layout.name == "v3.2" else None
    rounds = ROUNDS // p.cluster  # of rows that this block converts

    @T.macro
    def read_indices(lists, token, pair, main_tiles, rank, found):
        """The slots of this thread's rows of a pair; -1 after the last."""
        indices, length, extra_indices, extra_length = lists
        for t in T.unroll(2):
            for r in T.unroll(ROUNDS):
                found[t, r] = -1
                position = T.alloc_var(
                    T.int32, init=(pair * 2 + t) * TILE + first_row_of(r, rank) + thread_row()
                )
                if pair * 2 + t < main_tiles:
                    if position < length:
                        found[t, r] = indices[token, position]
                elif p.with_extra:
                    position = position - main_tiles * TILE
                    if position < extra_length:
                        found[t, r] = extra_indices[token, position]

    @T.macro
    def locate_pair(caches, pair, main_tiles, found, page, offset):
        for t in T.unroll(2):
            if p.with_extra:
                if pair * 2 + t < main_tiles:
                    locate(found, t, caches[1], caches[2], page, offset)
                else:
                    locate(found, t, caches[4], caches[5], page, offset)
            else:
                locate(found, t, caches[1], caches[2], page, offset)

    def by_source(action: Any) -> Any:
        """`action` on the pages that a tile is from."""

        @T.macro
        def act(caches, is_main, *rest):
            if p.with_extra:
                if is_main:
                    action(caches[0], caches[1], *rest)
                else:
                    action(caches[3], caches[4], *rest)
            else:
                action(caches[0], caches[1], *rest)

        return act

    @T.macro
    def copy_left(pages, _, page, offset, t, half):
        copy_half(pages, page, offset, t, 0, half)

    @T.macro
    def copy_right(pages, _, page, offset, t, half):
        copy_half(pages, page, offset, t, HALF, half)

    @T.macro
    def copy_tail(pages, _, page, offset, t, rank, half):
        tail(pages, page, offset, t, rank, half)

    left_from, right_from, tail_from = map(by_source, (copy_left, copy_right, copy_tail))

    def exchange(now: HalfTile | None, following: HalfTile) -> Any:
        """A macro: half a tile from registers to shared memory, the following one to registers.

        Row by row: the registers that a conversion leaves are loaded at once.
        """
        row_from = by_source(following.load)

        @T.macro
        def load(caches, is_main, page, offset, t, r, raw, scales):
            for n in T.unroll(LOADS):
                for v in T.unroll(WORDS):
                    raw[r, n, v] = 0
            for v in T.unroll(2):
                scales[r, v] = 0
            if page[t, r] >= 0:
                row_from(caches, is_main, page, offset, t, r, raw, scales)

        @T.macro
        def exchanged(caches, is_main, page, offset, t, rank, raw, scales, half):
            for r in T.unroll(rounds):
                if now is not None:
                    now.store(raw, scales, r, rank, half)
                load(caches, is_main, page, offset, t, r, raw, scales)

        return exchanged

    @T.macro
    def hand_over(half, rank, ready):
        """Converted rows to the consumers of this block, and to those of the other one."""
        T.fence_proxy_async()
        if p.cluster > 1:
            T.sync_warp()
            thread = T.get_thread_binding() - 2 * WARPGROUP
            column = thread % WARP * COPY_CHANNELS
            if column < HALF:
                row = first_row_of(0, rank) + thread // WARP * COPY_ROWS
                size = COPY_ROWS * COPY_CHANNELS
                T.evaluate(
                    T.call_extern(
                        "handle",
                        "tl::tma_store_cluster",
                        T.access_ptr(half[row, column], "w", size),
                        T.access_ptr(half[row, column], "r", size),
                        rank ^ 1,
                        2 * size,
                        ready[0],
                    )
                )
        T.barrier_arrive(ready)

    begin = exchange(None, left)
    left_to_right, right_to_right = exchange(left, right), exchange(right, right)
    right_to_left, left_to_left = exchange(right, left), exchange(left, left)

    @T.macro
    def convert(caches, lists, token, first, pairs, main_tiles, rank, tiles, gates):
        """For codes: half a tile is in registers while its memory is waited for."""
        found = T.alloc_local((2, ROUNDS), T.int32)
        page = T.alloc_local((2, ROUNDS), T.int32)
        offset = T.alloc_local((2, ROUNDS), T.int32)
        raw = T.alloc_local((rounds, LOADS, WORDS), T.int32)
        scales = T.alloc_local((rounds, 2), T.int32)
        for r in T.unroll(rounds):
            for v in T.unroll(2):
                scales[r, v] = 0
        read_indices(lists, token, first, main_tiles, rank, found)
        locate_pair(caches, first, main_tiles, found, page, offset)
        begin(caches, first * 2 < main_tiles, page, offset, 0, rank, raw, scales, tiles.even_l)
        for i in T.serial(pairs):
            pair = first + i
            even_main = pair * 2 < main_tiles
            odd_main = pair * 2 + 1 < main_tiles
            read_indices(lists, token, pair + 1, main_tiles, rank, found)  # used at the end
            T.barrier_wait(gates.even_l_free, (i & 1) ^ 1)
            left_to_right(caches, odd_main, page, offset, 1, rank, raw, scales, tiles.even_l)
            hand_over(tiles.even_l, rank, gates.even_l)
            T.barrier_wait(gates.odd_r_free, (i & 1) ^ 1)
            # Both consumers have masked the pair before: they freed these halves.
            write_mask(page, rank, tiles.mask)
            T.barrier_arrive(gates.mask)
            right_to_right(caches, even_main, page, offset, 0, rank, raw, scales, tiles.odd_r)
            hand_over(tiles.odd_r, rank, gates.odd_r)
            T.barrier_wait(gates.even_r_free, (i & 1) ^ 1)
            if tail is not None:
                tail_from(caches, even_main, page, offset, 0, rank, tiles.weights_even)
            right_to_left(caches, odd_main, page, offset, 1, rank, raw, scales, tiles.even_r)
            hand_over(tiles.even_r, rank, gates.even_r)
            T.barrier_wait(gates.odd_l_free, (i & 1) ^ 1)
            if tail is not None:
                tail_from(caches, odd_main, page, offset, 1, rank, tiles.weights_odd)
            for t in T.unroll(2):
                for r in T.unroll(ROUNDS):
                    page[t, r] = -1
            if i + 1 < pairs:
                locate_pair(caches, pair + 1, main_tiles, found, page, offset)
            left_to_left(
                caches, (pair + 1) * 2 < main_tiles, page, offset, 0, rank, raw, scales, tiles.odd_l
            )
            hand_over(tiles.odd_l, rank, gates.odd_l)

    @T.macro
    def copy(caches, lists, token, first, pairs, main_tiles, rank, tiles, gates):
        """For bfloat16: asynchronous copies arrive at the barriers by themselves."""
        found = T.alloc_local((2, ROUNDS), T.int32)
        page = T.alloc_local((2, ROUNDS), T.int32)
        offset = T.alloc_local((2, ROUNDS), T.int32)
        read_indices(lists, token, first, main_tiles, rank, found)
        for i in T.serial(pairs):
            pair = first + i
            even_main = pair * 2 < main_tiles
            odd_main = pair * 2 + 1 < main_tiles
            locate_pair(caches, pair, main_tiles, found, page, offset)
            read_indices(lists, token, pair + 1, main_tiles, rank, found)
            T.barrier_wait(gates.even_l_free, (i & 1) ^ 1)
            left_from(caches, even_main, page, offset, 0, tiles.even_l)
            T.cp_async_barrier_noinc(gates.even_l)
            T.barrier_wait(gates.odd_r_free, (i & 1) ^ 1)
            right_from(caches, odd_main, page, offset, 1, tiles.odd_r)
            T.cp_async_barrier_noinc(gates.odd_r)
            # A plain arrival, as that of the copies does not order these stores.
            write_mask(page, rank, tiles.mask)
            T.barrier_arrive(gates.mask)
            T.barrier_wait(gates.even_r_free, (i & 1) ^ 1)
            right_from(caches, even_main, page, offset, 0, tiles.even_r)
            T.cp_async_barrier_noinc(gates.even_r)
            T.barrier_wait(gates.odd_l_free, (i & 1) ^ 1)
            left_from(caches, odd_main, page, offset, 1, tiles.odd_l)
            T.cp_async_barrier_noinc(gates.odd_l)

    return convert if layout.plain else copy


# ---- attention ----------------------------------------------------------------------------------


def endings(with_sink: bool, in_parts: bool) -> Consumers:
    """What the consumers do at the end: a result, or one of several parts of it.

    A part has float32 values, divided by their own sum, and the logarithm of that sum, base 2.
    """
    finish = result_store(with_sink)

    @T.macro
    def store_part(r, first_channel, part_out, slot, head, heads):
        for h in T.Parallel(HEADS):
            r.factor[h] = T.if_then_else(r.total[h] == 0.0, 0.0, 1.0 / r.total[h])
        for h, c in T.Parallel(HEADS, HALF):
            if head + h < heads:
                part_out[slot, head + h, first_channel + c] = r.out[h, c] * r.factor[h]

    @T.macro
    def first(r, tiles, is_whole, sink, out, lse, where, parts, slot):
        token, request, step, head, heads = where
        part_out, part_lse = parts
        if in_parts and not is_whole:
            store_part(r, 0, part_out, slot, head, heads)
            for h in T.Parallel(HEADS):
                if head + h < heads:
                    part_lse[slot, head + h] = T.if_then_else(
                        r.total[h] == 0.0,
                        -T.infinity(T.float32),
                        T.log2(r.total[h]) + r.reference[h],
                    )
        else:
            finish(r, tiles, 0, NAMED, sink, out, token, head, heads)
            for h in T.Parallel(HEADS):
                if head + h < heads:
                    lse[request, head + h, step] = T.if_then_else(
                        r.total[h] == 0.0,
                        T.infinity(T.float32),
                        (T.log2(r.total[h]) + r.reference[h]) * LN2,
                    )

    @T.macro
    def second(r, tiles, is_whole, sink, out, lse, where, parts, slot):
        token, _, _, head, heads = where
        part_out, _ = parts
        if in_parts and not is_whole:
            store_part(r, HALF, part_out, slot, head, heads)
        else:
            finish(r, tiles, HALF, NAMED + 1, sink, out, token, head, heads)

    return Consumers(first, second)


def attend_access(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows in bfloat16 are copied to shared memory; results leave by TMA, parts do not."""
    p = AttendPlan(*static)
    loads = {"v4": (32, 128), "v3.2": (32, 64, 128), "bf16": (32,)}[p.layout]
    return loads, (32, 64) if p.in_parts else (32,)


@kernel(access_bits=attend_access, pass_configs=PASS_CONFIGS)
def attend_pages(*static: Any) -> Any:
    """A block for 64 heads of a query and a split of its keys.

    The blocks of a query's heads are neighbours, so that L2 has its rows. The two blocks of a
    cluster convert half of the rows each, and send them to each other. With `planned`, `items`
    have a request, its pairs of tiles from `first` to `end`, and the number of the split, or -1
    without work; `splits` how many a request has. Otherwise a request has `num_splits` splits of
    `split` pairs, as far as it has keys. A request in one piece is finished here.
    """
    p = AttendPlan(*static)
    layout = LAYOUTS[p.layout]
    width = layout.channels
    ending = endings(p.with_sink, p.in_parts)
    consume = consumers(width, Schedule(p.ahead, p.slack), p.cluster, ending)
    produce = producer(p)
    tokens, heads, k, extra_k = T.dynamic("tokens heads k extra_k")
    num_requests, num_items, s_q, slots = T.dynamic("num_requests num_items s_q slots")
    num_pages, cells, stride = T.dynamic("num_pages cells stride")
    num_extra, extra_cells, extra_stride = T.dynamic("num_extra extra_cells extra_stride")
    pages_t = pages_type(layout, num_pages, cells, stride)
    extra_t = pages_type(layout, num_extra, extra_cells, extra_stride)

    def grid(blocks: Any) -> Any:
        if p.cluster > 1:
            return T.ClusterKernel(blocks, threads=THREADS, prelude=PRELUDE, cluster_dims=p.cluster)
        return T.Kernel(blocks, threads=THREADS, prelude=PRELUDE)

    @T.prim_func
    def attend_to_pages(
        q: T.Tensor[(tokens, heads, width), T.bfloat16],
        pages: pages_t,
        indices: T.Tensor[(tokens, k), T.int32],
        extra_pages: extra_t,
        extra_indices: T.Tensor[(tokens, extra_k), T.int32],
        sink: T.Tensor[(heads,), T.float32],
        lengths: T.Tensor[(num_requests,), T.int32],
        extra_lengths: T.Tensor[(num_requests,), T.int32],
        items: T.Tensor[(num_items, 4), T.int32],
        splits: T.Tensor[(num_requests, 2), T.int32],
        out: T.Tensor[(tokens, heads, 2 * HALF), T.bfloat16],
        lse: T.Tensor[(num_requests, heads, s_q), T.float32],
        part_out: T.Tensor[(slots, heads, 2 * HALF), T.float32],
        part_lse: T.Tensor[(slots, heads), T.float32],
        scale: T.float32,  # of logits, times log2(e)
        page_size: T.int32,
        limit: T.int32,
        extra_page_size: T.int32,
        extra_limit: T.int32,
        total_items: T.int32,
        num_splits: T.int32,
        split: T.int32,
    ):
        with grid(total_items * s_q * T.ceildiv(heads, HEADS)) as block:
            assume_aligned(layout, stride)
            if p.with_extra:
                assume_aligned(layout, extra_stride)
            tx = T.get_thread_binding()
            # Variables: expressions would be computed anew, with divisions of 64 bits, at each use.
            item = T.alloc_var(T.int32, init=block // T.ceildiv(heads, HEADS))
            head = T.alloc_var(T.int32, init=(block - item * T.ceildiv(heads, HEADS)) * HEADS)
            step = T.alloc_var(T.int32, init=item % s_q)
            item = item // s_q
            request = T.alloc_var(T.int32, init=item // num_splits)
            first = T.alloc_var(T.int32, init=item % num_splits * split)
            end = T.alloc_var(T.int32, init=0)
            number = T.alloc_var(T.int32, init=item)
            rank = block % p.cluster
            if p.planned:
                request = items[item, 0]
                first = items[item, 1]
                end = items[item, 2]
                number = items[item, 3]
            length = T.alloc_var(T.int32, init=k)
            extra_length = T.alloc_var(T.int32, init=0)
            if p.with_length:
                length = T.max(0, T.min(k, lengths[request]))
            if p.with_extra:
                extra_length = extra_k
                if p.with_extra_length:
                    extra_length = T.max(0, T.min(extra_k, extra_lengths[request]))
            all_pairs = T.alloc_var(T.int32, init=pairs_of(length, extra_length))
            if not p.planned:
                end = T.min(first + split, all_pairs)
                if first > 0 and first >= all_pairs:
                    number = -1
            if number >= 0:
                pairs = T.alloc_var(T.int32, init=T.max(end - first, 0))
                is_whole = T.alloc_var(T.bool, init=all_pairs <= split)
                if p.planned:
                    is_whole = splits[request, 1] <= 1
                token = T.alloc_var(T.int32, init=request * s_q + step)
                main_tiles = T.alloc_var(T.int32, init=T.ceildiv(length, TILE))
                tiles = Tiles(*shared_memory(width))
                gates = Barriers(*barriers(p.cluster))
                if p.cluster > 1:
                    T.cluster_sync()  # all barriers are initialised
                T.tma_copy(q[token, head : head + HEADS, : 2 * HALF], tiles.q, barrier=gates.q)
                if width > 2 * HALF:
                    T.tma_copy(
                        q[token, head : head + HEADS, 2 * HALF :], tiles.q_tail, barrier=gates.q
                    )
                T.barrier_arrive(gates.q)
                # Variables: a macro would rename parameters, and two would have one name.
                sizes = T.alloc_local((4,), T.int32)
                sizes[0] = page_size
                sizes[1] = limit
                sizes[2] = extra_page_size
                sizes[3] = extra_limit
                results = (
                    is_whole, sink, out, lse, (token, request, step, head, heads),
                    (part_out, part_lse), number * s_q + step,
                )  # fmt: skip
                if tx < WARPGROUP:
                    consume.first(tiles, gates, pairs, scale, *results)
                elif tx < 2 * WARPGROUP:
                    consume.second(tiles, gates, pairs, scale, *results)
                else:
                    T.set_max_nreg(PRODUCER_REGISTERS, 0)
                    if pairs > 0:
                        produce(
                            (pages, sizes[0], sizes[1], extra_pages, sizes[2], sizes[3]),
                            (indices, length, extra_indices, extra_length),
                            token, first, pairs, main_tiles, rank, tiles, gates,
                        )  # fmt: skip
                if p.cluster > 1:
                    T.cluster_sync()  # no block leaves while the other may still signal it

    return attend_to_pages


# ---- parts of a request -------------------------------------------------------------------------


@kernel(access_bits=lambda *_: ((32, 128), (32, 64)), pass_configs=EXPLICIT_GUARDS)
def combine_parts(
    with_sink: bool, planned: bool, with_length: bool, with_extra_length: bool
) -> Any:
    """A warp for a head of a query: parts are added in their order, the sink once.

    Requests in one piece are finished already. `splits` (with `planned`) have the first split of a
    request and their number.
    """
    tokens, heads, num_requests, s_q, slots = T.dynamic("tokens heads num_requests s_q slots")
    f32 = T.float32

    @T.prim_func
    def combine(
        part_out: T.Tensor[(slots, heads, 2 * HALF), T.float32],
        part_lse: T.Tensor[(slots, heads), T.float32],
        sink: T.Tensor[(heads,), T.float32],
        lengths: T.Tensor[(num_requests,), T.int32],
        extra_lengths: T.Tensor[(num_requests,), T.int32],
        splits: T.Tensor[(num_requests, 2), T.int32],
        out: T.Tensor[(tokens, heads, 2 * HALF), T.bfloat16],
        lse: T.Tensor[(num_requests, heads, s_q), T.float32],
        k: T.int32,
        extra_k: T.int32,
        num_splits: T.int32,
        split: T.int32,
    ):
        with T.Kernel(
            tokens * T.ceildiv(heads, COMBINE_ROWS), threads=COMBINE_ROWS * WARP
        ) as block:
            lane = T.get_thread_binding() % WARP
            token = block // T.ceildiv(heads, COMBINE_ROWS)
            head = block % T.ceildiv(heads, COMBINE_ROWS) * COMBINE_ROWS
            head = head + T.get_thread_binding() // WARP
            request = token // s_q
            first = T.alloc_var(T.int32, init=request * num_splits)
            count = T.alloc_var(T.int32, init=0)
            if planned:
                first = splits[request, 0]
                count = splits[request, 1]
            else:
                length = T.alloc_var(T.int32, init=k)
                extra_length = T.alloc_var(T.int32, init=extra_k)
                if with_length:
                    length = T.max(0, T.min(k, lengths[request]))
                if with_extra_length:
                    extra_length = T.max(0, T.min(extra_k, extra_lengths[request]))
                count = T.ceildiv(pairs_of(length, extra_length), split)
            if head < heads and count > 1:
                top = T.alloc_var(f32, init=-T.infinity(f32))
                total = T.alloc_var(f32, init=T.float32(0))
                full = T.alloc_var(f32, init=T.float32(0))
                weight = T.alloc_var(f32, init=T.float32(0))
                kept = T.alloc_local((4, 4), f32)
                part = T.alloc_local((4,), f32)
                rounded = T.alloc_local((4,), T.bfloat16)
                for i in T.unroll(4):
                    for v in T.unroll(4):
                        kept[i, v] = T.float32(0)
                for i in T.serial(count):
                    top = T.max(top, part_lse[(first + i) * s_q + token % s_q, head])
                for i in T.serial(count):
                    # Without any key: 0, not the NaN of two infinities.
                    weight = part_lse[(first + i) * s_q + token % s_q, head]
                    if weight != -T.infinity(f32):
                        total = total + T.exp2(weight - top)
                full = total
                if with_sink:
                    if total > 0:
                        full = total + T.exp2(sink[head] * LOG2E - top)
                for i in T.serial(count):
                    weight = part_lse[(first + i) * s_q + token % s_q, head]
                    weight = T.if_then_else(
                        weight == -T.infinity(f32), T.float32(0), T.exp2(weight - top) / full
                    )
                    for j in T.unroll(4):
                        for v in T.vectorized(4):
                            part[v] = part_out[
                                (first + i) * s_q + token % s_q, head, j * 128 + lane * 4 + v
                            ]
                        for v in T.unroll(4):
                            kept[j, v] = kept[j, v] + weight * part[v]
                for j in T.unroll(4):
                    for v in T.unroll(4):
                        rounded[v] = T.cast(kept[j, v], T.bfloat16)
                    for v in T.vectorized(4):
                        out[token, head, j * 128 + lane * 4 + v] = rounded[v]
                if lane == 0:
                    lse[request, head, token % s_q] = T.if_then_else(
                        total == 0.0, T.infinity(f32), (T.log2(total) + top) * LN2
                    )

    return combine


# ---- the plan -----------------------------------------------------------------------------------


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def make_plan(with_length: bool, with_extra_length: bool) -> Any:
    """One block. Each lane tries a length of splits, the warps share the requests.

    Time is estimated as waves of blocks times their length; the best length is taken, and each
    request is cut into equal splits not longer than that.
    """
    num_requests, num_items = T.dynamic("num_requests num_items")
    warps = PLAN_THREADS // WARP

    @T.prim_func
    def plan_splits(
        lengths: T.Tensor[(num_requests,), T.int32],
        extra_lengths: T.Tensor[(num_requests,), T.int32],
        items: T.Tensor[(num_items, 4), T.int32],
        splits: T.Tensor[(num_requests, 2), T.int32],
        k: T.int32,
        extra_k: T.int32,
        blocks: T.int32,  # that run at once, of a token's heads
    ):
        with T.Kernel(1, threads=PLAN_THREADS):
            tx = T.get_thread_binding()
            counts = T.alloc_shared((warps, CANDIDATES), T.int32)
            starts = T.alloc_shared((PLAN_THREADS,), T.int32)
            longest = T.alloc_var(T.int32, init=T.max(pairs_of(k, extra_k), 1))
            candidate = T.alloc_var(T.int32, init=T.ceildiv(longest, tx % WARP + 1))
            count = T.alloc_var(T.int32, init=0)
            pairs = T.alloc_var(T.int32, init=0)
            length = T.alloc_var(T.int32, init=0)
            extra_length = T.alloc_var(T.int32, init=0)
            best = T.alloc_var(T.int32, init=0)
            cost = T.alloc_var(T.int32, init=0)
            other = T.alloc_var(T.int32, init=0)
            request = T.alloc_var(T.int32, init=0)
            base = T.alloc_var(T.int32, init=0)

            for i in T.serial(T.ceildiv(num_requests, warps)):
                request = i * warps + tx // WARP
                if request < num_requests:
                    length = k
                    extra_length = extra_k
                    if with_length:
                        length = T.max(0, T.min(k, lengths[request]))
                    if with_extra_length:
                        extra_length = T.max(0, T.min(extra_k, extra_lengths[request]))
                    pairs = pairs_of(length, extra_length)
                    count = count + T.max(T.ceildiv(pairs, candidate), 1)
            counts[tx // WARP, tx % WARP] = count
            T.sync_threads()
            count = 0
            for w in T.serial(warps):
                count = count + counts[w, tx % WARP]
            cost = T.ceildiv(count, blocks) * (2 * candidate + FIXED_COST)
            if candidate < longest:
                cost = cost + COMBINE_COST
            if count > num_items:
                cost = 2147483647
            best = candidate
            for d in T.unroll(5):
                other = T.shfl_xor(cost, 1 << d)
                count = T.shfl_xor(best, 1 << d)
                if other < cost or (other == cost and count > best):
                    cost = other
                    best = count

            for chunk in T.serial(T.ceildiv(num_requests, PLAN_THREADS)):
                request = chunk * PLAN_THREADS + tx
                count = 0
                pairs = 0
                if request < num_requests:
                    length = k
                    extra_length = extra_k
                    if with_length:
                        length = T.max(0, T.min(k, lengths[request]))
                    if with_extra_length:
                        extra_length = T.max(0, T.min(extra_k, extra_lengths[request]))
                    pairs = pairs_of(length, extra_length)
                    count = T.max(T.ceildiv(pairs, best), 1)
                T.sync_threads()
                starts[tx] = count
                T.sync_threads()
                for d in T.serial(PLAN_STEPS):  # inclusive prefix sums
                    other = 0
                    if tx >= (1 << d):
                        other = starts[tx - (1 << d)]
                    T.sync_threads()
                    starts[tx] = starts[tx] + other
                    T.sync_threads()
                if request < num_requests:
                    other = base + starts[tx] - count
                    splits[request, 0] = other
                    splits[request, 1] = count
                    length = T.ceildiv(pairs, count)
                    for s in T.serial(count):
                        items[other + s, 0] = request
                        items[other + s, 1] = T.min(s * length, pairs)
                        items[other + s, 2] = T.min(s * length + length, pairs)
                        items[other + s, 3] = other + s
                base = base + starts[PLAN_THREADS - 1]
            for i in T.serial(T.ceildiv(num_items, PLAN_THREADS)):
                if i * PLAN_THREADS + tx >= base and i * PLAN_THREADS + tx < num_items:
                    for c in T.unroll(4):
                        items[i * PLAN_THREADS + tx, c] = T.if_then_else(c == 3, -1, 0)

    return plan_splits
