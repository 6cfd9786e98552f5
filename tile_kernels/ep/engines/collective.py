"""Ranks of a `torch.distributed` process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tile_kernels.ep.engines.base import Engine, Pending

# Groups of rails and nodes, by backend and ranks. They are kept as long as the process group of the
# world: made a second time, one would meet what the first left in the store, and hang.
_parts: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}


def _part(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group = _parts.get((backend, ranks))
    if group is not None:
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # of a world that is gone
            group = None
    if group is None:
        group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        _parts[backend, ranks] = group
    return group


class _Sent:
    """A send that lives until it has been waited for: dropped before, it would never arrive."""

    under_way: ClassVar[set[_Sent]] = set()

    def __init__(self, work: dist.Work, data: Tensor) -> None:
        self._work = work
        self._data = data
        self.under_way.add(self)

    def wait(self) -> None:
        """Return when the receiver has it."""
        self._work.wait()
        self.under_way.discard(self)


class CollectiveEngine(Engine):
    """Rows travel by `all_to_all_single`. A tensor on a device that the group does not serve goes
    by way of one that it does.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.index = group.rank()
        self.size = group.size()

    def _device_for(self, device: torch.device) -> torch.device:
        served = [torch.device(each).type for each in self._group._device_types]
        if device.type in served:
            return device
        return torch.device(served[0])

    def exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Send rows to each peer and receive theirs."""
        shape = (sum(recv_counts), rows.shape[1])
        if self.size == 1:
            return rows.clone()
        if rows.shape[1] == 0:  # of the same width everywhere: nothing to send
            return rows.new_empty(shape)
        device = self._device_for(rows.device)
        received = torch.empty(shape, dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            received,
            rows.contiguous().to(device),
            list(recv_counts),
            list(send_counts),
            group=self._group,
        )
        return received.to(rows.device)

    def barrier(self) -> None:
        """Wait for the other processes."""
        dist.barrier(group=self._group)

    def send(self, data: Tensor, peer: int) -> Pending:
        """Start sending bytes to one process."""
        data = data.to(self._device_for(data.device))
        work = dist.isend(data, group=self._group, group_dst=peer)
        if work is None:
            raise RuntimeError("this process is not part of the group")
        return _Sent(work, data)

    def receive(self, out: Tensor, peer: int) -> None:
        """Receive bytes from one process."""
        arrived = torch.empty_like(out, device=self._device_for(out.device))
        dist.recv(arrived, group=self._group, group_src=peer)
        out.copy_(arrived)

    def split(self, places: Sequence[int]) -> CollectiveEngine:
        """The engine of some of the processes: a process group, which only they make."""
        ranks = tuple(dist.get_global_rank(self._group, place) for place in places)
        return CollectiveEngine(_part(str(dist.get_backend_config(self._group)), ranks))
