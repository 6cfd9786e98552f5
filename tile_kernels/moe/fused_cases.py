"""Mappings to the fused layout, for the argument sets of `expand` and `reduce`.

A mapping is `(token_topk_to_pos, pos_to_expert)`. It is built on the CPU from a fixed seed: the
shapes depend on the data and must be known on the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tile_kernels.moe.mapping.reference import get_fused_mapping
from tile_kernels.runtime.cases import Reject, with_value

Mapping = tuple[Tensor, Tensor]
MakeMapping = Callable[[], Mapping]


def _from_choices(topk_idx: Tensor, num_experts: int, alignment: int) -> Mapping:
    mapping = get_fused_mapping(topk_idx, num_experts, 0, alignment)
    return mapping[3], mapping[0]


def seeded(make: MakeMapping) -> MakeMapping:
    """`make` with a fixed seed, evaluated once."""

    @functools.cache
    def mapping() -> Mapping:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return mapping


def routed(
    num_tokens: int, num_topk: int, num_experts: int = 4, alignment: int = 8, ranks: int = 2
) -> MakeMapping:
    """Tokens that choose among the experts of all ranks; those of the others are -1."""

    def make() -> Mapping:
        all_experts = max(num_experts * ranks, num_topk)
        chosen = torch.rand(num_tokens, all_experts).argsort(1)[:, :num_topk]
        return _from_choices(chosen.masked_fill(chosen >= num_experts, -1), num_experts, alignment)

    return seeded(make)


def received(
    num_send_tokens: int, num_topk: int, num_experts: int, num_ep_ranks: int, alignment: int
) -> MakeMapping:
    """What one rank receives of `num_send_tokens` from each."""

    def make() -> Mapping:
        from tile_kernels.testing.generator import generate_topk_idx

        params = {
            "num_send_tokens": num_send_tokens,
            "num_topk": num_topk,
            "num_experts": num_experts,
            "num_ep_ranks": num_ep_ranks,
        }
        return _from_choices(generate_topk_idx(params, device="cpu"), num_experts, alignment)

    return seeded(make)


BENCHMARK = received(4096, 8, 32, 8, 128)


def masked(num_tokens: int, num_topk: int, num_positions: int) -> MakeMapping:
    """No slot names anything."""

    def make() -> Mapping:
        slots = torch.full((num_tokens, num_topk), -1, dtype=torch.int32)
        return slots, torch.zeros(num_positions, dtype=torch.int32)

    return make


def on_device(mapping: MakeMapping, device: torch.device, skip: int = 0) -> dict[str, Tensor]:
    """The mapping on a device, the slots `skip` elements into their storage."""
    slots, pos_to_expert = mapping()
    storage = torch.empty(slots.numel() + skip, dtype=torch.int32, device=device)
    copied = storage[skip:].view(slots.shape)
    if device.type != "meta":
        copied.copy_(slots)
    return {"token_topk_to_pos": copied, "pos_to_expert": pos_to_expert.to(device)}


# A worked example: 4 experts, alignment 4, slots in descending order.
EXAMPLE_SLOTS = [[2, 6], [5, -1], [1, 8], [4, 0]]


def as_int64(name: str) -> Reject:
    """An argument that must not be int64."""
    return Reject(name, "int64", lambda a: {**a, name: a[name].long()})


def fewer_tokens(name: str) -> Reject:
    """An argument that must have as many tokens as the others."""
    return Reject(name, "other tokens", lambda a: {**a, name: a[name][:-1]})


BAD_POSITIONS = [
    Reject("token_topk_to_pos", "below -1", with_value("token_topk_to_pos", -2)),
    Reject("token_topk_to_pos", "too large", with_value("token_topk_to_pos", 10_000)),
]
