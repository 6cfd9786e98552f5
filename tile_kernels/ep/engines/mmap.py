"""Processes of one host that write straight into each other's memory, as GPUs of a node would.

The protocol of `ring`, on memory-mapped files that all ranks share. The process group is used for
setup, for descriptors and for single messages. The memory order of x86 guarantees that a flag is
never visible before the data it announces. Slabs are unlinked once mapped, so no files are left
behind.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Counts
from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.ring import RingEngine, Rings, Slab, slab_bytes
from tile_kernels.ep.rows import as_bytes

CHUNK = 1 << 18
_POLL_SECONDS = 20e-6
_PATH_BYTES = 512


class MmapEngine(RingEngine):
    """One-sided exchange through shared memory."""

    name = "mmap"

    @classmethod
    def over(cls, control: CollectiveEngine) -> MmapEngine:
        """Map the memory of all ranks of a process group. Collective."""
        hosts = control.hosts()
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
        folder = _shared_folder(control)
        paths = [folder / f"slab_{rank}" for rank in range(control.size)]
        own = _slab(paths[control.index], control.size)  # new files are zero
        control.barrier("mapping memory")
        slabs = [
            own if rank == control.index else _slab(path, control.size)
            for rank, path in enumerate(paths)
        ]
        control.barrier("mapping memory")
        paths[control.index].unlink()  # mapped by all ranks: freed with the last of them
        control.barrier("mapping memory")
        if control.index == 0:
            folder.rmdir()
        return cls(control, Rings(slabs, control.index, CHUNK), range(control.size))

    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Put rows into the slabs of the peers and get theirs from this rank's slab."""
        self._check_usable()
        if rows.shape[1] == 0:
            return rows.new_empty((sum(recv_counts), 0))
        sent = as_bytes(rows.cpu())
        return self._through_rings(sent, send_counts, recv_counts, phase).to(rows.device)

    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        end = time.monotonic() + self.timeout
        while int(word) != value:
            if time.monotonic() > end:
                what = "to send" if value else "to take what it was sent"
                self._rings.broken = (
                    f"rank {self.rank_ids[self.index]} waited {self.timeout:g} s in {phase} for "
                    f"rank {self.rank_ids[peer]} {what}"
                )
                raise RuntimeError(self._rings.broken)
            time.sleep(_POLL_SECONDS)

    def _write(self, word: Tensor, value: int) -> None:
        word.fill_(value)


def _slab(path: Path, num_ranks: int) -> Slab:
    size = slab_bytes(num_ranks, CHUNK)
    memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return Slab(memory, num_ranks, CHUNK)


def _shared_folder(control: CollectiveEngine) -> Path:
    """A folder that rank 0 makes, on a file system in memory if there is one."""
    path = ""
    if control.index == 0:
        memory = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a unique folder inside
        parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
        path = tempfile.mkdtemp(prefix="tile_kernels_ep_", dir=parent)
    row = bytearray(path.encode().ljust(_PATH_BYTES, b"\0"))
    received = control.gather(torch.frombuffer(row, dtype=torch.uint8), "mapping memory")[0]
    return Path(bytes(received.tolist()).rstrip(b"\0").decode())
