"""Casts in blocks: worked examples, plain loops, padding, how threads are laid over blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tile_kernels
from tests.quant.helpers import (
    FORMATS,
    float32,
    hex_rows,
    nearest_codes,
)
from tile_kernels import torch as references
from tile_kernels.quant import (
    formats,
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_sf_only,
    scales,
)
from tile_kernels.quant.formats import E2M1
from tile_kernels.quant.per_block.plan import THREADS, tile_of
from tile_kernels.quant.sample_flags import PACKED
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.poison import poisoned_empty
from tile_kernels.torch import (
    cast,
)


def test_blocks() -> None:
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    for data, sf in (cast(x, "e4m3", (2, 2)), references.per_block_cast(x, "e4m3", (2, 2))):
        assert_equal(sf, float32(0.0111607146, 0.0133928573)[None])
        assert hex_rows(data) == "6B 73 76 / 7B 7E 7E"


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


COLUMNS = {"use_tma_aligned_col_major_sf": True}


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
