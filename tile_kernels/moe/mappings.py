"""Mappings to the fused layout, for the argument sets of `expand` and `reduce`.

They are built on the CPU from a fixed seed: the shapes depend on the data and must be known on the
meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import torch
from torch import Tensor

from tile_kernels.moe.mapping.reference import get_fused_mapping

P = ParamSpec("P")


@dataclass(frozen=True)
class Mapping:
    """`make` returns `(token_topk_to_pos, pos_to_expert)`."""

    make: Callable[[], tuple[Tensor, Tensor]]

    def on(self, device: torch.device, skip: int = 0) -> dict[str, Tensor]:
        """The mapping on a device, the slots `skip` elements into their storage."""
        slots, pos_to_expert = self.make()
        storage = torch.empty(slots.numel() + skip, dtype=torch.int32, device=device)
        copied = storage[skip:].view(slots.shape)
        if device.type != "meta":
            copied.copy_(slots)
        return {"token_topk_to_pos": copied, "pos_to_expert": pos_to_expert.to(device)}


def mapping(make: Callable[P, tuple[Tensor, Tensor]]) -> Callable[P, Mapping]:
    """Turns a function of sizes into one that returns a `Mapping`, evaluated once, at first use."""

    @functools.wraps(make)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Mapping:
        @functools.cache
        def seeded() -> tuple[Tensor, Tensor]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return make(*args, **kwargs)

        return Mapping(seeded)

    return bind


def _from_choices(topk_idx: Tensor, num_experts: int, alignment: int) -> tuple[Tensor, Tensor]:
    parts = get_fused_mapping(topk_idx, num_experts, 0, alignment)
    return parts[3], parts[0]


@mapping
def routed(
    num_tokens: int, num_topk: int, num_experts: int = 4, alignment: int = 8, ranks: int = 2
) -> tuple[Tensor, Tensor]:
    """Tokens that choose among the experts of all ranks; those of the others are -1."""
    all_experts = max(num_experts * ranks, num_topk)
    chosen = torch.rand(num_tokens, all_experts).argsort(1)[:, :num_topk]
    return _from_choices(chosen.masked_fill(chosen >= num_experts, -1), num_experts, alignment)


@mapping
def received(
    num_send_tokens: int, num_topk: int, num_experts: int, num_ep_ranks: int, alignment: int
) -> tuple[Tensor, Tensor]:
    """What one rank receives of `num_send_tokens` from each."""
    from tile_kernels.testing.generator import generate_topk_idx

    params = {
        "num_send_tokens": num_send_tokens,
        "num_topk": num_topk,
        "num_experts": num_experts,
        "num_ep_ranks": num_ep_ranks,
    }
    return _from_choices(generate_topk_idx(params, device="cpu"), num_experts, alignment)


@mapping
def masked(num_tokens: int, num_topk: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """No slot names anything."""
    slots = torch.full((num_tokens, num_topk), -1, dtype=torch.int32)
    return slots, torch.zeros(num_positions, dtype=torch.int32)


BENCHMARK = received(4096, 8, 32, 8, 128)

# A worked example: 4 experts, alignment 4, slots in descending order.
EXAMPLE = [[2, 6], [5, -1], [1, 8], [4, 0]]
