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


def with_flags(arguments: Arguments, names: Sequence[str]) -> Arguments:
    """The same arguments, with 0 and 1 for the named flags as `False` and `True`.

    Command-line options of many programs are such integers. Other values stay for the checks.
    """
    given = {name: getattr(arguments, name) for name in names}
    numbers = {name: bool(v) for name, v in given.items() if type(v) is int and v in (0, 1)}
    result: Arguments = replace(arguments, **numbers) if numbers else arguments
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

    def check(self, num_allocated_qps: int) -> None:
        """Check these arguments."""
        checks.integer("num_sms", self.num_sms, 0)
        checks.integer("num_qps", self.num_qps, 0)
        if self.num_qps > num_allocated_qps:
            raise ValueError(
                f"num_qps must be at most the {num_allocated_qps} queue pairs of the buffer "
                f"(num_allocated_qps), got {self.num_qps}"
            )
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
