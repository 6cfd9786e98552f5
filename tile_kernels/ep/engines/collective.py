"""Ranks of a `torch.distributed` process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tile_kernels.ep.engines.base import Counts, Engine, Pending

_GRACE_SECONDS = 2.0  # for ranks that gave up to report, before the others count as missing
_POLL_SECONDS = 0.02

# Groups of rails and nodes, by backend and ranks. They live as long as the default process group: a
# second one of the same ranks would find the keys of the first in the store, and hang.
_parts: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_failures: Counter[str] = Counter()


def _part(backend: str, ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
    group = _parts.get((backend, ranks))
    if group is not None:
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # the process group was destroyed
            group = None
    if group is None:
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout),
            backend=backend,
            use_local_synchronization=True,
        )
        _parts[backend, ranks] = group
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
    """Rows are sent by `all_to_all_single`. A tensor on a device that the group does not serve is
    copied to one that it does.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, rank_ids: Sequence[int] | None = None) -> None:
        self.group = group
        self.index = group.rank()
        self.size = group.size()
        self.rank_ids = range(self.size) if rank_ids is None else rank_ids
        pairs = str(dist.get_backend_config(group)).split(",")  # as cpu:gloo,cuda:nccl
        self._backends = dict(pair.split(":") for pair in pairs)

    @property
    def device(self) -> torch.device:
        """The current GPU for NCCL, else the CPU."""
        if self._backends.get("cuda", "gloo") != "gloo":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _device_for(self, device: torch.device) -> torch.device:
        """The device to send a tensor from. Gloo always takes host memory, whatever it lists."""
        if device.type in self._backends and self._backends[device.type] != "gloo":
            return device
        return torch.device("cpu" if "cpu" in self._backends else next(iter(self._backends)))

    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Send rows to each peer and receive theirs."""
        shape = (sum(recv_counts), rows.shape[1])
        if rows.shape[1] == 0:  # the width is the same on all ranks: nothing to send
            return rows.new_empty(shape)
        device = self._device_for(rows.device)
        received = torch.empty(shape, dtype=torch.uint8, device=device)
        sent = rows.contiguous().to(device)
        # As `dist.all_to_all_single` does it, which takes no timeout.
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.timeout)  # for each peer
        try:
            work = self.group.alltoall_base(
                received, sent, list(recv_counts), list(send_counts), options
            )
            if device.type == "cpu":
                work.wait(timedelta(seconds=2 * self.timeout + 1))
            else:
                work.wait()
        except RuntimeError as error:
            raise self.lost(phase, str(error)) from error
        return received.to(rows.device)

    def lost(self, phase: str, reason: str) -> RuntimeError:
        """The error to raise if other ranks do not answer, which names them.

        Ranks that give up write a key to the store of the group. Those that have not done so after
        the grace period are the missing ones.
        """
        me, name = self.index, self.group.group_name
        _failures[name] += 1
        keys = [f"tile_kernels_ep/{_failures[name]}/{rank}" for rank in range(self.size)]
        missing = [rank for rank in range(self.size) if rank != me]
        try:
            store = c10d._get_process_group_store(self.group)
            store.set(keys[me], phase)
            end = time.monotonic() + _GRACE_SECONDS
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                time.sleep(_POLL_SECONDS)
            ranks = " and ".join(str(self.rank_ids[rank]) for rank in missing)
            whom = f"no answer from rank {ranks}" if missing else "all ranks gave up"
        except (RuntimeError, dist.DistStoreError) as problem:
            whom = (
                "the store of the group is gone too, which rank 0 holds unless a launcher does "
                f"({_first_line(problem)})"
            )
        return RuntimeError(
            f"rank {self.rank_ids[me]} gave up in {phase}: {whom} ({_first_line(reason)})"
        )

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
        work = dist.isend(data, group=self.group, group_dst=peer)
        if work is None:
            raise RuntimeError("this process is not part of the group")
        return _Sent(self, work, data, peer)

    def receive(self, out: Tensor, peer: int) -> None:
        """Receive bytes from one process."""
        arrived = torch.empty_like(out, device=self._device_for(out.device))
        work = dist.irecv(arrived, group=self.group, group_src=peer)
        if work is None:
            raise RuntimeError("this process is not part of the group")
        self.finish(work, arrived, peer, "to send")
        out.copy_(arrived)

    def split(self, indices: Sequence[int]) -> CollectiveEngine:
        """The engine of some of the processes: a process group, which only they make."""
        ranks = tuple(dist.get_global_rank(self.group, index) for index in indices)
        backend = str(dist.get_backend_config(self.group))
        rank_ids = [self.rank_ids[index] for index in indices]
        part = CollectiveEngine(_part(backend, ranks, self.timeout), rank_ids)
        part.timeout = self.timeout
        return part


def _first_line(error: object) -> str:
    """The first line of an error, shortened, without its source location."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". ", 1)[0][:160]
