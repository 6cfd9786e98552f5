"""Fixtures of the mHC tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tile_kernels


@pytest.fixture
def device(ground: tuple[str, str]) -> Iterator[str]:
    torch.manual_seed(0)
    with tile_kernels.backend(ground[0]):
        yield ground[1]
