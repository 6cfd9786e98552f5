"""The number formats against worked vectors, exhaustive searches and independent arithmetic."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.helpers import (
    FLOAT32_MAX,
    INF,
    NAN,
    bits,
    float32,
    float32_of_bits,
    nearest_codes,
    random_float32,
    values_of_codes,
)
from tile_kernels.quant import formats
from tile_kernels.quant.formats import E2M1, E4M3, E5M6, scale_from_amax
from tile_kernels.testing.numeric import assert_equal


@pytest.mark.gpu
def test_formats_on_cuda_give_the_same_bytes() -> None:
    x = random_float32((1 << 20,))
    assert_equal(formats.e5m6_codes(x.cuda()).cpu(), formats.e5m6_codes(x))
    assert_equal(formats.e2m1_codes(x.cuda()).cpu(), formats.e2m1_codes(x))
    assert_equal(formats.encode_e4m3(x.cuda()).cpu(), formats.encode_e4m3(x))
    small = torch.randn(1 << 20) * 4
    assert_equal(formats.encode_e4m3(small.cuda()).cpu(), formats.encode_e4m3(small))
    codes = torch.arange(4096)
    packed = formats.pack_e5m6(codes)
    assert_equal(formats.pack_e5m6(codes.cuda()).cpu(), packed)
    assert_equal(formats.unpack_e5m6(packed.cuda()).cpu(), codes.int())
    amax = x.abs()
    for fmt in (E4M3, E2M1, formats.E5M6):
        for round_sf in (False, True):
            expected = formats.scale_from_amax(amax, fmt, round_sf)
            for tensor, kept in zip(formats.scale_from_amax(amax.cuda(), fmt, round_sf), expected):
                assert_equal(tensor.cpu(), kept)


FORMATS = [E4M3, E2M1, E5M6]
any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def codes_of(x: torch.Tensor, fmt: formats.Format) -> list[int]:
    if fmt is E4M3:
        return formats.encode_e4m3(x).view(torch.uint8).tolist()
    return (formats.e2m1_codes if fmt is E2M1 else formats.e5m6_codes)(x).tolist()


def around_boundaries(fmt: formats.Format) -> torch.Tensor:
    """All finite values of the format, the midpoints, and the float32 next to each of them."""
    values = values_of_codes(fmt)
    values = values[values.isfinite()].unique()
    midpoints = (values[1:] + values[:-1]) / 2
    points = torch.cat((values, midpoints))
    up, down = (torch.nextafter(points, torch.tensor(limit)) for limit in (INF, -INF))
    return torch.cat((points, up, down))


def all_bfloat16() -> torch.Tensor:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(torch.bfloat16).float()
    return x[~x.isnan()]


# ---- worked vectors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (1.0, 0x38), (1.0625, 0x38), (1.1875, 0x3A), (17.0, 0x58), (18.0, 0x59), (19.0, 0x5A),
        (240.0, 0x77), (448.0, 0x7E), (449.0, 0x7E), (465.0, 0x7E), (1e9, 0x7E), (-1e9, 0xFE),
        (2**-9, 0x01), (2**-10, 0x00), (2**-10 * 1.0001, 0x01), (3 * 2**-10, 0x02), (-0.0, 0x80),
        (-(2**-11), 0x80), (2**-6, 0x08), (INF, 0x7E), (-INF, 0xFE), (NAN, 0x7F), (-NAN, 0x7F),
    ],
)  # fmt: skip
def test_e4m3_vectors(value: float, code: int) -> None:
    assert codes_of(float32(value), E4M3) == [code]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.24, 0x0), (0.25, 0x0), (0.2500001, 0x1), (0.7499999, 0x1), (0.75, 0x2), (1.25, 0x2),
        (1.2500001, 0x3), (1.75, 0x4), (2.5, 0x4), (2.5000002, 0x5), (3.4999998, 0x5), (3.5, 0x6),
        (5.0, 0x6), (5.0000005, 0x7), (7.0, 0x7), (-0.75, 0xA), (-5.0, 0xE), (-100.0, 0xF),
        (INF, 0x7), (-INF, 0xF), (NAN, 0x7), (-NAN, 0x7), (1e-40, 0x0), (-1e-40, 0x8),
        (-0.0, 0x8), (-0.1, 0x8), (-0.25, 0x8),
    ],
)  # fmt: skip
def test_e2m1_vectors(value: float, code: int) -> None:
    assert codes_of(float32(value), E2M1) == [code]


def test_e2m1_decode_vectors() -> None:
    data = torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    magnitudes = float32(0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for bytes_ in (data, data.view(torch.int8)):
        assert_equal(formats.decode_e2m1(bytes_), torch.stack((magnitudes, -magnitudes)))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (1.0, 0x3C0), (1 + 1 / 128, 0x3C0), (1 + 3 / 128, 0x3C2), (1 + 1 / 128 + 2**-20, 0x3C1),
        (65024.0, 0x7BF), (65279.99, 0x7BF), (65280.0, 0x7C0), (2**-14, 0x040),
        (2**-14 * 63 / 64, 0x03F), (2**-20, 0x001), (2**-21, 0x000), (-1.5 * 2**-20, 0x801),
        (65535.9, 0x7C0), (65536.0, 0x7C0), (65537.5, 0x7C0), (1e30, 0x7C0), (-1e30, 0xFC0),
        (INF, 0x7C0), (-INF, 0xFC0), (NAN, 0x7E0), (-NAN, 0x7E0), (0.0, 0x000), (-0.0, 0x800),
    ],
)  # fmt: skip
def test_e5m6_vectors(value: float, code: int) -> None:
    assert codes_of(float32(value), E5M6) == [code]


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        (0x35FFFFFF, 0x002), (0x35810000, 0x002), (0x35801000, 0x001), (0x33010000, 0x000),
        (0x33010001, 0x001), (0x2F010001, 0x001), (0x00010001, 0x001), (0x80010001, 0x801),
        (0x36410001, 0x004),
    ],
)  # fmt: skip
def test_e5m6_vectors_of_bits(pattern: int, code: int) -> None:
    """The carry below the normal range, which the low bits of the float32 decide."""
    assert codes_of(float32_of_bits(pattern), E5M6) == [code]


def test_e5m6_packing_vector() -> None:
    x = float32(1, -1, 2, 0.5, 0, -0.0, 3, 65024)
    data = formats.encode_e5m6(x)
    assert data.dtype == torch.uint8
    assert bits(data.view(torch.int32)) == [0x3C0BC040, 0x03800008, 0x004207BF]
    assert bytes(data.tolist()).hex(" ") == "40 c0 0b 3c 08 00 80 03 bf 07 42 00"
    assert_equal(formats.decode_e5m6(data), x)


def test_e5m6_packing_by_bytes() -> None:
    """The table of bytes, for codes whose twelve bits are all different from their neighbours'."""
    h = [0x123, 0x456, 0x789, 0xABC, 0xDEF, 0x0F1, 0x2E3, 0x4D5]
    expected = [
        h[2] >> 4, h[1] & 0xFF, (h[0] & 0xF) << 4 | h[1] >> 8, h[0] >> 4,
        (h[4] & 0xF) << 4 | h[5] >> 8, h[4] >> 4, h[3] & 0xFF, (h[2] & 0xF) << 4 | h[3] >> 8,
        h[7] & 0xFF, (h[6] & 0xF) << 4 | h[7] >> 8, h[6] >> 4, h[5] & 0xFF,
    ]  # fmt: skip
    assert formats.pack_e5m6(torch.tensor(h)).tolist() == expected


def test_ue8m0() -> None:
    exponents = torch.arange(256, dtype=torch.uint8)
    values = formats.decode_ue8m0(exponents)
    assert values[0] == 0
    assert values[255] == INF
    assert values[1:255].tolist() == [2.0 ** (b - 127) for b in range(1, 255)]
    assert_equal(formats.encode_ue8m0(values), exponents)


SCALES = [
    # format, amax, bits of s, inv, log2 of the rounded sf
    (E4M3, 0.0, 0x346FACAD, 4480000.0, -22),
    (E4M3, 1e-4, 0x346FACAD, 4480000.0, -22),
    (E4M3, 1.0, 0x3B124925, 448.0, -8),
    (E4M3, 3.0, 0x3BDB6DB7, 149.33333, -7),
    (E4M3, 448.0, 0x3F800000, 1.0, 0),
    (E4M3, 448.0001, 0x3F800002, 0.99999982, 1),
    (E4M3, 3.4e38, 0x7B122A11, 1.31764709e-36, 120),
    (E2M1, 0.0, 0x00800000, 2.0**126, -126),
    (E2M1, 1.0, 0x3E2AAAAB, 6.0, -2),
    (E2M1, 6.0, 0x3F800000, 1.0, 0),
    (E2M1, 3.4e38, 0x7E2A8669, None, 126),
    (E5M6, 0.0, 0x30D35DD3, 650240000.0, -29),
    (E5M6, 1.0, 0x37810204, 65024.0, -15),
    (E5M6, 65024.0, 0x3F800000, 1.0, 0),
]


@pytest.mark.parametrize(("fmt", "amax", "s", "inv", "exponent"), SCALES)
def test_scale_vectors(
    fmt: formats.Format, amax: float, s: int, inv: float | None, exponent: int
) -> None:
    plain_sf, plain_inv = scale_from_amax(float32(amax), fmt, round_sf=False)
    assert bits(plain_sf) == [s]
    if inv is not None:
        assert_equal(plain_inv, float32(inv))
    sf, inv_of_sf = scale_from_amax(float32(amax), fmt, round_sf=True)
    assert_equal(sf, float32(2.0**exponent))
    assert_equal(inv_of_sf, float32(2.0**-exponent))
    assert formats.encode_ue8m0(sf).tolist() == [127 + exponent]


def test_scale_bytes() -> None:
    """The exponents as bytes, as they are listed."""
    listed = {E4M3: [105, 119, 120, 127, 128, 247], E2M1: [1, 125, 127, 253], E5M6: [98, 112, 127]}
    for fmt, expected in listed.items():
        amax = float32(*dict.fromkeys(row[1] for row in SCALES if row[0] is fmt and row[1] != 1e-4))
        sf, _ = scale_from_amax(amax, fmt, round_sf=True)
        assert formats.encode_ue8m0(sf).tolist() == expected


# ---- every code, every boundary ----------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_codes_survive_decoding_and_encoding(fmt: formats.Format) -> None:
    values = values_of_codes(fmt)
    numbers = ~values.isnan()
    num_codes = {E4M3: 256, E2M1: 16, E5M6: 4096}[fmt]
    assert int(numbers.sum()) == num_codes - {E4M3: 2, E2M1: 0, E5M6: 2 * 63}[fmt]
    codes = torch.tensor(codes_of(values, fmt))
    assert codes[numbers].tolist() == torch.arange(num_codes)[numbers].tolist()
    assert set(codes[~numbers].tolist()) <= {0x7F if fmt is E4M3 else 0x7E0}


def test_e4m3_is_the_format_of_torch() -> None:
    """The formula of the format: sign, 4 bits of exponent, 3 of mantissa, bias 7."""
    values = values_of_codes(E4M3).tolist()
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent, mantissa = code >> 3 & 0xF, code & 7
        if (exponent, mantissa) == (15, 7):
            assert math.isnan(values[code])
        elif exponent == 0:
            assert values[code] == sign * mantissa * 2**-9
        else:
            assert values[code] == sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_e5m6_is_the_top_of_float16() -> None:
    for code, value in enumerate(values_of_codes(E5M6).tolist()):
        (half,) = struct.unpack("<e", struct.pack("<H", code << 4))
        assert value == half or (math.isnan(value) and math.isnan(half))


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda fmt: fmt.name)
def test_encoding_finds_the_nearest(fmt: formats.Format) -> None:
    for x in (around_boundaries(fmt), torch.randn(20000) * fmt.max / 2, torch.randn(20000) * 2**-7):
        assert codes_of(x, fmt) == nearest_codes(x, fmt)


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda fmt: fmt.name)
def test_encoding_every_bfloat16(fmt: formats.Format) -> None:
    x = all_bfloat16()
    assert codes_of(x, fmt) == nearest_codes(x, fmt)


def test_encoding_normal_e5m6_finds_the_nearest() -> None:
    points = around_boundaries(E5M6)
    points = torch.cat((points[torch.randperm(len(points))[:6000]], torch.randn(3000) * 1000))
    normal = (points.abs() >= 2**-14) & (points.abs() < 65280)
    for x in points[normal].split(3000):
        assert codes_of(x, E5M6) == nearest_codes(x, E5M6)


@settings(deadline=None)
@given(st.floats(-(2.0**-14), 2.0**-14, width=32))
def test_encoding_subnormal_e5m6(value: float) -> None:
    """Truncation in exact arithmetic, and the carry by the low bits."""
    (pattern,) = struct.unpack("<I", struct.pack("<f", value))
    code = math.floor(math.ldexp(abs(value), 20))
    code += (code & 1) + (pattern & 0x1FFFF) > 0x10000
    sign = 0x800 if math.copysign(1, value) < 0 else 0
    assert codes_of(float32(value), E5M6) == [sign + code]


def test_subnormal_e5m6_is_off_by_up_to_a_step() -> None:
    """What the documentation says of magnitudes below 2**-14, for every 4075th of them."""
    x = torch.arange(0, 0x38800001, 0xFEB, dtype=torch.int32).view(torch.float32)
    exact = x.double() * 2**20
    codes = formats.e5m6_codes(x)
    assert ((codes - exact).abs() <= 1).all()
    assert ((codes == exact.floor()) | (codes == exact.floor() + 1)).all()
    assert (codes != exact.round()).double().mean() > 0.1
    tiny = x[(x > 0) & (x < 2**-24)]
    assert set(formats.e5m6_codes(tiny).tolist()) == {0, 1}


@settings(deadline=None)
@given(any_float32)
def test_encoding_is_odd_and_decodes_nearby(value: float) -> None:
    for fmt, half_ulp, step in ((E4M3, 2**-4, 2**-9), (E2M1, 2**-2, 0.5), (E5M6, 2**-7, 2**-20)):
        codes = codes_of(float32(value, -value), fmt)
        values = values_of_codes(fmt)
        assert abs(codes[0] - codes[1]) == len(values) // 2
        if abs(value) <= fmt.max:
            # Truncation and a wrong carry can be off by a whole step in the smallest e5m6 values.
            error = abs(float(values[codes[0]]) - value)
            assert error <= max(abs(value) * half_ulp, step if fmt is E5M6 else step / 2)
        else:
            assert abs(float(values[codes[0]])) in (fmt.max, INF)


@settings(deadline=None)
@given(st.lists(any_float32, min_size=2, max_size=20))
def test_encoding_is_monotonic(values: list[float]) -> None:
    x = float32(*values).sort().values
    for fmt in (E4M3, E2M1):
        decoded = values_of_codes(fmt)[codes_of(x, fmt)]
        assert_equal(decoded.sort().values + 0.0, decoded + 0.0)


# ---- packing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16,), (0, 16), (3, 0), (2, 3, 48)])
def test_packing_round_trip(shape: tuple[int, ...]) -> None:
    e2m1 = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = formats.pack_e2m1(e2m1)
    assert packed.dtype == torch.int8
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert_equal(formats.unpack_e2m1(packed), e2m1)

    e5m6 = torch.randint(0, 4096, shape, dtype=torch.int32)
    packed = formats.pack_e5m6(e5m6)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*shape[:-1], shape[-1] * 3 // 2)
    assert_equal(formats.unpack_e5m6(packed), e5m6)


def test_packed_data_may_be_strided() -> None:
    codes = torch.randint(0, 4096, (4, 16), dtype=torch.int32)
    wide = torch.zeros(4, 30, dtype=torch.uint8)
    wide[:, 3:27] = formats.pack_e5m6(codes)
    assert_equal(formats.unpack_e5m6(wide[:, 3:27]), codes)
    assert_equal(formats.unpack_e5m6(formats.pack_e5m6(codes).T.contiguous().T), codes)


def test_widths_that_cannot_be_packed_are_named() -> None:
    with pytest.raises(ValueError, match="even"):
        formats.encode_e2m1(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="multiple of 8"):
        formats.encode_e5m6(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="multiple of 12"):
        formats.decode_e5m6(torch.zeros(2, 8, dtype=torch.uint8))


# ---- scales ------------------------------------------------------------------------------------


amaxes = st.floats(0, FLOAT32_MAX, width=32)


@settings(deadline=None)
@given(amaxes, st.sampled_from(FORMATS))
def test_scales_are_divided_once(amax: float, fmt: formats.Format) -> None:
    """float64 has more than twice the bits, so its quotients round to the right float32."""
    sf, inv = scale_from_amax(float32(amax), fmt, round_sf=False)
    clamped = float32(max(amax, fmt.clamp_min)).double()
    largest = torch.tensor([fmt.max], dtype=torch.float64)
    assert_equal(sf, (clamped / largest).float())
    assert_equal(inv, (largest / clamped).float())


@settings(deadline=None)
@given(amaxes, st.sampled_from(FORMATS))
def test_rounded_scales_are_the_next_power_of_two(amax: float, fmt: formats.Format) -> None:
    plain, _ = scale_from_amax(float32(amax), fmt, round_sf=False)
    sf, inv = scale_from_amax(float32(amax), fmt, round_sf=True)
    mantissa, _ = math.frexp(float(sf))
    assert mantissa == 0.5
    assert float(sf) / 2 < float(plain) <= float(sf)
    assert float(sf) * float(inv) == 1
    assert 1 <= int(formats.encode_ue8m0(sf)) <= 253


@settings(deadline=None)
@given(st.floats(2**-20, 2**20, width=32), st.integers(-60, 60), st.booleans())
def test_scales_follow_powers_of_two(amax: float, power: int, round_sf: bool) -> None:
    factor = 2.0**power
    sf, inv = scale_from_amax(float32(amax), E2M1, round_sf)
    moved_sf, moved_inv = scale_from_amax(float32(amax * factor), E2M1, round_sf)
    assert_equal(moved_sf, sf * factor)
    assert_equal(moved_inv, inv / factor)


def test_another_least_amax() -> None:
    sf, inv = scale_from_amax(float32(0.0, 5.0), E4M3, round_sf=True, clamp_min=448.0)
    assert (sf.tolist(), inv.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    sf, inv = scale_from_amax(float32(1e-20), E4M3, round_sf=False, clamp_min=1e-30)
    assert_equal(sf, (float32(1e-20).double() / 448).float())
