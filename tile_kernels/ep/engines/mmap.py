"""Processes of one host that write straight into each other's memory, as GPUs of a node would.

The protocol of `ring`, on files in memory that all map. The process group serves only to meet, and
for single messages. That a word is never seen before what it announces is the memory order of x86.
Nothing stays behind: slabs lose their names once mapped.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.ring import RingEngine, Rings, Slab, slab_bytes
from tile_kernels.ep.rows import as_bytes

CHUNK = 1 << 18
_NAP = 20e-6
_PATH_BYTES = 512


class MmapEngine(RingEngine):
    """One-sided exchange through shared memory."""

    name = "mmap"

    @classmethod
    def over(cls, meeting: CollectiveEngine) -> MmapEngine:
        """Map the memory of all ranks of a process group. Collective."""
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
        folder = _shared_folder(meeting)
        paths = [folder / f"slab_{rank}" for rank in range(meeting.size)]
        own = _slab(paths[meeting.index], meeting.size)  # new files are zero
        meeting.barrier("mapping memory")
        slabs = [
            own if rank == meeting.index else _slab(path, meeting.size)
            for rank, path in enumerate(paths)
        ]
        meeting.barrier("mapping memory")
        paths[meeting.index].unlink()  # mapped by everyone: the memory goes with the last of them
        meeting.barrier("mapping memory")
        if meeting.index == 0:
            folder.rmdir()
        return cls(meeting, Rings(slabs, meeting.index, CHUNK), range(meeting.size))

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        phase: str = "an exchange",
    ) -> Tensor:
        """Put rows into the slabs of the peers and take theirs out of the own."""
        self._check_whole()
        if rows.shape[1] == 0:
            return rows.new_empty((sum(recv_counts), 0))
        sent = as_bytes(rows.cpu())
        return self._through_rings(sent, send_counts, recv_counts, phase).to(rows.device)

    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        end = time.monotonic() + self.patience
        while int(word) != value:
            if time.monotonic() > end:
                what = "to send" if value else "to take what it was sent"
                self._rings.broken = (
                    f"rank {self.names[self.index]} waited {self.patience:g} s in {phase} for "
                    f"rank {self.names[peer]} {what}"
                )
                raise RuntimeError(self._rings.broken)
            time.sleep(_NAP)

    def _write(self, word: Tensor, value: int) -> None:
        word.fill_(value)


def _slab(path: Path, num_ranks: int) -> Slab:
    size = slab_bytes(num_ranks, CHUNK)
    memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return Slab(memory, num_ranks, CHUNK)


def _shared_folder(meeting: CollectiveEngine) -> Path:
    """A folder that the first rank makes, in memory where there is such a place."""
    path = ""
    if meeting.index == 0:
        memory = Path("/dev/shm")  # noqa: S108 - the folder inside has a name of its own
        place = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
        path = tempfile.mkdtemp(prefix="tile_kernels_ep_", dir=place)
    row = bytearray(path.encode().ljust(_PATH_BYTES, b"\0"))
    told = meeting.gather(torch.frombuffer(row, dtype=torch.uint8), "mapping memory")[0]
    return Path(bytes(told.tolist()).rstrip(b"\0").decode())
