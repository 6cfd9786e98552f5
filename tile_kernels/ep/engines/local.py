"""All ranks in one process, one thread for each: for tests, experiments and single ranks."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tile_kernels.ep.engines.base import Counts, Engine, Pending

Result = TypeVar("Result")
_POLL_SECONDS = 0.1  # between checks whether a rank has failed


class _Rendezvous:
    """The send buffers and the barrier of one group of ranks."""

    def __init__(self, size: int) -> None:
        self.send_buffers: list[Any] = [None] * size
        self.num_arrivals = [0] * size  # at the barrier, of each rank
        self.barrier = threading.Barrier(size)


class _Message:
    """A tensor that one thread sends to another."""

    def __init__(self, data: Tensor, wait: Callable[[Callable[[float], object]], None]) -> None:
        self.data = data
        self.received = threading.Event()
        self._wait = wait

    def wait(self) -> None:
        self._wait(self.received.wait)


class _World:
    """The groups of one set of ranks, and the mailboxes between them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rendezvous: dict[tuple[int, ...], _Rendezvous] = {}
        self._mailboxes: dict[tuple[int, int], queue.SimpleQueue[_Message]] = {}
        self._lock = threading.Lock()
        self.failed = False

    def rendezvous(self, ranks: tuple[int, ...]) -> _Rendezvous:
        with self._lock:
            if ranks not in self._rendezvous:
                self._rendezvous[ranks] = _Rendezvous(len(ranks))
                if self.failed:
                    self._rendezvous[ranks].barrier.abort()
            return self._rendezvous[ranks]

    def mailbox(self, sender: int, receiver: int) -> queue.SimpleQueue[_Message]:
        with self._lock:
            return self._mailboxes.setdefault((sender, receiver), queue.SimpleQueue())

    def fail(self) -> None:
        with self._lock:
            self.failed = True
            for shared in self._rendezvous.values():
                shared.barrier.abort()


class LocalGroup:
    """One rank's membership in a group of ranks that are threads of this process.

    `LocalGroup()` is a group of one rank. `run_ranks` creates larger groups.

    Args:
        rank: The index of the rank.
        world: What the ranks share; only `run_ranks` passes it.
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
        self._rendezvous = group.world.rendezvous(self._ranks)
        self.index = self._ranks.index(group.rank)
        self.size = len(self._ranks)
        self.rank_ids = self._ranks

    def exchange(
        self, rows: Tensor, send_counts: Counts, recv_counts: Counts, phase: str = "an exchange"
    ) -> Tensor:
        """Send rows to each peer and receive theirs."""
        shared = self._rendezvous
        shared.send_buffers[self.index] = rows.split(list(send_counts))
        self.barrier(phase)
        received = torch.cat([parts[self.index].to(rows.device) for parts in shared.send_buffers])
        self.barrier(phase)
        if received.shape[0] != sum(recv_counts):
            raise RuntimeError(f"expected {list(recv_counts)} rows, got {received.shape[0]}")
        return received

    def barrier(self, phase: str = "a barrier") -> None:
        """Wait for the other threads."""
        shared = self._rendezvous
        shared.num_arrivals[self.index] += 1
        step = shared.num_arrivals[self.index]
        try:
            shared.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            arrivals = zip(self.rank_ids, shared.num_arrivals)
            late = [str(rank) for rank, count in arrivals if count < step]
            self._give_up(f"in {phase} for rank {' and '.join(late)}")

    def _wait_for(self, ready: Callable[[float], object], whom: str) -> None:
        """Poll `ready(seconds)` until it is true, a rank has failed, or the timeout has passed."""
        end = time.monotonic() + self.timeout
        while not ready(_POLL_SECONDS):
            if self._group.world.failed or time.monotonic() > end:
                self._give_up(whom)

    def _give_up(self, whom: str) -> None:
        if self._group.world.failed:
            raise threading.BrokenBarrierError("another rank has failed")
        rank = self.rank_ids[self.index]
        raise RuntimeError(f"rank {rank} waited {self.timeout:g} s {whom}")

    def send(self, data: Tensor, peer: int) -> Pending:
        """Put bytes into the mailbox of one thread."""
        whom = f"for rank {self.rank_ids[peer]} to receive"
        message = _Message(data, lambda ready: self._wait_for(ready, whom))
        self._group.world.mailbox(self._group.rank, self._ranks[peer]).put(message)
        return message

    def receive(self, out: Tensor, peer: int) -> None:
        """Take bytes of one thread out of the mailbox."""
        mailbox = self._group.world.mailbox(self._ranks[peer], self._group.rank)
        found: list[_Message] = []

        def ready(seconds: float) -> bool:
            try:
                found.append(mailbox.get(timeout=seconds))
            except queue.Empty:
                return False
            return True

        self._wait_for(ready, f"for rank {self.rank_ids[peer]} to send")
        out.copy_(found[0].data)
        found[0].received.set()

    def split(self, indices: Sequence[int]) -> LocalEngine:
        """The engine of some of the threads."""
        part = LocalEngine(self._group, tuple(self._ranks[index] for index in indices))
        part.timeout = self.timeout
        return part


def run_ranks(num_ranks: int, body: Callable[[LocalGroup], Result]) -> list[Result]:
    """Runs a function once for each rank, each in a thread, and returns the results.

    If one of them raises, the others stop waiting for it and its error is raised here. Gradients
    are computed in the thread of the rank, because the backward pass of one rank would block
    PyTorch's single thread per GPU while it waits for another rank.

    Args:
        num_ranks: The number of ranks.
        body: The function, which receives the `LocalGroup` of its rank.

    Returns:
        The results, in the order of the ranks.

    Example:
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
        aborted = threading.BrokenBarrierError
        raise next((each for each in found if not isinstance(each, aborted)), found[0])
    return results
