"""Plans: which row is sent to which rank, and the order of the sums on the path back.

A *hop* is one exchange among a group of peers. In direct mode dispatch is one hop, to the ranks of
the chosen experts. In hybrid mode it is two: to the nodes, then to the ranks inside each. Combine
takes the same hops in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def largest_slots(groups: Tensor) -> Tensor:
    """For each slot of `groups` `[rows, K]`, the largest slot of the row with the same group.

    >>> largest_slots(torch.tensor([[0, 1, 0, -1]])).tolist()
    [[2, 1, 2, 3]]
    """
    same = groups[:, :, None] == groups[:, None, :]
    slots = torch.arange(groups.shape[1], device=groups.device)
    return (same * slots).amax(2) if groups.shape[1] else groups.clone()


def numbered(groups: Tensor, chosen: Tensor) -> Tensor:
    """Number the chosen slots by group, then row, then slot; -1 elsewhere, int32 `[rows, K]`.

    >>> groups = torch.tensor([[1, 0], [0, 0]])
    >>> numbered(groups, torch.tensor([[True, True], [False, True]])).tolist()
    [[2, 0], [-1, 1]]
    """
    order = groups[chosen].argsort(stable=True)
    numbers = torch.empty_like(order)
    numbers[order] = torch.arange(order.numel(), device=order.device)
    out = torch.full(groups.shape, -1, dtype=torch.int32, device=groups.device)
    out[chosen] = numbers.int()
    return out


@dataclass
class Hop:
    """One exchange. `rows` are the senders', `K` the slots of each; an item is a row to one peer.

    | field | shape | meaning |
    |---|---|---|
    | `groups` | `[rows, K]` | the peer of each slot, -1: none |
    | `masters` | `[rows, K]` bool | the largest slot of each peer |
    | `items` | `[rows, K]` int32 | at those: the number of the item, by peer, then row; -1 \
elsewhere |
    | `owners` | `[rows, K]` | the item that serves a slot, -1: none |
    | `send_counts`, `recv_counts` | per peer | items that leave and that arrive |
    | `is_static` | bool | counts are a capacity; items beyond the real ones are zeros |
    """

    groups: Tensor
    masters: Tensor
    items: Tensor
    owners: Tensor
    send_counts: list[int]
    recv_counts: list[int] = field(default_factory=list)
    is_static: bool = False

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.groups, self.masters, self.items, self.owners]


def master_slots(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The largest slots of `groups` `[rows, K]`, and whether a slot is the largest of its peer."""
    largest = largest_slots(groups)
    slots = torch.arange(groups.shape[1], device=groups.device)
    return largest, (groups >= 0) & (largest == slots)


def counted_hop(groups: Tensor, num_peers: int) -> tuple[Hop, Tensor]:
    """The items for the peers named by `groups` `[rows, K]`: each row once to each of its peers.

    Returns the hop without counts, and the counts `[num_peers]`; the host does not wait for them.
    """
    largest, masters, peers, sent = _sent(groups, num_peers)
    counts = sent.sum(1)
    first = (counts.cumsum(0) - counts).index_select(0, peers.flatten()).view_as(peers)
    index = (sent.cumsum(1) - 1).T.gather(1, peers)
    items = torch.where(masters, first + index, -1)
    owners = items.gather(1, largest).masked_fill_(groups < 0, -1)
    return Hop(groups, masters, items.int(), owners, []), counts[:num_peers]


def _sent(groups: Tensor, num_peers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`master_slots`, the peer at those (`num_peers` elsewhere), and 1 for each peer and row."""
    largest, masters = master_slots(groups)
    peers = torch.where(masters, groups, num_peers)
    # By peer, as a sum along contiguous rows is much faster on a GPU.
    sent = groups.new_zeros((num_peers + 1, groups.shape[0])).scatter_(0, peers.T, 1)
    return largest, masters, peers, sent


def plan_hop(groups: Tensor, num_peers: int) -> Hop:
    """`counted_hop` with its counts."""
    hop, counts = counted_hop(groups, num_peers)
    hop.send_counts = counts.tolist()
    return hop


def plan_static_hop(groups: Tensor, num_peers: int, capacity: int) -> Hop:
    """The same with `capacity` items for each peer, without waiting for the device.

    `capacity` is at least the number of rows. Item `n` of peer `p` has the number
    `p * capacity + n`.
    """
    largest, masters, peers, sent = _sent(groups, num_peers)
    index = (sent.cumsum(1) - 1).T.gather(1, peers)
    items = torch.where(masters, groups * capacity + index, -1)
    owners = items.gather(1, largest).masked_fill_(groups < 0, -1)
    counts = [capacity] * num_peers
    return Hop(groups, masters, items.int(), owners, counts, counts, is_static=True)


@dataclass(frozen=True)
class Traffic:
    """What all ranks send to all, known on every host: for rows that are written directly.

    `rows[s][d]` are the rows from rank `s` to rank `d`, `choices[s][e]` the slots of rank `s` that
    name expert `e`.
    """

    rows: list[list[int]]
    choices: list[list[int]]

    def start_at(self, source: int, peer: int) -> int:
        """Where the rows of a source begin among those that a peer receives."""
        return sum(row[peer] for row in self.rows[:source])

    def item_at(self, source: int, peer: int) -> int:
        """Where the rows for a peer begin among those that a source sends."""
        return sum(self.rows[source][:peer])

    def num_received(self, rank: int) -> int:
        """The rows that a rank receives."""
        return self.start_at(len(self.rows), rank)

    def chosen(self, expert: int) -> int:
        """The slots that name an expert."""
        return sum(row[expert] for row in self.choices)


@dataclass
class Layout:
    """Where the rows of a dispatch lie at their receivers.

    `slots` are the rows of data and scales, `items` those of words, `ranks` the receivers; all
    `[T, K]` int32. `sizes[r]` are the rows and the items that
    rank `r` receives.
    """

    ranks: Tensor
    slots: Tensor
    items: Tensor
    sizes: list[tuple[int, int]]


@dataclass
class Plan:
    """All hops of a dispatch, and the order of what arrived.

    `order` `[N]` takes rows from the order of arrival to that of their sources; `None` where the
    two are the same. `ranks` `[T, K]` is the rank of each slot, -1: none (in hybrid mode the first
    hop only knows nodes). `traffic` is given where rows were written directly; `returns`
    are the rank and the row to which such rows are returned, `layout` is that of the rows sent.
    `sources` `[N]` is `source rank * num_max_tokens_per_rank + token` of
    what arrived, `topk_idx` `[N, K]` its expert ids, both in the order of the sources;
    `block_counts` is how many came from each peer of the last hop. In a static plan `N` is what
    could arrive, and the rows that did not come last, with -1 for source and ids.
    """

    hops: list[Hop]
    order: Tensor | None
    ranks: Tensor
    sources: Tensor
    topk_idx: Tensor
    block_counts: Tensor
    traffic: Traffic | None = None
    returns: tuple[Tensor, Tensor] | None = None
    layout: Layout | None = None

    @property
    def is_static(self) -> bool:
        """Whether the host does not know the counts."""
        return self.hops[0].is_static

    @property
    def num_arrived(self) -> int:
        """How many rows this rank receives."""
        return sum(self.hops[-1].recv_counts)


def peers_of(topk_idx: Tensor, experts_per_peer: int, first_expert: int, num_peers: int) -> Tensor:
    """The peer that owns each chosen expert, -1 for none or one that is not among the peers."""
    peers = (topk_idx - first_expert).div(experts_per_peer, rounding_mode="floor")
    return peers.masked_fill((topk_idx < 0) | (peers < 0) | (peers >= num_peers), -1)


def count_ids(ids: Tensor, num_ids: int) -> Tensor:
    """How often each of `0..num_ids-1` comes, without waiting for the device."""
    counts = ids.new_zeros(num_ids + 1)  # the last for all others
    slots = torch.where((ids >= 0) & (ids < num_ids), ids, num_ids).flatten()
    return counts.scatter_add_(0, slots, torch.ones_like(slots))[:num_ids]
