"""All ranks in one process, one thread for each. For tests, for trying things out, for one rank."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Engine, Pending

Result = TypeVar("Result")
_GLANCE = 0.1  # seconds between looks whether one has failed


class _Table:
    """Where the ranks of one group put what they send."""

    def __init__(self, size: int) -> None:
        self.offers: list[Any] = [None] * size
        self.here = [0] * size  # how often each came to a barrier
        self.meeting = threading.Barrier(size)


class _Parcel:
    """A tensor on its way from one thread to another."""

    def __init__(self, data: Tensor, wait: Callable[[Callable[[float], object]], None]) -> None:
        self.data = data
        self.received = threading.Event()
        self._wait = wait

    def wait(self) -> None:
        self._wait(self.received.wait)


class _World:
    """The tables of all groups of one set of ranks, and the mail between them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._tables: dict[tuple[int, ...], _Table] = {}
        self._mail: dict[tuple[int, int], queue.SimpleQueue[_Parcel]] = {}
        self._lock = threading.Lock()
        self.failed = False

    def table(self, ranks: tuple[int, ...]) -> _Table:
        with self._lock:
            if ranks not in self._tables:
                self._tables[ranks] = _Table(len(ranks))
                if self.failed:
                    self._tables[ranks].meeting.abort()
            return self._tables[ranks]

    def mail(self, sender: int, receiver: int) -> queue.SimpleQueue[_Parcel]:
        with self._lock:
            return self._mail.setdefault((sender, receiver), queue.SimpleQueue())

    def fail(self) -> None:
        with self._lock:
            self.failed = True
            for table in self._tables.values():
                table.meeting.abort()


class LocalGroup:
    """One rank's membership of a group of ranks that are threads of this process.

    `LocalGroup()` is a group of one. `run_ranks` makes larger ones.
    """

    def __init__(self, rank: int = 0, world: _World | None = None) -> None:
        self.rank = rank
        self.world = world or _World(1)

    def size(self) -> int:
        """How many ranks the group has."""
        return self.world.num_ranks


class LocalEngine(Engine):
    """Rows pass from thread to thread by reference and are copied by their receiver."""

    name = "local"

    def __init__(self, group: LocalGroup, ranks: tuple[int, ...] | None = None) -> None:
        self._group = group
        self._ranks = ranks or tuple(range(group.size()))
        self._table = group.world.table(self._ranks)
        self.index = self._ranks.index(group.rank)
        self.size = len(self._ranks)
        self.names = self._ranks

    def exchange(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        phase: str = "an exchange",
    ) -> Tensor:
        """Send rows to each peer and receive theirs."""
        table = self._table
        table.offers[self.index] = rows.split(list(send_counts))
        self.barrier(phase)
        received = torch.cat([offer[self.index].to(rows.device) for offer in table.offers])
        self.barrier(phase)
        if received.shape[0] != sum(recv_counts):
            raise RuntimeError(f"expected {list(recv_counts)} rows, got {received.shape[0]}")
        return received

    def barrier(self, phase: str = "a barrier") -> None:
        """Wait for the other threads."""
        table = self._table
        table.here[self.index] += 1
        turn = table.here[self.index]
        try:
            table.meeting.wait(self.patience)
        except threading.BrokenBarrierError:
            late = [str(name) for name, here in zip(self.names, table.here) if here < turn]
            self._give_up(f"in {phase} for rank {' and '.join(late)}")

    def _wait_for(self, ready: Callable[[float], object], whom: str) -> None:
        """Ask `ready(seconds)` until it is, unless a rank has failed or patience ends."""
        end = time.monotonic() + self.patience
        while not ready(_GLANCE):
            if self._group.world.failed or time.monotonic() > end:
                self._give_up(whom)

    def _give_up(self, whom: str) -> None:
        if self._group.world.failed:
            raise threading.BrokenBarrierError("another rank has failed")
        name = self.names[self.index]
        raise RuntimeError(f"rank {name} waited {self.patience:g} s {whom}")

    def send(self, data: Tensor, peer: int) -> Pending:
        """Put bytes into the mail of one thread."""
        whom = f"for rank {self.names[peer]} to receive"
        parcel = _Parcel(data, lambda ready: self._wait_for(ready, whom))
        self._group.world.mail(self._group.rank, self._ranks[peer]).put(parcel)
        return parcel

    def receive(self, out: Tensor, peer: int) -> None:
        """Take bytes from one thread out of the mail."""
        mail = self._group.world.mail(self._ranks[peer], self._group.rank)
        found: list[_Parcel] = []

        def ready(seconds: float) -> bool:
            try:
                found.append(mail.get(timeout=seconds))
            except queue.Empty:
                return False
            return True

        self._wait_for(ready, f"for rank {self.names[peer]} to send")
        out.copy_(found[0].data)
        found[0].received.set()

    def split(self, places: Sequence[int]) -> LocalEngine:
        """The engine of some of the threads."""
        part = LocalEngine(self._group, tuple(self._ranks[place] for place in places))
        part.patience = self.patience
        return part


def run_ranks(num_ranks: int, body: Callable[[LocalGroup], Result]) -> list[Result]:
    """Run `body(group)` once for each rank, each in a thread, and return what they returned.

    If one raises, the others stop waiting for it and its error is raised here. Gradients are worked
    out in the rank's own thread: PyTorch's one thread for each GPU would wait in the backward pass
    of one rank for another's, which comes after it.

    >>> run_ranks(3, lambda group: group.rank * 10)
    [0, 10, 20]
    """
    world = _World(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = body(LocalGroup(rank, world))
        except BaseException as error:  # raised again below
            errors[rank] = error
            world.fail()

    contexts = [contextvars.copy_context() for _ in range(num_ranks)]  # as `tile_kernels.backend`
    threads = [
        threading.Thread(target=context.run, args=(run, rank))
        for rank, context in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [error for error in errors if error is not None]
    if found:
        left_waiting = threading.BrokenBarrierError
        raise next((each for each in found if not isinstance(each, left_waiting)), found[0])
    return results
