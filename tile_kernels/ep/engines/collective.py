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

from tile_kernels.ep.engines.base import Engine, Pending

_GRACE = 2.0  # seconds in which ranks that gave up report, before the others are called missing
_NAP = 0.02

# Groups of rails and nodes, by backend and ranks. They are kept as long as the process group of the
# world: made a second time, one would meet what the first left in the store, and hang.
_parts: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_failures: Counter[str] = Counter()


def _part(backend: str, ranks: tuple[int, ...], patience: float) -> dist.ProcessGroup:
    group = _parts.get((backend, ranks))
    if group is not None:
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # of a world that is gone
            group = None
    if group is None:
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=patience),
            backend=backend,
            use_local_synchronization=True,
        )
        _parts[backend, ranks] = group
    return group


class _Sent:
    """A send that lives until it has been waited for: dropped before, it would never arrive."""

    under_way: ClassVar[set[_Sent]] = set()

    def __init__(self, engine: CollectiveEngine, work: dist.Work, data: Tensor, peer: int) -> None:
        self._engine = engine
        self._work = work
        self._data = data
        self._peer = peer
        self.under_way.add(self)

    def wait(self) -> None:
        """Return when the receiver has it."""
        self.under_way.discard(self)
        self._engine.finish(self._work, self._data, self._peer, "to receive")


class CollectiveEngine(Engine):
    """Rows travel by `all_to_all_single`. A tensor on a device that the group does not serve goes
    by way of one that it does.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, names: Sequence[int] | None = None) -> None:
        self.group = group
        self.index = group.rank()
        self.size = group.size()
        self.names = range(self.size) if names is None else names
        pairs = str(dist.get_backend_config(group)).split(",")  # as cpu:gloo,cuda:nccl
        self._backends = dict(pair.split(":") for pair in pairs)

    def _device_for(self, device: torch.device) -> torch.device:
        """Where a tensor must be to travel. Gloo is for host memory, whatever it says it serves."""
        if device.type in self._backends and self._backends[device.type] != "gloo":
            return device
        return torch.device("cpu" if "cpu" in self._backends else next(iter(self._backends)))

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        phase: str = "an exchange",
    ) -> Tensor:
        """Send rows to each peer and receive theirs."""
        shape = (sum(recv_counts), rows.shape[1])
        if rows.shape[1] == 0:  # of the same width everywhere: nothing to send
            return rows.new_empty(shape)
        device = self._device_for(rows.device)
        received = torch.empty(shape, dtype=torch.uint8, device=device)
        sent = rows.contiguous().to(device)
        # As `dist.all_to_all_single` does it, which takes no timeout.
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.patience)  # for each peer in turn
        try:
            work = self.group.alltoall_base(
                received, sent, list(recv_counts), list(send_counts), options
            )
            if device.type == "cpu":
                work.wait(timedelta(seconds=2 * self.patience + 1))
            else:
                work.wait()
        except RuntimeError as error:
            raise self.lost(phase, str(error)) from error
        return received.to(rows.device)

    def lost(self, phase: str, reason: str) -> RuntimeError:
        """What to raise if others do not answer: which ones.

        Ranks that give up say so in the store of the group. Who has not done so after a while is
        what they all waited for.
        """
        me, name = self.index, self.group.group_name
        _failures[name] += 1
        keys = [f"tile_kernels_ep/{_failures[name]}/{rank}" for rank in range(self.size)]
        missing = [rank for rank in range(self.size) if rank != me]
        try:
            store = c10d._get_process_group_store(self.group)
            store.set(keys[me], phase)
            end = time.monotonic() + _GRACE
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                time.sleep(_NAP)
            ranks = " and ".join(str(self.names[rank]) for rank in missing)
            whom = f"no answer from rank {ranks}" if missing else "all ranks gave up"
        except (RuntimeError, dist.DistStoreError) as problem:
            whom = (
                "the store of the group is gone too, which rank 0 holds unless a launcher does "
                f"({_first_line(problem)})"
            )
        return RuntimeError(
            f"rank {self.names[me]} gave up in {phase}: {whom} ({_first_line(reason)})"
        )

    def finish(self, work: dist.Work, data: Tensor, peer: int, what: str) -> None:
        """Wait for a message to or from a peer."""
        try:
            if data.is_cuda:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.patience))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.names[self.index]} waited in vain for rank {self.names[peer]} {what} "
                f"({_first_line(error)})"
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

    def split(self, places: Sequence[int]) -> CollectiveEngine:
        """The engine of some of the processes: a process group, which only they make."""
        ranks = tuple(dist.get_global_rank(self.group, place) for place in places)
        backend = str(dist.get_backend_config(self.group))
        names = [self.names[place] for place in places]
        part = CollectiveEngine(_part(backend, ranks, self.patience), names)
        part.patience = self.patience
        return part


def _first_line(error: object) -> str:
    """Without the place in the sources where it happened, and not too much of it."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". ", 1)[0][:160]
