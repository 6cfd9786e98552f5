"""The arguments of dispatch and combine, each as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from tile_kernels.ep.events import EventHandle
from tile_kernels.ep.handle import EPHandle
from tile_kernels.runtime import checks

Arguments = TypeVar("Arguments", bound=Any)


def as_flag(value: Any) -> Any:
    """0 and 1 as `False` and `True`; other values stay for the checks.

    Command-line options of many programs are such integers.
    """
    return bool(value) if type(value) is int and value in (0, 1) else value


def with_flags(arguments: Arguments, names: Sequence[str]) -> Arguments:
    """The same arguments, with `as_flag` of those that are named."""
    given = {name: getattr(arguments, name) for name in names}
    flags = {name: as_flag(v) for name, v in given.items() if type(v) is int}
    result: Arguments = replace(arguments, **flags) if flags else arguments
    return result


COMMON_FLAGS = ("async_with_compute_stream", "allocate_on_comm_stream")
DISPATCH_FLAGS = (
    *COMMON_FLAGS, "do_handle_copy", "do_cpu_sync", "do_expand", "do_zero_padding",
    "use_tma_aligned_col_major_sf",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CommonArguments:
    """The arguments that dispatch and combine share."""

    num_sms: int
    num_qps: int
    previous_event: EventHandle | None
    previous_event_before_epilogue: EventHandle | None
    async_with_compute_stream: bool
    allocate_on_comm_stream: bool

    def check(self) -> None:
        """Check these arguments but for `num_qps`, whose limit is the buffer's."""
        checks.integer("num_sms", self.num_sms, 0)
        for name in COMMON_FLAGS:
            checks.boolean(name, getattr(self, name))
        for name in ("previous_event", "previous_event_before_epilogue"):
            event = getattr(self, name)
            if event is not None and not isinstance(event, EventHandle):
                kind = type(event).__name__
                raise TypeError(f"{name} must be an EventHandle or None, got {kind}")
        if self.previous_event is not None and not self.allocate_on_comm_stream:
            raise ValueError(
                "allocate_on_comm_stream must be True with a previous_event, got False"
            )


@dataclass(frozen=True, kw_only=True)
class DispatchArguments(CommonArguments):
    """The arguments of `ElasticBuffer.dispatch`."""

    x: Any
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    cumulative_local_expert_recv_stats: Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    handle: EPHandle | None
    do_handle_copy: bool
    do_cpu_sync: bool | None
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool
    num_max_rows: int | None


@dataclass(frozen=True, kw_only=True)
class CombineArguments(CommonArguments):
    """The arguments of `ElasticBuffer.combine`."""

    x: Tensor
    handle: EPHandle
    topk_weights: Tensor | None
    bias: Any
