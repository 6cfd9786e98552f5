"""Processes of one node on GPUs, over PyTorch's symmetric memory.

Kernels write rows into the peers' windows (`window`). What has no room there, and what is sent in
hybrid mode, takes the protocol of `ring` without a kernel: chunks are copied into the peers'
memory. In both, flags are written and waited for by the CUDA stream itself (`cuStreamWriteValue32`,
`cuStreamWaitValue32`). Nothing spins on an SM, so ranks may even share a GPU, and nothing waits on
the host: a thread monitors transfers that do not end, names the missing rank, and lets the
stream continue. Rows in host memory (descriptors, counts) and single messages go through the
process group.

Only the communication stream waits, the only one of its priority: streams can share a hardware
queue, and a stream that waits blocks the work behind it in that queue.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Counts
from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.ring import BUSY, FULL, SLOTS, RingEngine, Rings, Slab, slab_bytes
from tile_kernels.ep.engines.watch import Watch
from tile_kernels.ep.engines.window import ALIGNMENT, Region, Window
from tile_kernels.utils import align

MIN_CHUNK = 1 << 12
_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_POLL_SECONDS = 100e-6
_DEVICE_BYTES = 64
_RING_SHARE = 4  # the ring has this part of the bytes of a window
READY, DONE = 2 * SLOTS, 2 * SLOTS + 1  # flags of windows, after those of the ring


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
    watch: Watch
    last: torch.cuda.Event | None = None

    def begin(self, stream: torch.cuda.Stream) -> None:
        """One transfer at a time, on any stream."""
        if self.last is not None:
            stream.wait_event(self.last)

    def end(self, stream: torch.cuda.Stream, phase: str) -> None:
        """Adds a transfer to those in flight."""
        self.last = torch.cuda.Event()
        self.last.record(stream)
        self.watch.add(self.last, phase)


class SymmWindow(Window):
    """The part of each rank's symmetric memory after its slab."""

    def __init__(
        self, addresses: Sequence[int], num_bytes: int, rings: Rings, work: _Work, others: list[int]
    ) -> None:
        super().__init__(addresses, rings.index, num_bytes)
        self._work, self._others = work, others
        flags = [slab.flags for slab in rings.slabs]
        self._begins = [(each.data_ptr(), each.stride(0) * each.element_size()) for each in flags]
        self._flag_bytes = flags[0].element_size()

    @property
    def device(self) -> torch.device:
        """The GPU whose memory is shared."""
        memory: Tensor = self._work.memory[0]
        return memory.device

    def memory(self, region: Region, start: int, num_bytes: int) -> Tensor:
        """Bytes of a region as a tensor that keeps it alive."""
        address = self.addresses[self.index] + region.start + start
        return torch.as_tensor(_Bytes(region, address, num_bytes), device=self.device)

    def mark(self) -> Any:
        """An event on the current stream, after which a part that became free is unused."""
        if sys.is_finalizing() or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def begin(self, phase: str) -> None:
        """The stream waits for the peers to be ready, and tells them that this rank is."""
        del phase  # the watching thread names it
        stream, flags = self._stream(), self._flags
        self._work.begin(stream)
        for event in self.take_marks():
            stream.wait_event(event)
        for peer in self._others:
            self._write(stream, flags(peer, self.index, READY), 1)
        for peer in self._others:
            self._wait(stream, flags(self.index, peer, READY), 1)
            self._write(stream, flags(self.index, peer, READY), 0)

    def end(self, phase: str) -> None:
        """The stream tells the peers that this rank has written, and waits for them."""
        stream, flags = self._stream(), self._flags
        for peer in self._others:
            self._write(stream, flags(peer, self.index, DONE), 1)
        for peer in self._others:
            self._wait(stream, flags(self.index, peer, DONE), 1)
            self._write(stream, flags(self.index, peer, DONE), 0)
        self._work.end(stream, phase)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _flags(self, owner: int, peer: int, kind: int) -> int:
        begin, row_bytes = self._begins[owner]
        return begin + peer * row_bytes + kind * self._flag_bytes

    def _write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._work.driver.write(stream.cuda_stream, address, value)

    def _wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._work.driver.wait(stream.cuda_stream, address, value)


class _Bytes:
    """Device memory for `torch.as_tensor`, which keeps this object, and so the region."""

    def __init__(self, region: Region, address: int, num_bytes: int) -> None:
        self.region = region
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class SymmEngine(RingEngine):
    """One-sided exchange through symmetric memory."""

    name = "symm"
    _work: _Work

    @classmethod
    def over(cls, control: CollectiveEngine, num_bytes: int, timeout: float) -> SymmEngine:
        """Allocate and exchange memory for windows of `num_bytes` on each rank. Collective.

        Each rank uses its current CUDA device. A transfer may take `timeout` seconds.
        """
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        _check_devices(control, device)
        chunk = max(MIN_CHUNK, num_bytes // _RING_SHARE // (control.size * SLOTS) // 256 * 256)
        slab_size = align(slab_bytes(control.size, chunk), ALIGNMENT)
        window_size = align(num_bytes, ALIGNMENT)
        size = slab_size + window_size
        memory = symmetric.empty((size,), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, control.group)
        memory.zero_()
        torch.cuda.synchronize(device)
        control.barrier("clearing symmetric memory")
        parts = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(control.size)]
        slabs = [
            Slab(part[: slab_bytes(control.size, chunk)], control.size, chunk) for part in parts
        ]
        rings = Rings(slabs, control.index, chunk)
        engine = cls(control, rings, range(control.size))
        watch = Watch(engine, timeout)
        work = _Work(_Driver(), torch.cuda.Stream(device), (memory, handle), watch)
        engine._work = work
        addresses = [part.data_ptr() + slab_size for part in parts]
        others = [(control.index + step) % control.size for step in range(1, control.size)]
        engine.window = SymmWindow(addresses, window_size, rings, work, others)
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
        work.begin(stream)
        received = self._through_rings(rows, send_counts, recv_counts, phase)
        work.end(stream, phase)
        return received

    def start(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Callable[[], Tensor]:
        """Start an exchange; of host memory in the background."""
        if rows.is_cuda:
            return super().start(rows, send_counts, recv_counts, phase)
        self._check_usable()
        return self._control.start(rows, send_counts, recv_counts, phase)

    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        del peer, phase  # `settle` finds the missing rank
        stream = torch.cuda.current_stream(word.device).cuda_stream
        self._work.driver.wait(stream, word.data_ptr(), value)

    def _write(self, word: Tensor, value: int) -> None:
        stream = torch.cuda.current_stream(word.device).cuda_stream
        self._work.driver.write(stream, word.data_ptr(), value)

    def settle(self) -> None:
        """Wait on the host until the exchanges so far are done."""
        self._work.watch.settle()

    def lost(self, phase: str, reason: str) -> RuntimeError:
        """The error that names the ranks that do not answer."""
        return self._control.lost(phase, reason)

    def give_up(self, watch: Watch, problem: str) -> None:
        """Let the streams of this rank continue; the data that they copy is invalid."""
        self._rings.broken = problem
        own = self._rings.slabs[self._rings.index].flags
        stream = self._work.side.cuda_stream
        while watch.unfinished():
            for peer in range(own.shape[0]):
                for slot in range(SLOTS):
                    self._work.driver.write(stream, own[peer, FULL + slot].data_ptr(), 1)
                    self._work.driver.write(stream, own[peer, BUSY + slot].data_ptr(), 0)
                for kind in (READY, DONE):
                    self._work.driver.write(stream, own[peer, kind].data_ptr(), 1)
            time.sleep(_POLL_SECONDS)


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
