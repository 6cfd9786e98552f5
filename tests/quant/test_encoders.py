"""The kernels' encoders on every bfloat16 there is."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import quant
from tile_kernels.torch import quant as oracles

MAX = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}


def every_bfloat16(largest: float, columns: int) -> torch.Tensor:
    """All patterns up to `largest`, NaN among them, in rows whose factor is 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = torch.where(x.abs() > largest, largest, x).view(-1, columns - 1)
    return torch.cat((torch.full((len(x), 1), largest), x), 1).to(torch.bfloat16)


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", MAX)
def test_every_bfloat16(fmt: str, dtype: torch.dtype, ground: tuple[str, str]) -> None:
    backend, device = ground
    columns = 257 if fmt == "e4m3" else 258
    x = every_bfloat16(MAX[fmt], 257)
    if columns == 258:
        x = torch.cat((x, torch.zeros(len(x), 1)), 1)
    if fmt == "e5m6":
        x = torch.cat((x, torch.zeros(len(x), 6)), 1)
    x = x.to(dtype)
    width = x.shape[1]
    expected = oracles.per_token_cast(x, fmt, width, None, False, True, False)
    with tile_kernels.backend(backend):
        data, sf = quant.per_token_cast(x.to(device), fmt, width, round_sf=True)
    assert (sf == 1).all()
    assert torch.equal(data.cpu().view(torch.uint8), expected[0].view(torch.uint8))
