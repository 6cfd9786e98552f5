"""The transposes on the reference grid, their properties, and their benchmarks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tile_kernels.runtime import emulation
from tile_kernels.runtime.device import described
from tile_kernels.runtime.sampling import random_bits
from tile_kernels.testing.bench import make_param_id
from tile_kernels.testing.generator import generate_hidden_sizes, generate_num_tokens
from tile_kernels.testing.numeric import assert_equal

E4M3 = torch.float8_e4m3fn


def grid(is_benchmark: bool = False) -> list[dict[str, Any]]:
    return [
        {"num_tokens": num_tokens, "hidden": hidden, "dtype": dtype}
        for num_tokens in generate_num_tokens(64, is_benchmark=is_benchmark)
        for hidden in generate_hidden_sizes()
        for dtype in (E4M3, torch.bfloat16)
    ]


def batched_grid(is_benchmark: bool = False) -> list[dict[str, Any]]:
    return [
        {"batch": batch, "num_tokens": num_tokens, "hidden": hidden, "dtype": dtype}
        for num_tokens in generate_num_tokens(64, is_benchmark=is_benchmark)
        for hidden in generate_hidden_sizes()
        for batch in (8, 32)
        for dtype in (E4M3, torch.bfloat16, torch.float32)
    ]


def left_half(params: dict[str, Any]) -> torch.Tensor:
    """The input of the reference tests: the left half of a tensor twice as wide."""
    shape = (params["num_tokens"], 2 * params["hidden"])
    wide = random_bits(shape, params["dtype"], torch.device("cuda"))
    return wide[:, : params["hidden"]]


def batch_of(params: dict[str, Any]) -> torch.Tensor:
    shape = (params["batch"], params["num_tokens"], params["hidden"])
    return random_bits(shape, params["dtype"], torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("params", grid(), ids=make_param_id)
def test_transpose(params: dict[str, Any]) -> None:
    x = left_half(params)
    assert_equal(tile_kernels.transpose.transpose(x), x.T.contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("params", batched_grid(), ids=make_param_id)
def test_batched_transpose(params: dict[str, Any]) -> None:
    x = batch_of(params)
    out = tile_kernels.transpose.batched_transpose(x)
    assert out.is_contiguous()
    assert out.shape == (x.shape[0], x.shape[2], x.shape[1])
    bits = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    for matrix, transposed in zip(bits, out.view(bits.dtype)):  # one at a time: up to 15 GB
        assert torch.equal(transposed, matrix.T)


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.parametrize("params", grid(is_benchmark=True), ids=make_param_id)
def test_transpose_benchmark(params: dict[str, Any], record_time: Any) -> None:
    record_time(tile_kernels.transpose.transpose, params, left_half(params))


@pytest.mark.gpu
@pytest.mark.benchmark
@pytest.mark.parametrize("params", batched_grid(is_benchmark=True), ids=make_param_id)
def test_batched_transpose_benchmark(params: dict[str, Any], record_time: Any) -> None:
    record_time(tile_kernels.transpose.batched_transpose, params, batch_of(params))


# ---- properties ---------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(0, 9),
    cols=st.integers(0, 9),
    dtype=st.sampled_from([torch.uint8, E4M3, torch.bfloat16, torch.float64, torch.bool]),
)
def test_transposing_twice_changes_nothing(rows: int, cols: int, dtype: torch.dtype) -> None:
    x = (torch.arange(rows * cols).view(rows, cols) % 7).to(dtype)
    twice = tile_kernels.transpose.transpose(tile_kernels.transpose.transpose(x))
    assert_equal(twice, x)


def test_nan_payloads_and_signed_zeros_survive() -> None:
    bits = torch.tensor([[0x7FC00001, -0x400000], [-(1 << 31), 0]], dtype=torch.int32)
    out = tile_kernels.transpose.transpose(bits.view(torch.float32))
    assert torch.equal(out.view(torch.int32), bits.T)


def test_more_columns_than_the_grid_has_blocks_on_y(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide matrices put their columns on the grid's x axis; here from 129 columns on."""
    from tile_kernels.transpose import plan as plans

    monkeypatch.setattr(plans, "MAX_BLOCKS_ON_Y", 1)
    x = torch.arange(40.0 * 200).view(40, 200).bfloat16()
    assert not plans.plan("bfloat16", 2, 40, 200, 200, None, 16, described()).rows_on_x
    with tile_kernels.backend("emulate"):
        assert torch.equal(tile_kernels.transpose.transpose(x), x.T)


def test_more_matrices_than_the_grid_has_blocks_on_z(monkeypatch: pytest.MonkeyPatch) -> None:
    from tile_kernels.transpose import op

    monkeypatch.setattr(op, "_MAX_BATCHES", 2)
    x = torch.arange(5.0 * 9 * 12).view(5, 9, 12)
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        assert torch.equal(tile_kernels.transpose.batched_transpose(x), x.transpose(1, 2))
    assert len(reports) == 3


def test_documented_sentences() -> None:
    with pytest.raises(TypeError, match=r"^transpose: x must have elements of 1, 2, 4 or 8 bytes"):
        tile_kernels.transpose.transpose(torch.ones(2, 2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"stride 1 in its last dimension, got 2$"):
        tile_kernels.transpose.transpose(torch.ones(4, 8)[:, ::2])
