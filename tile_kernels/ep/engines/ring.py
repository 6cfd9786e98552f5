"""One-sided exchange: ranks that write straight into each other's memory.

Each rank owns a slab that all others can write. For every ordered pair of ranks there is a ring of
`SLOTS` areas in the receiver's slab, and for each area two words: `full`, beside it, and `busy`, in
the sender's slab. Everyone waits on words of its own slab only.

```
 sender                                    receiver
 wait until busy = 0, then busy = 1
 put the chunk into the area  ---------->
 full = 1  ----------------------------->  wait until full = 1
                                           take the chunk out, full = 0
           <-----------------------------  busy = 0
```

Chunk `n` of an exchange goes through area `n % SLOTS`. Nothing is counted from one exchange to the
next: words are as before when it ends, so a recorded exchange can be replayed. Chunks of all peers
are put in turn, then taken in turn, so that nobody waits for what comes later.

Where the memory is, how to wait and how to write a word is up to the engine: `mmap` waits on the
host, `symm` lets a CUDA stream wait.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Engine, Pending
from tile_kernels.ep.engines.collective import CollectiveEngine

SLOTS = 2
FULL, BUSY = 0, SLOTS  # the first word of each kind
_WORDS = 8  # int64 words for each peer: a cache line, so that pairs do not share one

Ring = TypeVar("Ring", bound="RingEngine")


class Slab:
    """The memory of one rank, seen by any: `words` `[R, 8]`, `areas` `[R, SLOTS, chunk]`."""

    def __init__(self, memory: Tensor, num_ranks: int, chunk: int) -> None:
        head = 8 * _WORDS * num_ranks
        self.words = memory[:head].view(torch.int64).view(num_ranks, _WORDS)
        self.areas = memory[head:].view(num_ranks, SLOTS, chunk)


def slab_bytes(num_ranks: int, chunk: int) -> int:
    """The size of a slab."""
    return num_ranks * (8 * _WORDS + SLOTS * chunk)


@dataclass
class Rings:
    """The slabs of all ranks, `index` being this one's."""

    slabs: list[Slab]
    index: int
    chunk: int
    broken: str | None = None  # what went wrong: words may be as they should not


class RingEngine(Engine):
    """Some of the ranks of a set of rings; `places` are theirs in it.

    Any part of the ranks uses the rings between them: a pair meets in the same order on both sides.
    """

    def __init__(self, meeting: CollectiveEngine, rings: Rings, places: Sequence[int]) -> None:
        self._meeting = meeting
        self._rings = rings
        self._places = list(places)
        self.index, self.size = meeting.index, meeting.size
        self.names, self.patience = meeting.names, meeting.patience

    @abstractmethod
    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        """Until a word of the own slab has a value."""

    @abstractmethod
    def _write(self, word: Tensor, value: int) -> None:
        """Set a word of any slab, after all that was done before."""

    def _put(self, peer: int, number: int, data: Tensor, phase: str) -> None:
        rings, slot = self._rings, number % SLOTS
        own, theirs = rings.slabs[rings.index], rings.slabs[self._places[peer]]
        busy = own.words[self._places[peer], BUSY + slot]
        self._wait(busy, 0, peer, phase)
        self._write(busy, 1)
        theirs.areas[rings.index, slot, : data.numel()].copy_(data)
        self._write(theirs.words[rings.index, FULL + slot], 1)

    def _take(self, peer: int, number: int, out: Tensor, phase: str) -> None:
        rings, slot = self._rings, number % SLOTS
        own, theirs = rings.slabs[rings.index], rings.slabs[self._places[peer]]
        full = own.words[self._places[peer], FULL + slot]
        self._wait(full, 1, peer, phase)
        out.copy_(own.areas[self._places[peer], slot, : out.numel()])
        self._write(full, 0)
        self._write(theirs.words[rings.index, BUSY + slot], 0)

    def _check_whole(self) -> None:
        if self._rings.broken is not None:
            raise RuntimeError(f"{self.name}: this buffer broke down before: {self._rings.broken}")

    def _through_rings(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], phase: str
    ) -> Tensor:
        """The exchange, of contiguous rows where the slabs are."""
        received = rows.new_empty((sum(recv_counts), rows.shape[1]))
        outgoing = rows.split(list(send_counts))
        incoming = received.split(list(recv_counts))
        incoming[self.index].copy_(outgoing[self.index])
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        chunk = self._rings.chunk
        puts = {peer: _chunks(outgoing[peer], chunk) for peer in others}
        takes = {peer: _chunks(incoming[peer], chunk) for peer in others}
        most = max((len(each) for each in (*puts.values(), *takes.values())), default=0)
        for number in range(most):
            for peer in others:
                if number < len(puts[peer]):
                    self._put(peer, number, puts[peer][number], phase)
            for peer in others:
                if number < len(takes[peer]):
                    self._take(peer, number, takes[peer][number], phase)
        return received

    def send(self, data: Tensor, peer: int) -> Pending:
        """Single messages go through the process group."""
        return self._meeting.send(data, peer)

    def receive(self, out: Tensor, peer: int) -> None:
        """Single messages go through the process group."""
        self._meeting.receive(out, peer)

    def split(self: Ring, places: Sequence[int]) -> Ring:
        """The engine of some of the processes, on the same rings."""
        meeting = self._meeting.split(places)
        return type(self)(meeting, self._rings, [self._places[place] for place in places])


def _chunks(rows: Tensor, size: int) -> list[Tensor]:
    """Contiguous rows of bytes as pieces that fit an area."""
    return list(rows.reshape(-1).split(size)) if rows.numel() else []
