"""Routings, problem sizes and plain definitions that tests of several operators use."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels.testing.bench import make_param_id
from tile_kernels.testing.generator import generate_moe_params, generate_topk_idx

BACKENDS = ["torch", "emulate"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def routed(num_tokens: int = 21, num_topk: int = 4, num_experts: int = 6) -> tuple[Tensor, Tensor]:
    """Slots and experts of a mapping; half of the slots are masked."""
    torch.manual_seed(1)
    chosen = torch.rand(num_tokens, 2 * num_experts).argsort(1)[:, :num_topk]
    chosen = chosen.masked_fill(chosen >= num_experts, -1)
    mapping = tile_kernels.torch.get_fused_mapping(chosen, num_experts, 0, 4)
    return mapping[3], mapping[0]


def reduced_plainly(
    x: Tensor, weights: Tensor | None, slots: Tensor, x_sf: Tensor | None
) -> Tensor:
    """What `reduce_fused` means, for PyTorch's own autograd."""
    total = x.new_zeros(slots.shape[0], x.shape[1])
    for k in range(slots.shape[1]):
        (tokens,) = (slots[:, k] >= 0).nonzero(as_tuple=True)
        rows = slots[tokens, k].long()
        row = x[rows] if x_sf is None else x[rows] * x_sf[rows, None]
        row = row if weights is None else row * weights[tokens, k, None]
        total = total.index_add(0, tokens, row)
    return total


HIDDEN_SIZES = (576, 2048, 2560, 3072, 4096, 6144, 7168)
PARAMS_AND_HIDDEN = [
    {**params, "hidden": hidden}
    for params, hidden in zip(generate_moe_params(), itertools.cycle(HIDDEN_SIZES))
]
each_grid_point_and_hidden = pytest.mark.parametrize("params", PARAMS_AND_HIDDEN, ids=make_param_id)


def mapped(params: dict[str, int], alignment: int) -> tuple[Tensor, Tensor]:
    topk_idx = generate_topk_idx(params, device="cuda")
    mapping = tile_kernels.moe.get_fused_mapping(topk_idx, params["num_experts"], 0, alignment)
    return mapping[3], mapping[1]


PARAMS = list(generate_moe_params())
each_grid_point = pytest.mark.parametrize("params", PARAMS, ids=make_param_id)


def labels_of(params: dict[str, int], x: torch.Tensor) -> dict[str, int]:
    kept = {name: value for name, value in params.items() if name != "num_send_tokens"}
    return {**kept, "num_tokens": x.shape[0]}
