"""Operands whose products are exact, and where tests run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels import config
from tile_kernels.gemm import samples, tiling
from tile_kernels.gemm.tiling import Tile

E4M3 = torch.float8_e4m3fn
GROUNDS = [
    pytest.param(("emulate", "cpu"), id="emulate", marks=pytest.mark.emulated),
    pytest.param(("tilelang", "cuda"), id="cuda", marks=pytest.mark.gpu),
]
each_ground = pytest.mark.parametrize("ground", GROUNDS)

# Tiles that give the same bits; those with clusters are not emulated.
TILES = [
    tiling.WIDE,
    tiling.WIDE_GROUPED,
    tiling.NARROW,
    tiling.FEW_ROWS,
    Tile(64, 256, 4, 8, separate=True, cluster=1),
    Tile(128, 128, 3, 1, separate=False, cluster=1),
    tiling.WIDE_FP8,
    # Two stages: each is reused after one step.
    Tile(128, 128, 2, 1, separate=True, cluster=1, ahead=True, alternate=True, copied_scales=True),
]
TILES_OF_ROW_SCALES = [tile for tile in TILES if tile.rows == 64 or tile.columns == 128]


def set_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile | None) -> None:
    """Makes the plans use a tile, until the test ends."""
    monkeypatch.setattr(tiling, "override", tile)
    monkeypatch.setattr(config, "generation", config.generation + 1)


def integers(*shape: int, device: str, low: int = -2, high: int = 2) -> Tensor:
    """Small integers as e4m3: all sums are exact."""
    values = torch.randint(low, high + 1, shape, device=device)
    return values.float().to(E4M3)


def powers(*shape: int, device: str) -> Tensor:
    """Scales that are powers of two near 1."""
    return torch.randint(-2, 3, shape, device=device).float().exp2()


def dense(m: int, n: int, k: int, device: str, exact: bool = False, by_row: bool = False) -> Any:
    """`(a, b, d)` of a dense product; exact ones have a float32 result."""
    torch.manual_seed(m + n + k)
    if not exact:
        a = samples.by_rows(torch.randn(m, k, device=device))
        b = samples.weights((n, k), by_row, samples.MN, torch.device(device)) if by_row else None
        b = b or samples.by_blocks(torch.randn(n, k, device=device))
        return a, b, torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=device)
    rows = n if by_row else -(-n // 128)
    a = integers(m, k, device=device), powers(m, k // 128, device=device)
    b = integers(n, k, device=device), powers(rows, k // 128, device=device)
    return a, b, torch.full((m, n), torch.nan, device=device)


def on(ground: tuple[str, str]) -> Any:
    """The backend of a ground."""
    return tile_kernels.backend(ground[0])
