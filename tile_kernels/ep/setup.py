"""The arguments of the constructor: checks, environment variables, and the engine they choose."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tile_kernels.ep import model
from tile_kernels.ep.agreement import Settings
from tile_kernels.ep.engines import ActiveEngine, Engine, check_engine, chosen_engine
from tile_kernels.runtime import checks

BUFFER_FLAGS = (
    "use_fp8_dispatch", "deterministic", "allow_hybrid_mode", "allow_multiple_reduction",
    "prefer_overlap_with_compute", "explicitly_destroy", "check_ranks",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BufferArguments:
    """The arguments of `ElasticBuffer` after `group`."""

    num_bytes: int | None
    num_cpu_bytes: int
    num_max_tokens_per_rank: int
    hidden: int
    num_topk: int
    use_fp8_dispatch: bool
    deterministic: bool
    allow_hybrid_mode: bool
    allow_multiple_reduction: bool
    prefer_overlap_with_compute: bool
    sl_idx: int
    num_allocated_qps: int
    num_cpu_timeout_secs: int
    num_gpu_timeout_secs: int
    explicitly_destroy: bool
    engine: str
    num_scaleup_ranks: int | None
    check_ranks: bool
    active_ranks: Sequence[bool] | None

    def settings(self) -> Settings:
        """The settings that must be equal on all ranks."""
        return {
            "num_bytes": self.num_bytes,
            "num_cpu_bytes": self.num_cpu_bytes,
            "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
            "hidden": self.hidden,
            "num_topk": self.num_topk,
            "use_fp8_dispatch": str(self.use_fp8_dispatch),
            "allow_hybrid_mode": str(self.allow_hybrid_mode),
            "allow_multiple_reduction": str(self.allow_multiple_reduction),
            "num_scaleup_ranks": self.num_scaleup_ranks,
            "check_ranks": str(self.check_ranks),
            "engine": str(self.engine),
        }


@dataclass(frozen=True)
class Environment:
    """The values of environment variables, and of the argument that one of them overrides."""

    sl_idx: int
    keep_tensors: bool
    verbose: bool


def check_arguments(world: Engine, arguments: BufferArguments) -> Environment:
    """Check the arguments of `ElasticBuffer` and read its environment variables."""
    check_engine(world, arguments.engine)
    for name in BUFFER_FLAGS:
        checks.boolean(name, getattr(arguments, name))
    sl_idx = _from_environment("EP_OVERRIDE_RDMA_SL", arguments.sl_idx)
    checks.integer("sl_idx", sl_idx, 0, 15)
    checks.integer("num_allocated_qps", arguments.num_allocated_qps, 0)
    checks.integer("num_cpu_timeout_secs", arguments.num_cpu_timeout_secs, 1)
    checks.integer("num_gpu_timeout_secs", arguments.num_gpu_timeout_secs, 1)
    _check_sizes(arguments)
    bits = _from_environment("EP_NUM_TOPK_IDX_BITS", 64)
    if bits not in (32, 64):
        raise ValueError(f"EP_NUM_TOPK_IDX_BITS must be 32 or 64, got {bits}")
    keep_tensors = bool(_from_environment("EP_AVOID_RECORD_STREAM", 0))
    return Environment(sl_idx, keep_tensors, bool(_from_environment("EP_BUFFER_DEBUG", 0)))


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ValueError(f"{name} must be a number, got {text!r}")
    return int(text)


def _check_sizes(arguments: BufferArguments) -> None:
    num_bytes, num_cpu_bytes = arguments.num_bytes, arguments.num_cpu_bytes
    max_tokens, hidden = arguments.num_max_tokens_per_rank, arguments.hidden
    checks.integer("num_max_tokens_per_rank", max_tokens, 0)
    checks.integer("hidden", hidden, 0)
    checks.integer("num_topk", arguments.num_topk, 0, model.MAX_TOPK)
    checks.integer("num_cpu_bytes", num_cpu_bytes, 0)
    if num_bytes is None:
        if num_cpu_bytes:
            raise ValueError(f"num_cpu_bytes needs num_bytes, got {num_cpu_bytes} and None")
        if not (max_tokens and hidden):
            raise ValueError(
                "give num_bytes, or num_max_tokens_per_rank and hidden, got num_bytes=None, "
                f"num_max_tokens_per_rank={max_tokens}, hidden={hidden}"
            )
        return
    checks.integer("num_bytes", num_bytes, 0)
    for name, size in (("num_bytes", num_bytes), ("num_cpu_bytes", num_cpu_bytes)):
        if size % model.PAGE:
            raise ValueError(f"{name} must be a multiple of {model.PAGE} (2 MiB), got {size}")
    if num_cpu_bytes > num_bytes:
        raise ValueError(
            f"num_cpu_bytes must be at most num_bytes {num_bytes}, got {num_cpu_bytes}"
        )


_num_buffers: weakref.WeakKeyDictionary[Any, Counter[Hashable]] = weakref.WeakKeyDictionary()
_num_buffers_lock = threading.Lock()  # ranks may be threads


def identity(group: Any, kind: Hashable) -> Settings:
    """What tells a new buffer of a group from others of its kind: its number.

    That is equal on all ranks that make buffers of this kind, since making one is collective among
    them. The kind names the active ranks: some of these ranks did not make the buffers of others.
    """
    with _num_buffers_lock:
        made = _num_buffers.setdefault(group, Counter())
        made[kind] += 1
        return {"buffer": f"number {made[kind]} of the group"}


def active_engine(world: Engine, arguments: BufferArguments) -> Engine:
    """The engine of the ranks that take part, with its timeout. Collective among them."""
    timeout: object = arguments.num_cpu_timeout_secs
    active_ranks: object = arguments.active_ranks
    if isinstance(timeout, int) and timeout >= 1:  # `check_arguments` raises for any other
        world.timeout = timeout
    with checks.named("ElasticBuffer"):
        if active_ranks is None:
            return world
        if isinstance(active_ranks, Tensor):
            active_ranks = active_ranks.tolist()
        if not (
            isinstance(active_ranks, Sequence)
            and len(active_ranks) == world.size
            and all(isinstance(each, bool) for each in active_ranks)
        ):
            raise ValueError(
                f"active_ranks must be {world.size} bools, one for each rank, got {active_ranks!r}"
            )
        if not active_ranks[world.index]:
            raise ValueError(f"active_ranks must not leave out this rank, {world.index}")
    ranks = [rank for rank, is_active in enumerate(active_ranks) if is_active]
    if len(ranks) == world.size:
        return world
    return ActiveEngine(world.split(ranks), ranks, world.size)


def data_engine(world: Engine, arguments: BufferArguments, num_bytes: int) -> Engine:
    """The engine that the arguments name, for the ranks of `world`. Collective."""
    name, timeout = arguments.engine, arguments.num_gpu_timeout_secs
    if isinstance(world, ActiveEngine):
        part = chosen_engine(world.part, name, num_bytes, timeout)
        return ActiveEngine(part, world.active, world.size)
    return chosen_engine(world, name, num_bytes, timeout)
