"""Casts along channels beyond the op suite: worked examples, tiles, properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.quant.helpers import (
    float32,
    hex_rows,
)
from tile_kernels import torch as references
from tile_kernels.quant import (
    cast_back,
    per_channel_cast,
    per_channel_cast_and_transpose,
    per_channel_cast_fused,
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.quant.per_channel import reference
from tile_kernels.quant.per_channel import reference as channel_references
from tile_kernels.quant.per_channel.cases import worked_codes, worked_example
from tile_kernels.quant.per_channel.kernel import access_bits
from tile_kernels.quant.per_channel.plan import plan
from tile_kernels.runtime.cases import assert_equal_results
from tile_kernels.runtime.device import Device
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.torch import (
    cast,
)


def test_gathered_channels() -> None:
    x = torch.tensor([[1.0, 2], [3, -4], [5, 6]])
    pos = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    data, sf = references.per_channel_cast_fused(x, 2, None, False, pos)
    assert hex_rows(data) == "7E 7E / 00 00 / 71 76 / 7E FE"
    expected = [[0.0111607146, 0.0133928573], [0.0066964286, 0.0089285718]]
    assert_equal(sf, torch.tensor(expected))

    with_scales = x.to(torch.float8_e4m3fn), float32(0.5, 1, 3)[:, None]
    for found in (
        references.per_channel_cast_fused(with_scales, 2, 2, True, pos),
        channel_references.per_channel_cast_fused(with_scales, "e4m3", 2, True, 2, pos),
    ):
        assert hex_rows(found[0]) == "77 79 / 00 00 / 68 68 / 7C F8"
        assert found[1].tolist() == [[2**-4, 2**-4], [2**-7, 2**-6]]


@pytest.mark.parametrize(("tokens", "block"), [(128, 32), (384, 128), (140, 32)])
@pytest.mark.parametrize("quantized", [False, True])
def test_scales_packed_along_tokens(quantized: bool, tokens: int, block: int) -> None:
    """Byte `i` of word `[r, h]` is of block `4 r + i`; `cast_back` reads such words."""
    torch.manual_seed(0)
    x: Any = torch.randn(tokens, 24).bfloat16()
    groups = None
    if quantized:
        x, groups = references.per_token_cast(x, "e4m3", 32), 32
    options: dict[str, Any] = {"num_per_channels": groups}
    data, sf = per_channel_cast(x, "e4m3", block, True, **options)
    same, words = per_channel_cast(x, "e4m3", block, True, **options, use_packed_ue8m0=True)
    assert_equal(same, data)
    assert (words.dtype, words.shape) == (torch.int32, (-(-len(sf) // 4), 24))
    assert words.is_contiguous()
    exponents = sf.view(torch.int32) >> 23
    for m in range(4 * len(words)):
        byte = words[m // 4] >> 8 * (m % 4) & 0xFF
        assert_equal(byte, exponents[m] if m < len(sf) else torch.zeros_like(byte))
    for fmt in ("fp32", "bf16"):
        back = cast_back((same, words), fmt, (block, 1))
        assert_equal(back, cast_back((data, sf), fmt, (block, 1)))


def test_no_tokens_along_channels() -> None:
    x = torch.zeros(0, 64)
    shapes = lambda found: [tuple(tensor.shape) for tensor in found]  # noqa: E731
    assert shapes(references.per_channel_cast(x, "e4m3", 128)) == [(0, 64), (0, 64)]
    assert shapes(references.per_channel_cast_and_transpose(x, "e4m3", 128)) == [(64, 0), (0, 64)]
    assert shapes(references.per_channel_cast_fused(x, 128, None, True, None)) == [(0, 64), (0, 64)]
    padding = torch.full((5,), -1)
    data, sf = references.per_channel_cast_fused(x, 128, None, True, padding)
    assert shapes((data, sf)) == [(5, 64), (1, 64)]
    assert not data.view(torch.uint8).any()


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
            found = references.per_channel_cast_fused(x, 4, num_per_channels, round_sf, None)
            assert_equal(found[0], data)
            assert_equal(found[1], sf)


@pytest.mark.parametrize("with_sf", [False, True])
def test_gather_is_a_gather(with_sf: bool) -> None:
    """Rows past the end do not exist for the scale, padding rows count as zeros."""
    x: Any = torch.randn(9, 16)
    pos = torch.tensor([3, -1, 8, 8, 0, -7, 2], dtype=torch.int32)
    if with_sf:
        x = cast(x, "e4m3", (1, 8))
        rows = torch.cat((references.cast_back(x, "fp32", (1, 8)), torch.zeros(1, 16)))
    else:
        rows = torch.cat((x, torch.zeros(1, 16)))
    expected = cast(rows[pos.clamp(min=-1).long()], "e4m3", (4, 1), round_sf=True)
    data, sf = references.per_channel_cast_fused(x, 4, 8, True, pos)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])


BACKENDS = pytest.mark.parametrize("backend", ["torch", "emulate"])


def codes(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.uint8)


@BACKENDS
def test_worked_example_of_a_quantised_source(backend: str) -> None:
    with tile_kernels.backend(backend):
        result = per_channel_cast_fused(**worked_example(scales=True))
    scales = torch.tensor([[2.0**-4, 2.0**-4], [2.0**-7, 2.0**-6]])
    assert_equal_results(result, (worked_codes("7779", "6868", "7CF8"), scales))


@BACKENDS
def test_source_scales_are_applied_before_the_new_ones(backend: str) -> None:
    """`(code * sf) * inv` is not `code * (sf * inv)`: a place where they differ."""
    torch.manual_seed(1990)
    data = torch.randint(0, 127, (32, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    sf = 0.1 + torch.rand(32, 2)
    with tile_kernels.backend(backend):
        out, out_sf = per_channel_cast_fused((data, sf), "e4m3", 32, num_per_channels=128)
    wide = sf.repeat_interleave(128, 1)
    inverse = torch.tensor(448.0) / (data.float() * wide).amax(0)
    exact = ((data.float() * wide) * inverse).to(torch.float8_e4m3fn)
    other = (data.float() * (wide * inverse)).to(torch.float8_e4m3fn)
    assert torch.equal(codes(out), codes(exact))
    assert not torch.equal(codes(out), codes(other))
    assert out_sf.shape == (1, 256)


@BACKENDS
def test_positions_beyond_the_tokens_are_padding(backend: str) -> None:
    x = torch.randn(3, 8)
    index = torch.tensor([3, 0, 2**31 - 1, -(2**31)], dtype=torch.int32)
    padded = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    with tile_kernels.backend(backend):
        result = per_channel_cast_fused(x, "e4m3", 32, pos_to_token=index)
        assert_equal_results(result, per_channel_cast_fused(x, "e4m3", 32, pos_to_token=padded))
    assert (codes(result[0])[[0, 2, 3]] == 0).all()


def test_a_short_last_block_has_the_scale_of_its_own_rows() -> None:
    x = torch.full((36, 8), 2.0)
    x[0] = 100.0
    with tile_kernels.backend("emulate"):
        _, scales = per_channel_cast(x, "e4m3", 32)
    assert (scales * 448).tolist() == [[100.0] * 8, [2.0] * 8]


def test_results_go_to_given_buffers() -> None:
    x = torch.randn(40, 16)
    data = torch.zeros(16, 40, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(2, 16)
    with tile_kernels.backend("emulate"):
        result = per_channel_cast_and_transpose(x, "e4m3", 32, out=(data, scales))
    assert result[0] is data
    assert result[1] is scales
    assert_equal_results((data, scales), reference.per_channel_cast_and_transpose(x, "e4m3", 32))


def test_activation_is_rounded_before_its_scale_is_made() -> None:
    x = torch.tensor([[1.0, 3.0]]).bfloat16()
    with tile_kernels.backend("emulate"):
        _, scales = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32)
    assert scales.view(torch.int32).item() == 0x3BA00000  # unrounded: 0x3BA06A47


@pytest.mark.parametrize("clamp", [None, 2.0])
def test_nan_passes_the_clamp(clamp: float | None) -> None:
    x = torch.tensor([[float("nan"), 1.0, 3.0, float("nan")], [1.0, 1.0, 5.0, 5.0]]).bfloat16()
    with tile_kernels.backend("emulate"):
        data, scales = swiglu_forward_and_per_channel_cast_and_transpose(
            x, "e4m3", 32, without_transpose=True, swiglu_clamp_value=clamp
        )
    assert codes(data).tolist() == [[0x7F, 0x7F], [0x7E, 0x7E]]
    assert scales.isfinite().all()


def test_transposed_data_is_that_of_the_straight_cast() -> None:
    x = torch.randn(145, 40).bfloat16()
    with tile_kernels.backend("emulate"):
        straight, scales = per_channel_cast(x, "e4m3", 128)
        turned, same = per_channel_cast_and_transpose(x, "e4m3", 128)
        x2 = torch.cat((x, x), 1)
        mine = swiglu_forward_and_per_channel_cast_and_transpose(x2, "e4m3", 128)
        plain = swiglu_forward_and_per_channel_cast_and_transpose(x2, "e4m3", 128, False, True)
    assert torch.equal(codes(turned), codes(straight).T)
    assert torch.equal(same, scales)
    assert torch.equal(codes(mine[0]), codes(plain[0]).T)
    assert torch.equal(mine[1], plain[1])


# ---- plans --------------------------------------------------------------------------------------


H200 = Device("NVIDIA H200", "sm_90a", 132, 227 * 1024, 228 * 1024)


def planned(**changes: Any) -> Any:
    problem = {
        "source": "bfloat16",
        "activation": "none",
        "transposed": False,
        "group": 128,
        "round_sf": False,
        "gathered": False,
        "scale_columns": 128,
        "packed": False,
        "rows": 8192,
        "width": 7168,
        "row_stride": 7168,
        "alignment": 16,
        "out_alignment": 16,
    }
    return plan(**{**problem, **changes}, device=H200)


def test_accesses_are_as_wide_as_rows_allow() -> None:
    assert access_bits(*planned()) == ((128,), (32, 64))
    assert access_bits(*planned(transposed=True)) == ((128,), (32, 128))
    assert access_bits(*planned(source="e4m3")) == ((32, 128), (32, 128))
    assert access_bits(*planned(transposed=True, rows=8194)) == ((128,), (16, 32))
    assert access_bits(*planned(width=7170, row_stride=7170)) == ((32,), (16, 32))
    assert access_bits(*planned(row_stride=7169)) == ((16,), (32, 64))
    assert access_bits(*planned(alignment=8)) == ((64,), (32, 64))


def test_one_kernel_serves_many_sizes() -> None:
    assert planned(rows=4096) == planned(rows=1)
    assert planned(width=576, row_stride=576) == planned()


def test_no_axis_of_the_grid_overflows() -> None:
    most = 128 * 65535
    assert not planned(rows=most).rows_on_x
    assert planned(rows=most + 1).rows_on_x
    assert planned(transposed=True, width=most).rows_on_x
    assert not planned(transposed=True, width=most + 8).rows_on_x
