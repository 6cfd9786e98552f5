"""Casts back: worked examples, strides, several rows per thread, refused arguments."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.quant.helpers import (
    e4m3,
    float32,
    float32_of_bits,
)
from tile_kernels import torch as references
from tile_kernels.quant import (
    cast_back,
    formats,
    per_token_cast_back,
    unpack_from_e2m1fn_x2,
)
from tile_kernels.quant.back import plan as back_plan
from tile_kernels.quant.back import reference as back_references
from tile_kernels.quant.cast_back_e5m6_kernel import cast_back_e5m6
from tile_kernels.quant.samples import codes, hexed, words
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.torch import (
    cast,
    cast_to_e5m6,
)


def test_back_from_e4m3() -> None:
    x = e4m3([0x6E, 0xF6, 0x7A, 0x7E]), float32_of_bits(0x3C124925)[None]
    assert_equal(references.cast_back(x, "fp32", (1, 4)), float32(1, -2, 2.8571429253, 4)[None])
    rounded = references.cast_back(x, "bf16", (1, 4))
    assert rounded.dtype == torch.bfloat16
    assert rounded.tolist() == [[1.0, -2.0, 2.859375, 4.0]]


def test_strided_quantised_input() -> None:
    data, sf = cast(torch.randn(6, 32), "e4m3", (2, 8), round_sf=True)
    wide = torch.zeros(6, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide[:, 5:37] = data
    strided = wide[:, 5:37], sf.T.contiguous().T
    assert_equal(
        references.cast_back(strided, "bf16", (2, 8)),
        references.cast_back((data, sf), "bf16", (2, 8)),
    )


def test_back_by_the_operators_names() -> None:
    x = torch.randn(4, 32)
    quantised = cast(x, "e2m1", (1, 8))
    expected = references.cast_back(quantised, "bf16", (1, 8))
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
        references.cast_back(quantised, "fp16", (1, 8))
    with pytest.raises(TypeError, match="float32"):
        references.unpack_from_e2m1fn_x2(x)
    with pytest.raises(ValueError, match="dimension"):
        references.unpack_from_e2m1fn_x2(torch.tensor(1, dtype=torch.int8))


BACKENDS = ["torch", "emulate"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_e4m3_back(backend: str) -> None:
    """The worked example; not among the operator's vectors, as opcheck takes no float8."""
    x = hexed("6EF67A7E", torch.float8_e4m3fn), words([0x3C124925])
    with tile_kernels.backend(backend):
        for out in (cast_back(x, "fp32", (1, 4)), per_token_cast_back(x, "fp32", 4)):
            assert out.tolist() == [[1.0, -2.0, 2.857142925262451, 4.0]]


@pytest.mark.parametrize(
    ("fmt", "block"),
    [("e4m3", (1, 32)), ("e2m1", (2, 16)), ("e5m6", (4, 64)), ("e4m3", (128, 1))],
)
def test_several_rows_per_thread(
    fmt: str, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a large tensor: the last thread has fewer rows, scales are shared or not."""
    monkeypatch.setattr(back_plan, "BUSY", 0)
    torch.manual_seed(0)
    x = codes(7, 64, fmt, torch.device("cpu"))
    sf = torch.exp2(torch.arange(-(-7 // block[0]) * (64 // block[1])).float() / 3)
    sf = sf.view(-(-7 // block[0]), 64 // block[1])
    special = "e5m6" if fmt == "e5m6" else None
    expected = cast_back((x, sf), "fp32", block, special)
    with tile_kernels.backend("emulate"):
        result = cast_back((x, sf), "fp32", block, special)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_e5m6_back() -> None:
    x = hexed("68000F6C040040078007F682", torch.uint8), torch.tensor([[2.0**-13]])
    expected = cast_back(x, "bf16", (1, 8), "e5m6")
    assert expected.equal(cast_back_e5m6(x, "bf16", (1, 8)))
    assert expected[0, :4].tolist() == [0.5, -1.0, 0.25, 2.0]


def test_unpacking_takes_signed_and_unsigned_bytes() -> None:
    data = hexed("10F8", torch.int8)
    expected = [[0.0, 0.5, -0.0, -6.0]]
    assert unpack_from_e2m1fn_x2(data).tolist() == expected
    assert unpack_from_e2m1fn_x2(data.view(torch.uint8), torch.bfloat16).tolist() == expected
