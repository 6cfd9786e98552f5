"""What the argument sets of several operators of the family share."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Reject
from tile_kernels.runtime.sampling import INF, NAN, changed, edited, with_value

SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
SPECIAL_LOGITS = (NAN, INF, -INF, 0.0, -0.0, 1.0, 100.0, -100.0)


def outside(name: str) -> list[Reject]:
    """Indices that name nothing, which the checked mode refuses."""
    return [
        Reject(name, "below -1", with_value(name, -2)),
        Reject(name, "too large", with_value(name, 10_000)),
    ]


def int64(name: str) -> Reject:
    """An argument that must not be int64."""
    return Reject(name, "int64", edited(name, torch.Tensor.long))


def fewer_tokens(name: str) -> Reject:
    """An argument that must have as many tokens as the others."""
    return Reject(name, "other tokens", edited(name, lambda x: x[:-1]))


def no_columns(name: str) -> Reject:
    """An argument that must have a column at least."""
    return Reject(name, "no columns", edited(name, lambda x: x[:, :0]))


def physical_map(num_logical: int, extra: int, device: torch.device) -> Arguments:
    """Each logical expert under its own number; `extra` physical ones replicate the first ones."""
    physical = torch.arange(num_logical, dtype=torch.int32)[:, None].repeat(1, extra + 1)
    count = torch.ones(num_logical, dtype=torch.int32)
    for replica in range(extra):
        expert = replica % max(1, num_logical // 2)
        physical[expert, count[expert]] = num_logical + replica
        count[expert] += 1
    return {"to_physical_map": physical.to(device), "logical_count": count.to(device)}


# Arguments that every gate refuses; the samples that they change have 16 experts.
GATE_REJECTS = [
    Reject("scoring_func", "unknown", changed(scoring_func="relu")),
    Reject("scoring_func", "identity", changed(scoring_func="identity")),
    Reject("routed_scaling_factor", "a string", changed(routed_scaling_factor="1")),
    Reject("mask", "too short", changed(mask=torch.ones(4, dtype=torch.bool))),
    Reject("logical_count", "alone", changed(logical_count=torch.ones(16, dtype=torch.int32))),
    Reject("num_ep_ranks", "more than experts", changed(num_ep_ranks=17)),
    Reject("num_tp_ranks", "zero", changed(num_tp_ranks=0)),
    Reject("ep_rank", "negative", changed(ep_rank=-1)),
]
