"""Rows of paged key-value caches: written, read back, and their slots."""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.cache.plan import ROWS_PER_BLOCK, Plan
from tile_kernels.attention.cache_layout import LAYOUTS, Layout
from tile_kernels.quant.primitives import CLAMP_MIN, group_amax, scale_of
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

CHUNK = 16  # channels of a thread
WORDS = 4  # int32 in 16 bytes: a thread's codes


def pages_type(layout: Layout, num_pages: Any, cells: Any, stride: Any) -> Any:
    """The type of a cache as `flat_pages` gives it."""
    dtype = T.int32 if layout.plain else T.bfloat16
    return T.StridedTensor[(num_pages, cells), (stride, 1), dtype]


def assume_aligned(layout: Layout, stride: Any) -> None:
    """In a kernel: pages start at multiples of 16 bytes."""
    T.evaluate(T.assume(stride % (WORDS if layout.plain else 8) == 0))


def data_word(layout: Layout, offset: Any) -> Any:
    """The first word of a token's codes in its page."""
    return (576 if layout.name == "v4" else 656) // 4 * offset


def rotated_word(layout: Layout, offset: Any) -> Any:
    """The first word of a token's rotated channels."""
    return data_word(layout, offset) + (112 if layout.name == "v4" else 132)


def scale_word(layout: Layout, offset: Any, page_size: Any) -> Any:
    """The first word of a token's scales."""
    if layout.name == "v4":
        return 144 * page_size + 2 * offset
    return data_word(layout, offset) + 128


def append_access(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    p = Plan(*static)
    if p.layout == "bf16":
        return (32, 128), (128,)
    return (32, 128), (32, 128)


@kernel(access_bits=append_access, pass_configs=EXPLICIT_GUARDS)
def append_rows(*static: Any) -> Any:
    """A warp per row. `rows` are bfloat16 to cast; else codes, scales and rotated channels come."""
    p = Plan(*static)
    layout = LAYOUTS[p.layout]
    groups = max(layout.groups, 1)
    num_rows, num_pages, cells, stride = T.dynamic("num_rows num_pages cells stride")
    pages_t = pages_type(layout, num_pages, cells, stride)
    amax_of, scaled = group_amax(CHUNK, max(layout.group, 1)), scale_of("e4m3", True)
    lanes_of_codes = layout.plain // CHUNK  # 28 or 32

    @T.macro
    def copy_row(pages, page, offset, rows, row, lane):
        """bfloat16 as it is: 16 channels of a thread."""
        kept = T.alloc_local((8,), T.bfloat16)
        for half in T.unroll(2):
            channel = half * 256 + lane * 8
            for v in T.vectorized(8):
                kept[v] = rows[row, channel + v]
            for v in T.vectorized(8):
                pages[page, offset * 512 + channel + v] = kept[v]

    @T.macro
    def cast_row(pages, page, offset, page_size, rows, row, lane):
        kept = T.alloc_local((CHUNK,), T.bfloat16)
        values = T.alloc_local((CHUNK,), T.float32)
        scale = T.alloc_local((2,), T.float32)
        codes = T.alloc_local((CHUNK,), T.float8_e4m3fn)
        words, raw = T.view(codes, (WORDS,), T.int32), T.view(kept, (2 * WORDS,), T.int32)
        exponents = T.alloc_var(T.int32, init=0)
        for half in T.unroll(2):
            for v in T.vectorized(8):
                kept[half * 8 + v] = rows[row, lane * CHUNK + half * 8 + v]
        for v in T.unroll(CHUNK):
            values[v] = T.cast(kept[v], T.float32)
        scaled(amax_of(values, 0), T.float32(CLAMP_MIN["e4m3"]), scale)
        for v in T.unroll(CHUNK):
            values[v] = T.ieee_mul(values[v], scale[1])
        for v in T.vectorized(CHUNK):
            codes[v] = T.cast(values[v], T.float8_e4m3fn)
        if lane < lanes_of_codes:
            for v in T.vectorized(WORDS):
                pages[page, data_word(layout, offset) + lane * WORDS + v] = words[v]
        if layout.name == "v4":
            if lane < lanes_of_codes and lane % 4 == 0:
                exponents = (T.reinterpret(scale[0], T.int32) >> 23) << (lane // 4 % 4 * 8)
            exponents = exponents | T.shfl_xor(exponents, 4)
            exponents = exponents | T.shfl_xor(exponents, 8)
            if lane % 16 == 0:
                pages[page, scale_word(layout, offset, page_size) + lane // 16] = exponents
            if lane >= lanes_of_codes:
                for half in T.unroll(2):
                    for v in T.vectorized(WORDS):
                        pages[
                            page,
                            rotated_word(layout, offset)
                            + (lane - lanes_of_codes) * 2 * WORDS
                            + half * WORDS
                            + v,
                        ] = raw[half * WORDS + v]
        else:
            if lane % 8 == 0:
                pages[page, scale_word(layout, offset, page_size) + lane // 8] = T.reinterpret(
                    scale[0], T.int32
                )
            for v in T.vectorized(2):
                kept[v] = rows[row, layout.plain + lane * 2 + v]
            pages[page, rotated_word(layout, offset) + lane] = raw[0]

    @T.macro
    def store_row(pages, page, offset, page_size, codes, sf, rotated, row, lane):
        words = T.alloc_local((WORDS,), T.int32)
        more = T.alloc_local((WORDS,), T.int32)
        exponents = T.alloc_var(T.int32, init=0)
        if lane < lanes_of_codes:
            for v in T.vectorized(WORDS):
                words[v] = codes[row, lane * WORDS + v]
            for v in T.vectorized(WORDS):
                pages[page, data_word(layout, offset) + lane * WORDS + v] = words[v]
        if lane < layout.rotated // 8:  # another array: a second read of the first is not repeated
            for v in T.vectorized(WORDS):
                more[v] = rotated[row, lane * WORDS + v]
            for v in T.vectorized(WORDS):
                pages[page, rotated_word(layout, offset) + lane * WORDS + v] = more[v]
        if layout.name == "v4":
            if lane < 2:
                for g in T.unroll(4):
                    if lane * 4 + g < groups:
                        exponents = exponents | (
                            (T.reinterpret(sf[row, lane * 4 + g], T.int32) >> 23 & 255) << (8 * g)
                        )
                pages[page, scale_word(layout, offset, page_size) + lane] = exponents
        elif lane < groups:
            pages[page, scale_word(layout, offset, page_size) + lane] = T.reinterpret(
                sf[row, lane], T.int32
            )

    @T.prim_func
    def append_to_cache(
        pages: pages_t,
        slots: T.Tensor[(num_rows,), T.int32],
        rows: T.Tensor[(num_rows, layout.channels), T.bfloat16],
        codes: T.Tensor[(num_rows, max(layout.plain // 4, 1)), T.int32],
        sf: T.Tensor[(num_rows, groups), T.float32],
        rotated: T.Tensor[(num_rows, layout.rotated // 2), T.int32],
        page_size: T.int32,
        limit: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, ROWS_PER_BLOCK), threads=ROWS_PER_BLOCK * WARP) as block:
            assume_aligned(layout, stride)
            lane = T.get_thread_binding() % WARP
            row = block * ROWS_PER_BLOCK + T.get_thread_binding() // WARP
            slot = T.alloc_var(T.int32, init=-1)
            if row < num_rows:
                slot = slots[row]
            if slot >= 0 and slot < limit:  # the same for the whole warp
                page = T.alloc_var(T.int32, init=slot // page_size)
                offset = T.alloc_var(T.int32, init=slot % page_size)
                if not layout.plain:
                    copy_row(pages, page, offset, rows, row, lane)
                elif p.cast:
                    cast_row(pages, page, offset, page_size, rows, row, lane)
                else:
                    store_row(pages, page, offset, page_size, codes, sf, rotated, row, lane)

    return append_to_cache


def gather_access(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (32, 128), ((128,) if layout != "v3.2" else (32, 128))


@kernel(access_bits=gather_access, pass_configs=EXPLICIT_GUARDS)
def gather_rows(name: str) -> Any:
    """A warp per row."""
    layout = LAYOUTS[name]
    num_rows, num_pages, cells, stride = T.dynamic("num_rows num_pages cells stride")
    pages_t = pages_type(layout, num_pages, cells, stride)
    lanes_of_codes = layout.plain // CHUNK

    @T.macro
    def copied(pages, page, offset, read, lane):
        for half in T.unroll(2):
            for v in T.vectorized(8):
                read[half * 8 + v] = pages[page, offset * 512 + lane * CHUNK + half * 8 + v]

    @T.macro
    def decoded(pages, page, offset, page_size, read, more, lane):
        words = T.alloc_local((WORDS,), T.int32)
        codes = T.view(words, (CHUNK,), T.float8_e4m3fn)
        raw, rest = T.view(read, (2 * WORDS,), T.int32), T.view(more, (1,), T.int32)
        bits = T.alloc_var(T.int32, init=0)
        scale = T.alloc_var(T.float32, init=T.float32(0))
        if lane < lanes_of_codes:
            for v in T.vectorized(WORDS):
                words[v] = pages[page, data_word(layout, offset) + lane * WORDS + v]
            if layout.name == "v4":
                bits = pages[page, scale_word(layout, offset, page_size) + lane // 16]
                bits = bits >> (lane // 4 % 4 * 8) & 255
                # The exponent 0 is 2**-127, which float32 has as a subnormal number.
                scale = T.reinterpret(T.if_then_else(bits == 0, 1 << 22, bits << 23), T.float32)
            else:
                bits = pages[page, scale_word(layout, offset, page_size) + lane // 8]
                scale = T.reinterpret(bits, T.float32)
            for v in T.unroll(CHUNK):
                read[v] = T.cast(T.ieee_mul(T.cast(codes[v], T.float32), scale), T.bfloat16)
        else:
            for half in T.unroll(2):
                for v in T.vectorized(WORDS):
                    raw[half * WORDS + v] = pages[
                        page,
                        rotated_word(layout, offset)
                        + (lane - lanes_of_codes) * 2 * WORDS
                        + half * WORDS
                        + v,
                    ]
        if layout.name == "v3.2":
            rest[0] = pages[page, rotated_word(layout, offset) + lane]

    @T.prim_func
    def gather_from_cache(
        pages: pages_t,
        slots: T.Tensor[(num_rows,), T.int32],
        rows: T.Tensor[(num_rows, layout.channels), T.bfloat16],
        page_size: T.int32,
        limit: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, ROWS_PER_BLOCK), threads=ROWS_PER_BLOCK * WARP) as block:
            assume_aligned(layout, stride)
            lane = T.get_thread_binding() % WARP
            row = block * ROWS_PER_BLOCK + T.get_thread_binding() // WARP
            if row < num_rows:
                slot = T.alloc_var(T.int32, init=slots[row])
                read = T.alloc_local((CHUNK,), T.bfloat16)
                more = T.alloc_local((2,), T.bfloat16)
                for v in T.unroll(CHUNK):
                    read[v] = T.bfloat16(0)
                for v in T.unroll(2):
                    more[v] = T.bfloat16(0)
                if slot >= 0 and slot < limit:
                    if layout.plain:
                        decoded(
                            pages, slot // page_size, slot % page_size, page_size, read, more, lane
                        )
                    else:
                        copied(pages, slot // page_size, slot % page_size, read, lane)
                for half in T.unroll(2):
                    for v in T.vectorized(8):
                        rows[row, lane * CHUNK + half * 8 + v] = read[half * 8 + v]
                if layout.name == "v3.2":
                    for v in T.vectorized(2):
                        rows[row, layout.plain + lane * 2 + v] = more[v]

    return gather_from_cache


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def cache_slots(threads: int) -> Any:
    num, num_requests, max_pages = T.dynamic("num num_requests max_pages")

    @T.prim_func
    def slots_of_positions(
        logical: T.Tensor[(num,), T.int32],
        block_table: T.Tensor[(num_requests, max_pages), T.int32],
        slots: T.Tensor[(num,), T.int32],
        per_request: T.int32,
        page_size: T.int32,
    ):
        with T.Kernel(T.ceildiv(num, threads), threads=threads) as block:
            i = block * threads + T.get_thread_binding()
            if i < num:
                position = T.alloc_var(T.int32, init=logical[i])
                page = T.alloc_var(T.int32, init=-1)
                slot = T.alloc_var(T.int64, init=T.int64(-1))
                if position >= 0 and position // page_size < max_pages:
                    page = block_table[i // per_request, position // page_size]
                if page >= 0:
                    slot = T.cast(page, T.int64) * page_size + position % page_size
                    if slot > 2147483647:
                        slot = T.int64(-1)
                slots[i] = T.cast(slot, T.int32)

    return slots_of_positions
