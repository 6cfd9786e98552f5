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
    | `patience` | seconds to wait for others, where the engine itself waits |
    """

    patience: float = 300.0
    name: str
    index: int
    size: int

    @abstractmethod
    def exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Send `rows` (`uint8`, `[sum(send_counts), bytes]`, by peer) and receive others.

        Returns `[sum(recv_counts), bytes]`, by peer, in memory of its own, on the same device.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank of the group is here."""

    @abstractmethod
    def split(self, places: Sequence[int]) -> Engine:
        """The engine of a part of the group, given as places in it, this rank's among them."""

    @abstractmethod
    def send(self, data: Tensor, peer: int) -> Pending:
        """Send bytes (`uint8`, `[n]`, not changed until received) to one rank; do not wait."""

    @abstractmethod
    def receive(self, out: Tensor, peer: int) -> None:
        """Fill `out` (`uint8`, `[n]`) with the next bytes from one rank: `n`, as it sent."""

    def gather(self, row: Tensor) -> Tensor:
        """`row` (`uint8`, `[bytes]`) of every rank: `[size, bytes]`."""
        ones = [1] * self.size
        return self.exchange(row.expand(self.size, -1).contiguous(), ones, ones)

    def hosts(self) -> list[str]:
        """The host name of every rank."""
        name = socket.gethostname().encode()[:_HOST_BYTES]
        row = torch.frombuffer(bytearray(name.ljust(_HOST_BYTES, b"\0")), dtype=torch.uint8)
        return [bytes(each.tolist()).rstrip(b"\0").decode() for each in self.gather(row)]
