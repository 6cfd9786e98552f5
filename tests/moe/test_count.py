"""Counts of indices: limits, and independence of the default dtype."""

from __future__ import annotations

import pytest
import torch

import tile_kernels


def test_flat_kernels_count_in_32_bits() -> None:
    indices = torch.empty(2**28, 8, dtype=torch.int64, device="meta")
    for call in (
        lambda: tile_kernels.moe.group_count(indices, 4),
        lambda: tile_kernels.moe.mask_indices_by_tp(indices, 8, 1, 0, 1),
    ):
        with pytest.raises(ValueError, match="elements"):
            call()


def test_load_does_not_depend_on_the_default_dtype() -> None:
    idx = torch.zeros(257, 1, dtype=torch.int64)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tile_kernels.moe.aux_fi(idx, 2, 1).tolist() == [2.0, 0.0]
    finally:
        torch.set_default_dtype(torch.float32)
