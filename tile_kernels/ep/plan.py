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
    largest = torch.zeros_like(groups)
    for slot in range(groups.shape[1]):
        largest.masked_fill_(groups == groups[:, slot : slot + 1], slot)
    return largest


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


def plan_hop(groups: Tensor, num_peers: int) -> Hop:
    """The items for the peers named by `groups` `[rows, K]`: each row once to each of its peers."""
    largest, masters = master_slots(groups)
    items = numbered(groups, masters)
    owners = items.long().gather(1, largest).masked_fill_(groups < 0, -1)
    counts = torch.bincount(groups[masters], minlength=num_peers)
    return Hop(groups, masters, items, owners, counts.tolist())


def plan_static_hop(groups: Tensor, num_peers: int, capacity: int) -> Hop:
    """The same with `capacity` items for each peer, without waiting for the device.

    `capacity` is at least the number of rows. Item `n` of peer `p` has the number
    `p * capacity + n`.
    """
    largest, masters = master_slots(groups)
    peers = torch.where(masters, groups, num_peers)  # num_peers: no peer
    sent = groups.new_zeros((groups.shape[0], num_peers + 1)).scatter_(1, peers, 1)
    index = (sent.cumsum(0) - 1).gather(1, peers)
    items = torch.where(masters, groups * capacity + index, -1)
    owners = items.gather(1, largest).masked_fill_(groups < 0, -1)
    counts = [capacity] * num_peers
    return Hop(groups, masters, items.int(), owners, counts, counts, is_static=True)


@dataclass
class Plan:
    """All hops of a dispatch, and the order of what arrived.

    `order` `[N]` takes rows from the order of arrival to that of their sources; `None` where the
    two are the same. `ranks` `[T, K]` is the rank of each slot, -1: none (in hybrid mode the first
    hop only knows nodes). `sources` `[N]` is `source rank * num_max_tokens_per_rank + token` of
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
