"""What moves bytes between ranks."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_HOST_BYTES = 256


class Pending(Protocol):
    """A send under way."""

    def wait(self) -> object:
        """Return when the receiver has it."""


class Engine(ABC):
    """A group of ranks that exchange rows of bytes. Every method is called by all of them.

    | attribute | meaning |
    |---|---|
    | `name` | what the engine is called |
    | `index`, `size` | this rank's place in the group, and how many there are |
    | `names` | the number of each place among the ranks of the buffer, for errors |
    | `patience` | seconds to wait for others before an error says for whom |
    """

    patience: float = 300.0
    name: str
    index: int
    size: int
    names: Sequence[int]

    @property
    def active(self) -> Sequence[int]:
        """The places of the ranks that take part."""
        return range(self.size)

    @abstractmethod
    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        phase: str = "an exchange",
    ) -> Tensor:
        """Send `rows` (`uint8`, `[sum(send_counts), bytes]`, by peer) and receive others.

        Returns `[sum(recv_counts), bytes]`, by peer, in memory of its own, on the same device.
        Errors say in which `phase` it happened.
        """

    @abstractmethod
    def split(self, places: Sequence[int]) -> Engine:
        """The engine of a part of the group, given as places in it, this rank's among them."""

    @abstractmethod
    def send(self, data: Tensor, peer: int) -> Pending:
        """Send bytes (`uint8`, `[n]`, not changed until received) to one rank; do not wait."""

    @abstractmethod
    def receive(self, out: Tensor, peer: int) -> None:
        """Fill `out` (`uint8`, `[n]`) with the next bytes from one rank: `n`, as it sent."""

    def ones(self) -> list[int]:
        """One row for each rank that takes part."""
        active = set(self.active)
        return [int(place in active) for place in range(self.size)]

    def gather(self, row: Tensor, phase: str = "a gather") -> Tensor:
        """`row` (`uint8`, `[bytes]`) of every active rank: `[active, bytes]`."""
        ones = self.ones()
        return self.exchange(row.expand(sum(ones), -1).contiguous(), ones, ones, phase)

    def barrier(self, phase: str = "a barrier") -> None:
        """Wait until every rank of the group is here."""
        self.gather(torch.zeros(1, dtype=torch.uint8), phase)

    def settle(self) -> None:  # noqa: B027 - most engines have nothing to do
        """Wait until what was begun is done, where that happens behind the host's back.

        Raises if patience ends. Most engines are done when their calls return.
        """

    def hosts(self) -> list[str]:
        """The host name of every active rank."""
        name = socket.gethostname().encode()[:_HOST_BYTES]
        row = torch.frombuffer(bytearray(name.ljust(_HOST_BYTES, b"\0")), dtype=torch.uint8)
        told = self.gather(row, "learning the hosts")
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in told]
