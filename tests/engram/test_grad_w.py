"""The reduction of weight gradients: a worked vector and its order."""

from __future__ import annotations

import torch

from tile_kernels.torch import engram


def test_reduce_vector() -> None:
    partial = torch.tensor([[1.0, 2], [3, -1], [0.5, 0.5], [0, 1]])[:, None]
    of_hidden, of_embed = torch.tensor([[10.0, 10]]), torch.zeros(1, 2)
    weights = torch.tensor([[2.0, 1]]).bfloat16(), torch.tensor([[0.5, 4]]).bfloat16()
    assert engram.grad_w_reduce(partial, *weights, of_hidden, of_embed) is None
    assert of_hidden.tolist() == [[12.25, 20]]
    assert of_embed.tolist() == [[9, 2.5]]


def test_reduce_adds_in_order() -> None:
    """2^25 swallows each 1 that comes after it, and not what comes before."""
    parts = torch.tensor([2.0, 2, 2**25, 1, 1])[:, None, None]
    one, found = torch.ones(1, 1), torch.zeros(2, 1, 1)
    engram.grad_w_reduce(parts, one, one, found[0], found[1])
    assert found.flatten().tolist() == [2**25 + 4, 2**25 + 4]
