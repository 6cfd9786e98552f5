"""The mapping to the fused layout: what the checked mode finds."""

from __future__ import annotations

import pytest
import torch

import tile_kernels


def test_checked_mode_finds_dropped_and_doubled_rows() -> None:
    moe = tile_kernels.moe
    chosen = torch.tensor([[0, 1], [0, 1]])
    twice = torch.tensor([[1], [1]], dtype=torch.int32)
    with tile_kernels.checked():
        moe.get_fused_mapping(chosen, 2, 4, 1)
        with pytest.raises(ValueError, match=r"get_fused_mapping: num_exp.* 2 choices"):
            moe.get_fused_mapping(chosen, 2, 2, 1)
        with pytest.raises(ValueError, match=r"expand_to_fused: token_topk_to_pos .* but 1 occurs"):
            moe.expand_to_fused(torch.ones(2, 4), twice, torch.zeros(3, dtype=torch.int32))
