"""A new number of tokens is served by the plan of an earlier call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.test_operator import evaluated
from tile_kernels import moe
from tile_kernels.moe.samples import physical_map
from tile_kernels.runtime import launch

__all__ = ["evaluated"]  # a fixture
EXPERTS, TOPK, HIDDEN = 32, 4, 64
RANKS = (0, 1, 0, 1)


def chosen(tokens: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(tokens, TOPK, dtype=dtype)


def slots(tokens: int) -> torch.Tensor:
    return torch.arange(tokens * TOPK, dtype=torch.int32).view(tokens, TOPK)


def experts_of_rows(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens * TOPK + 3, dtype=torch.int32)


def gate(tokens: int, **more: Any) -> Any:
    logits, bias = torch.zeros(tokens, EXPERTS), torch.zeros(EXPERTS)
    return moe.top2_sum_gate(logits, bias, TOPK, 2, 4, False, 0, 1.0, *RANKS, "softmax", **more)


def scaled(tokens: int, column_major: bool) -> Any:
    x = torch.zeros(tokens, HIDDEN).to(torch.float8_e4m3fn), torch.zeros(tokens, 2)
    return moe.expand_to_fused_with_sf(x, 32, slots(tokens), experts_of_rows(tokens), column_major)


def reduced(tokens: int, **more: Any) -> Any:
    rows = torch.zeros(tokens * TOPK + 3, HIDDEN)
    weights = torch.zeros(tokens, TOPK)
    return moe.reduce_fused((rows, rows[:, 0].clone()), weights, slots(tokens), **more)


CALLS: dict[str, Callable[[int], Any]] = {
    "topk_gate": lambda n: moe.topk_gate(torch.zeros(n, EXPERTS), TOPK),
    "topk_gate, sorted": lambda n: moe.topk_gate(torch.zeros(n, 64), 40),
    "groups": lambda n: moe.topk_sum_and_topk_group_idx(torch.zeros(n, 4, 8), 2, 2),
    "top2_sum_gate": gate,
    "top2_sum_gate, all arguments": lambda n: gate(
        n,
        mask=torch.ones(n, dtype=torch.bool),
        fix_routing_mask=torch.ones(n, dtype=torch.bool),
        unmapped_topk_idx=chosen(n),
        **physical_map(EXPERTS, 2, torch.device("cpu")),
    ),
    "topk_weights": lambda n: moe.topk_weights(torch.zeros(n, EXPERTS), chosen(n)),
    "normalize_weight": lambda n: moe.normalize_weight(torch.zeros(n, TOPK)),
    "hash_gate": lambda n: moe.hash_gate(
        torch.zeros(n, EXPERTS),
        torch.zeros(n, dtype=torch.int32),
        torch.zeros(9, TOPK, dtype=torch.int32),
        mask=torch.ones(n, dtype=torch.bool),
    ),
    "group_count": lambda n: moe.group_count(chosen(n), EXPERTS),
    "aux_fi": lambda n: moe.aux_fi(chosen(n), EXPERTS, TOPK),
    "mask_indices_by_tp": lambda n: moe.mask_indices_by_tp(chosen(n), EXPERTS, 4, 0, 2),
    "unique": lambda n: moe.inplace_unique_group_indices(chosen(n), EXPERTS),
    "mapping": lambda n: moe.get_fused_mapping(chosen(n), EXPERTS, 64, 8),
    "mapping, as many rows as needed": lambda n: moe.get_fused_mapping(chosen(n), EXPERTS, 0, 8),
    "expand": lambda n: moe.expand_to_fused(torch.zeros(n, HIDDEN), slots(n), experts_of_rows(n)),
    "expand with scales": lambda n: scaled(n, False),
    "expand with scales in columns": lambda n: scaled(n, True),
    "reduce": reduced,
    "reduce, into a buffer": lambda n: reduced(n, out=torch.zeros(n, HIDDEN)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_launches_are_evaluated_once(
    call: Callable[[int], Any], evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.Kernel, "handle", lambda *_: lambda *_: None)
    for tokens in (40, 48, 1, 300, 48):
        call(tokens)
    assert len(evaluated) == 1
