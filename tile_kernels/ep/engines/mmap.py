"""Processes of one host that write straight into each other's memory, as GPUs of a node would.

Each rank owns a slab that all others map. A sender *puts* bytes into its own area of the receiver's
slab and then raises a counter there; the receiver takes them out and raises another, which tells
the sender that the area is free again. Nobody answers requests, and the process group serves only
to meet. That a counter is never seen before what it counts is the memory order of x86.

```
 slab of rank r:   words [R, 2]   put: chunks written by each sender, taken: chunks taken out by r
                   here           how often r came to a barrier
                   areas [R, SLOTS, CHUNK]   a ring for each sender
```

Single messages (`send`) are files, complete when they have their name. Nothing stays behind: slabs
lose their names once mapped, messages when received.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Engine, Pending
from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.rows import as_bytes

SLOTS = 2
CHUNK = 1 << 18
_WORDS = 8  # int64 words for each peer: a cache line, so that counters do not share one
_PUT, _TAKEN, _HERE = 0, 1, 2
_NAP = 20e-6
_PATH_BYTES = 512


class _Slab:
    """The memory of one rank, seen by any."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        num_words = num_ranks * _WORDS
        size = 8 * num_words + num_ranks * SLOTS * CHUNK
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self.words = memory[: 8 * num_words].view(torch.int64).view(num_ranks, _WORDS)
        self.areas = memory[8 * num_words :].view(num_ranks, SLOTS, CHUNK)


class _Parcel:
    """A message in a file; the receiver removes it."""

    def __init__(self, path: Path, engine: MmapEngine) -> None:
        self._path = path
        self._engine = engine

    def wait(self) -> None:
        """Return when the receiver has it."""
        self._engine.until(lambda: not self._path.exists(), f"{self._path.name} to be received")


class MmapEngine(Engine):
    """One-sided exchange through shared memory."""

    name = "mmap"

    def __init__(self, meeting: CollectiveEngine) -> None:
        hosts = meeting.hosts()
        if len(set(hosts)) > 1:
            raise ValueError(
                "engine 'mmap' is not available: its ranks share memory, but these are on "
                f"{', '.join(sorted(set(hosts)))}"
            )
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(
                "engine 'mmap' is not available: it relies on the memory order of x86, but this is "
                f"{platform.machine()}"
            )
        self._meeting = meeting
        self.index, self.size = meeting.index, meeting.size
        self._folder = self._shared_folder()
        paths = [self._folder / f"slab_{rank}" for rank in range(self.size)]
        own = _Slab(paths[self.index], self.size)  # new files are zero
        meeting.barrier()
        self._slabs = [
            own if rank == self.index else _Slab(path, self.size) for rank, path in enumerate(paths)
        ]
        meeting.barrier()
        paths[self.index].unlink()  # mapped by everyone: the memory goes with the last of them
        meeting.barrier()
        self._tidy()
        meeting.barrier()
        self._sent = [0] * self.size
        self._received = [0] * self.size

    def _shared_folder(self) -> Path:
        """A folder that the first rank makes, in memory where there is such a place."""
        path = ""
        if self.index == 0:
            memory = Path("/dev/shm")  # noqa: S108 - the folder inside has a name of its own
            place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
            path = tempfile.mkdtemp(prefix="tile_kernels_ep_", dir=place)
        row = bytearray(path.encode().ljust(_PATH_BYTES, b"\0"))
        told = self._meeting.gather(torch.frombuffer(row, dtype=torch.uint8))[0]
        return Path(bytes(told.tolist()).rstrip(b"\0").decode())

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):  # there are messages, or another rank was quicker
            self._folder.rmdir()

    def exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Put rows into the slabs of the peers while taking theirs out of the own."""
        width = rows.shape[1]
        shape = (sum(recv_counts), width)
        if width == 0:
            return rows.new_empty(shape)
        received = torch.empty(shape, dtype=torch.uint8)
        outgoing = list(as_bytes(rows.cpu()).split(list(send_counts)))
        incoming = list(received.split(list(recv_counts)))
        incoming[self.index].copy_(outgoing[self.index])
        others = [(self.index + step) % self.size for step in range(1, self.size)]
        puts = {peer: _chunks(outgoing[peer]) for peer in others}
        takes = {peer: _chunks(incoming[peer]) for peer in others}
        end = time.monotonic() + self.patience
        while any(puts.values()) or any(takes.values()):
            moved = [self._put(peer, puts[peer]) for peer in others]
            moved += [self._take(peer, takes[peer]) for peer in others]
            if any(moved):
                end = time.monotonic() + self.patience
            elif time.monotonic() > end:
                left = {peer: (len(puts[peer]), len(takes[peer])) for peer in others}
                raise RuntimeError(
                    f"mmap: rank {self.index} waited {self.patience:g} s; chunks still to put into "
                    f"and to take from each rank: {left}"
                )
            else:
                time.sleep(_NAP)
        return received.to(rows.device)

    def _put(self, peer: int, chunks: list[Tensor]) -> bool:
        """Write the next chunk for a peer if its area has room."""
        slab = self._slabs[peer]
        words = slab.words[self.index]
        if not chunks or int(words[_PUT]) - int(words[_TAKEN]) >= SLOTS:
            return False
        chunk = chunks.pop(0)
        slot = int(words[_PUT]) % SLOTS
        slab.areas[self.index, slot, : chunk.numel()].copy_(chunk)
        words[_PUT] += 1
        return True

    def _take(self, peer: int, chunks: list[Tensor]) -> bool:
        """Read the next chunk from a peer if it is there."""
        slab = self._slabs[self.index]
        words = slab.words[peer]
        if not chunks or int(words[_PUT]) == int(words[_TAKEN]):
            return False
        chunk = chunks.pop(0)
        slot = int(words[_TAKEN]) % SLOTS
        chunk.copy_(slab.areas[peer, slot, : chunk.numel()])
        words[_TAKEN] += 1
        return True

    def barrier(self) -> None:
        """Count this rank's arrivals where all can see them, and wait for theirs."""
        self._slabs[self.index].words[self.index, _HERE] += 1
        target = int(self._slabs[self.index].words[self.index, _HERE])
        for peer, slab in enumerate(self._slabs):
            here = slab.words[peer]
            self.until(
                lambda here=here: int(here[_HERE]) >= target,  # type: ignore[misc]
                f"rank {peer} at barrier {target}",
            )

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready()`; say `what` was waited for if patience ends."""
        end = time.monotonic() + self.patience
        while not ready():
            if time.monotonic() > end:
                raise RuntimeError(f"mmap: rank {self.index} waited {self.patience:g} s for {what}")
            time.sleep(_NAP)

    def _path(self, sender: int, receiver: int, number: int) -> Path:
        return self._folder / f"message_{number}_from_{sender}_to_{receiver}"

    def send(self, data: Tensor, peer: int) -> Pending:
        """Leave bytes in a file for one process."""
        path = self._path(self.index, peer, self._sent[peer])
        self._sent[peer] += 1
        draft = path.with_suffix(".draft")
        content = data.cpu().numpy().tobytes()
        while True:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            try:
                draft.write_bytes(content)
                break
            except FileNotFoundError:  # a receiver has just tidied up
                continue
        draft.rename(path)
        return _Parcel(path, self)

    def receive(self, out: Tensor, peer: int) -> None:
        """Take the next file of one process."""
        path = self._path(peer, self.index, self._received[peer])
        self.until(path.exists, path.name)
        self._received[peer] += 1
        data = bytearray(path.read_bytes())
        path.unlink()
        self._tidy()
        if data:
            out.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def split(self, places: Sequence[int]) -> MmapEngine:
        """The engine of some of the processes, with slabs of their own."""
        part = MmapEngine(self._meeting.split(places))
        part.patience = self.patience
        return part


def _chunks(rows: Tensor) -> list[Tensor]:
    """Contiguous rows of bytes as pieces that fit a slot."""
    return list(rows.reshape(-1).split(CHUNK)) if rows.numel() else []
