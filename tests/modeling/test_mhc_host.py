"""What a layer of streams costs the host: calls, launches, allocations; see `tests.host_cost`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.host_cost import Counts, counting, pytorch_operators
from tile_kernels.modeling.mhc import HyperConnection


def steps(*leading: int) -> dict[str, Callable[[], Any]]:
    """Training and inference of a layer around a block that costs nothing."""
    layer = HyperConnection(nn.Identity(), 7168, 4)
    residual = torch.zeros(*leading, 4, 7168, dtype=torch.bfloat16, requires_grad=True)
    inputs, grad = [residual, *layer.parameters()], torch.zeros_like(residual)

    def inference() -> Any:
        with torch.no_grad():
            return layer(residual)

    def training() -> Any:
        return torch.autograd.grad(layer(residual), inputs, grad)

    return {"inference": inference, "training": training}


def counted(step: Callable[[], Any], counts: Counts) -> Counts:
    """The counts of a step that is repeated."""
    step()
    counts.clear()
    step()
    return counts


def test_training_step() -> None:
    with counting() as counts:
        step = steps(2)["training"]
        counted(step, counts)
        assert counts.calls == [
            "mhc.mhc_pre_fwd", "mhc.mhc_post_fwd", "mhc.mhc_post_bwd", "mhc._mhc_pre_bwd_in_place",
        ]  # fmt: skip
        assert counts.launches == [
            "products", "read_from_products", "post", "post_backward", "apply_mix_backward",
            "sinkhorn_backward", "mixes_backward", "mix_gradients", "product_gradients",
        ]  # fmt: skip
        assert counts.slow == 0
        assert counts.allocations == 24
        assert counts.steps == 4 + 3  # views, and the counter of a launch in three parts
        # Besides the views, the residual is a result of the first autograd node.
        assert pytorch_operators(step) == {"aten::view": 4 + 1, "aten::view_as": 1}


def test_inference_step() -> None:
    with counting() as counts:
        step = steps(2)["inference"]
        counted(step, counts)
        assert counts.calls == ["mhc.mhc_pre_big_fuse", "mhc.mhc_post"]
        assert counts.launches == ["products", "read_from_products", "post"]
        assert (counts.slow, counts.allocations, counts.steps) == (0, 6, 1)
        assert pytorch_operators(step) == {"aten::view": 1}


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_more_leading_dimensions_cost_views_alone(kind: str) -> None:
    found = []
    for leading in ((6,), (2, 3)):
        with counting() as counts:
            counted(steps(*leading)[kind], counts)
            found.append((counts.calls, counts.launches, counts.slow, counts.allocations))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_graphed_layer_has_the_same_bits() -> None:
    """Forward and backward in CUDA graphs, replayed with other values than those recorded."""
    torch.manual_seed(0)
    layer = HyperConnection(nn.SiLU(), 512, 4, device="cuda")
    example = torch.randn(100, 4, 512, device="cuda").bfloat16().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(layer), (example,))
    for _ in range(2):
        residual = torch.randn_like(example).detach().requires_grad_()
        grad, found = torch.randn_like(residual), []
        for each in (layer, graphed):
            out = each(residual)
            grads = torch.autograd.grad(out, [residual, *each.parameters()], grad)
            found.append([x.clone() for x in (out.detach(), *grads)])
        for one, other in zip(*found):
            assert torch.equal(one, other)
