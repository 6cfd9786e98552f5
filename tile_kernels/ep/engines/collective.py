"""Ranks of a `torch.distributed` process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tile_kernels.ep.engines.base import Counts, Engine, Pending
from tile_kernels.ep.engines.watch import Watch

_GRACE_SECONDS = 2.0  # for ranks that gave up to report, before the others count as missing
_POLL_SECONDS = 0.02


@dataclass
class _Connections:
    """What some ranks of a group made to communicate, shared by their buffers.

    Calls of all these buffers come in the same order on every rank, so that a call on the wrong
    buffer is found. `number` counts what these ranks made, for keys in the store, and `problem` is
    the error after which the connections cannot be used any more.
    """

    number: int = 1
    problem: str | None = None
    host: dist.ProcessGroupGloo | None = None
    device: Any = None  # None for all ranks of the group, which have the group

    def store(self, group: dist.ProcessGroup, ranks: Sequence[int], what: str) -> c10d.Store:
        """A part of the group's store for one purpose."""
        name = f"tile_kernels_ep/{'_'.join(map(str, ranks))}/{self.number}/{what}"
        return c10d.PrefixStore(name, c10d._get_process_group_store(group))


_Made = dict[tuple[int, ...], _Connections]  # by ranks
_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()
_lock = threading.Lock()

# Process groups of some ranks, for libraries that need one. They live as long as the default group:
# a second one of the same ranks would find the keys of the first in the store, and hang.
_parts: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _part(ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
    group = _parts.get(ranks)
    if group is not None:
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # the process group was destroyed
            group = None
    if group is None:
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=True,
        )
        _parts[ranks] = group
    return group


class _Sent:
    """A send, kept alive until it was waited for: dropped before, it would never arrive."""

    in_flight: ClassVar[set[_Sent]] = set()

    def __init__(self, engine: CollectiveEngine, work: dist.Work, data: Tensor, peer: int) -> None:
        self._engine = engine
        self._work = work
        self._data = data
        self._peer = peer
        self.in_flight.add(self)

    def wait(self) -> None:
        """Return when the receiver has it."""
        self.in_flight.discard(self)
        self._engine.finish(self._work, self._data, self._peer, "to receive")


class CollectiveEngine(Engine):
    """Rows are sent by `all_to_all_single`; in host memory over connections of the engine's own.

    Those are made by gloo at the first exchange, whatever the backend of the group is, and only by
    the ranks that take part. What hosts tell each other thus neither waits for a CUDA stream nor
    mixes with what else is sent in the group. Memory of a GPU takes the group if its backend serves
    GPUs; otherwise it is copied to the host.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self._whole = group
        self._ranks = tuple(range(group.size()) if ranks is None else ranks)
        self.index = self._ranks.index(group.rank())
        self.size = len(self._ranks)
        self.rank_ids = self._ranks
        pairs = str(dist.get_backend_config(group)).split(",")  # as cpu:gloo,cuda:nccl
        self._backends = dict(pair.split(":") for pair in pairs)
        with _lock:
            made = _connections.setdefault(group, {})
            self._made = made.setdefault(self._ranks, _Connections())
        self._watch: Watch | None = None  # of transfers on streams

    @property
    def device(self) -> torch.device:
        """The current GPU for NCCL, else the CPU."""
        if self._backends.get("cuda", "gloo") != "gloo":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def group(self) -> dist.ProcessGroup:
        """A process group of these ranks: the caller's, or one of some of its ranks."""
        if self.size == self._whole.size():
            return self._whole
        return _part(tuple(dist.get_global_rank(self._whole, rank) for rank in self._ranks),
                     self.timeout)  # fmt: skip

    def _device_for(self, device: torch.device) -> torch.device:
        """The device to send a tensor from."""
        serves = self._backends.get(device.type, "gloo") != "gloo"
        return device if serves and device.type != "cpu" else torch.device("cpu")

    def _channel(self, device: torch.device) -> Any:
        """What sends memory of a device; made if there is none. Collective."""
        made, timeout = self._made, timedelta(seconds=self.timeout)
        if device.type == "cpu":
            if made.host is None:
                store = made.store(self._whole, self._ranks, "hosts")
                made.host = dist.ProcessGroupGloo(store, self.index, self.size, timeout)
            return made.host
        if self.size == self._whole.size():
            return self._whole
        if made.device is None:
            # `new_group` may split a communicator of all ranks, for which all must be alive.
            if self._backends[device.type] != "nccl":
                raise ValueError(
                    f"collective: some ranks of a group of {self._backends[device.type]} cannot "
                    f"exchange memory of a {device.type} device without the others"
                )
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            store = made.store(self._whole, self._ranks, "devices")
            made.device = dist.ProcessGroupNCCL(store, self.index, self.size, options)
        return made.device

    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Send rows to each peer and receive theirs."""
        return self.start(rows, send_counts, recv_counts, phase)()

    def start(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Callable[[], Tensor]:
        """Start to send rows to each peer."""
        if self._made.problem is not None:
            raise RuntimeError(f"collective: this buffer broke down before: {self._made.problem}")
        shape = (sum(recv_counts), rows.shape[1])
        if rows.shape[1] == 0:  # the width is the same on all ranks: nothing to send
            empty = rows.new_empty(shape)
            return lambda: empty
        device = self._device_for(rows.device)
        received = torch.empty(shape, dtype=torch.uint8, device=device)
        sent = rows.contiguous().to(device)
        # As `dist.all_to_all_single` does it, which takes no timeout.
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.timeout)  # for each peer
        try:
            work = self._channel(device).alltoall_base(
                received, sent, list(recv_counts), list(send_counts), options
            )
        except RuntimeError as error:
            raise self.lost(phase, str(error)) from error

        def end() -> Tensor:
            try:
                if device.type == "cpu":
                    work.wait(timedelta(seconds=2 * self.timeout + 1))
                else:
                    work.wait()
                    self._follow(device, phase)
            except RuntimeError as error:
                raise self.lost(phase, str(error)) from error
            return received.to(rows.device)

        return end

    def _follow(self, device: torch.device, phase: str) -> None:
        """Monitor what the current stream waits for."""
        if torch.cuda.is_current_stream_capturing():  # the graph may be replayed at any time
            return
        if self._watch is None:
            self._watch = Watch(self, self.device_timeout)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._watch.add(event, phase)

    def settle(self) -> None:
        """Wait on the host until the exchanges of streams are done."""
        if self._watch is not None:
            self._watch.settle()

    def give_up(self, watch: Watch, problem: str) -> None:
        """Nothing: NCCL itself ends what it does on the stream, after its own timeout."""

    def lost(self, phase: str, reason: str) -> RuntimeError:
        """The error to raise if other ranks do not answer, which names them.

        Ranks that give up write a key to the store of the group. Those that have not done so after
        the grace period are the missing ones.
        """
        me, made = self.index, self._made
        missing = [rank for rank in range(self.size) if rank != me]
        with _lock:  # a later buffer makes its own, unless another one has done so
            if _connections[self._whole][self._ranks] is made:
                _connections[self._whole][self._ranks] = _Connections(made.number + 1)
        try:
            store = made.store(self._whole, self._ranks, "failures")
            store.set(str(me), phase)
            end = time.monotonic() + _GRACE_SECONDS
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([str(rank)])]
                time.sleep(_POLL_SECONDS)
            ranks = " and ".join(str(self.rank_ids[rank]) for rank in missing)
            whom = f"no answer from rank {ranks}" if missing else "all ranks gave up"
        except (RuntimeError, dist.DistStoreError) as error:
            whom = (
                "the store of the group is gone too, which rank 0 holds unless a launcher does "
                f"({_first_line(error)})"
            )
        problem = f"rank {self.rank_ids[me]} gave up in {phase}: {whom} ({_first_line(reason)})"
        made.problem = made.problem or problem
        return RuntimeError(problem)

    def finish(self, work: dist.Work, data: Tensor, peer: int, what: str) -> None:
        """Wait for a message to or from a peer."""
        try:
            if data.is_cuda:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            own, other = self.rank_ids[self.index], self.rank_ids[peer]
            raise RuntimeError(
                f"rank {own} waited in vain for rank {other} {what} ({_first_line(error)})"
            ) from error

    def send(self, data: Tensor, peer: int) -> Pending:
        """Start sending bytes to one process."""
        data = data.to(self._device_for(data.device))
        return _Sent(self, self._channel(data.device).send([data], peer, 0), data, peer)

    def receive(self, out: Tensor, peer: int) -> None:
        """Receive bytes from one process."""
        arrived = torch.empty_like(out, device=self._device_for(out.device))
        work = self._channel(arrived.device).recv([arrived], peer, 0)
        self.finish(work, arrived, peer, "to send")
        out.copy_(arrived)

    def split(self, indices: Sequence[int]) -> CollectiveEngine:
        """The engine of some of the processes, which others need not make."""
        part = CollectiveEngine(self._whole, [self._ranks[index] for index in indices])
        part.timeout, part.device_timeout = self.timeout, self.device_timeout
        return part


def _first_line(error: object) -> str:
    """The first line of an error, shortened, without its source location."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". ", 1)[0][:160]
