"""Worker processes for `check`: each runs one case at a time, and may die without harm."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")


def each(
    run: Callable[[Item], str | None], items: Sequence[Item], jobs: int
) -> Generator[tuple[Item, str | None], None, None]:
    """Yield every item with `run(item)`, an error message or None, in the order they finish.

    `run` and the items must be picklable. With one job everything runs in this process. Closing
    the generator ends the workers and the compilers they have started.
    """
    if jobs == 1:
        for item in items:
            yield item, run(item)
        return
    waiting = list(reversed(items))
    workers = {}
    try:
        for _ in range(min(jobs, len(items))):
            worker = _Worker(run)
            workers[worker.pipe] = worker
            worker.give(waiting.pop())
        while workers:
            for pipe in wait(list(workers)):
                worker = workers.pop(pipe)  # type: ignore[call-overload]
                item, error = worker.item, worker.outcome()
                if waiting:
                    if not worker.process.is_alive():
                        worker = _Worker(run)
                    workers[worker.pipe] = worker
                    worker.give(waiting.pop())
                else:
                    worker.stop()
                yield item, error
    finally:
        for worker in workers.values():
            worker.stop()


class _Worker:
    """A process that runs one item after the other."""

    def __init__(self, run: Callable[[Any], str | None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, run), daemon=True)
        # The process inherits this: Ctrl-C is for the parent alone, which ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other.close()

    def give(self, item: Any) -> None:
        self.item = item
        with contextlib.suppress(BrokenPipeError):  # it died: `outcome` reports that
            self.pipe.send(item)

    def outcome(self) -> str | None:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return f"the process that ran it died with exit code {self.process.exitcode}"

    def stop(self) -> None:
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
                os.killpg(self.process.pid, signal.SIGTERM)
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, run: Callable[[Any], str | None]) -> None:
    import torch

    os.setpgid(0, 0)  # a group with its compilers, so that all of them can be ended at once
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while True:
            pipe.send(run(pipe.recv()))
