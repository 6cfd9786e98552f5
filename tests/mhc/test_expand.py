"""Streams from hidden states: a worked example."""

from __future__ import annotations

import torch

from tile_kernels import torch as references
from tile_kernels.torch import mhc as mhc_reference

# ---- worked examples ----------------------------------------------------------------------------


def test_expand_example() -> None:
    hidden = torch.tensor([0.0, 1.0, 2.0])
    assert references.expand_to_mhc_ref(hidden, 2).tolist() == [[0, 1, 2], [0, 1, 2]]
    grad = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert mhc_reference.expand_to_mhc_bwd(grad).tolist() == [5, 7, 9]
    several = references.expand_to_mhc_ref(torch.arange(12).view(2, 3, 2), 4)
    assert several.shape == (2, 3, 4, 2)
    assert several.is_contiguous()
