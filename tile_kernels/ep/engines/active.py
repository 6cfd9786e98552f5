"""A group that goes on without some of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Engine, Pending


class ActiveEngine(Engine):
    """All ranks by their numbers, of which only those of `part` take part.

    `places` are the numbers of the ranks of `part`. Rows for the others go nowhere, and rows from
    them are zeros.
    """

    def __init__(self, part: Engine, places: Sequence[int], size: int) -> None:
        self.part = part
        self._places = list(places)
        self.name = part.name
        self.index = self._places[part.index]
        self.size = size
        self.names = range(size)
        self.patience = part.patience

    @property
    def active(self) -> Sequence[int]:
        """The places of the ranks that take part."""
        return self._places

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        phase: str = "an exchange",
    ) -> Tensor:
        """Send rows to each active peer and receive theirs."""
        sent = [send_counts[place] for place in self._places]
        received = [recv_counts[place] for place in self._places]
        if sum(sent) != sum(send_counts):
            parts = rows.split(list(send_counts))
            rows = torch.cat([parts[place] for place in self._places])
        found = self.part.exchange(rows, sent, received, phase)
        if sum(received) == sum(recv_counts):
            return found
        all_parts = [found.new_zeros((count, found.shape[1])) for count in recv_counts]
        for place, part in zip(self._places, found.split(received)):
            all_parts[place] = part
        return torch.cat(all_parts)

    def split(self, places: Sequence[int]) -> Engine:
        """The engine of some of the active ranks."""
        return self.part.split([self._places.index(place) for place in places])

    def send(self, data: Tensor, peer: int) -> Pending:
        """Send bytes to one active rank."""
        return self.part.send(data, self._places.index(peer))

    def receive(self, out: Tensor, peer: int) -> None:
        """Receive bytes from one active rank."""
        self.part.receive(out, self._places.index(peer))

    def settle(self) -> None:
        """Wait until what was begun is done."""
        self.part.settle()
