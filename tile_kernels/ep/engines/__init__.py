"""Engines: what moves rows between ranks. The group given to a buffer decides which one."""

from __future__ import annotations

import torch.distributed as dist

from tile_kernels.ep.engines.base import Engine, Pending
from tile_kernels.ep.engines.local import LocalEngine, LocalGroup, run_ranks

ENGINES = ("auto", "collective", "local", "mmap")

__all__ = [
    "ENGINES",
    "Engine",
    "LocalGroup",
    "Pending",
    "check_engine",
    "chosen_engine",
    "make_engine",
    "run_ranks",
]


def make_engine(group: object) -> Engine:
    """The engine that a group is made for. Raises `TypeError` for an object that is no group."""
    if isinstance(group, LocalGroup):
        return LocalEngine(group)
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        from tile_kernels.ep.engines.collective import CollectiveEngine

        return CollectiveEngine(group)
    raise TypeError(
        "group must be a torch.distributed process group or a LocalGroup, got "
        f"{type(group).__name__}"
    )


def check_engine(engine: Engine, name: object) -> None:
    """Whether the engine called `name` can serve the group of `engine`; if not, say why."""
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}")
    if name in ("auto", engine.name):
        return
    if engine.name == "local":
        raise ValueError(
            f"engine {name!r} is not available: it needs a torch.distributed process group, but "
            "group is a LocalGroup"
        )
    if name == "local":
        raise ValueError(
            "engine 'local' is not available: its ranks are threads of one process (LocalGroup), "
            "but group is a torch.distributed process group"
        )


def chosen_engine(engine: Engine, name: str) -> Engine:
    """The engine called `name` for the group of `engine`, as checked. Collective."""
    if name != "mmap":
        return engine
    from tile_kernels.ep.engines.collective import CollectiveEngine
    from tile_kernels.ep.engines.mmap import MmapEngine

    if not isinstance(engine, CollectiveEngine):
        raise TypeError(f"engine 'mmap' needs a process group, got engine {engine.name!r}")
    return MmapEngine(engine)
