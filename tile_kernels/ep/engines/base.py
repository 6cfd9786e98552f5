"""What moves bytes between ranks."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tile_kernels.ep.engines.window import Window

_HOST_BYTES = 256
Counts = Sequence[int]  # rows for or from each peer


class Pending(Protocol):
    """A send in flight."""

    def wait(self) -> object:
        """Return when the receiver has it."""


class Engine(ABC):
    """A group of ranks that exchange rows of bytes. Every method is called by all of them.

    | attribute | meaning |
    |---|---|
    | `name` | what the engine is called |
    | `index`, `size` | the index of this rank in the group, and the number of ranks |
    | `rank_ids` | the rank of each index in the whole buffer, for errors |
    | `timeout` | seconds to wait for another rank before an error that names it |
    | `device_timeout` | seconds that a transfer on a CUDA stream may take |
    """

    timeout: float = 300.0
    device_timeout: float = 100.0
    window: Window | None = None  # memory that the ranks write directly
    name: str
    index: int
    size: int
    rank_ids: Sequence[int]

    @property
    def active(self) -> Sequence[int]:
        """The indices of the ranks that take part."""
        return range(self.size)

    @property
    def device(self) -> torch.device:
        """The device whose memory the engine exchanges without a copy to another one."""
        return torch.device("cpu")

    @abstractmethod
    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Send `rows` (`uint8`, `[sum(send_counts), bytes]`, by peer) and receive others.

        Returns `[sum(recv_counts), bytes]`, by peer, in new memory on the same device.
        Errors name the `phase`.
        """

    def start(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Callable[[], Tensor]:
        """Start an exchange; the function that is returned ends it, with the rows received.

        Engines that cannot send in the background do all of it at once.
        """
        received = self.exchange(rows, send_counts, recv_counts, phase)
        return lambda: received

    def start_descriptors(self, rows: Tensor, phase: str) -> Callable[[], Tensor]:
        """Start to send one row in host memory to each active rank.

        All engines of the same ranks send these over the same connections, so that calls of
        different buffers meet.
        """
        ones = self.ones()
        return self.start(rows, ones, ones, phase)

    @abstractmethod
    def split(self, indices: Sequence[int]) -> Engine:
        """The engine of a part of the group, which includes this rank."""

    @abstractmethod
    def send(self, data: Tensor, peer: int) -> Pending:
        """Send bytes (`uint8`, `[n]`, not changed until received) to one rank; do not wait."""

    @abstractmethod
    def receive(self, out: Tensor, peer: int) -> None:
        """Fill `out` (`uint8`, `[n]`) with the next bytes from one rank: `n`, as it sent."""

    def ones(self) -> list[int]:
        """One row for each rank that takes part."""
        active = set(self.active)
        return [int(index in active) for index in range(self.size)]

    def gather(self, row: Tensor, phase: str = "a gather") -> Tensor:
        """`row` (`uint8`, `[bytes]`) of every active rank: `[active, bytes]`."""
        ones = self.ones()
        return self.exchange(row.expand(sum(ones), -1).contiguous(), ones, ones, phase)

    def barrier(self, phase: str = "a barrier") -> None:
        """Wait until every rank of the group is here."""
        self.gather(torch.zeros(1, dtype=torch.uint8), phase)

    def settle(self) -> None:  # noqa: B027 - a default without work
        """Wait on the host until all enqueued exchanges are done; an error after the timeout.

        Only engines that enqueue work on a CUDA stream have something to wait for.
        """

    def hosts(self) -> list[str]:
        """The host name of every active rank."""
        name = socket.gethostname().encode()[:_HOST_BYTES]
        row = torch.frombuffer(bytearray(name.ljust(_HOST_BYTES, b"\0")), dtype=torch.uint8)
        rows = self.gather(row, "learning the hosts")
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in rows]
