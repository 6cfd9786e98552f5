"""Casts in groups of a row: the references against worked vectors, loops and properties."""

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
    FORMATS,
    INF,
    LAYOUTS,
    NAN,
    bits,
    e4m3,
    float32,
    hex_rows,
    nearest_codes,
    random_float32,
    values_of_codes,
)
from tests.requirements import GROUNDS
from tile_kernels import torch as references
from tile_kernels.quant import formats, scales
from tile_kernels.quant.back import reference as back_references
from tile_kernels.quant.per_channel import reference as channel_references
from tile_kernels.testing.generator import generate_e5m6_inputs, generate_rand_float
from tile_kernels.testing.numeric import assert_equal, calc_diff, check_bias
from tile_kernels.torch import (
    cast,
    cast_back_from_e5m6,
    cast_to_e5m6,
)

ROW = float32(1, -2, 3, 4, 0.5, 0, -0.0, 7)[None]


def any_cast(x: Any, fmt: str, num_per_channels: int, **options: bool) -> Any:
    """To any of the three formats, in groups of a row."""
    if fmt == "e5m6":
        return cast_to_e5m6(x, num_per_channels, **options)
    return cast(x, fmt, (1, num_per_channels), **options)


def any_cast_back(x: Any, fmt: str, num_per_channels: int) -> torch.Tensor:
    if fmt == "e5m6":
        return cast_back_from_e5m6(x, "fp32", (1, num_per_channels))
    return references.cast_back(x, "fp32", (1, num_per_channels))


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
            expected = cast(references.cast_back(x, "fp32", (2, 8)), fmt, (3, 5), round_sf=round_sf)
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
        assert calc_diff(x, references.cast_back(x_e2m1, "fp32", (1, 32))) < 3e-2


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


def test_inputs_are_not_changed() -> None:
    x = torch.randn(4, 16)
    copy = x.clone()
    quantised = cast(x, "e2m1", (1, 8), round_sf=True)
    copies = tuple(tensor.clone() for tensor in quantised)
    cast(quantised, "e4m3", (2, 8), x_block_size=(1, 8))
    cast_to_e5m6(x, 16)
    references.cast_back(quantised, "fp32", (1, 8))
    references.per_block_cast_lossless(quantised, "e4m3", (1, 8), (2, 16))
    references.per_channel_cast_fused(x, 2, None, False, torch.tensor([1, -1]))
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
