"""The number formats of quantized tensors, to the bit, and the scales that go with them.

| format | a value is | stored as | largest |
|---|---|---|---|
| e4m3 | 8 bits `S EEEE MMM`, bias 7, no infinity, NaN `S.1111.111` | `float8_e4m3fn` | 448 |
| e2m1 | 4 bits `S EE M`, bias 1, neither infinity nor NaN | `int8`, 2 in a byte | 6 |
| e5m6 | 12 bits `S EEEEE MMMMMM`, bias 15: the top of a float16 | `uint8`, 8 in 12 bytes | 65024 |
| ue8m0 | 8 bits `EEEEEEEE`: the exponent of a float32 power of two | `uint8` | 2**127 |

The storage dtype tells the first three apart. Encoders take float32. Every NaN becomes the format's
one NaN, whatever its sign and payload, since devices differ in those: e4m3 `0x7F`, e5m6 `0x7E0`,
and in e2m1, which has none, the largest value (code 7). Zeros keep their sign.

A group of values shares a scale: `value = code * sf`, `code = encode(value * inv)`.
`scale_from_amax` makes both factors from the group's largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# ---- words -------------------------------------------------------------------------------------


def bytes_to_words(data: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., 4 * W]` of any strides to int32 `[..., W]`, the first byte the lowest.

    >>> bytes_to_words(torch.tensor([0x21, 0x43, 0, 0], dtype=torch.uint8)).tolist() == [0x4321]
    True
    """
    fours = data.unflatten(-1, (-1, 4)).clone(memory_format=torch.contiguous_format)
    return fours.view(torch.int32).squeeze(-1)


def words_to_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 `[..., W]` of any strides to uint8 `[..., 4 * W]`; inverse of `bytes_to_words`."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


# ---- e4m3 --------------------------------------------------------------------------------------

_E4M3_MAX = 448.0
_E4M3_NAN = 0x7F


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 to `float8_e4m3fn` of the same shape: to nearest, ties to even, saturating.

    Magnitudes above 448, infinity included, become 448.

    >>> encode_e4m3(torch.tensor([1.0, -17.0, 1e9])).float().tolist()
    [1.0, -16.0, 448.0]
    """
    codes = x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    codes.masked_fill_(codes & _E4M3_NAN == _E4M3_NAN, _E4M3_NAN)  # of either sign
    return codes.view(torch.float8_e4m3fn)


def decode_e4m3(data: torch.Tensor) -> torch.Tensor:
    """`float8_e4m3fn` to float32 of the same shape, exactly."""
    return data.float()


# ---- e2m1 --------------------------------------------------------------------------------------

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-magnitude for magnitude in _E2M1_MAGNITUDES))
_E2M1_NAN = 7


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """float32 to 4-bit codes, uint8 of the same shape: to nearest, ties to even, saturating.

    The sign bit is the input's, also where the magnitude rounds to zero.

    >>> e2m1_codes(torch.tensor([0.25, 0.75, 5.0, -0.1, -100.0])).tolist()
    [0, 2, 6, 8, 15]
    """
    magnitude = x.abs()
    codes = torch.signbit(x).to(torch.uint8) << 3
    for code in range(1, 8):
        boundary = (_E2M1_MAGNITUDES[code - 1] + _E2M1_MAGNITUDES[code]) / 2
        reached = magnitude >= boundary if code % 2 == 0 else magnitude > boundary
        codes += reached
    return codes.masked_fill(x.isnan(), _E2M1_NAN)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes `[..., H]` to int8 `[..., H / 2]`, the even elements in the low halves.

    >>> pack_e2m1(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist()
    [33, 15]
    """
    if codes.shape[-1] % 2 != 0:
        raise ValueError(f"e2m1 packs values in pairs: the width must be even, got {codes.shape}")
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)


def unpack_e2m1(data: torch.Tensor) -> torch.Tensor:
    """int8 or uint8 `[..., H / 2]` to 4-bit codes, uint8 `[..., H]`; inverse of `pack_e2m1`."""
    pairs = data.view(torch.uint8)
    return torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 `[..., H]` to packed int8 `[..., H / 2]`.

    >>> encode_e2m1(torch.tensor([0.5, 1.0, -6.0, 0.0])).tolist()
    [33, 15]
    """
    return pack_e2m1(e2m1_codes(x))


def decode_e2m1(data: torch.Tensor) -> torch.Tensor:
    """Packed int8 or uint8 `[..., H / 2]` to float32 `[..., H]`, exactly.

    >>> decode_e2m1(torch.tensor([33, 15], dtype=torch.int8)).tolist()
    [0.5, 1.0, -6.0, 0.0]
    """
    values = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=data.device)
    return values[unpack_e2m1(data).int()]


# ---- e5m6 --------------------------------------------------------------------------------------

_E5M6_MAX = 65024.0
_E5M6_NAN = 0x7E0
_FLOAT32_BIAS = 127
_FLOAT16_BIAS = 15
_FLOAT16_MIN_NORMAL = 0x38800000  # 2**-14, as the bits of a float32
_BELOW_2_TO_16 = 0x477FFFFF  # the largest float32 below 2**16


def e5m6_codes(x: torch.Tensor) -> torch.Tensor:
    """float32 to 12-bit codes, int32 of the same shape.

    From `2**-14` on this rounds to nearest, ties to even; from 65280 on the code is infinity,
    `0x7C0`. Below `2**-14` the format is defined as truncation to a multiple of `2**-20` plus a
    carry that the float32's low 17 bits decide, although other bits were cut off there: even a
    very small value can become `2**-20`.

    >>> [hex(code) for code in e5m6_codes(torch.tensor([1.0, -1.5 * 2**-20, 65280.0])).tolist()]
    ['0x3c0', '0x801', '0x7c0']
    """
    bits = x.view(torch.int32)
    # What lies above rounds to infinity as the largest number below 2**16 does.
    magnitude = (bits & 0x7FFFFFFF).clamp(max=_BELOW_2_TO_16)
    exponent = magnitude >> 23
    significand = magnitude & 0x7FFFFF | 0x800000

    # The float16 below: its exponent and 10 bits of mantissa, or a multiple of 2**-24.
    normal = (magnitude - (_FLOAT32_BIAS - _FLOAT16_BIAS << 23)) >> 13
    subnormal = significand >> (126 - exponent).clamp(0, 31)
    half = torch.where(magnitude >= _FLOAT16_MIN_NORMAL, normal, subnormal)

    code = half >> 4
    code = code + ((code & 1) + (magnitude & 0x1FFFF) > 0x10000).int()
    sign = bits >> 20 & 0x800
    return (sign | code).masked_fill(x.isnan(), _E5M6_NAN)


def pack_e5m6(codes: torch.Tensor) -> torch.Tensor:
    """12-bit codes `[..., H]` to uint8 `[..., 3 * H / 2]`.

    Eight codes, the first in the highest bits, fill three 32-bit words, each stored with its low
    byte first.

    >>> bytes(pack_e5m6(torch.arange(8)).tolist()).hex()
    '000100004000032007600005'
    """
    if codes.shape[-1] % 8 != 0:
        raise ValueError(
            f"e5m6 packs 8 values in 12 bytes: the width must be a multiple of 8, got {codes.shape}"
        )
    h0, h1, h2, h3, h4, h5, h6, h7 = codes.long().unflatten(-1, (-1, 8)).unbind(-1)
    words = (
        h0 << 20 | h1 << 8 | h2 >> 4,
        (h2 & 0xF) << 28 | h3 << 16 | h4 << 4 | h5 >> 8,
        (h5 & 0xFF) << 24 | h6 << 12 | h7,
    )
    return words_to_bytes(torch.stack(words, dim=-1).flatten(-2).to(torch.int32))


def unpack_e5m6(data: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., 3 * H / 2]` to 12-bit codes, int32 `[..., H]`; inverse of `pack_e5m6`."""
    if data.shape[-1] % 12 != 0:
        raise ValueError(
            f"e5m6 keeps 8 values in 12 bytes: the width must be a multiple of 12, got {data.shape}"
        )
    words = bytes_to_words(data).long() & 0xFFFFFFFF
    w0, w1, w2 = words.unflatten(-1, (-1, 3)).unbind(-1)
    codes = (
        w0 >> 20,
        w0 >> 8 & 0xFFF,
        (w0 & 0xFF) << 4 | w1 >> 28,
        w1 >> 16 & 0xFFF,
        w1 >> 4 & 0xFFF,
        (w1 & 0xF) << 8 | w2 >> 24,
        w2 >> 12 & 0xFFF,
        w2 & 0xFFF,
    )
    return torch.stack(codes, dim=-1).flatten(-2).int()


def encode_e5m6(x: torch.Tensor) -> torch.Tensor:
    """float32 `[..., H]` to packed uint8 `[..., 3 * H / 2]`."""
    return pack_e5m6(e5m6_codes(x))


def decode_e5m6(data: torch.Tensor) -> torch.Tensor:
    """Packed uint8 `[..., 3 * H / 2]` to float32 `[..., H]`, exactly.

    >>> x = torch.tensor([1.0, -1.0, 2.0, 0.5, 0.0, 3.0, 1e-3, 65024.0])
    >>> decode_e5m6(encode_e5m6(x)).tolist()
    [1.0, -1.0, 2.0, 0.5, 0.0, 3.0, 0.001007080078125, 65024.0]
    """
    return (unpack_e5m6(data) << 4).to(torch.int16).view(torch.float16).float()


# ---- ue8m0 -------------------------------------------------------------------------------------


def encode_ue8m0(sf: torch.Tensor) -> torch.Tensor:
    """The biased exponents of positive float32 scales, uint8 of the same shape.

    Exact for powers of two; the mantissa of any other scale is dropped.

    >>> encode_ue8m0(torch.tensor([1.0, 2.0, 0.25])).tolist()
    [127, 128, 125]
    """
    return (sf.view(torch.int32) >> 23).to(torch.uint8)


def decode_ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Biased exponents `0..255` of any integer dtype to float32 of the same shape.

    `2**(b - 127)` for `1 <= b <= 254`; 0 stands for 0.0 and 255 for infinity.

    >>> decode_ue8m0(torch.tensor([0, 127, 128, 255])).tolist()
    [0.0, 1.0, 2.0, inf]
    """
    return (exponents.int() << 23).view(torch.float32)


# ---- scales ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """What casts need to know of a number format."""

    name: str
    # Identifies the format in a quantized tensor.
    dtype: torch.dtype
    # The largest finite value: the largest magnitude of a group is scaled to it.
    max: float
    # A group's largest magnitude counts as at least this.
    clamp_min: float
    # float32 `[..., H]` to storage, and back.
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


E4M3 = Format("e4m3", torch.float8_e4m3fn, _E4M3_MAX, 1e-4, encode_e4m3, decode_e4m3)
E2M1 = Format("e2m1", torch.int8, 6.0, 6.0 * 2.0**-126, encode_e2m1, decode_e2m1)
E5M6 = Format("e5m6", torch.uint8, _E5M6_MAX, 1e-4, encode_e5m6, decode_e5m6)


def scale_from_amax(
    amax: torch.Tensor, fmt: Format, round_sf: bool, clamp_min: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of groups with the largest magnitudes `amax`, and the factor before encoding.

    `amax` is finite float32 of any shape. Returns `(sf, inv)` of that shape. With
    `a = max(amax, clamp_min)` they are `a / fmt.max` and `fmt.max / a`, each rounded once. With
    `round_sf` both are powers of two: `sf` is the least that is not below `a / fmt.max`, and
    `inv = 1 / sf`. `clamp_min` replaces the format's own lower bound of `amax`.

    >>> sf, inv = scale_from_amax(torch.tensor([448.0, 3.0, 0.0]), E4M3, round_sf=True)
    >>> sf.log2().tolist(), inv.tolist()
    ([0.0, -7.0, -22.0], [1.0, 128.0, 4194304.0])
    """
    amax = amax.clamp(min=fmt.clamp_min if clamp_min is None else clamp_min)
    # Tensors on both sides: division by or of a number may multiply with a rounded reciprocal.
    largest = torch.full_like(amax, fmt.max)
    sf = amax / largest
    if not round_sf:
        return sf, largest / amax
    exponents = ((sf.view(torch.int32) - 1) >> 23) + 1
    return decode_ue8m0(exponents), decode_ue8m0(254 - exponents)


_LEAST_E4M3 = 2.0**-9


def e4m3_amax_min(fmt: Format) -> float:
    """The lower bound of `amax` for scales in e4m3: that with the least scale, `2**-9`.

    >>> e4m3_amax_min(E4M3), e4m3_amax_min(E2M1)
    (0.875, 0.01171875)
    """
    return fmt.max * _LEAST_E4M3


def e4m3_scale_from_amax(
    amax: torch.Tensor,
    fmt: Format,
    clamp_min: float | None = None,
    global_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in e4m3 of groups with the largest magnitudes `amax`, and the factor before encoding.

    `amax` is finite float32 of any shape, `global_sf` a float32 that all scales are multiplied by.
    Returns `(sf, inv)` of that shape, `sf` in float8_e4m3fn: `amax / (fmt.max * global_sf)`, but at
    least `clamp_min / fmt.max` and `2**-9`, to the nearest e4m3, at most 448; and
    `inv = 1 / (sf * global_sf)`. A quotient of zeros counts as the least.

    >>> sf, inv = e4m3_scale_from_amax(torch.tensor([6.0, 600.0, 0.0]), E2M1)
    >>> sf.float().tolist(), inv.tolist()
    ([1.0, 96.0, 0.001953125], [1.0, 0.010416666977107525, 512.0])
    """
    least = torch.full_like(amax, max(e4m3_amax_min(fmt), clamp_min or 0.0))
    largest = torch.full_like(amax, fmt.max)
    divisor = largest if global_sf is None else largest * global_sf
    sf = encode_e4m3(torch.fmax(amax / divisor, least / largest))
    scale = sf.float() if global_sf is None else sf.float() * global_sf
    return sf, torch.ones_like(scale) / scale
