"""Processes of one node on GPUs, over PyTorch's symmetric memory.

The protocol of `ring` without a kernel: chunks are copied into the peers' memory, flags are written
and waited for by the CUDA stream itself (`cuStreamWriteValue32`, `cuStreamWaitValue32`). Nothing
spins on an SM, so ranks may even share a GPU, and nothing waits on the host. Rows in host
memory (descriptors, counts) and single messages go through the process group.

Only the communication stream waits, the only one of its priority: streams can share a hardware
queue, and a stream that waits blocks the work behind it in that queue.
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

from tile_kernels.ep.engines.base import Counts
from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.ring import BUSY, FULL, SLOTS, RingEngine, Rings, Slab, slab_bytes

MIN_CHUNK = 1 << 12
_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_POLL_SECONDS = 100e-6
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


def unavailable_reason() -> str | None:
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
    side: torch.cuda.Stream  # for writes that must not wait behind an exchange
    memory: Any  # kept alive
    timeout: float  # seconds that the host waits for the device
    last: torch.cuda.Event | None = None
    in_flight: deque[tuple[torch.cuda.Event, str]] = field(default_factory=deque)


class SymmEngine(RingEngine):
    """One-sided exchange through symmetric memory."""

    name = "symm"
    _work: _Work

    @classmethod
    def over(cls, control: CollectiveEngine, num_bytes: int, timeout: float) -> SymmEngine:
        """Allocate and exchange memory for rings of `num_bytes` on each rank. Collective.

        Each rank uses its current CUDA device. `settle` waits for it for `timeout` seconds.
        """
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        _check_devices(control, device)
        chunk = max(MIN_CHUNK, num_bytes // (control.size * SLOTS) // 256 * 256)
        size = slab_bytes(control.size, chunk)
        memory = symmetric.empty((size,), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, control.group)
        memory.zero_()
        torch.cuda.synchronize(device)
        control.barrier("clearing symmetric memory")
        slabs = [
            Slab(handle.get_buffer(rank, (size,), torch.uint8), control.size, chunk)
            for rank in range(control.size)
        ]
        engine = cls(control, Rings(slabs, control.index, chunk), range(control.size))
        engine._work = _Work(_Driver(), torch.cuda.Stream(device), (memory, handle), timeout)
        return engine

    @property
    def device(self) -> torch.device:
        """The GPU whose memory is shared."""
        memory: Tensor = self._work.memory[0]
        return memory.device

    def split(self, indices: Sequence[int]) -> SymmEngine:
        """The engine of some of the processes, on the same rings."""
        part = super().split(indices)
        part._work = self._work
        return part

    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Enqueue the exchange on the current stream; host memory takes the process group."""
        self._check_usable()
        if not rows.is_cuda:
            return self._control.exchange(rows, send_counts, recv_counts, phase)
        if rows.shape[1] == 0:
            return rows.new_empty((sum(recv_counts), 0))
        rows = rows.contiguous()
        if torch.cuda.is_current_stream_capturing():  # the graph orders exchanges; no `settle`
            return self._through_rings(rows, send_counts, recv_counts, phase)
        work, stream = self._work, torch.cuda.current_stream(rows.device)
        if work.last is not None:  # the rings serve one exchange at a time, on any stream
            stream.wait_event(work.last)
        received = self._through_rings(rows, send_counts, recv_counts, phase)
        work.last = torch.cuda.Event()
        work.last.record(stream)
        work.in_flight.append((work.last, phase))
        while work.in_flight[0][0].query() and len(work.in_flight) > 1:
            work.in_flight.popleft()
        return received

    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        del peer, phase  # `settle` finds the missing rank
        stream = torch.cuda.current_stream(word.device).cuda_stream
        self._work.driver.wait(stream, word.data_ptr(), value)

    def _write(self, word: Tensor, value: int) -> None:
        stream = torch.cuda.current_stream(word.device).cuda_stream
        self._work.driver.write(stream, word.data_ptr(), value)

    def settle(self) -> None:
        """Wait on the host until the exchanges so far are done."""
        end = time.monotonic() + self._work.timeout
        while self._work.in_flight:
            done, phase = self._work.in_flight[0]
            if done.query():
                self._work.in_flight.popleft()
            elif time.monotonic() > end:
                problem = self._control.lost(phase, f"no data after {self._work.timeout:g} s")
                self._rings.broken = str(problem)
                self._release()
                raise problem
            else:
                time.sleep(_POLL_SECONDS)

    def _release(self) -> None:
        """Let the streams of this rank continue; the data that they copy is invalid."""
        own = self._rings.slabs[self._rings.index].flags
        stream = self._work.side.cuda_stream
        while self._work.in_flight:
            for peer in range(own.shape[0]):
                for slot in range(SLOTS):
                    self._work.driver.write(stream, own[peer, FULL + slot].data_ptr(), 1)
                    self._work.driver.write(stream, own[peer, BUSY + slot].data_ptr(), 0)
            time.sleep(_POLL_SECONDS)
            while self._work.in_flight and self._work.in_flight[0][0].query():
                self._work.in_flight.popleft()


def _check_devices(control: CollectiveEngine, device: torch.device) -> None:
    """All ranks on one host, each with its own GPU unless PyTorch may let them share one."""
    hosts = control.hosts()
    if len(set(hosts)) > 1:
        raise ValueError(
            "engine 'symm' is not available: its ranks reach each other's memory inside a node, "
            f"but these are on {', '.join(sorted(set(hosts)))}"
        )
    name = str(torch.cuda.get_device_properties(device).uuid).encode()[:_DEVICE_BYTES]
    row = torch.frombuffer(bytearray(name.ljust(_DEVICE_BYTES)), dtype=torch.uint8)
    devices = {bytes(each.tolist()) for each in control.gather(row, "learning the devices")}
    if len(devices) < control.size and not os.environ.get(_OVERLAP):
        raise ValueError(
            f"engine 'symm' is not available: {control.size} ranks share GPUs; give each its own "
            f"(torch.cuda.set_device), or set {_OVERLAP}=1 for tests"
        )
