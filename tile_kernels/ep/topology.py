"""The topology: nodes with equally many ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """`num_scaleout_ranks` nodes of `num_scaleup_ranks` ranks each, numbered node by node.

    One node is direct mode: every token is sent once to each rank that needs it. Several nodes are
    hybrid mode: once to each node, then once to each rank inside it.

    >>> topology = Topology(num_scaleout_ranks=2, num_scaleup_ranks=4)
    >>> topology.num_ranks, topology.node_of(5), topology.rail(5), topology.node(5)
    (8, 1, (1, 5), (4, 5, 6, 7))
    """

    num_scaleout_ranks: int
    num_scaleup_ranks: int

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.num_scaleout_ranks * self.num_scaleup_ranks

    @property
    def is_hybrid(self) -> bool:
        """Whether tokens are sent in two hops."""
        return self.num_scaleout_ranks > 1

    def node_of(self, rank: int) -> int:
        """The node (scale-out index) of a rank."""
        return rank // self.num_scaleup_ranks

    def index_in_node(self, rank: int) -> int:
        """The index of a rank in its node (scale-up index)."""
        return rank % self.num_scaleup_ranks

    def node(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        first = self.node_of(rank) * self.num_scaleup_ranks
        return tuple(range(first, first + self.num_scaleup_ranks))

    def rail(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same index in all nodes."""
        return tuple(range(self.index_in_node(rank), self.num_ranks, self.num_scaleup_ranks))
