"""Casts in blocks and back: worked examples in e4m3, padding, the way threads lie over blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels.quant import (
    cast_back,
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_sf_only,
    per_token_cast_back,
    unpack_from_e2m1fn_x2,
)
from tile_kernels.quant.back import plan as back_plan
from tile_kernels.quant.cast_back_e5m6_kernel import cast_back_e5m6
from tile_kernels.quant.per_block.plan import THREADS, tile_of
from tile_kernels.quant.sample_flags import PACKED
from tile_kernels.quant.samples import codes, hexed, words
from tile_kernels.testing.poison import poisoned_empty

BACKENDS = ["torch", "emulate"]
COLUMNS = {"use_tma_aligned_col_major_sf": True}


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


def lossless(x: torch.Tensor, flags: dict[str, bool]) -> torch.Tensor:
    data = torch.full((x.shape[0], x.shape[1] // 2), 0x22, dtype=torch.int8)
    scales = torch.ones(x.shape[0], x.shape[1] // 32)
    return per_block_cast_lossless((data, scales), "e4m3", (1, 32), (32, 32), **flags)[1]


@pytest.mark.parametrize("flags", [COLUMNS, PACKED], ids=["column", "packed"])
@pytest.mark.parametrize(
    "scales_of",
    [
        lambda x, flags: per_block_cast(x, "e4m3", (32, 32), **flags)[1],
        lambda x, flags: per_block_cast_with_sf_only(x, "e2m1", (32, 32), **flags),
        lossless,
    ],
    ids=["cast", "scales", "lossless"],
)
def test_padding_is_zero(scales_of: Callable[..., Any], flags: dict[str, bool]) -> None:
    """Rows up to a multiple of 4, and the bytes of groups that do not exist."""
    with tile_kernels.backend("emulate"), poisoned_empty(0xA5):
        sf = scales_of(torch.ones(40, 160), flags)  # 2 x 5 blocks
    buffer = sf.as_strided((sf.shape[1], 4), (4, 1))
    assert buffer[:, 2:].eq(0).all()
    assert buffer[:, :2].ne(0).all()
    if sf.dtype == torch.int32:
        assert (buffer[1] >> 8).eq(0).all()


@pytest.mark.parametrize("rows", [1, 3, 16, 32, 64, 128, 300, 5000])
@pytest.mark.parametrize("channels", [16, 32, 128, 4096])
@pytest.mark.parametrize("steps", [4, 8])
def test_tiles_cover_their_blocks(rows: int, channels: int, steps: int) -> None:
    tile = tile_of(rows, channels, 16, steps)
    assert THREADS % tile.team == 0
    assert tile.team % 32 == 0
    assert tile.team % tile.lanes == 0
    assert tile.width % channels == 0
    assert tile.steps * tile.at_a_time >= rows


def test_unpacking_takes_signed_and_unsigned_bytes() -> None:
    data = hexed("10F8", torch.int8)
    expected = [[0.0, 0.5, -0.0, -6.0]]
    assert unpack_from_e2m1fn_x2(data).tolist() == expected
    assert unpack_from_e2m1fn_x2(data.view(torch.uint8), torch.bfloat16).tolist() == expected
