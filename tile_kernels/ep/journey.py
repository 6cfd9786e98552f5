"""Rows on their way: out along the legs of a plan, and back, being added up as they meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.plan import (
    Leg,
    Plan,
    largest_slots,
    numbered,
    peers_of,
    plan_leg,
    plan_static_leg,
)
from tile_kernels.ep.rows import Field, field_of, pack, placed, reordered, restored, unpack
from tile_kernels.ep.topology import Topology

_DISPATCH, _COMBINE = "ElasticBuffer.dispatch (rows)", "ElasticBuffer.combine (rows)"  # phases


@dataclass
class Fabric:
    """The engines of one rank: among all ranks, and for each leg of a journey."""

    topology: Topology
    rank: int
    world: Engine
    legs: list[Engine]

    @classmethod
    def of(cls, world: Engine, topology: Topology) -> Fabric:
        """Direct mode has one leg, among all ranks; hybrid mode has one along the rail of this
        rank and one inside its node.
        """
        rank = world.index
        if not topology.is_hybrid:
            return cls(topology, rank, world, [world])
        node = world.split(topology.node(rank))
        rail = world.split(topology.rail(rank))
        return cls(topology, rank, world, [rail, node])

    def first_leg(self, topk_idx: Tensor, num_experts: int, capacity: int | None = None) -> Leg:
        """To the ranks, or to the nodes, of the chosen experts `[T, K]`.

        With a `capacity`, the most tokens of any rank, the leg is static.
        """
        num_peers = self.legs[0].size
        groups = peers_of(topk_idx, num_experts // num_peers, 0, num_peers)
        if capacity is None:
            return plan_leg(groups, num_peers)
        return plan_static_leg(groups, num_peers, capacity)

    def without_inactive(self, topk_idx: Tensor, num_experts: int) -> Tensor:
        """The same choices; -1 for experts of ranks that do not take part."""
        size = self.world.size
        if len(self.world.active) == size:
            return topk_idx
        takes_part = torch.tensor(self.world.ones(), dtype=torch.bool, device=topk_idx.device)
        ranks = peers_of(topk_idx, num_experts // size, 0, size)
        return topk_idx.masked_fill(~takes_part[ranks.clamp(min=0)], -1)

    def counts_by_rank(self, leg: Leg) -> list[int]:
        """The items of the first leg for every rank; 0 for one that it does not lead to."""
        if not self.topology.is_hybrid:
            return leg.send_counts
        counts = [0] * self.topology.num_ranks
        for rank, count in zip(self.topology.rail(self.rank), leg.send_counts):
            counts[rank] = count
        return counts

    def counts_on_first_leg(self, by_rank: Sequence[int]) -> list[int]:
        """What the peers of the first leg announced, of what all ranks did."""
        if not self.topology.is_hybrid:
            return list(by_rank)
        return [by_rank[rank] for rank in self.topology.rail(self.rank)]


# ---- out ----------------------------------------------------------------------------------------


def explore(
    fabric: Fabric,
    leg: Leg,
    payloads: Sequence[Tensor],
    sources: Tensor,
    topk_idx: Tensor,
    num_experts: int,
) -> tuple[Plan, Tensor]:
    """The first journey of a routing: send `payloads` `[T, width]` and learn the plan on the way.

    `leg` is the first, its counts agreed. Each row takes its source and its expert ids along, so
    that whoever forwards or receives it knows what to do; each plus one, so that zeros are none.
    Returns the plan and the packed rows that arrived, in the order of their sources.
    """
    start = sum(field_of(each).num_bytes for each in payloads)
    fields = [Field(torch.int64, 1), Field(torch.int64, topk_idx.shape[1])]
    rows = _send(fabric.legs[0], leg, pack([*payloads, sources[:, None] + 1, topk_idx + 1]))
    legs, order = [leg], None
    if not leg.is_static:  # what arrived is read on the host, which could wait for ever
        fabric.world.settle()
    if fabric.topology.is_hybrid:
        _, ids = unpack(rows, fields, start)
        second = _forwarding_leg(fabric, ids - 1, num_experts, leg.is_static)
        rows = _send(fabric.legs[1], second, rows)
        legs.append(second)
        if not leg.is_static:
            fabric.world.settle()
    found, ids = unpack(rows, fields, start)
    found, ids = found.flatten() - 1, ids - 1
    if leg.is_static:
        block_counts = (found >= 0).view(len(legs[-1].recv_counts), -1).sum(1)
    else:
        block_counts = torch.tensor(legs[-1].recv_counts, device=found.device)
    if fabric.topology.is_hybrid or leg.is_static:
        last = torch.iinfo(found.dtype).max
        order = torch.where(found >= 0, found, last).argsort(stable=True)
        found, ids, rows = found[order], ids[order], reordered(rows, order)
    num_ranks = fabric.topology.num_ranks
    ranks = peers_of(topk_idx, num_experts // num_ranks, 0, num_ranks)
    return Plan(legs, order, ranks, found, ids, block_counts), rows


def _forwarding_leg(fabric: Fabric, topk_idx: Tensor, num_experts: int, is_static: bool) -> Leg:
    """From this rank to those of its node, for rows that came along the rail."""
    node = fabric.legs[1]
    first = fabric.topology.node_of(fabric.rank) * (num_experts // fabric.legs[0].size)
    experts_per_rank = num_experts // fabric.topology.num_ranks
    groups = peers_of(topk_idx, experts_per_rank, first, node.size)
    if is_static:
        return plan_static_leg(groups, node.size, groups.shape[0])
    leg = plan_leg(groups, node.size)
    ones = [1] * node.size
    counts = torch.tensor(leg.send_counts).view(-1, 1).view(torch.uint8)
    heard = node.exchange(counts, ones, ones, "ElasticBuffer.dispatch (counts inside the node)")
    leg.recv_counts = heard.view(torch.int64).flatten().tolist()
    return leg


def _send(engine: Engine, leg: Leg, rows: Tensor) -> Tensor:
    items = placed(rows, leg.items, sum(leg.send_counts))
    return engine.exchange(items, leg.send_counts, leg.recv_counts, _DISPATCH)


def forward(fabric: Fabric, plan: Plan, rows: Tensor) -> Tensor:
    """Send `rows` `[T, bytes]` along a known plan; `[N, bytes]` in the order of the sources."""
    for engine, leg in zip(fabric.legs, plan.legs):
        rows = _send(engine, leg, rows)
    return rows if plan.order is None else reordered(rows, plan.order)


def nothing() -> None:
    """What happens between the transfer and the last sum unless something is to."""


# ---- back ---------------------------------------------------------------------------------------


def staged_sum(values: Tensor, items: Tensor, first: Sequence[Tensor] = ()) -> Tensor:
    """For each row, `first` and then the values named by `items` `[rows, K]`, added in that order.

    In float32, from +0.0; rounded once to the dtype of `values` `[n, H]`.
    """
    if first:
        rows = torch.arange(items.shape[0], dtype=torch.int32, device=items.device)[:, None]
        taken = len(first) * items.shape[0]
        later = torch.where(items >= 0, items + taken, items)
        items = torch.cat([rows + i * items.shape[0] for i in range(len(first))] + [later], 1)
        values = torch.cat([*first, values])
    if values.numel() == 0:
        return values.new_zeros((items.shape[0], values.shape[1]))
    return moe.reduce_fused(values, None, items)


def owned_weights(weights: Tensor, owners: Tensor) -> Tensor:
    """`weights[owners[r, k], k]`, 0 where there is no owner; `[rows, K]`."""
    if weights.shape[0] == 0:
        return weights.new_zeros(owners.shape)
    return torch.where(owners >= 0, weights.gather(0, owners.clamp(min=0)), 0)


def _arrival_order(plan: Plan, rows: Tensor) -> Tensor:
    """Rows `[N, ...]` in the order of their sources, put back into that of their arrival."""
    return rows if plan.order is None else restored(rows, plan.order)


def back(
    fabric: Fabric,
    plan: Plan,
    values: Tensor,
    weights: Tensor | None,
    bias: Sequence[Tensor] = (),
    before_sum: Callable[[], None] = nothing,
) -> tuple[Tensor, Tensor | None]:
    """Return one value `[N, H]` for each received row, adding up wherever a leg ends.

    `weights` `[N, K]` go along. Returns `[T, H]` and `[T, K]`.
    """
    values = _arrival_order(plan, values)
    weights = None if weights is None else _arrival_order(plan, weights)
    for depth in reversed(range(len(plan.legs))):
        leg = plan.legs[depth]
        together = [values] if weights is None else [values, weights]
        fields = [Field(each.dtype, each.shape[1]) for each in together]
        rows = fabric.legs[depth].exchange(
            pack(together), leg.recv_counts, leg.send_counts, _COMBINE
        )
        values, *rest = unpack(rows, fields)
        if depth == 0:
            before_sum()
        values = staged_sum(values, leg.items, bias if depth == 0 else ())
        weights = owned_weights(rest[0], leg.owners) if rest else None
    return values, weights


def back_unreduced(
    fabric: Fabric,
    plan: Plan,
    values: Tensor,
    weights: Tensor | None,
    places: Tensor | None,
    bias: Sequence[Tensor] = (),
    before_sum: Callable[[], None] = nothing,
) -> tuple[Tensor, Tensor | None]:
    """Return every value to the source, which adds them all up with one rounding.

    Without `places`, values and weights are one for each received row. With them (`[N, K]`, the
    row of each slot, -1: none) `values` are in the expanded layout, and each slot has its own.
    """
    first, last = plan.legs[0], plan.legs[-1]
    sent = torch.ones(plan.num_arrived, dtype=torch.int64, device=values.device)
    if places is None:
        values = _arrival_order(plan, values)
        weights = None if weights is None else _arrival_order(plan, weights)
    else:
        places = _arrival_order(plan, places)
        sent = (places >= 0).sum(1)
        values = values.index_select(0, places[places >= 0].long())
    together = [values] if weights is None else [values, weights]
    fields = [Field(each.dtype, each.shape[1]) for each in together]
    rows = pack(together)
    by_peer = [int(part.sum()) for part in sent.split(last.recv_counts)]
    if fabric.topology.is_hybrid:  # the forwarder puts values into the order of its own rows
        chosen = last.masters if places is None else last.groups >= 0
        rows = fabric.legs[1].exchange(rows, by_peer, _counts(last, chosen), _COMBINE)
        rows = rows.index_select(0, numbered(last.groups, chosen)[chosen].long())
        by_peer = [int(part.sum()) for part in chosen.sum(1).split(first.recv_counts)]
    valid = plan.ranks >= 0
    largest = largest_slots(plan.ranks)
    chosen = valid
    if places is None:
        chosen = valid & (largest == torch.arange(valid.shape[1], device=valid.device))
    rows = fabric.legs[0].exchange(rows, by_peer, _counts(first, chosen), _COMBINE)
    values, *rest = unpack(rows, fields)
    before_sum()
    items = numbered(first.groups, chosen)
    owners = items.long().gather(1, largest).masked_fill_(~valid, -1)
    return staged_sum(values, items, bias), owned_weights(rest[0], owners) if rest else None


def _counts(leg: Leg, chosen: Tensor) -> list[int]:
    """How many of the chosen slots each peer of a leg owns."""
    return torch.bincount(leg.groups[chosen], minlength=len(leg.send_counts)).tolist()
