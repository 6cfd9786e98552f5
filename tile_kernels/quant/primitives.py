"""Device macros of the casts: formats, scales and their layouts, vectors of a row.

The mirror of `tile_kernels.quant.formats` and `.scales`, which define every bit. A cast reads as
load -> amax -> scale -> encode -> store; each step is a macro here.
"""

import math
from typing import Any

from tilelang import language as T

from tile_kernels.quant.storage import (
    ARITHMETIC,
    HALVES,
    INSTRUCTION,
    LANES,
    PACKED,
    PACKED_ROW,
    is_by_rows,
    is_e4m3,
    is_packed,
    storage,
    units,
)

MAX = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}
CLAMP_MIN = {"e4m3": 1e-4, "e2m1": 6.0 * 2.0**-126, "e5m6": 1e-4}
LARGEST_FLOAT = 3.4028234663852886e38

# For kernels that use `e2m1_pair`.
E2M1_PRELUDE = """
#include <cuda_fp4.h>
__device__ __forceinline__ int e2m1_pair(float low, float high) {
  return __nv_cvt_float2_to_fp4x2(make_float2(low, high), __NV_E2M1, cudaRoundNearest);
}
"""


def local_arrays(dtype: Any, *sizes: int) -> tuple[Any, ...]:
    """In a kernel: arrays of `sizes` elements in registers."""
    return tuple(T.alloc_local((size,), dtype) for size in sizes)


# ---- formats ------------------------------------------------------------------------------------


def e2m1_prelude(conversion: str) -> str | None:
    """What a kernel with this conversion begins with."""
    return E2M1_PRELUDE if conversion == INSTRUCTION else None


def unit_of_factors(conversion: str) -> float:
    """What factors of values are multiplied by; see `e2m1_word`."""
    return 2.0**-14 if conversion == HALVES else 1.0


def e2m1_pair(low: Any, high: Any) -> Any:
    """Two float32 -> their codes in an int32, to nearest, ties to even, saturating; NaN is 7.

    An instruction of Blackwell's; elsewhere the same, but slow. For kernels with `e2m1_prelude`.
    """
    return T.call_extern(T.int32, "e2m1_pair", low, high)


@T.macro
def e2m1_code(value):
    """float32 -> 4-bit code in an int32: to nearest, ties to even, saturating; NaN is 7.

    The codes count steps: of a half up to 2, of 1 up to 4, of 2 up to 6. So the code is the sum of
    the three parts of the magnitude, in steps. Adding each to 2**23, where floats are integers,
    rounds it; the sums before a tie are even, so that ties go to even codes. A NaN that arithmetic
    returned is positive, so its code has no sign.
    """
    magnitude = T.alloc_var(T.float32, init=T.min(T.abs(value), T.float32(6)))  # drops NaN
    steps = T.alloc_var(T.float32)
    steps = T.fma(T.min(magnitude, T.float32(2)), T.float32(2), T.float32(8388608))
    steps = T.fma(saturated_half(magnitude, 2), T.float32(2), steps)
    steps = T.ieee_add(steps, saturated_half(magnitude, 4))
    sign = (T.reinterpret(value, T.int32) >> 28) & 8
    return (T.reinterpret(steps, T.int32) & 7) | sign


@T.macro
def saturated_half(value, start):
    """`(value - start) / 2`, but at least 0 and at most 1; exact between."""
    return T.call_extern(
        T.float32, "__saturatef", T.fma(value, T.float32(0.5), T.float32(-0.5 * start))
    )


@T.macro
def e2m1_word(values, base, words, index):
    """Eight values, from `base` on, to eight codes in the uint32 `words[index]`; twice as fast.

    For products of a bfloat16 and 2**-14 times a power of two, of magnitudes up to 6 * 2**-14 or
    infinite, or NaN. There the bits of a float16 count as the codes do, with nine bits below: those
    are rounded away, to nearest, ties to even. What a float16 itself cannot hold is below 0.25.
    """
    paired = T.alloc_local((8,), T.float32)
    halves = T.alloc_local((8,), T.float16)
    pairs = T.view(halves, (4,), T.uint32)
    for i in T.unroll(4):
        paired[2 * i] = values[base + i]
        paired[2 * i + 1] = values[base + i + 4]
    for i in T.vectorized(8):
        halves[i] = T.cast(paired[i], T.float16)
    if ((pairs[0] | pairs[1] | pairs[2] | pairs[3]) & T.uint32(0x70007000)) != T.uint32(0):
        for i in T.unroll(4):  # infinities and NaN are 6
            if (pairs[i] & T.uint32(0x7000)) != T.uint32(0):
                pairs[i] = (pairs[i] & T.uint32(0xFFFF8000)) | T.uint32(0x0E00)
            if (pairs[i] & T.uint32(0x70000000)) != T.uint32(0):
                pairs[i] = (pairs[i] & T.uint32(0x8000FFFF)) | T.uint32(0x0E000000)
    for i in T.unroll(4):
        pairs[i] = (
            pairs[i] + T.uint32(0x00FF00FF) + ((pairs[i] >> T.uint32(9)) & T.uint32(0x00010001))
        )
        pairs[i] = (pairs[i] & T.uint32(0x0E000E00)) | (
            (pairs[i] >> T.uint32(3)) & T.uint32(0x10001000)
        )
    words[index] = (
        (pairs[0] >> T.uint32(9))
        | (pairs[1] >> T.uint32(5))
        | (pairs[2] >> T.uint32(1))
        | (pairs[3] << T.uint32(3))
    )


@T.macro
def e5m6_code(value):
    """float32 -> 12-bit code in an int32, saturating at 65024; NaN is 0x7E0.

    Below 2**-14 the format truncates to a multiple of 2**-20 and adds a carry that the low 17 bits
    of the float32 decide, whatever was cut off.
    """
    bits = T.alloc_var(T.int32, init=T.reinterpret(value, T.int32))
    magnitude = T.alloc_var(T.int32, init=T.min(bits & 0x7FFFFFFF, 0x477E0000))  # 65024
    code = T.alloc_var(T.int32)
    code = (magnitude - (112 << 23)) >> 17  # the exponent rebiased, six bits of mantissa
    if magnitude < 0x38800000:  # 2**-14
        code = ((magnitude & 0x7FFFFF) | 0x800000) >> T.min(T.max(130 - (magnitude >> 23), 0), 31)
    if (code & 1) + (magnitude & 0x1FFFF) > 0x10000:
        code = code + 1
    code = code | ((bits >> 20) & 0x800)
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        code = 0x7E0
    return code


@T.macro
def e2m1_value(code):
    """4-bit code (int32) -> float32, exactly."""
    magnitude = code & 7
    # 1 and above: the bits are exponent and mantissa, three exponents above float32's 2**-126.
    large = T.reinterpret((magnitude + (126 << 1)) << 22, T.float32)
    small = T.cast(magnitude, T.float32) * T.float32(0.5)
    unsigned = T.alloc_var(T.float32, init=T.Select(magnitude >= 2, large, small))
    return T.reinterpret(T.reinterpret(unsigned, T.int32) | ((code & 8) << 28), T.float32)


@T.macro
def e5m6_value(code):
    """12-bit code (int32) -> float32, exactly: the upper bits of a float16."""
    return T.cast(T.reinterpret(T.cast(code << 4, T.uint16), T.float16), T.float32)


# ---- scales -------------------------------------------------------------------------------------


def scale_of(fmt: str, round_sf: bool) -> Any:
    """A macro: `scale[0]`, the scale of a group, and `scale[1]`, the factor before encoding.

    `amax` is the group's largest magnitude; infinity counts as the largest float32. The exponent of
    a rounded scale takes a product where the quotient has the same: of 448 and 6, at every power of
    two and its neighbours, not of 65024.
    """
    largest = MAX[fmt]
    multiplied = round_sf and fmt in ("e4m3", "e2m1")

    @T.macro
    def scaled(amax, clamp_min, scale):
        bounded = T.alloc_var(
            T.float32, init=T.max(T.min(amax, T.float32(LARGEST_FLOAT)), clamp_min)
        )
        if multiplied:
            scale[0] = T.ieee_mul(bounded, T.float32(1 / largest))
        else:
            scale[0] = T.ieee_fdiv(bounded, T.float32(largest))
        if round_sf:
            exponent = T.alloc_var(T.int32, init=((T.reinterpret(scale[0], T.int32) - 1) >> 23) + 1)
            scale[0] = T.reinterpret(exponent << 23, T.float32)
            scale[1] = T.reinterpret((254 - exponent) << 23, T.float32)
        else:
            scale[1] = T.ieee_fdiv(T.float32(largest), bounded)

    return scaled


def e4m3_scale_of(fmt: str, has_factor: bool) -> Any:
    """A macro: as `scale_of`, with a scale in e4m3; `factor` is the factor of all scales.

    `scale[0]` is without that factor.
    """
    largest = MAX[fmt]

    @T.macro
    def scaled(amax, clamp_min, factor, scale):
        code = T.alloc_local((1,), "float8_e4m3fn")
        divisor = T.alloc_var(T.float32, init=T.float32(largest))
        if has_factor:
            divisor = T.ieee_mul(divisor, factor)
        ratio = T.alloc_var(
            T.float32, init=T.ieee_fdiv(T.min(amax, T.float32(LARGEST_FLOAT)), divisor)
        )
        ratio = T.max(ratio, T.ieee_fdiv(clamp_min, T.float32(largest)))
        code[0] = T.cast(ratio, "float8_e4m3fn")
        scale[0] = T.cast(code[0], T.float32)
        if has_factor:
            scale[1] = T.ieee_fdiv(T.float32(1), T.ieee_mul(scale[0], factor))
        else:
            scale[1] = T.ieee_fdiv(T.float32(1), scale[0])

    return scaled


@T.macro
def exponent_of(scale):
    """The ue8m0 byte of a power of two, in an int32."""
    return T.reinterpret(scale, T.int32) >> 23


def read_scale(packed: bool) -> Any:
    """A macro: the scale of block `(m, g)` in a buffer of any strides."""

    @T.macro
    def read(sf, m, g):
        if packed:
            return T.reinterpret(((sf[m, g // 4] >> (g % 4 * 8)) & 255) << 23, T.float32)
        return T.cast(sf[m, g], T.float32)

    return read


def write_scale(layout: str) -> Any:
    """A macro: put the scale of row `m`, group `g` where the layout has it (not packed)."""

    @T.macro
    def write(sf, m, g, value):
        stored = T.cast(value, "float8_e4m3fn") if is_e4m3(layout) else value
        if is_by_rows(layout):
            sf[m, g] = stored
        else:
            sf[g, m] = stored

    return write


def scale_of_row(fmt: str, round_sf: bool, layout: str, threads: int, written: bool) -> Any:
    """A macro: `scale` of a row (see `scale_of`) by all threads of a block, each with its `amax`.

    `warp_maxima` is shared, a float32 for each warp. If it is `written`, the scale goes to `sf`,
    as zero where the row does not exist.
    """
    warps = threads // LANES
    scaled = scale_of(fmt, round_sf)
    write = write_scale(layout)

    @T.macro
    def scaled_row(amax, warp_maxima, clamp_min, scale, sf, row, exists):
        tx = T.get_thread_binding()
        row_max = T.alloc_var(T.float32, init=amax)
        for d in T.unroll(5):
            row_max = T.max(row_max, T.shfl_xor(row_max, T.shift_left(1, d)))
        if tx % LANES == 0:
            warp_maxima[tx // LANES] = row_max
        T.sync_threads()
        for w in T.unroll(warps):
            row_max = T.max(row_max, warp_maxima[w])
        scaled(row_max, clamp_min, scale)
        if written:
            if tx == 0:
                shown = T.alloc_var(T.float32, init=scale[0])
                if not exists:
                    shown = T.float32(0)
                if layout == PACKED:
                    sf[0, row] = exponent_of(shown)
                elif layout == PACKED_ROW:
                    sf[row, 0] = exponent_of(shown)
                else:
                    write(sf, row, 0, shown)

    return scaled_row


def group_amax(chunk: int, group: int) -> Any:
    """A macro: the largest magnitude of a thread's group `i`, over the lanes that share it.

    Each thread has `chunk` neighbouring values, lanes are neighbours; both are powers of two.
    """
    per_thread = max(1, chunk // group)
    lanes = max(1, group // chunk)

    @T.macro
    def amax_of(values, i):
        amax = T.alloc_var(T.float32, init=T.float32(0))
        for v in T.unroll(chunk // per_thread):
            amax = T.max(amax, T.abs(values[i * (chunk // per_thread) + v]))
        for d in T.unroll(lanes.bit_length() - 1):
            amax = T.max(amax, T.shfl_xor(amax, T.shift_left(1, d)))
        return amax

    return amax_of


def write_group_scales(
    layout: str, width: int, chunk: int, group: int, batched: bool = False
) -> Any:
    """A macro: the scales of a thread's groups, each by its first lane.

    They are zero where the row does not exist, or past the last group. The whole warp calls it.
    `batched`: the macro has one more argument, the columns of `sf` before those of the row's batch.
    """
    groups = -(-width // group)
    per_thread = max(1, chunk // group)  # groups of one thread
    lanes = max(1, group // chunk)  # threads of one group
    write = write_scale(layout)

    @T.macro
    def write_scales(sf, row, first, lane, scales, exists, before):
        if is_packed(layout):
            word = T.alloc_var(T.int32, init=0)
            for i in T.unroll(per_thread):
                g = first // group + i
                if exists and g < groups:
                    word = word | (exponent_of(scales[i]) << (g % 4 * 8))
            for d in T.unroll(max(0, (4 // per_thread).bit_length() - 1)):
                word = word | T.shfl_xor(word, T.shift_left(lanes, d))
            if lane % (4 * lanes // per_thread) == 0 and first < width:
                if layout == PACKED:
                    sf[before + first // group // 4, row] = word
                else:
                    sf[row, first // group // 4] = word
        else:
            for i in T.unroll(per_thread):
                g = first // group + i
                if lane % lanes == 0 and g < groups:
                    if exists:
                        write(sf, row, before + g, scales[i])
                    else:
                        write(sf, row, before + g, T.float32(0))

    @T.macro
    def write_one_batch(sf, row, first, lane, scales, exists):
        write_scales(sf, row, first, lane, scales, exists, 0)

    return write_scales if batched else write_one_batch


# ---- rows ---------------------------------------------------------------------------------------


@T.macro
def low_half(word):
    """The first bfloat16 of a word, as float32."""
    return T.reinterpret(word << T.uint32(16), T.float32)


@T.macro
def high_half(word):
    """The second bfloat16 of a word, as float32."""
    return T.reinterpret(word & T.uint32(0xFFFF0000), T.float32)


def fetch_values(source: str, width: int, count: int, vector: int, offset: int = 0) -> Any:
    """A macro: the elements that hold `count` neighbouring values, zero past the row's end.

    They go to `raw` from `base` on. `first` is a multiple of `count`; `vector` values come with one
    load. The row of `width` values starts `offset`, a multiple of `vector`, into the buffer's.
    Nothing waits for the loads here: fetch all that is needed, then widen.
    """
    dtype, _ = storage(source)
    elements = units(source, vector)
    whole = width % count == 0  # all of a thread's values exist, or none

    @T.macro
    def fetch(x, row, first, raw, base):
        for i in T.unroll(count // vector):
            for v in T.vectorized(elements):
                raw[base + i * elements + v] = T.cast(T.float32(0), dtype)
        for c in T.unroll(1 if whole else count // vector):
            if first + c * vector < width:
                for i in T.unroll(count // vector if whole else 1):
                    for v in T.vectorized(elements):
                        raw[base + (c + i) * elements + v] = x[
                            row, ((offset + first) // vector + c + i) * elements + v
                        ]

    return fetch


def widen_values(source: str, count: int, vector: int) -> Any:
    """A macro: `count` values as float32, exactly, of the elements of `raw` from `base` on.

    They were fetched `vector` at a time; those that came one by one are converted one by one, so
    that they need no memory to meet in.
    """
    elements = units(source, count)

    @T.macro
    def widen(raw, base, values):
        if source == "e2m1":
            for v in T.unroll(elements):
                pair = T.alloc_var(T.int32, init=T.cast(raw[base + v], T.int32))
                values[2 * v] = e2m1_value(pair & 15)
                values[2 * v + 1] = e2m1_value(pair >> 4)
        elif source == "bfloat16" and count % 2 == 0:
            words = T.view(raw, (math.prod(raw.shape) // 2,), T.uint32)
            for v in T.unroll(count // 2):
                values[2 * v] = low_half(words[base // 2 + v])
                values[2 * v + 1] = high_half(words[base // 2 + v])
        else:
            for v in T.unroll(elements) if vector == 1 else T.vectorized(elements):
                values[v] = T.cast(raw[base + v], T.float32)

    return widen


def multiply_scales(count: int, block: tuple[int, int], packed: bool) -> Any:
    """A macro: the values of a quantised row times their scales, by blocks of `block`."""
    run = math.gcd(block[1], count)  # values that surely share a scale
    read = read_scale(packed)

    @T.macro
    def multiplied(sf, row, first, width, values):
        for c in T.unroll(count // run):
            if first + c * run < width:
                scale = T.alloc_var(
                    T.float32, init=read(sf, row // block[0], (first + c * run) // block[1])
                )
                for v in T.unroll(run):
                    values[c * run + v] = T.ieee_mul(values[c * run + v], scale)

    return multiplied


@T.macro
def encode_e5m6(values, factor, words, index):
    """Eight values times the factor to three words, from `index` on.

    From 2**-14 on, the six bits of mantissa are rounded by adding a number whose last bit is the
    sixth of the value's, and taking it away; that leaves the upper 12 bits of a float16. Smaller
    values, and what has no finite float16, take the slow path.
    """
    paired = T.alloc_local((8,), T.float32)
    halves = T.alloc_local((8,), T.float16)
    pairs = T.view(halves, (4,), T.uint32)
    bits = T.alloc_var(T.uint32)
    smallest = T.alloc_var(T.uint32, init=T.uint32(0xFFFFFFFF))
    for v in T.unroll(8):
        values[v] = T.ieee_mul(values[v], factor)
        bits = T.reinterpret(values[v], T.uint32)
        smallest = T.min(smallest, bits * T.uint32(2) - T.uint32(1))  # of those that are not zero
        middle = T.alloc_var(
            T.float32,
            init=T.reinterpret((bits & T.uint32(0x7F800000)) + T.uint32(0x08C00000), T.float32),
        )
        rounded = T.ieee_sub(T.ieee_add(values[v], middle), middle)
        # The second of a pair in the lower half; the sign for zeros.
        paired[v ^ 1] = T.reinterpret(
            T.reinterpret(rounded, T.uint32) | (bits & T.uint32(0x80000000)), T.float32
        )
    for v in T.vectorized(8):
        halves[v] = T.cast(paired[v], T.float16)
    large = T.alloc_var(T.uint32, init=T.uint32(0))  # infinite exponents
    for i in T.unroll(4):
        large = large | ((pairs[i] & T.uint32(0x7C007C00)) + T.uint32(0x04000400))
    for i in T.unroll(4):  # two codes in 24 bits
        pairs[i] = ((pairs[i] >> T.uint32(8)) & T.uint32(0xFFF000)) | (
            (pairs[i] >> T.uint32(4)) & T.uint32(0xFFF)
        )
    if smallest < T.uint32(2 * 0x38800000 - 1) or (large & T.uint32(0x80008000)) != T.uint32(0):
        for i in T.unroll(4):
            pairs[i] = T.cast(
                (e5m6_code(values[2 * i]) << 12) | e5m6_code(values[2 * i + 1]), T.uint32
            )
    words[index] = T.cast((pairs[0] << T.uint32(8)) | (pairs[1] >> T.uint32(16)), T.int32)
    words[index + 1] = T.cast((pairs[1] << T.uint32(16)) | (pairs[2] >> T.uint32(8)), T.int32)
    words[index + 2] = T.cast((pairs[2] << T.uint32(24)) | pairs[3], T.int32)


def store_values(target: str, width: int, count: int, vector: int, offset: int = 0) -> Any:
    """A macro: `count` float32 values, from `base` on, to a row of `out`, from channel `first` on.

    They are rounded if `target` is bfloat16, the other one is float32.
    """
    dtype, _ = storage(target)

    @T.macro
    def store(values, base, out, row, first):
        stored = T.alloc_local((vector,), dtype)
        for c in T.unroll(count // vector):
            if first + c * vector < width:
                for v in T.vectorized(vector):
                    stored[v] = T.cast(values[base + c * vector + v], dtype)
                for v in T.vectorized(vector):
                    out[row, (offset + first + c * vector) // vector * vector + v] = stored[v]

    return store


def round_trip(fmt: str, count: int, conversion: str = ARITHMETIC) -> Any:
    """A macro: `count` values, from `base` on, as they come back from a cast to the format."""

    @T.macro
    def rounded_pairs(values, base, scales, inverse, per):
        codes = T.alloc_var(T.int32)
        for i in T.unroll(count // 2):
            for j in T.unroll(2):
                values[base + 2 * i + j] = T.ieee_mul(
                    values[base + 2 * i + j], inverse[(2 * i + j) // per]
                )
            codes = e2m1_pair(values[base + 2 * i], values[base + 2 * i + 1])
            for j in T.unroll(2):
                values[base + 2 * i + j] = T.ieee_mul(
                    e2m1_value((codes >> (4 * j)) & 15), scales[(2 * i + j) // per]
                )

    @T.macro
    def rounded(values, base, scales, inverse, per):
        code = T.alloc_local((1,), "float8_e4m3fn")
        for i in T.unroll(count):
            values[base + i] = T.ieee_mul(values[base + i], inverse[i // per])
            if fmt == "e4m3":
                code[0] = T.cast(values[base + i], "float8_e4m3fn")
                values[base + i] = T.cast(code[0], T.float32)
            elif fmt == "e2m1":
                values[base + i] = e2m1_value(e2m1_code(values[base + i]))
            else:
                values[base + i] = e5m6_value(e5m6_code(values[base + i]))
            values[base + i] = T.ieee_mul(values[base + i], scales[i // per])

    return rounded_pairs if conversion == INSTRUCTION else rounded


def encode_and_store(
    fmt: str, width: int, count: int, vector: int, offset: int = 0, conversion: str = ARITHMETIC
) -> Any:
    """A macro: `count` values times `inverse[i // per]`, encoded, to a row of `out`.

    The values are those from `base` on; they are changed. They go to the channels from `first` on.
    `per` of them share a factor, `vector` go with one store. e4m3 and e2m1; `conversion` is the
    conversion to e2m1, with factors in its `unit_of_factors`.
    """
    dtype, _ = storage(fmt)
    elements = units(fmt, vector)

    @T.macro
    def encode(values, base, inverse, per, out, row, first):
        stored = T.alloc_local((elements,), dtype)
        codes = T.alloc_local((vector,), T.int32)
        for i in T.unroll(count):
            values[base + i] = T.ieee_mul(values[base + i], inverse[i // per])
        for c in T.unroll(count // vector):
            if first + c * vector < width:
                if fmt == "e4m3":
                    for v in T.vectorized(elements):
                        stored[v] = T.cast(values[base + c * vector + v], dtype)
                elif conversion == HALVES:
                    words = T.view(stored, (elements // 4,), T.uint32)
                    for w in T.unroll(vector // 8):
                        e2m1_word(values, base + c * vector + 8 * w, words, w)
                elif conversion == INSTRUCTION:
                    for v in T.unroll(elements):
                        index = base + c * vector + 2 * v
                        stored[v] = T.cast(e2m1_pair(values[index], values[index + 1]), dtype)
                else:
                    for v in T.unroll(vector):
                        codes[v] = e2m1_code(values[base + c * vector + v])
                    for v in T.unroll(elements):
                        stored[v] = T.cast(codes[2 * v] | (codes[2 * v + 1] << 4), dtype)
                start = (offset + first + c * vector) // vector * elements
                for v in T.vectorized(elements):
                    out[row, start + v] = stored[v]

    return encode
