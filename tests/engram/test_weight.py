"""Fused weights: a worked vector, and how little they change the gate."""

from __future__ import annotations

import pytest
import torch

from tests.engram.helpers import CLAMP, EPS, inputs
from tile_kernels.testing.numeric import assert_equal, calc_diff
from tile_kernels.torch import engram


def test_fused_weight_vector() -> None:
    found = engram.fused_weight(torch.tensor([[1.5]]).bfloat16(), torch.tensor([[-2.25]]).float())
    assert_equal(found, torch.tensor([[-3.375]]))


@pytest.mark.parametrize("hidden", [1, 64, 256])
def test_fused_weights_change_little(hidden: int) -> None:
    x, k, v, weight_hidden, weight_embed = inputs(257, 4, hidden, torch.bfloat16)
    reference = engram.engram_gate_ref(x, k, v, weight_hidden, weight_embed, CLAMP, EPS, True)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    found = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    for part, expected in zip(found, reference):
        assert calc_diff(part, expected) < 2e-10
    alone = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP, save_for_backward=False)
    assert_equal(alone[0], found[0])
    assert alone[1:] == (None, None, None, None)
