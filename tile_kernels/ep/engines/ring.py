"""One-sided exchange: ranks that write directly into each other's memory.

Each rank owns a slab that all others can write. For every ordered pair of ranks there is a ring of
`SLOTS` areas in the receiver's slab, and for each area two flags: `full`, beside it, and `busy`, in
the sender's slab. A rank polls flags in its local slab only.

```
 sender                                    receiver
 wait until busy = 0, then busy = 1
 put the chunk into the area  ---------->
 full = 1  ----------------------------->  wait until full = 1
                                           take the chunk out, full = 0
           <-----------------------------  busy = 0
```

Chunk `n` of an exchange goes through area `n % SLOTS`. No counter is carried from one exchange
to the next: flags are zero again when it ends, so a CUDA graph can replay an exchange. Each step
puts one chunk to every peer, then gets one from every peer, so that no rank waits for a later step.

The engine decides where the memory is, how to wait for a flag and how to write one: `mmap` waits on
the host, `symm` lets a CUDA stream wait.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Counts, Engine, Pending
from tile_kernels.ep.engines.collective import CollectiveEngine

SLOTS = 2
FULL, BUSY = 0, SLOTS  # the first flag of each kind
_FLAGS = 8  # int64 flags for each peer: a cache line, so that pairs do not share one

Ring = TypeVar("Ring", bound="RingEngine")


class Slab:
    """The memory of one rank, seen by any: `flags` `[R, 8]`, `areas` `[R, SLOTS, chunk]`."""

    def __init__(self, memory: Tensor, num_ranks: int, chunk: int) -> None:
        head = 8 * _FLAGS * num_ranks
        self.flags = memory[:head].view(torch.int64).view(num_ranks, _FLAGS)
        self.areas = memory[head:].view(num_ranks, SLOTS, chunk)


def slab_bytes(num_ranks: int, chunk: int) -> int:
    """The size of a slab."""
    return num_ranks * (8 * _FLAGS + SLOTS * chunk)


@dataclass
class Rings:
    """The slabs of all ranks, `index` being this one's."""

    slabs: list[Slab]
    index: int
    chunk: int
    broken: str | None = None  # the error after which flags are inconsistent


class RingEngine(Engine):
    """Some of the ranks of a set of rings; `ranks` are theirs in it.

    Every part of the ranks uses the same rings: both sides of a pair use theirs in the same order.
    """

    def __init__(self, control: CollectiveEngine, rings: Rings, ranks: Sequence[int]) -> None:
        self._control = control
        self._rings = rings
        self._ranks = list(ranks)
        self.index, self.size = control.index, control.size
        self.rank_ids, self.timeout = control.rank_ids, control.timeout

    @abstractmethod
    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        """Wait until a flag of this rank's slab has a value."""

    @abstractmethod
    def _write(self, word: Tensor, value: int) -> None:
        """Set a flag of any slab, ordered after all earlier writes."""

    def _put(self, peer: int, number: int, data: Tensor, phase: str) -> None:
        rings, slot = self._rings, number % SLOTS
        own, theirs = rings.slabs[rings.index], rings.slabs[self._ranks[peer]]
        busy = own.flags[self._ranks[peer], BUSY + slot]
        self._wait(busy, 0, peer, phase)
        self._write(busy, 1)
        theirs.areas[rings.index, slot, : data.numel()].copy_(data)
        self._write(theirs.flags[rings.index, FULL + slot], 1)

    def _get(self, peer: int, number: int, out: Tensor, phase: str) -> None:
        rings, slot = self._rings, number % SLOTS
        own, theirs = rings.slabs[rings.index], rings.slabs[self._ranks[peer]]
        full = own.flags[self._ranks[peer], FULL + slot]
        self._wait(full, 1, peer, phase)
        out.copy_(own.areas[self._ranks[peer], slot, : out.numel()])
        self._write(full, 0)
        self._write(theirs.flags[rings.index, BUSY + slot], 0)

    def _check_usable(self) -> None:
        if self._rings.broken is not None:
            raise RuntimeError(f"{self.name}: this buffer broke down before: {self._rings.broken}")

    def _through_rings(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str
    ) -> Tensor:
        """The exchange, of contiguous rows on the device of the slabs."""
        received = rows.new_empty((sum(recv_counts), rows.shape[1]))
        outgoing = rows.split(list(send_counts))
        incoming = received.split(list(recv_counts))
        incoming[self.index].copy_(outgoing[self.index])
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        chunk = self._rings.chunk
        puts = {peer: _chunks(outgoing[peer], chunk) for peer in others}
        gets = {peer: _chunks(incoming[peer], chunk) for peer in others}
        num_steps = max((len(each) for each in (*puts.values(), *gets.values())), default=0)
        for number in range(num_steps):
            for peer in others:
                if number < len(puts[peer]):
                    self._put(peer, number, puts[peer][number], phase)
            for peer in others:
                if number < len(gets[peer]):
                    self._get(peer, number, gets[peer][number], phase)
        return received

    def start_descriptors(self, rows: Tensor, phase: str) -> Callable[[], Tensor]:
        """Descriptors go through the process group."""
        self._check_usable()
        return self._control.start_descriptors(rows, phase)

    def send(self, data: Tensor, peer: int) -> Pending:
        """Single messages go through the process group."""
        return self._control.send(data, peer)

    def receive(self, out: Tensor, peer: int) -> None:
        """Single messages go through the process group."""
        self._control.receive(out, peer)

    def split(self: Ring, indices: Sequence[int]) -> Ring:
        """The engine of some of the processes, on the same rings."""
        control = self._control.split(indices)
        return type(self)(control, self._rings, [self._ranks[index] for index in indices])


def _chunks(rows: Tensor, size: int) -> list[Tensor]:
    """Contiguous rows of bytes as pieces that fit an area."""
    return list(rows.reshape(-1).split(size)) if rows.numel() else []
