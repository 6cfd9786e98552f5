"""Processes of one node on GPUs, over PyTorch's symmetric memory.

The protocol of `ring` without a kernel: chunks are copied into the peers' memory, words are written
and waited for by the CUDA stream itself (`cuStreamWriteValue32`, `cuStreamWaitValue32`). Nothing
spins on an SM, so ranks may even share a GPU, and nothing waits on the host. Rows that lie in host
memory (descriptors, counts) and single messages go through the process group.

All waiting happens on the communication stream, the only one of its priority: streams can share a
queue of the hardware, and one that waits holds up what is behind it there.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.ring import BUSY, FULL, SLOTS, RingEngine, Rings, Slab, slab_bytes

LEAST_CHUNK = 1 << 12
_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_NAP = 100e-6
_DEVICE_BYTES = 64


class _Driver:
    """Two functions of libcuda that PyTorch does not offer, or not in every version."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._wait = library.cuStreamWaitValue32_v2
        self._write = library.cuStreamWriteValue32_v2
        for function in (self._wait, self._write):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def wait(self, stream: int, address: int, value: int) -> None:
        """Let a stream wait until the word at an address equals a value."""
        self._checked("cuStreamWaitValue32", self._wait(stream, address, value, _EQUAL))

    def write(self, stream: int, address: int, value: int) -> None:
        """Let a stream set the word at an address, after all writes before it are visible."""
        self._checked("cuStreamWriteValue32", self._write(stream, address, value, 0))

    @staticmethod
    def _checked(name: str, status: int) -> None:
        if status:
            raise RuntimeError(f"symm: {name} failed with CUDA driver error {status}")


def why_not() -> str | None:
    """Why the engine cannot work in this process; None where it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"this PyTorch ({torch.__version__}) has no symmetric memory: {error}"
    try:
        _Driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver library cannot be used: {error}"
    return None


@dataclass
class _Work:
    """What an engine and its parts share."""

    driver: _Driver
    side: torch.cuda.Stream  # for what must not wait behind an exchange
    memory: Any  # to be kept alive
    patience: float  # seconds, of the host for the device
    last: torch.cuda.Event | None = None
    under_way: deque[tuple[torch.cuda.Event, str]] = field(default_factory=deque)


class SymmEngine(RingEngine):
    """One-sided exchange through symmetric memory."""

    name = "symm"
    _work: _Work

    @classmethod
    def over(cls, meeting: CollectiveEngine, num_bytes: int, patience: float) -> SymmEngine:
        """Allocate and exchange memory for rings of `num_bytes` on each rank. Collective.

        Each rank uses its current CUDA device. `settle` waits for it for `patience` seconds.
        """
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        _check_places(meeting, device)
        chunk = max(LEAST_CHUNK, num_bytes // (meeting.size * SLOTS) // 256 * 256)
        size = slab_bytes(meeting.size, chunk)
        memory = symmetric.empty((size,), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, meeting.group)
        memory.zero_()
        torch.cuda.synchronize(device)
        meeting.barrier("clearing symmetric memory")
        slabs = [
            Slab(handle.get_buffer(rank, (size,), torch.uint8), meeting.size, chunk)
            for rank in range(meeting.size)
        ]
        engine = cls(meeting, Rings(slabs, meeting.index, chunk), range(meeting.size))
        engine._work = _Work(_Driver(), torch.cuda.Stream(device), (memory, handle), patience)
        return engine

    def split(self, places: Sequence[int]) -> SymmEngine:
        """The engine of some of the processes, on the same rings."""
        part = super().split(places)
        part._work = self._work
        return part

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        phase: str = "an exchange",
    ) -> Tensor:
        """Enqueue the exchange on the current stream; rows in host memory go another way."""
        self._check_whole()
        if not rows.is_cuda:
            return self._meeting.exchange(rows, send_counts, recv_counts, phase)
        if rows.shape[1] == 0:
            return rows.new_empty((sum(recv_counts), 0))
        rows = rows.contiguous()
        if torch.cuda.is_current_stream_capturing():  # order is the graph's, and nobody settles
            return self._through_rings(rows, send_counts, recv_counts, phase)
        work, stream = self._work, torch.cuda.current_stream(rows.device)
        if work.last is not None:  # on whatever stream: the rings serve one exchange at a time
            stream.wait_event(work.last)
        received = self._through_rings(rows, send_counts, recv_counts, phase)
        work.last = torch.cuda.Event()
        work.last.record(stream)
        work.under_way.append((work.last, phase))
        while work.under_way[0][0].query() and len(work.under_way) > 1:
            work.under_way.popleft()
        return received

    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        del peer, phase  # `settle` finds out who did not come
        stream = torch.cuda.current_stream(word.device).cuda_stream
        self._work.driver.wait(stream, word.data_ptr(), value)

    def _write(self, word: Tensor, value: int) -> None:
        stream = torch.cuda.current_stream(word.device).cuda_stream
        self._work.driver.write(stream, word.data_ptr(), value)

    def settle(self) -> None:
        """Wait on the host until the exchanges so far are done."""
        end = time.monotonic() + self._work.patience
        while self._work.under_way:
            done, phase = self._work.under_way[0]
            if done.query():
                self._work.under_way.popleft()
            elif time.monotonic() > end:
                problem = self._meeting.lost(phase, f"no data after {self._work.patience:g} s")
                self._rings.broken = str(problem)
                self._release()
                raise problem
            else:
                time.sleep(_NAP)

    def _release(self) -> None:
        """Let the streams of this rank run on; what they copy is worth nothing."""
        own = self._rings.slabs[self._rings.index].words
        stream = self._work.side.cuda_stream
        while self._work.under_way:
            for peer in range(own.shape[0]):
                for slot in range(SLOTS):
                    self._work.driver.write(stream, own[peer, FULL + slot].data_ptr(), 1)
                    self._work.driver.write(stream, own[peer, BUSY + slot].data_ptr(), 0)
            time.sleep(_NAP)
            while self._work.under_way and self._work.under_way[0][0].query():
                self._work.under_way.popleft()


def _check_places(meeting: CollectiveEngine, device: torch.device) -> None:
    """All ranks on one host, each with a GPU of its own unless PyTorch is told that they share."""
    hosts = meeting.hosts()
    if len(set(hosts)) > 1:
        raise ValueError(
            "engine 'symm' is not available: its ranks reach each other's memory inside a node, "
            f"but these are on {', '.join(sorted(set(hosts)))}"
        )
    name = str(torch.cuda.get_device_properties(device).uuid).encode()[:_DEVICE_BYTES]
    row = torch.frombuffer(bytearray(name.ljust(_DEVICE_BYTES)), dtype=torch.uint8)
    told = meeting.gather(row, "learning the devices")
    if len({bytes(each.tolist()) for each in told}) < meeting.size and not os.environ.get(_OVERLAP):
        raise ValueError(
            f"engine 'symm' is not available: {meeting.size} ranks share GPUs; give each its own "
            f"(torch.cuda.set_device), or set {_OVERLAP}=1 for tests"
        )
