"""A group in which only some ranks are active."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Counts, Engine, Pending


class ActiveEngine(Engine):
    """All ranks of a group, of which only those of `part` take part.

    `ranks` are the ranks of `part` in the whole group. Rows for inactive ranks are
    dropped, and rows from them are zeros.
    """

    def __init__(self, part: Engine, ranks: Sequence[int], size: int) -> None:
        self.part = part
        self._ranks = list(ranks)
        self.name = part.name
        self.index = self._ranks[part.index]
        self.size = size
        self.rank_ids = range(size)
        self.timeout = part.timeout

    @property
    def active(self) -> Sequence[int]:
        """The ranks that take part."""
        return self._ranks

    @property
    def device(self) -> torch.device:
        """That of the active ranks."""
        return self.part.device

    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Send rows to each active peer and receive theirs."""
        return self.start(rows, send_counts, recv_counts, phase)()

    def start(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Callable[[], Tensor]:
        """Start to send rows to each active peer."""
        sent = [send_counts[rank] for rank in self._ranks]
        received = [recv_counts[rank] for rank in self._ranks]
        if sum(sent) != sum(send_counts):
            parts = rows.split(list(send_counts))
            rows = torch.cat([parts[rank] for rank in self._ranks])
        end = self.part.start(rows, sent, received, phase)

        def with_inactive() -> Tensor:
            found = end()
            if sum(received) == sum(recv_counts):
                return found
            all_parts = [found.new_zeros((count, found.shape[1])) for count in recv_counts]
            for rank, part in zip(self._ranks, found.split(received)):
                all_parts[rank] = part
            return torch.cat(all_parts)

        return with_inactive

    def start_descriptors(self, rows: Tensor, phase: str) -> Callable[[], Tensor]:
        """Start to send one row to each active rank."""
        return self.part.start_descriptors(rows, phase)

    def split(self, indices: Sequence[int]) -> Engine:
        """The engine of some of the active ranks."""
        return self.part.split([self._ranks.index(rank) for rank in indices])

    def send(self, data: Tensor, peer: int) -> Pending:
        """Send bytes to one active rank."""
        return self.part.send(data, self._ranks.index(peer))

    def receive(self, out: Tensor, peer: int) -> None:
        """Receive bytes from one active rank."""
        self.part.receive(out, self._ranks.index(peer))

    def settle(self) -> None:
        """Wait until all enqueued exchanges are done."""
        self.part.settle()
