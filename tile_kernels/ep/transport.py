"""Rows over the hops of a plan to the experts, and back to their sources, reduced at each hop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.engines.window import Window
from tile_kernels.ep.plan import (
    Hop,
    Plan,
    master_slots,
    numbered,
    peers_of,
    plan_hop,
    plan_static_hop,
)
from tile_kernels.ep.rows import (
    Field,
    field_of,
    on_host,
    pack,
    reordered,
    restored,
    scatter_rows,
    unpack,
)
from tile_kernels.ep.topology import Topology

_ROWS_AT_ONCE = 128  # of a sum on the host

_DISPATCH, _COMBINE = "ElasticBuffer.dispatch (rows)", "ElasticBuffer.combine (rows)"  # phases


@dataclass
class Fabric:
    """The engines of one rank: among all ranks, and for each hop."""

    topology: Topology
    rank: int
    world: Engine
    hops: list[Engine]

    @classmethod
    def of(cls, world: Engine, topology: Topology) -> Fabric:
        """Direct mode has one hop, among all ranks; hybrid mode has one along the rail of this
        rank and one inside its node.
        """
        rank = world.index
        if not topology.is_hybrid:
            return cls(topology, rank, world, [world])
        node = world.split(topology.node(rank))
        rail = world.split(topology.rail(rank))
        return cls(topology, rank, world, [rail, node])

    def settle(self) -> None:
        """Wait on the host until the exchanges so far are done."""
        for engine in self.hops:
            engine.settle()

    def peers_on_first_hop(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, int]:
        """The rank, or the node, of each of the chosen experts `[T, K]`; and how many there are."""
        num_peers = self.hops[0].size
        return peers_of(topk_idx, num_experts // num_peers, 0, num_peers), num_peers

    @property
    def window(self) -> Window | None:
        """The windows that rows are written to directly, if the ranks have some."""
        all_active = len(self.world.active) == self.world.size
        return self.world.window if all_active and not self.topology.is_hybrid else None

    def without_inactive(self, topk_idx: Tensor, num_experts: int) -> Tensor:
        """The same choices; -1 for experts of ranks that do not take part."""
        size = self.world.size
        if len(self.world.active) == size:
            return topk_idx
        is_active = torch.tensor(self.world.ones(), dtype=torch.bool, device=topk_idx.device)
        ranks = peers_of(topk_idx, num_experts // size, 0, size)
        return topk_idx.masked_fill(~is_active[ranks.clamp(min=0)], -1)

    def counts_by_rank(self, hop: Hop) -> list[int]:
        """The items of the first hop for every rank; 0 for ranks that are not its peers."""
        if not self.topology.is_hybrid:
            return hop.send_counts
        counts = [0] * self.topology.num_ranks
        for rank, count in zip(self.topology.rail(self.rank), hop.send_counts):
            counts[rank] = count
        return counts

    def counts_on_first_hop(self, by_rank: Sequence[int]) -> list[int]:
        """The counts that the peers of the first hop announced, of those of all ranks."""
        if not self.topology.is_hybrid:
            return list(by_rank)
        return [by_rank[rank] for rank in self.topology.rail(self.rank)]


# ---- dispatch -----------------------------------------------------------------------------------


def dispatch_new(
    fabric: Fabric,
    hop: Hop,
    payloads: Sequence[Tensor],
    sources: Tensor,
    topk_idx: Tensor,
    num_experts: int,
    agreed: Callable[[], object],
) -> tuple[Plan, Tensor]:
    """Send `payloads` `[T, width]` along a new routing and build its plan.

    `hop` is the first, whose counts `agreed` completes before data is sent. Each row carries its
    source and its expert ids for the ranks that forward and receive it; each plus one, so that 0
    means none. Returns the plan and the packed rows that arrived, in the order of their sources.
    """
    start = sum(field_of(each).num_bytes for each in payloads)
    fields = [Field(torch.int64, 1), Field(torch.int64, topk_idx.shape[1])]
    rows = pack([*payloads, sources[:, None] + 1, topk_idx + 1])
    rows = _send(fabric.hops[0], hop, rows, agreed)
    hops, order = [hop], None
    if not hop.is_static:  # the host reads the rows, so they must have arrived
        fabric.settle()
    if fabric.topology.is_hybrid:
        _, ids = unpack(rows, fields, start)
        second = _forwarding_hop(fabric, ids - 1, num_experts, hop.is_static)
        rows = _send(fabric.hops[1], second, rows)
        hops.append(second)
        if not hop.is_static:
            fabric.settle()
    recv_sources, ids = unpack(rows, fields, start)
    recv_sources, ids = recv_sources.flatten() - 1, ids - 1
    if hop.is_static:
        block_counts = (recv_sources >= 0).view(len(hops[-1].recv_counts), -1).sum(1)
    else:
        block_counts = torch.tensor(hops[-1].recv_counts, device=recv_sources.device)
    if fabric.topology.is_hybrid or hop.is_static:
        last = torch.iinfo(recv_sources.dtype).max
        order = torch.where(recv_sources >= 0, recv_sources, last).argsort(stable=True)
        recv_sources, ids = recv_sources[order], ids[order]
        rows = reordered(rows, order)
    num_ranks = fabric.topology.num_ranks
    ranks = peers_of(topk_idx, num_experts // num_ranks, 0, num_ranks)
    return Plan(hops, order, ranks, recv_sources, ids, block_counts), rows


def _forwarding_hop(fabric: Fabric, topk_idx: Tensor, num_experts: int, is_static: bool) -> Hop:
    """From this rank to those of its node, for rows received over the rail."""
    node = fabric.hops[1]
    first = fabric.topology.node_of(fabric.rank) * (num_experts // fabric.hops[0].size)
    experts_per_rank = num_experts // fabric.topology.num_ranks
    groups = peers_of(topk_idx, experts_per_rank, first, node.size)
    if is_static:
        return plan_static_hop(groups, node.size, groups.shape[0])
    hop = plan_hop(groups, node.size)
    ones = [1] * node.size
    counts = torch.tensor(hop.send_counts).view(-1, 1).view(torch.uint8)
    received = node.exchange(counts, ones, ones, "ElasticBuffer.dispatch (counts inside the node)")
    hop.recv_counts = received.view(torch.int64).flatten().tolist()
    return hop


def no_wait() -> None:
    """The default for something to wait for: nothing."""


def _send(engine: Engine, hop: Hop, rows: Tensor, agreed: Callable[[], object] = no_wait) -> Tensor:
    items = scatter_rows(rows, hop.items, sum(hop.send_counts))
    agreed()
    return engine.exchange(items, hop.send_counts, hop.recv_counts, _DISPATCH)


def dispatch_planned(
    fabric: Fabric, plan: Plan, rows: Tensor, agreed: Callable[[], object]
) -> Tensor:
    """Send `rows` `[T, bytes]` along a known plan; `[N, bytes]` in the order of the sources."""
    for engine, hop in zip(fabric.hops, plan.hops):
        rows = _send(engine, hop, rows, agreed if hop is plan.hops[0] else no_wait)
    return rows if plan.order is None else reordered(rows, plan.order)


# ---- combine ------------------------------------------------------------------------------------


def staged_sum(values: Tensor, items: Tensor, first: Sequence[Tensor] = ()) -> Tensor:
    """For each row, `first` and then the values named by `items` `[rows, K]`, added in that order.

    In float32, from +0.0; rounded once to the dtype of `values` `[n, H]`.
    """
    if on_host(values):
        return _sum_on_host(values, items, first)
    if first:
        rows = torch.arange(items.shape[0], dtype=torch.int32, device=items.device)[:, None]
        num_first = len(first) * items.shape[0]
        shifted = torch.where(items >= 0, items + num_first, items)
        items = torch.cat([rows + i * items.shape[0] for i in range(len(first))] + [shifted], 1)
        values = torch.cat([*first, values])
    if values.numel() == 0:
        return values.new_zeros((items.shape[0], values.shape[1]))
    return moe.reduce_fused(values, None, items)


def _sum_on_host(values: Tensor, items: Tensor, first: Sequence[Tensor]) -> Tensor:
    """`staged_sum` on the host, some rows at a time so that their sums stay in the cache."""
    num_rows, hidden = items.shape[0], values.shape[1]
    out = values.new_empty((num_rows, hidden))
    if hidden == 0:
        return out
    total = torch.empty((_ROWS_AT_ONCE, hidden), dtype=torch.float32)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        some = items[start : start + _ROWS_AT_ONCE]
        sums = total[: len(some)].zero_()
        for each in first:
            sums += each[start : start + len(some)].float()
        for slot in some.unbind(1):
            rows = ((slot >= 0) & (slot < values.shape[0])).nonzero().flatten()
            if len(rows) == len(some):
                sums += values.index_select(0, slot).float()
            elif len(rows):
                sums.index_add_(0, rows, values.index_select(0, slot[rows]).float())
        rounded = out[start : start + len(some)].copy_(sums)
        if values.dtype != torch.bfloat16:  # one NaN, as kernels have it
            rounded.masked_fill_(sums.isnan(), torch.nan)
    return out


def owned_weights(weights: Tensor, owners: Tensor) -> Tensor:
    """`weights[owners[r, k], k]`, 0 where there is no owner; `[rows, K]`."""
    if weights.shape[0] == 0:
        return weights.new_zeros(owners.shape)
    return torch.where(owners >= 0, weights.gather(0, owners.clamp(min=0)), 0)


def _arrival_order(plan: Plan, rows: Tensor) -> Tensor:
    """Rows `[N, ...]` in the order of their sources, put back into that of their arrival."""
    return rows if plan.order is None else restored(rows, plan.order)


def combine_staged(
    fabric: Fabric,
    plan: Plan,
    values: Tensor,
    weights: Tensor | None,
    agreed: Callable[[], object],
    bias: Sequence[Tensor] = (),
    before_sum: Callable[[], None] = no_wait,
) -> tuple[Tensor, Tensor | None]:
    """Return one value `[N, H]` for each received row, reduced at the end of each hop.

    `weights` `[N, K]` are sent with them, once the ranks have `agreed`. Returns `[T, H]` and
    `[T, K]`.
    """
    values = _arrival_order(plan, values)
    weights = None if weights is None else _arrival_order(plan, weights)
    for depth in reversed(range(len(plan.hops))):
        hop = plan.hops[depth]
        parts = [values] if weights is None else [values, weights]
        fields = [Field(each.dtype, each.shape[1]) for each in parts]
        rows = pack(parts)
        agreed()
        rows = fabric.hops[depth].exchange(rows, hop.recv_counts, hop.send_counts, _COMBINE)
        values, *rest = unpack(rows, fields)
        if depth == 0:
            before_sum()
        values = staged_sum(values, hop.items, bias if depth == 0 else ())
        weights = owned_weights(rest[0], hop.owners) if rest else None
    return values, weights


def combine_unreduced(
    fabric: Fabric,
    plan: Plan,
    values: Tensor,
    weights: Tensor | None,
    topk_to_pos: Tensor | None,
    bias: Sequence[Tensor] = (),
    before_sum: Callable[[], None] = no_wait,
) -> tuple[Tensor, Tensor | None]:
    """Return every value to the source, which adds them all up with one rounding.

    Without `topk_to_pos`, values and weights are one for each received row. With it (`[N, K]`, the
    expanded row of each slot, -1: none) `values` are in the expanded layout, one for each slot.
    """
    first, last = plan.hops[0], plan.hops[-1]
    num_sent = torch.ones(plan.num_arrived, dtype=torch.int64, device=values.device)
    if topk_to_pos is None:
        values = _arrival_order(plan, values)
        weights = None if weights is None else _arrival_order(plan, weights)
    else:
        topk_to_pos = _arrival_order(plan, topk_to_pos)
        num_sent = (topk_to_pos >= 0).sum(1)
        values = values.index_select(0, topk_to_pos[topk_to_pos >= 0].long())
    parts = [values] if weights is None else [values, weights]
    fields = [Field(each.dtype, each.shape[1]) for each in parts]
    rows = pack(parts)
    by_peer = [int(part.sum()) for part in num_sent.split(last.recv_counts)]
    if fabric.topology.is_hybrid:  # the forwarding rank restores the order of its rows
        chosen = last.masters if topk_to_pos is None else last.groups >= 0
        rows = fabric.hops[1].exchange(rows, by_peer, _counts(last, chosen), _COMBINE)
        rows = rows.index_select(0, numbered(last.groups, chosen)[chosen].long())
        by_peer = [int(part.sum()) for part in chosen.sum(1).split(first.recv_counts)]
    valid = plan.ranks >= 0
    largest, masters = master_slots(plan.ranks)
    chosen = masters if topk_to_pos is None else valid
    rows = fabric.hops[0].exchange(rows, by_peer, _counts(first, chosen), _COMBINE)
    values, *rest = unpack(rows, fields)
    before_sum()
    items = numbered(first.groups, chosen)
    owners = items.long().gather(1, largest).masked_fill_(~valid, -1)
    return staged_sum(values, items, bias), owned_weights(rest[0], owners) if rest else None


def _counts(hop: Hop, chosen: Tensor) -> list[int]:
    """How many of the chosen slots each peer of a hop owns."""
    return torch.bincount(hop.groups[chosen], minlength=len(hop.send_counts)).tolist()
