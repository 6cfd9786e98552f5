"""The references of casts against worked vectors, plain loops, and properties."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tests.quant.helpers import (
    FLOAT32_MAX,
    INF,
    LAYOUTS,
    NAN,
    bits,
    float32,
    float32_of_bits,
    hex_rows,
    nearest_codes,
    random_float32,
    values_of_codes,
)
from tests.requirements import GROUNDS
from tile_kernels import torch as references
from tile_kernels.quant import formats, scales
from tile_kernels.quant.back import reference as back_references
from tile_kernels.quant.formats import E2M1, E4M3
from tile_kernels.quant.per_channel import reference as channel_references
from tile_kernels.testing.generator import generate_e5m6_inputs, generate_rand_float
from tile_kernels.testing.numeric import assert_equal, calc_diff, check_bias
from tile_kernels.torch import (
    cast,
    cast_back,
    cast_back_from_e5m6,
    cast_to_e5m6,
    per_channel_cast_fused,
)

FORMATS = {"e4m3": E4M3, "e2m1": E2M1}
ROW = float32(1, -2, 3, 4, 0.5, 0, -0.0, 7)[None]


def e4m3(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


def any_cast(x: Any, fmt: str, num_per_channels: int, **options: bool) -> Any:
    """To any of the three formats, in groups of a row."""
    if fmt == "e5m6":
        return cast_to_e5m6(x, num_per_channels, **options)
    return cast(x, fmt, (1, num_per_channels), **options)


def any_cast_back(x: Any, fmt: str, num_per_channels: int) -> torch.Tensor:
    if fmt == "e5m6":
        return cast_back_from_e5m6(x, "fp32", (1, num_per_channels))
    return cast_back(x, "fp32", (1, num_per_channels))


# ---- where they are found ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cast", "per_channel_cast_fused"])
def test_functions_that_share_their_module_s_name(name: str) -> None:
    module = importlib.import_module(f"tile_kernels.torch.{name}")
    assert getattr(tile_kernels.torch, name) is getattr(module, name)
    assert callable(getattr(tile_kernels.torch, name))


# ---- worked vectors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "round_sf", "data", "sf"),
    [
        ("e4m3", False, "6E F6 7A 7E 60 00 80 7E", [0x3C124925, 0x3C800000]),
        ("e4m3", True, "68 F0 74 78 60 00 80 7E", bits(float32(2**-6, 2**-6))),
        ("e2m1", True, "C2 65 00 68", bits(float32(1, 2))),
        ("e2m1", False, "D3 76 01 78", [0x3F2AAAAB, 0x3F955555]),
    ],
)
def test_groups_of_a_row(fmt: str, round_sf: bool, data: str, sf: list[int]) -> None:
    for x in (ROW, ROW.bfloat16()):
        for found in (
            cast(x, fmt, (1, 4), round_sf=round_sf),
            references.per_token_cast(x, fmt, 4, round_sf=round_sf),
        ):
            assert hex_rows(found[0]) == data
            assert found[0].dtype == FORMATS[fmt].dtype
            assert bits(found[1]) == sf


def test_back_from_e4m3() -> None:
    x = e4m3([0x6E, 0xF6, 0x7A, 0x7E]), float32_of_bits(0x3C124925)[None]
    assert_equal(cast_back(x, "fp32", (1, 4)), float32(1, -2, 2.8571429253, 4)[None])
    rounded = cast_back(x, "bf16", (1, 4))
    assert rounded.dtype == torch.bfloat16
    assert rounded.tolist() == [[1.0, -2.0, 2.859375, 4.0]]


def test_requantised() -> None:
    x = formats.encode_e4m3(float32(1, 2, 448, -16))[None], float32(0.5, 4)[None]
    expected = "20 28 7E D8", [4.0]
    for data, sf in (
        cast(x, "e4m3", (1, 4), x_block_size=(1, 2), round_sf=True),
        references.per_token_cast(x, "e4m3", 4, (1, 2), round_sf=True),
    ):
        assert (hex_rows(data), sf.flatten().tolist()) == expected


@pytest.mark.parametrize(
    ("x", "fmt", "n", "sf", "data"),
    [
        ([1, 2, 3, 1000], "e4m3", 4, [1], "38 40 44 7E"),
        ([1, 2, 3, 1000], "e4m3", 4, [0.3], "45 4D 52 7E"),
        ([1, 2, 3, 1000], "e2m1", 2, [1, 100], "42 70"),
    ],
)
def test_precomputed_scales(x: list[float], fmt: str, n: int, sf: list[float], data: str) -> None:
    row, sf_row = float32(*x)[None], float32(*sf)[None]
    for found in (
        cast(row, fmt, (1, n), sf=sf_row),
        references.per_token_cast_with_precomputed_sf(row, fmt, n, sf_row),
        references.per_block_cast_with_precomputed_sf(row, fmt, (1, n), sf_row, round_sf=True),
    ):
        assert hex_rows(found) == data


def test_blocks() -> None:
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    for data, sf in (cast(x, "e4m3", (2, 2)), references.per_block_cast(x, "e4m3", (2, 2))):
        assert_equal(sf, float32(0.0111607146, 0.0133928573)[None])
        assert hex_rows(data) == "6B 73 76 / 7B 7E 7E"


def test_e5m6() -> None:
    x = float32(0.5, -1, 0.25, 2, 0, 0.001, -3, 4)[None]
    data, sf = cast_to_e5m6(x, 8)
    assert hex_rows(data) == "6B 3F FF 6F 04 00 7F F7 BF F7 F9 C1"
    assert bits(sf) == [0x38810204]
    data, sf = references.per_token_cast(x, "e5m6", 8, round_sf=True)
    assert hex_rows(data) == "68 00 0F 6C 04 00 40 07 80 07 F6 82"
    assert sf.tolist() == [[2**-13]]
    assert scales.read_exponents(sf).tolist() == [[114]]
    expected = float32(0.5, -1, 0.25, 2, 0, 0.0010070801, -3, 4)[None]
    assert_equal(cast_back_from_e5m6((data, sf), "fp32", (1, 8)), expected)
    assert_equal(back_references.cast_back((data, sf), "bf16", (1, 8), "e5m6"), expected.bfloat16())


def test_gathered_channels() -> None:
    x = torch.tensor([[1.0, 2], [3, -4], [5, 6]])
    pos = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    data, sf = per_channel_cast_fused(x, 2, None, False, pos)
    assert hex_rows(data) == "7E 7E / 00 00 / 71 76 / 7E FE"
    expected = [[0.0111607146, 0.0133928573], [0.0066964286, 0.0089285718]]
    assert_equal(sf, torch.tensor(expected))

    with_scales = x.to(torch.float8_e4m3fn), float32(0.5, 1, 3)[:, None]
    for found in (
        per_channel_cast_fused(with_scales, 2, 2, True, pos),
        channel_references.per_channel_cast_fused(with_scales, "e4m3", 2, True, 2, pos),
    ):
        assert hex_rows(found[0]) == "77 79 / 00 00 / 68 68 / 7C F8"
        assert found[1].tolist() == [[2**-4, 2**-4], [2**-7, 2**-6]]


LOSSLESS = torch.tensor(
    [[6, -4, 1, 0.5, 0.75, -0.5, 0, 0.1875], [48, 8, -1, 2, 3, 3, 1.5, -6]], dtype=torch.float32
)


@pytest.mark.parametrize("x_flags", LAYOUTS)
@pytest.mark.parametrize("flags", LAYOUTS)
def test_lossless(x_flags: tuple[bool, bool], flags: tuple[bool, bool]) -> None:
    col_major, packed = x_flags
    x = cast(
        LOSSLESS,
        "e2m1",
        (1, 4),
        round_sf=True,
        use_tma_aligned_col_major_sf=col_major,
        use_packed_ue8m0=packed,
    )
    assert hex_rows(x[0]) == "E7 12 E7 30 / 27 08 55 F3"
    assert scales.read_sf(x[1])[:, :2].tolist() == [[1, 0.125], [8, 1]]
    options = {"use_tma_aligned_col_major_sf": flags[0], "use_packed_ue8m0": flags[1]}

    data, sf = references.per_block_cast_lossless(x, "e4m3", (1, 4), (2, 8), **options)
    assert hex_rows(data) == "64 E0 50 48 4C C8 00 3C / 7C 68 80 00 5C 5C 54 E4"
    assert_equal(sf, scales.lay_out_sf(torch.tensor([[0.125]]), *flags))

    data, sf = references.per_block_cast_lossless(x, "e4m3", (1, 4), (1, 8), **options)
    assert hex_rows(data[:1]) == "7C F8 68 60 64 E0 00 54"
    assert_equal(sf, scales.lay_out_sf(torch.tensor([[1 / 64], [1 / 8]]), *flags))


# ---- plain loops -------------------------------------------------------------------------------


def cast_by_loops(
    x: torch.Tensor, fmt: formats.Format, block_size: tuple[int, int], round_sf: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale factors, block by block, in float64 and by search for the nearest code."""
    x = x.float()
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    sf = torch.zeros(scales.num_blocks(x.shape, block_size))
    for m in range(sf.shape[0]):
        for g in range(sf.shape[1]):
            rows = slice(m * block_size[0], (m + 1) * block_size[0])
            columns = slice(g * block_size[1], (g + 1) * block_size[1])
            block = x[rows, columns]
            amax = float32(max(float(block.abs().max()), fmt.clamp_min)).double()
            scale, inv = (amax / fmt.max).float(), (fmt.max / amax).float()
            if round_sf:
                scale = 2.0 ** scale.double().log2().ceil().float()
                inv = 1 / scale
            sf[m, g] = scale
            scaled = (block.double() * inv.double()).float().reshape(-1)
            found = torch.tensor(nearest_codes(scaled, fmt), dtype=torch.uint8)
            codes[rows, columns] = found.view(block.shape)
    data = formats.pack_e2m1(codes) if fmt is E2M1 else codes.view(torch.float8_e4m3fn)
    return data, sf


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("block_size", [(1, 4), (1, 14), (3, 5), (4, 1), (100, 100)])
def test_cast_by_loops(
    fmt: str, dtype: torch.dtype, block_size: tuple[int, int], round_sf: bool
) -> None:
    x = (torch.randn(7, 14) * 2.0 ** torch.randint(-20, 20, (7, 14))).to(dtype)
    expected = cast_by_loops(x, FORMATS[fmt], block_size, round_sf)
    data, sf = cast(x, fmt, block_size, round_sf=round_sf)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])
    if round_sf:  # otherwise 1 / sf differs from the cast's own factor in the last bit
        assert_equal(cast(x, fmt, block_size, sf=sf), data)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_given_scales_round_each_step_once(fmt: str) -> None:
    """Quotients next to the midpoints of two codes, where the last bit of `1 / sf` decides."""
    magnitudes = values_of_codes(FORMATS[fmt]).unique()
    magnitudes = magnitudes[magnitudes.isfinite()]
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    sf = torch.rand(200, len(midpoints)) * 2 + 2**-10
    x = (midpoints.double() * sf.double()).float()
    if x.shape[1] % 2 != 0:
        x, sf = x[:, 1:].contiguous(), sf[:, 1:].contiguous()
    inv = (1 / sf.double()).float()
    scaled = (x.double() * inv.double()).float()
    expected = [nearest_codes(row, FORMATS[fmt]) for row in scaled]
    assert codes_in(cast(x, fmt, (1, 1), sf=sf), fmt).tolist() == expected


def test_requantised_by_the_dequantised() -> None:
    """Unrounded scales, so that the order of the multiplications shows."""
    x = cast(torch.randn(6, 24), "e4m3", (2, 8))
    for fmt in ("e4m3", "e2m1"):
        for round_sf in (False, True):
            found = cast(x, fmt, (3, 5), x_block_size=(2, 8), round_sf=round_sf)
            expected = cast(cast_back(x, "fp32", (2, 8)), fmt, (3, 5), round_sf=round_sf)
            assert_equal(found[0], expected[0])
            assert_equal(found[1], expected[1])


@pytest.mark.parametrize("flags", [*LAYOUTS, (False, True)])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_layouts_change_only_the_scales_place(fmt: str, flags: tuple[bool, bool]) -> None:
    x = torch.randn(5, 40)
    options = {"use_tma_aligned_col_major_sf": flags[0], "use_packed_ue8m0": flags[1]}
    plain = any_cast(x, fmt, 16, round_sf=True)
    laid_out = any_cast(x, fmt, 16, round_sf=True, **options)
    assert_equal(laid_out[0], plain[0])
    assert_equal(laid_out[1], scales.lay_out_sf(plain[1], *flags))
    assert_equal(any_cast_back(laid_out, fmt, 16), any_cast_back(plain, fmt, 16))
    if fmt != "e5m6":
        again = cast(laid_out, "e4m3", (2, 3), x_block_size=(1, 16))
        assert_equal(again[0], cast(plain, "e4m3", (2, 3), x_block_size=(1, 16))[0])


# ---- properties --------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
@pytest.mark.parametrize("round_sf", [False, True])
def test_round_trip_is_near_and_not_biased(fmt: str, round_sf: bool) -> None:
    x = torch.randn(64, 1024)
    back = any_cast_back(any_cast(x, fmt, 128, round_sf=round_sf), fmt, 128)
    assert calc_diff(x, back) < {"e4m3": 1e-3, "e2m1": 2e-2, "e5m6": 1e-4}[fmt]
    check_bias(back, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_smallest_e5m6_values(dtype: torch.dtype) -> None:
    _, *edges = generate_e5m6_inputs(3, 64, dtype, device="cpu")
    for x, _ in edges:
        data, sf = cast_to_e5m6(x, 64, round_sf=True)
        assert sf.tolist() == [[1.0]] * 3
        assert_equal(cast_back_from_e5m6((data, sf), "fp32", (1, 64)), x.float())


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_casting_twice_changes_nothing(fmt: str) -> None:
    x = torch.randn(16, 64)
    once = any_cast(x, fmt, 16, round_sf=True)
    twice = any_cast(any_cast_back(once, fmt, 16), fmt, 16, round_sf=True)
    assert_equal(any_cast_back(twice, fmt, 16), any_cast_back(once, fmt, 16))


@settings(deadline=None)
@given(st.integers(-90, 90), st.sampled_from(["e4m3", "e2m1", "e5m6"]), st.booleans())
def test_powers_of_two_move_only_the_scales(power: int, fmt: str, round_sf: bool) -> None:
    # Large enough before and after that the least magnitude of the format never decides.
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)) * 2.0 ** (20 - min(0, power))
    factor = 2.0**power
    data, sf = any_cast(x, fmt, 8, round_sf=round_sf)
    moved_data, moved_sf = any_cast(x * factor, fmt, 8, round_sf=round_sf)
    assert_equal(moved_data, data)
    assert_equal(moved_sf, sf * factor)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_random_bits_stay_finite(fmt: str) -> None:
    """The scale is finite and the largest element is kept, whatever the magnitude.

    Half the largest float32 is the limit: more can be rounded up to infinity on the way back.
    """
    x = random_float32((256, 16)).clamp(-FLOAT32_MAX / 2, FLOAT32_MAX / 2)
    for round_sf in (False, True):
        data, sf = any_cast(x, fmt, 8, round_sf=round_sf)
        assert bool(sf.isfinite().all())
        assert float(sf.min()) >= 2.0**-126
        back = any_cast_back((data, sf), fmt, 8)
        assert bool(back.isfinite().all())
        amax = x.abs().view(256, 2, 8).amax(2)
        found = back.abs().view(256, 2, 8).amax(2)
        tolerance = {"e4m3": 2**-4, "e2m1": 2**-2, "e5m6": 2**-7}[fmt]
        large = amax > 1e-4
        assert bool(((found - amax).abs() <= amax * tolerance)[large].all())


def test_generated_magnitudes() -> None:
    for _ in range(20):
        x = generate_rand_float((4, 64), device="cpu")
        x_e2m1 = cast(x, "e2m1", (1, 32), round_sf=True)
        assert calc_diff(x, cast_back(x_e2m1, "fp32", (1, 32))) < 3e-2


# ---- NaN and infinity --------------------------------------------------------------------------

NAN_CODE = {"e4m3": 0x7F, "e2m1": 0x7, "e5m6": 0x7E0}
MAX_CODE = {"e4m3": 0x7E, "e2m1": 0x7, "e5m6": 0x7BF}
NEGATIVE = {"e4m3": 0x80, "e2m1": 0x8, "e5m6": 0x800}


def codes_in(data: torch.Tensor, fmt: str) -> torch.Tensor:
    if fmt == "e4m3":
        return data.view(torch.uint8).int()
    return (formats.unpack_e2m1 if fmt == "e2m1" else formats.unpack_e5m6)(data).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_nan_affects_only_itself(fmt: str, round_sf: bool, dtype: torch.dtype) -> None:
    x = torch.randn(4, 16).to(dtype)
    where = torch.zeros(4, 16, dtype=torch.bool)
    where[0, 3] = where[1, 8:] = where[2, ::2] = where[3] = True
    with_nan = x.masked_fill(where, NAN)
    with_nan[0, 3] = -NAN
    data, sf = any_cast(with_nan, fmt, 8, round_sf=round_sf)
    expected_data, expected_sf = any_cast(x.masked_fill(where, 0), fmt, 8, round_sf=round_sf)
    assert_equal(sf, expected_sf)
    expected_codes = codes_in(expected_data, fmt).masked_fill(where, NAN_CODE[fmt])
    assert_equal(codes_in(data, fmt), expected_codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_infinity_saturates(fmt: str, round_sf: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 16).to(dtype)
    x[0, 3], x[0, 5], x[1, 15] = INF, -INF, -INF
    finite = x.float().clamp(-FLOAT32_MAX, FLOAT32_MAX)
    data, sf = any_cast(x, fmt, 8, round_sf=round_sf)
    expected_data, expected_sf = any_cast(finite, fmt, 8, round_sf=round_sf)
    assert_equal(sf, expected_sf)
    assert bool(sf.isfinite().all())
    assert int(scales.read_exponents(sf).max()) <= 254
    codes, infinite = codes_in(data, fmt), x.isinf()
    assert codes[infinite].tolist() == [
        MAX_CODE[fmt],
        MAX_CODE[fmt] + NEGATIVE[fmt],
        MAX_CODE[fmt] + NEGATIVE[fmt],
    ]
    assert_equal(codes[~infinite], codes_in(expected_data, fmt)[~infinite])


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_the_largest_numbers_come_back(fmt: str, round_sf: bool, ground: tuple[str, str]) -> None:
    """As infinity where code times scale overflows, which docs/quant.md says."""
    backend, device = ground
    largest = FLOAT32_MAX, torch.finfo(torch.bfloat16).max
    special = fmt if fmt == "e5m6" else None
    with tile_kernels.backend(backend):
        for value, out in zip(largest, ("fp32", "bf16")):
            x = torch.full((1, 64), value, device=device)
            quantised = tile_kernels.quant.per_token_cast(x, fmt, 64, round_sf=round_sf)
            back = tile_kernels.quant.per_token_cast_back(quantised, out, 64, special)
            infinite = round_sf or (fmt == "e5m6" and out == "fp32")
            assert (back == (INF if infinite else value)).all()


def test_nan_and_infinity_with_given_scales() -> None:
    x = float32(NAN, INF, -INF, 1.0)[None]
    assert hex_rows(cast(x, "e4m3", (1, 4), sf=torch.ones(1, 1))) == "7F 7E FE 38"
    assert hex_rows(cast(x, "e2m1", (1, 4), sf=torch.ones(1, 1))) == "77 2F"


def test_nan_and_overflow_of_quantised_input() -> None:
    x = e4m3([0x7F, 0x7E, 0xFE, 0x38]), torch.tensor([[2.0**125]])
    data, sf = cast(x, "e4m3", (1, 4), x_block_size=(1, 4), round_sf=True)
    assert hex_rows(data)[:8] == "7F 7E FE"
    assert sf.tolist() == [[2.0**120]]


# ---- sizes, strides, devices -------------------------------------------------------------------


@pytest.mark.parametrize("flags", LAYOUTS)
def test_no_tokens(flags: tuple[bool, bool]) -> None:
    x = torch.zeros(0, 576)
    options = {"use_tma_aligned_col_major_sf": flags[0], "use_packed_ue8m0": flags[1]}
    sf_shape = (0, 2) if flags[1] else (0, 5)
    widths = {"e4m3": 576, "e2m1": 288, "e5m6": 864}
    for fmt, width in widths.items():
        data, sf = any_cast(x, fmt, 128, round_sf=True, **options)
        assert (tuple(data.shape), tuple(sf.shape)) == ((0, width), sf_shape)
        assert any_cast_back((data, sf), fmt, 128).shape == (0, 576)
    data, sf = cast(x, "e2m1", (32, 32), round_sf=True, **options)
    lossless = references.per_block_cast_lossless(
        (data, sf), "e4m3", (32, 32), (128, 128), **options
    )
    assert (tuple(lossless[0].shape), tuple(lossless[1].shape)) == ((0, 576), sf_shape)


def test_no_tokens_along_channels() -> None:
    x = torch.zeros(0, 64)
    shapes = lambda found: [tuple(tensor.shape) for tensor in found]  # noqa: E731
    assert shapes(references.per_channel_cast(x, "e4m3", 128)) == [(0, 64), (0, 64)]
    assert shapes(references.per_channel_cast_and_transpose(x, "e4m3", 128)) == [(64, 0), (0, 64)]
    assert shapes(per_channel_cast_fused(x, 128, None, True, None)) == [(0, 64), (0, 64)]
    padding = torch.full((5,), -1)
    data, sf = per_channel_cast_fused(x, 128, None, True, padding)
    assert shapes((data, sf)) == [(5, 64), (1, 64)]
    assert not data.view(torch.uint8).any()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_strided_input(fmt: str) -> None:
    wide = torch.randn(6, 64)
    sliced = wide[:, 16:48]
    expected = any_cast(sliced.contiguous(), fmt, 8)
    for x in (sliced, sliced.contiguous().T.contiguous().T):
        found = any_cast(x, fmt, 8)
        assert_equal(found[0], expected[0])
        assert_equal(found[1], expected[1])
        assert found[0].is_contiguous()


def test_strided_quantised_input() -> None:
    data, sf = cast(torch.randn(6, 32), "e4m3", (2, 8), round_sf=True)
    wide = torch.zeros(6, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide[:, 5:37] = data
    strided = wide[:, 5:37], sf.T.contiguous().T
    assert_equal(cast_back(strided, "bf16", (2, 8)), cast_back((data, sf), "bf16", (2, 8)))


def test_inputs_are_not_changed() -> None:
    x = torch.randn(4, 16)
    copy = x.clone()
    quantised = cast(x, "e2m1", (1, 8), round_sf=True)
    copies = tuple(tensor.clone() for tensor in quantised)
    cast(quantised, "e4m3", (2, 8), x_block_size=(1, 8))
    cast_to_e5m6(x, 16)
    cast_back(quantised, "fp32", (1, 8))
    references.per_block_cast_lossless(quantised, "e4m3", (1, 8), (2, 16))
    per_channel_cast_fused(x, 2, None, False, torch.tensor([1, -1]))
    assert_equal(x, copy)
    for tensor, kept in zip(quantised, copies):
        assert_equal(tensor, kept)


# ---- the operators' own signatures -------------------------------------------------------------


@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_scales_alone(fmt: str, flags: tuple[bool, bool]) -> None:
    x = torch.randn(5, 40)
    layout = {"use_tma_aligned_col_major_sf": flags[0], "use_packed_ue8m0": flags[1]}
    _, sf = references.per_token_cast(x, fmt, 16, round_sf=True, **layout)
    assert_equal(references.per_token_cast_with_sf_only(x, fmt, 16, round_sf=True, **layout), sf)
    _, sf = references.per_block_cast(x, fmt, (2, 16), round_sf=True, **layout)
    assert_equal(
        references.per_block_cast_with_sf_only(x, fmt, (2, 16), round_sf=True, **layout), sf
    )


def test_given_scales_must_be_row_major() -> None:
    x, sf = torch.ones(4, 32), torch.ones(4, 1)
    with pytest.raises(ValueError, match="row-major"):
        references.per_token_cast_with_precomputed_sf(x, "e4m3", 32, sf, None, True)
    with pytest.raises(ValueError, match="row-major"):
        references.per_block_cast_with_precomputed_sf(x, "e4m3", (1, 32), sf, use_packed_ue8m0=True)
    with pytest.raises(ValueError, match=r"shape \(4, 2\)"):
        cast(x, "e4m3", (1, 16), sf=sf)


def test_channels() -> None:
    x = torch.randn(6, 10).bfloat16()
    for round_sf in (False, True):
        data, sf = cast(x, "e4m3", (4, 1), round_sf=round_sf)
        assert sf.shape == (2, 10)
        found = references.per_channel_cast(x, "e4m3", 4, round_sf)
        assert_equal(found[0], data)
        assert_equal(found[1], sf)
        found = references.per_channel_cast_and_transpose(x, "e4m3", 4, round_sf)
        assert_equal(found[0], data.T.contiguous())
        assert_equal(found[1], sf)
        for num_per_channels in (None, 128):
            found = per_channel_cast_fused(x, 4, num_per_channels, round_sf, None)
            assert_equal(found[0], data)
            assert_equal(found[1], sf)


@pytest.mark.parametrize("with_sf", [False, True])
def test_gather_is_a_gather(with_sf: bool) -> None:
    """Rows past the end do not exist for the scale, padding rows count as zeros."""
    x: Any = torch.randn(9, 16)
    pos = torch.tensor([3, -1, 8, 8, 0, -7, 2], dtype=torch.int32)
    if with_sf:
        x = cast(x, "e4m3", (1, 8))
        rows = torch.cat((cast_back(x, "fp32", (1, 8)), torch.zeros(1, 16)))
    else:
        rows = torch.cat((x, torch.zeros(1, 16)))
    expected = cast(rows[pos.clamp(min=-1).long()], "e4m3", (4, 1), round_sf=True)
    data, sf = per_channel_cast_fused(x, 4, 8, True, pos)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])


def test_back_by_the_operators_names() -> None:
    x = torch.randn(4, 32)
    quantised = cast(x, "e2m1", (1, 8))
    expected = cast_back(quantised, "bf16", (1, 8))
    assert_equal(references.per_token_cast_back(quantised, "bf16", 8), expected)
    assert_equal(back_references.cast_back(quantised, "bf16", (1, 8)), expected)
    assert_equal(
        references.unpack_from_e2m1fn_x2(quantised[0], torch.bfloat16),
        formats.decode_e2m1(quantised[0]).bfloat16(),
    )
    with pytest.raises(ValueError, match="e4m3x"):
        back_references.cast_back(quantised, "bf16", (1, 8), "e4m3x")
    with pytest.raises(TypeError, match="uint8"):
        back_references.cast_back(cast_to_e5m6(x, 8), "bf16", (1, 8))
    with pytest.raises(ValueError, match="fp16"):
        cast_back(quantised, "fp16", (1, 8))
    with pytest.raises(TypeError, match="float32"):
        references.unpack_from_e2m1fn_x2(x)
    with pytest.raises(ValueError, match="dimension"):
        references.unpack_from_e2m1fn_x2(torch.tensor(1, dtype=torch.int8))


def test_wrong_arguments_are_named() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(KeyError):
        cast(x, "e5m6")
    with pytest.raises(TypeError, match="float64"):
        cast(x.double(), "e4m3")
    with pytest.raises(ValueError, match="x_block_size"):
        cast((e4m3([1]), torch.ones(1, 1)), "e4m3")
    with pytest.raises(ValueError, match="x_block_size"):
        cast(x, "e4m3", x_block_size=(1, 1))
    with pytest.raises(ValueError, match="e5m6"):
        references.per_token_cast(cast(x, "e4m3", (1, 8)), "e5m6", 8, (1, 8))
    with pytest.raises(TypeError, match="uint8"):
        cast_back_from_e5m6((e4m3([1]), torch.ones(1, 1)), "fp32", (1, 1))
    e2m1 = cast(x, "e2m1", (1, 4), round_sf=True)
    with pytest.raises(ValueError, match=r"multiple of x_block_size, \(1, 4\)"):
        references.per_block_cast_lossless(e2m1, "e4m3", (1, 4), (1, 6))
    for call in (references.per_block_cast_lossless, channel_references.per_channel_cast_fused):
        arguments = ((1, 4), (1, 8)) if call is references.per_block_cast_lossless else (2,)
        with pytest.raises(ValueError, match="must be 'e4m3', got 'e2m1'"):
            call(e2m1, "e2m1", *arguments)


# ---- without loss ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_lossless_is_lossless(data: st.DataObject) -> None:
    """Any exponents that are at most 11 apart, down to the least that stands for a number."""
    lowest = data.draw(st.integers(1, 254 - 11))
    offsets = torch.tensor(data.draw(st.lists(st.integers(0, 11), min_size=12, max_size=12)))
    sf = formats.decode_ue8m0((lowest + offsets).view(3, 4))
    x = torch.randint(-128, 128, (5, 14), dtype=torch.int8), sf
    out_block = data.draw(st.sampled_from([(2, 8), (4, 8), (6, 16), (2, 32), (8, 32)]))
    out_data, out_sf = references.per_block_cast_lossless(x, "e4m3", (2, 8), out_block)
    back = cast_back((out_data, out_sf), "fp32", out_block)
    assert_equal(back, cast_back(x, "fp32", (2, 8)))
    assert out_sf.shape == scales.num_blocks((5, 28), out_block)


def test_lossless_beyond_its_range() -> None:
    """Zero blocks and zero scales are exact; what e4m3 cannot hold beside the rest is rounded."""
    data = torch.tensor([[0x77, 0x80, 0x13, 0x77]], dtype=torch.uint8).view(torch.int8)
    x = data, float32(2.0**20, 2.0**-126, 2.0**8, 0.0)[None]
    out_data, out_sf = references.per_block_cast_lossless(x, "e4m3", (1, 2), (1, 8))
    assert out_sf.tolist() == [[2.0**14]]
    assert (out_data.float() * 2.0**14).tolist() == [
        [6 * 2.0**20, 6 * 2.0**20, 0.0, -0.0, 1.5 * 2.0**8, 0.5 * 2.0**8, 0.0, 0.0]
    ]
    assert hex_rows(out_data)[6:11] == "00 80"
    beyond = torch.tensor([[0x03]], dtype=torch.int8), float32(2.0**20, 2.0**5)[None]
    out_data, _ = references.per_block_cast_lossless(beyond, "e4m3", (1, 1), (1, 2))
    assert (out_data.float() * 2.0**14).tolist() == [[1.5 * 2.0**20, 0.0]]


def test_lossless_with_zero_scales() -> None:
    """A zero scale makes zeros also where the other scales are the smallest there are."""
    x = torch.tensor([[0x72, 0x72]], dtype=torch.int8), float32(0.0, 2.0**-125)[None]
    for out_block in ((1, 2), (1, 4)):
        out = references.per_block_cast_lossless(x, "e4m3", (1, 2), out_block)
        assert_equal(cast_back(out, "fp32", out_block), cast_back(x, "fp32", (1, 2)))


def test_lossless_reads_only_exponents() -> None:
    data = torch.randint(-128, 128, (2, 8), dtype=torch.int8)
    exact = references.per_block_cast_lossless((data, torch.ones(2, 2)), "e4m3", (1, 8), (2, 16))
    sloppy = references.per_block_cast_lossless(
        (data, torch.ones(2, 2) * 1.9), "e4m3", (1, 8), (2, 16)
    )
    assert_equal(sloppy[0], exact[0])
    assert_equal(sloppy[1], exact[1])


def test_lossless_ignores_bytes_of_missing_groups() -> None:
    data = torch.randint(-128, 128, (2, 4), dtype=torch.int8)
    sf = torch.tensor([[0x7F7F7F7F]] * 2, dtype=torch.int32)
    garbage = torch.tensor([[0x7E7E7F7F]] * 2, dtype=torch.int32)
    expected = references.per_block_cast_lossless((data, sf), "e4m3", (1, 4), (1, 8))
    found = references.per_block_cast_lossless((data, garbage), "e4m3", (1, 4), (1, 8))
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])


# ---- the same on every device ------------------------------------------------------------------


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("num_per_channels", [16, 32, 96])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_every_nan_of_bfloat16_is_dropped(
    fmt: str, num_per_channels: int, ground: tuple[str, str]
) -> None:
    """Quiet or signalling, of either sign: one in each row, which counts for no scale."""
    backend, device = ground
    nans = torch.tensor([sign | 0x7F80 | m for sign in (0, 0x8000) for m in range(1, 128)])
    x = torch.full((254, 96), FORMATS[fmt].max, dtype=torch.bfloat16)
    rows = torch.arange(254)
    x.view(torch.int16)[rows, rows % 96] = nans.to(torch.int16)
    with tile_kernels.backend(backend):
        data, sf = tile_kernels.quant.per_token_cast(x.to(device), fmt, num_per_channels)
    assert (sf == 1).all()
    codes = torch.full((254, 96), {"e4m3": 0x7E, "e2m1": 7}[fmt], dtype=torch.uint8)
    codes[rows, rows % 96] = {"e4m3": 0x7F, "e2m1": 7}[fmt]
    assert_equal(codes_in(data.cpu(), fmt).to(torch.uint8), codes)


@pytest.mark.gpu
@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_casts_on_cuda_give_the_same_bytes(fmt: str, round_sf: bool) -> None:
    x = random_float32((512, 1024))
    x[0, :4] = float32(NAN, -NAN, INF, -INF)
    for part in (x, torch.randn(512, 1024), x.bfloat16(), torch.randn(512, 1024) * 1e-4):
        expected = any_cast(part, fmt, 128, round_sf=round_sf)
        found = any_cast(part.cuda(), fmt, 128, round_sf=round_sf)
        assert_equal(found[0].cpu(), expected[0])
        assert_equal(found[1].cpu(), expected[1])
        back = any_cast_back(found, fmt, 128).cpu()
        expected_back = any_cast_back(expected, fmt, 128)
        assert_equal(back.nan_to_num(), expected_back.nan_to_num())
        if fmt != "e5m6":
            sf = expected[1] * 0.7
            given_sf = cast(part.cuda(), fmt, (1, 128), sf=sf.cuda())
            assert_equal(given_sf.cpu(), cast(part, fmt, (1, 128), sf=sf))


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


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_nothing_is_written_where_a_buffer_does_not_fit(backend: str) -> None:
    x, data = torch.randn(4, 64), torch.zeros(4, 64).to(torch.float8_e4m3fn)
    with tile_kernels.backend(backend):
        with pytest.raises(ValueError, match=r"per_token_cast: .* must have shape \[4, 2\]"):
            tile_kernels.quant.per_token_cast(x, "e4m3", 32, out=(data, torch.empty(2, 2)))
        with pytest.raises(TypeError, match="per_token_cast: out_sf must be a tensor, got int"):
            tile_kernels.quant.per_token_cast(x, "e4m3", 32, out=(data, 3))
        with pytest.raises(TypeError, match="fake_cast: out must be a tensor, got int"):
            tile_kernels.quant.fake_cast(x, "e4m3", 32, out=3)
        with pytest.raises(TypeError, match="per_token_cast: out must be 2 tensors, got int"):
            tile_kernels.quant.per_token_cast(x, "e4m3", 32, out=3)
    assert not data.float().any()
