"""Device macros of stochastic rounding: the mirror of `tile_kernels.quant.stochastic`."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.stochastic import GRIDS, HASH, NAN_BITS, PER_COUNTER, PER_HASH
from tile_kernels.quant.storage import storage, units
from tile_kernels.runtime.kernels.philox import philox


@T.macro
def pattern_of(value):
    """The bits of a float32; every NaN has the same."""
    bits = T.alloc_var(T.uint32, init=T.reinterpret(value, T.uint32))
    if (bits & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000):
        bits = T.uint32(NAN_BITS)
    return bits


@T.macro
def reversed_half(bits):
    """16 bits in the opposite order."""
    return T.call_extern(T.uint32, "__brev", bits) >> T.uint32(16)


def hashed_bits(fmt: str) -> Any:
    """A macro: 16 bits for each of four values, from `base` on, by their hash with an index."""

    @T.macro
    def hashed(values, base, index, bits):
        h = T.alloc_var(T.uint32, init=index)
        for i in (0, 1, 2, 3):
            h = h + pattern_of(values[base + i]) * T.uint32(HASH[i])
        h = (h ^ (h >> T.uint32(23))) * T.uint32(0x7FEB352D)
        h = h ^ (h >> T.uint32(16))
        word = T.alloc_var(T.uint32, init=h * T.uint32(0x846CA68B))
        word = word ^ (word >> T.uint32(11))
        if fmt == "bfloat16":
            other = T.alloc_var(T.uint32, init=h * T.uint32(0xD35A2D97))
            other = other ^ (other >> T.uint32(11))
            bits[0] = word & T.uint32(0xFFFF)
            bits[1] = word >> T.uint32(16)
            bits[2] = other & T.uint32(0xFFFF)
            bits[3] = other >> T.uint32(16)
        else:
            if fmt == "e2m1":  # bytes 2 and 0, 3 and 1
                bits[0] = ((word >> T.uint32(8)) & T.uint32(0xFF00)) | (word & T.uint32(0xFF))
                bits[2] = ((word >> T.uint32(16)) & T.uint32(0xFF00)) | (
                    (word >> T.uint32(8)) & T.uint32(0xFF)
                )
            else:
                bits[0] = word & T.uint32(0xFFFF)
                bits[2] = word >> T.uint32(16)
            bits[1] = reversed_half(bits[0])
            bits[3] = reversed_half(bits[2])

    return hashed


def rounded_code(fmt: str) -> Any:
    """A macro: a float32 and 16 bits to a code in an int32, with its sign."""
    dropped, rebias, least, steps, largest, nan = GRIDS[fmt]
    sign_shift = {"bfloat16": 16, "e4m3": 24, "e2m1": 28}[fmt]

    @T.macro
    def rounded(value, bits):
        pattern = T.alloc_var(T.int32, init=T.reinterpret(value, T.int32))
        magnitude = T.alloc_var(T.int32, init=pattern & 0x7FFFFFFF)
        # Up to infinity: a carry out of 31 bits would need a NaN.
        added = T.cast(magnitude, T.uint32) + (bits << T.uint32(dropped - 16))
        code = T.alloc_var(T.int32, init=T.cast(added >> T.uint32(dropped), T.int32) - rebias)
        if fmt != "bfloat16":
            if magnitude < (least << 23):
                scaled = T.ieee_mul(T.abs(value), T.float32(steps * 65536))
                code = (T.cast(scaled, T.int32) + T.cast(bits, T.int32)) >> 16
        code = T.min(code, largest)
        code = code | ((pattern >> sign_shift) & (0x80000000 >> sign_shift))
        if magnitude > 0x7F800000:
            code = nan
        return code

    return rounded


def round_and_store(fmt: str, width: int, count: int, vector: int, seeded: bool) -> Any:
    """A macro: `count` values times `inverse[i // per]`, rounded stochastically, to a row of `out`.

    As `encode_and_store`; `out` holds bytes. Random bits are those of the columns from `first` on,
    by a seed and the row, or by the values.
    """
    elements = units(fmt, vector)
    hashed = hashed_bits(fmt)
    rounded = rounded_code(fmt)

    @T.macro
    def draw(values, base, seed, row, first, bits):
        """The bits of eight values."""
        if seeded:
            words = T.alloc_local((4,), T.uint32)
            sequence = T.alloc_var(
                T.int64,
                init=T.shift_left(T.cast(row, T.int64), T.int64(32))
                + T.cast((first + base) // PER_COUNTER, T.int64),
            )
            philox(seed[0], sequence, words)
            for i in T.unroll(4):
                bits[2 * i] = words[i] & T.uint32(0xFFFF)
                bits[2 * i + 1] = words[i] >> T.uint32(16)
        else:
            four = T.alloc_local((4,), T.uint32)
            for q in T.unroll(2):
                hashed(
                    values, base + q * PER_HASH,
                    T.cast((first + base) // PER_HASH + q, T.uint32), four,
                )  # fmt: skip
                for i in T.unroll(PER_HASH):
                    bits[q * PER_HASH + i] = four[i]

    @T.macro
    def encode(values, inverse, per, out, row, first, seed):
        stored = T.alloc_local((elements,), storage("e2m1")[0])
        codes = T.alloc_local((count,), T.int32)
        bits = T.alloc_local((PER_COUNTER,), T.uint32)
        for i in T.unroll(count):
            values[i] = T.ieee_mul(values[i], inverse[i // per])
        for e in T.unroll(count // PER_COUNTER):
            draw(values, e * PER_COUNTER, seed, row, first, bits)
            for i in T.unroll(PER_COUNTER):
                codes[e * PER_COUNTER + i] = rounded(values[e * PER_COUNTER + i], bits[i])
        for c in T.unroll(count // vector):
            if first + c * vector < width:
                for v in T.unroll(elements):
                    if fmt == "e2m1":
                        pair = codes[c * vector + 2 * v] | (codes[c * vector + 2 * v + 1] << 4)
                        stored[v] = T.cast(pair, T.uint8)
                    else:
                        stored[v] = T.cast(codes[c * vector + v], T.uint8)
                for v in T.vectorized(elements):
                    out[row, (first + c * vector) // vector * elements + v] = stored[v]

    return encode
