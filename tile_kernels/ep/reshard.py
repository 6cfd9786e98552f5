"""Experts to other ranks: their weights are moved by the engine that moves tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.agreement import agree, checked, unreachable
from tile_kernels.ep.engines import ActiveEngine, Engine, make_engine
from tile_kernels.ep.rows import as_bytes
from tile_kernels.runtime import checks

_CALL = "move_experts"


def even_owners(num_experts: int, active_ranks: Sequence[bool]) -> list[int]:
    """The rank of each expert if the active ranks hold equally many, in ascending order.

    >>> even_owners(6, [True, False, True])
    [0, 0, 0, 2, 2, 2]
    """
    ranks = [rank for rank, is_active in enumerate(active_ranks) if is_active]
    if not ranks or num_experts % len(ranks):
        raise ValueError(
            f"even_owners: num_experts must be a multiple of the {len(ranks)} active ranks, got "
            f"{num_experts}"
        )
    return [rank for rank in ranks for _ in range(num_experts // len(ranks))]


def move_experts(
    group: Any,
    weights: Tensor,
    owners: Sequence[Sequence[int]] | Sequence[int],
    new_owners: Sequence[int],
    active_ranks: Sequence[bool] | None = None,
) -> Tensor:
    """Moves the weights of experts to the ranks that hold them from now on. Collective.

    For example after a rank was lost: `owners` names the remaining holders of each expert (replicas
    on other ranks, or a rank that has read a checkpoint), `new_owners` is
    `even_owners(num_experts, active_ranks)`, and the experts get numbers among the active ranks.

    Args:
        group: As of `ElasticBuffer`.
        weights: `[experts here, ...]`: those whose owners include this rank, in ascending order.
        owners: For each expert its rank, or all ranks that hold a copy. The first of them that is
            active sends it.
        new_owners: For each expert the rank that receives it.
        active_ranks: As of `ElasticBuffer`.

    Returns:
        `[experts received, ...]`, in ascending order of the experts.

    Raises:
        ValueError: If an argument is wrong on any rank; on all of them.

    Example:
        >>> from tile_kernels.ep import LocalGroup
        >>> move_experts(LocalGroup(), torch.tensor([[1.0], [2.0]]), [0, 0], [0, 0]).tolist()
        [[1.0], [2.0]]
    """
    world = make_engine(group)
    active = [True] * world.size if active_ranks is None else list(active_ranks)
    if len(active) != world.size or not active[world.index]:
        raise ValueError(
            f"{_CALL}: active_ranks must be {world.size} bools, True for this rank "
            f"({world.index}), got {active}"
        )
    ranks = [rank for rank, is_active in enumerate(active) if is_active]
    engine = world
    if len(ranks) < world.size:
        engine = ActiveEngine(world.split(ranks), ranks, world.size)
    senders, error = checked(lambda: _senders(engine, weights, owners, new_owners, active))
    settings = {
        "owners": str(owners), "new_owners": str(list(new_owners)),
        "weights": str((weights.dtype, tuple(weights.shape[1:]))),
    } if error is None else {}  # fmt: skip
    short = {name: _digest(text) if len(text) > 200 else text for name, text in settings.items()}
    agree(engine, _CALL, short, error)
    if senders is None:
        raise unreachable()
    return _exchanged(engine, weights, senders, [_holders(each) for each in owners], new_owners)


def _digest(text: str) -> str:
    return f"{text[:60]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _holders(owner: int | Sequence[int]) -> list[int]:
    return [owner] if isinstance(owner, int) else list(owner)


def _senders(
    engine: Engine,
    weights: Tensor,
    owners: Sequence[Sequence[int]] | Sequence[int],
    new_owners: Sequence[int],
    active: Sequence[bool],
) -> list[int]:
    """The rank that sends each expert."""
    checks.integer("the length of new_owners", len(new_owners), len(owners), len(owners))
    senders = []
    all_holders = [_holders(owner) for owner in owners]
    for expert, (holders, receiver) in enumerate(zip(all_holders, new_owners)):
        for rank in (*holders, receiver):
            checks.integer("a rank of owners and new_owners", rank, 0, engine.size - 1)
        if not active[receiver]:
            raise ValueError(
                f"new_owners must be active ranks, but expert {expert} goes to {receiver}"
            )
        alive = [rank for rank in holders if active[rank]]
        if not alive:
            raise ValueError(f"owners must name an active rank, but expert {expert} has {holders}")
        senders.append(receiver if receiver in alive else alive[0])
    mine = sum(engine.index in holders for holders in all_holders)
    if weights.dim() < 1 or weights.shape[0] != mine:
        raise ValueError(
            f"weights must have the {mine} experts of rank {engine.index}, got shape "
            f"{tuple(weights.shape)}"
        )
    return senders


def _exchanged(
    engine: Engine,
    weights: Tensor,
    senders: Sequence[int],
    holders: Sequence[Sequence[int]],
    new_owners: Sequence[int],
) -> Tensor:
    me = engine.index
    held = [expert for expert, ranks in enumerate(holders) if me in ranks]
    pairs = list(enumerate(zip(senders, new_owners)))
    sent = [(to, expert) for expert, (sender, to) in pairs if sender == me]
    received = [(sender, expert) for expert, (sender, to) in pairs if to == me]
    rows = as_bytes(weights.detach().reshape(len(held), math.prod(weights.shape[1:])))
    order = [held.index(expert) for _, expert in sorted(sent)]
    send_counts = [sum(to == rank for to, _ in sent) for rank in range(engine.size)]
    recv_counts = [sum(sender == rank for sender, _ in received) for rank in range(engine.size)]
    index = torch.tensor(order, dtype=torch.int64, device=rows.device)
    found = engine.exchange(rows.index_select(0, index), send_counts, recv_counts, _CALL)
    engine.settle()
    experts = [expert for _, expert in sorted(received)]
    by_expert = sorted(range(len(experts)), key=experts.__getitem__)
    index = torch.tensor(by_expert, dtype=torch.int64, device=found.device)
    shape = (len(experts), *weights.shape[1:])
    return found.index_select(0, index).view(weights.dtype).view(shape)
