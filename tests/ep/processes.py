"""Run a function on several ranks, each a process, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A server that has imported everything and does nothing else forks the ranks: they start in a
# hundredth of a second, and inherit neither threads nor the state of autograd from the tests.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.ep.helpers", "torch.distributed", "tile_kernels.moe"])


def _rank(
    rank: int,
    num_ranks: int,
    file: str,
    pipe: Connection,
    body: Callable[..., Any],
    args: Any,
    together: bool,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=num_ranks
        )
        pipe.send((True, body(dist.group.WORLD, *args)))
        if together:
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def run_processes(
    num_ranks: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """`body(group, *args)` of each rank. `body` is a function of a module; results are plain.

    Ranks in `may_die` may end without a word, which is the result None; others do not wait for
    them at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "meet")
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = _context.Pipe()
            arguments = (rank, num_ranks, file, theirs, body, args, not may_die)
            processes.append(_context.Process(target=_rank, args=arguments))
            processes[-1].start()
            theirs.close()  # so that the end of the process is the end of the pipe
            pipes.append(ours)
        try:
            results = []
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(timeout):
                    raise AssertionError(f"rank {rank} said nothing for {timeout} s")
                try:
                    fine, result = pipe.recv()
                except EOFError:
                    if rank not in may_die:
                        raise AssertionError(f"rank {rank} died") from None
                    fine, result = True, None
                if not fine:
                    raise AssertionError(f"rank {rank}:\n{result}")
                results.append(result)
            return results
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
