"""Engines move rows between ranks. The group given to a buffer decides which are available."""

from __future__ import annotations

import torch.distributed as dist

from tile_kernels.ep.engines.active import ActiveEngine
from tile_kernels.ep.engines.base import Engine, Pending
from tile_kernels.ep.engines.local import LocalEngine, LocalGroup, run_ranks

ENGINES = ("auto", "collective", "local", "mmap", "symm")

__all__ = [
    "ENGINES",
    "ActiveEngine",
    "Engine",
    "LocalGroup",
    "Pending",
    "check_engine",
    "chosen_engine",
    "make_engine",
    "run_ranks",
]


def make_engine(group: object) -> Engine:
    """The default engine of a group. Raises `TypeError` for an object that is no group."""
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
    """Raise an error with the reason if engine `name` cannot serve the group of `engine`."""
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
    if name == "symm":
        from tile_kernels.ep.engines.symm import unavailable_reason

        reason = unavailable_reason()
        if reason is not None:
            raise ValueError(f"engine 'symm' is not available: {reason}")


def chosen_engine(
    engine: Engine, name: str, num_bytes: int = 0, device_timeout: float = 100.0
) -> Engine:
    """The engine called `name` for the group of `engine`, as checked. Collective.

    `num_bytes` is how much memory of each rank `symm` lets the others write to, and
    `device_timeout` how many seconds the exchanges of a stream may take.
    """
    engine.device_timeout = device_timeout
    if name in ("auto", engine.name):
        return engine
    from tile_kernels.ep.engines.collective import CollectiveEngine

    if not isinstance(engine, CollectiveEngine):
        raise TypeError(f"engine {name!r} needs a process group, got engine {engine.name!r}")
    if name == "mmap":
        from tile_kernels.ep.engines.mmap import MmapEngine

        return MmapEngine.over(engine)
    from tile_kernels.ep.engines.symm import SymmEngine

    return SymmEngine.over(engine, num_bytes, device_timeout)
