"""Inputs of the compression."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.requirements import GROUNDS
from tile_kernels.attention.compress.cases import (
    series,
)

each_ground = pytest.mark.parametrize("ground", GROUNDS)
LENGTHS = (9, 0, 1, 3, 4, 17, 2)


def arguments(
    num_tokens: int, channels: int, window: int, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    torch.manual_seed(num_tokens)
    return series(num_tokens, channels, window, **options)(torch.device(device))
