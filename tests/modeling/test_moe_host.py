"""What a layer of experts costs the host: calls, launches, allocations; see `tests.host_cost`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host_cost import counting
from tile_kernels.modeling import bf16_experts as module
from tile_kernels.modeling.moe import MoELayer

ROUTING = ["top2_sum_gate", "group_count", "fused_mapping"]
LAUNCHES = {
    "bf16": [
        *ROUTING, "expand", "swiglu_plain", "reduce",
        "expand", "swiglu_plain_backward", "expand", "reduce", "topk_weights_backward",
    ],
    "fp8": [
        *ROUTING, "cast_groups", "expand", "m_grouped_gemm_nt", "swiglu_groups",
        "m_grouped_gemm_nt", "reduce", "cast_groups",
        "cast_groups", "expand", "m_grouped_gemm_nt", "swiglu_backward", "mn_major",
        "m_grouped_gemm_nt", "reduce", "cast_columns", "cast_columns", "k_grouped_gemm_nt",
        "cast_columns", "cast_columns", "k_grouped_gemm_nt", "topk_weights_backward",
    ],
}  # fmt: skip
ALLOCATIONS = {"bf16": 16, "fp8": 35}


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The shape of PyTorch's grouped product."""
    if weight.dim() == 3:
        return rows.new_empty(len(rows), weight.shape[2])
    return rows.new_empty(len(ends), len(rows), weight.shape[1])


def training(precision: str) -> Callable[[], Any]:
    layer = MoELayer(128, 128, 4, 2, precision=precision, dtype=torch.bfloat16)
    x = torch.zeros(8, 128, dtype=torch.bfloat16, requires_grad=True)
    inputs, grad = [x, *layer.parameters()], torch.zeros_like(x)
    return lambda: torch.autograd.grad(layer(x), inputs, grad)


@pytest.mark.parametrize("precision", list(LAUNCHES))
def test_training_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is prepared, weights in FP8 are cast once, and nothing asks for row counts."""
    monkeypatch.setattr(module, "grouped_mm_is_available", lambda _: True)
    monkeypatch.setattr(module, "grouped_product", grouped)
    with counting() as counts:
        step = training(precision)
        step()
        counts.clear()
        step()
        assert counts.launches == LAUNCHES[precision]
        assert (counts.slow, counts.allocations) == (0, ALLOCATIONS[precision])
