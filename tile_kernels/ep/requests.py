"""What a call asks for, checked on this rank before the ranks compare notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.events import EventHandle
from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.journey import Fabric
from tile_kernels.ep.model import MOST_TOPK
from tile_kernels.ep.plan import Leg
from tile_kernels.ep.rows import Field, field_of
from tile_kernels.moe.mapping.plan import MAX_EXPERTS
from tile_kernels.runtime import checks

MOST_PAYLOADS = 8
MOST_ALIGNMENT = 2**16
SUMMED = (torch.float32, torch.float16, torch.bfloat16)
topk_idx_t = torch.int64

Settings = dict[str, "str | int | None"]


@dataclass
class DispatchRequest:
    """A dispatch that is fine as far as this rank can tell."""

    payloads: list[Tensor]
    is_tuple: bool
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    handle: EPHandle | None
    expand: bool
    cpu_sync: bool
    column_major_sf: bool
    copy_handle: bool
    num_sms: int
    num_max_rows: int | None
    stats: Tensor | None
    leg: Leg | None  # the first, unless there is a handle
    settings: Settings

    @property
    def needs_grad(self) -> bool:
        """Whether autograd must look."""
        return self.settings["gradients"] != "none"


@dataclass
class CombineRequest:
    """A combine that is fine as far as this rank can tell."""

    x: Tensor
    handle: EPHandle
    topk_weights: Tensor | None
    bias: list[Tensor]
    reduce_first: bool
    needs_grad: bool
    settings: Settings


def _grad_names(named: Sequence[tuple[str, Tensor | None]]) -> str:
    if not torch.is_grad_enabled():
        return "none"
    names = [name for name, tensor in named if tensor is not None and tensor.requires_grad]
    return ", ".join(names) or "none"


def _check_common(
    num_sms: object,
    num_qps: object,
    previous_event: object,
    previous_event_before_epilogue: object,
    async_with_compute_stream: object,
    allocate_on_comm_stream: object,
) -> None:
    checks.integer("num_sms", num_sms, 0)
    checks.integer("num_qps", num_qps, 0)
    checks.boolean("async_with_compute_stream", async_with_compute_stream)
    checks.boolean("allocate_on_comm_stream", allocate_on_comm_stream)
    for name, event in (
        ("previous_event", previous_event),
        ("previous_event_before_epilogue", previous_event_before_epilogue),
    ):
        if event is not None and not isinstance(event, EventHandle):
            raise TypeError(f"{name} must be an EventHandle or None, got {type(event).__name__}")
    if previous_event is not None and not allocate_on_comm_stream:
        raise ValueError("allocate_on_comm_stream must be True with a previous_event, got False")


def _check_handle(handle: object, fabric: Fabric) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle must be an EPHandle, got {type(handle).__name__}")
    made = (handle.routing.rank, handle.routing.topology)
    if made != (fabric.rank, fabric.topology):
        raise ValueError(
            f"handle must come from this rank and topology ({fabric.rank} in {fabric.topology}), "
            f"got one of rank {made[0]} in {made[1]}"
        )
    return handle


def _same_device(name: str, tensor: Tensor, x: Tensor, like: str = "x") -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on {x.device} as {like} is, got {tensor.device}")


def _payloads(x: Any) -> tuple[list[Tensor], bool]:
    """`x` as a list of `[T, width]` on one device."""
    if not isinstance(x, tuple):
        checks.tensor("x", x, ("num_tokens", "hidden"))
        return [x], False
    if not 1 <= len(x) <= MOST_PAYLOADS:
        raise ValueError(f"x must have 1..{MOST_PAYLOADS} tensors, got {len(x)}")
    checks.tensor("x[0]", x[0], ("num_tokens", "width"))
    for place, tensor in enumerate(x):
        checks.tensor(f"x[{place}]", tensor, ("num_tokens", "width"), shape=(len(x[0]), None))
        _same_device(f"x[{place}]", tensor, x[0])
    return list(x), True


def _check_choices(topk_idx: Tensor, num_experts: int) -> None:
    """Ids in `-1..num_experts-1`, none twice in a row."""
    checks.in_range("topk_idx", topk_idx, -1, num_experts - 1)
    ordered = topk_idx.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, slot = twice.nonzero()[0].tolist()
        raise ValueError(
            f"topk_idx must name an expert once for each token, but token {token} names expert "
            f"{ordered[token, slot].item()} more often"
        )


def _from_handle(name: str, given: int | None, recorded: int) -> int:
    if given is not None and given != recorded:
        raise ValueError(f"{name} must be that of the handle, {recorded}, got {given}")
    return recorded


def dispatch_request(
    fabric: Fabric,
    default_max_tokens: int,
    x: Any,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    stats: Tensor | None,
    num_experts: int | None,
    num_max_tokens_per_rank: int | None,
    expert_alignment: int | None,
    common: tuple[object, ...],
    handle: EPHandle | None,
    do_handle_copy: bool,
    do_cpu_sync: bool | None,
    do_expand: bool,
    do_zero_padding: bool,
    column_major_sf: bool,
    num_max_rows: int | None,
    static: bool,
) -> DispatchRequest:
    """Check the arguments of `ElasticBuffer.dispatch`.

    With `static`, a dispatch without CPU sync looks at no value on the device.
    """
    _check_common(*common)
    for name, flag in (
        ("do_handle_copy", do_handle_copy),
        ("do_expand", do_expand),
        ("do_zero_padding", do_zero_padding),
        ("use_tma_aligned_col_major_sf", column_major_sf),
    ):
        checks.boolean(name, flag)
    payloads, is_tuple = _payloads(x)
    num_tokens = payloads[0].shape[0]
    if column_major_sf and (len(payloads) < 2 or payloads[1].element_size() != 4):
        raise ValueError(
            "use_tma_aligned_col_major_sf needs x to be a pair with scale factors of 4 bytes as "
            f"second, got {', '.join(str(field_of(each)) for each in payloads)}"
        )
    num_sms = int(common[0])  # type: ignore[call-overload]
    if handle is not None:
        handle = _check_handle(handle, fabric)
        for name, value in (
            ("topk_idx", topk_idx),
            ("cumulative_local_expert_recv_stats", stats),
        ):
            if value is not None:
                raise ValueError(f"{name} must be None with a handle")
        if do_cpu_sync:
            raise ValueError("do_cpu_sync must not be True with a handle")
        if num_max_rows is not None:
            raise ValueError("num_max_rows must be None with a handle, which has its own")
        if do_expand and not handle.do_expand:
            raise ValueError("do_expand must be False with a handle of the compact layout")
        expand, cpu_sync = handle.do_expand, bool(handle.num_recv_tokens_per_expert_list)
        topk_idx = handle.topk_idx
        _same_device("x", payloads[0], topk_idx, "the handle")
        num_experts = _from_handle("num_experts", num_experts, handle.num_experts)
        most_tokens = _from_handle(
            "num_max_tokens_per_rank", num_max_tokens_per_rank, handle.num_max_tokens_per_rank
        )
        alignment = _from_handle("expert_alignment", expert_alignment, handle.expert_alignment)
        num_sms = num_sms or handle.num_sms
        if num_tokens != topk_idx.shape[0]:
            raise ValueError(
                f"x must have the {topk_idx.shape[0]} tokens of the handle, got {num_tokens}"
            )
        leg = None
    else:
        if topk_idx is None:
            raise ValueError("topk_idx must be given unless there is a handle")
        expand = do_expand
        cpu_sync = True if do_cpu_sync is None else do_cpu_sync
        checks.boolean("do_cpu_sync", cpu_sync)
        if num_max_rows is not None:
            if cpu_sync:
                raise ValueError("num_max_rows needs do_cpu_sync=False: with it, all rows fit")
            checks.integer("num_max_rows", num_max_rows, 1)
        alignment = 1 if expert_alignment is None else expert_alignment
        checks.integer("expert_alignment", alignment, 1, MOST_ALIGNMENT)
        num_experts = _num_experts(num_experts, fabric.topology.num_ranks)
        num_local = num_experts // fabric.topology.num_ranks
        if expand and num_local > MAX_EXPERTS:
            raise ValueError(
                f"num_experts must be at most {MAX_EXPERTS} on each rank for the expanded layout, "
                f"got {num_local}"
            )
        most_tokens = default_max_tokens
        if num_max_tokens_per_rank is not None:
            most_tokens = num_max_tokens_per_rank
        elif not most_tokens:
            raise ValueError(
                "num_max_tokens_per_rank must be given here or when the buffer is made"
            )
        most = checks.MOST_SIZE // fabric.topology.num_ranks
        checks.integer("num_max_tokens_per_rank", most_tokens, 1, most)
        dims = ("num_tokens", "num_topk")
        checks.tensor("topk_idx", topk_idx, dims, topk_idx_t, shape=(num_tokens, None))
        _same_device("topk_idx", topk_idx, payloads[0])
        checks.integer("the number of columns of topk_idx", topk_idx.shape[1], 1, MOST_TOPK)
        if num_tokens > most_tokens:
            raise ValueError(
                f"x must have at most num_max_tokens_per_rank = {most_tokens} tokens, got "
                f"{num_tokens}"
            )
        is_static = static and not cpu_sync
        if not is_static:
            _check_choices(topk_idx, num_experts)
        topk_idx = fabric.without_inactive(topk_idx, num_experts)
        leg = fabric.first_leg(topk_idx, num_experts, most_tokens if is_static else None)
    if do_zero_padding and not expand:
        raise ValueError("do_zero_padding needs the expanded layout (do_expand=True)")
    if topk_weights is not None:
        shape = tuple(topk_idx.shape)
        checks.tensor(
            "topk_weights", topk_weights, ("num_tokens", "num_topk"), torch.float32, shape=shape
        )
        _same_device("topk_weights", topk_weights, payloads[0])
    if stats is not None:
        shape = (num_experts // fabric.topology.num_ranks,)
        name = "cumulative_local_expert_recv_stats"
        checks.tensor(name, stats, ("num_local_experts",), torch.int32, shape=shape)
        _same_device(name, stats, payloads[0])
    named = [(f"x[{place}]", payload) for place, payload in enumerate(payloads)]
    settings: Settings = {
        "handle": "none" if handle is None else f"of dispatch {handle.routing.serial}",
        "x": ", ".join(str(field_of(each)) for each in payloads),
        "the number of columns of topk_idx": topk_idx.shape[1],
        "topk_weights": "none" if topk_weights is None else "given",
        "num_experts": num_experts,
        "num_max_tokens_per_rank": most_tokens,
        "expert_alignment": alignment,
        "do_expand": str(expand),
        "gradients": _grad_names([*named, ("topk_weights", topk_weights)]),
    }
    return DispatchRequest(
        payloads, is_tuple, topk_idx, topk_weights, num_experts, most_tokens, alignment, handle,
        expand, cpu_sync, column_major_sf, do_handle_copy, num_sms, num_max_rows, stats, leg,
        settings,
    )  # fmt: skip


def _num_experts(num_experts: int | None, num_ranks: int) -> int:
    if num_experts is None:
        raise ValueError("num_experts must be given unless there is a handle")
    checks.integer("num_experts", num_experts, 1)
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of the {num_ranks} ranks, got {num_experts}"
        )
    return num_experts


def combine_request(
    fabric: Fabric,
    allow_multiple_reduction: bool,
    x: Tensor,
    handle: EPHandle,
    topk_weights: Tensor | None,
    bias: Any,
    common: tuple[object, ...],
) -> CombineRequest:
    """Check the arguments of `ElasticBuffer.combine`."""
    _check_common(*common)
    handle = _check_handle(handle, fabric)
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    checks.tensor("x", x, ("num_rows", "hidden"), SUMMED, shape=(num_rows, None))
    _same_device("x", x, handle.topk_idx, "the handle")
    if handle.routing.plan.is_static and not allow_multiple_reduction:
        raise ValueError("handle must come from a buffer with allow_multiple_reduction=False too")
    num_tokens, num_topk = handle.topk_idx.shape
    if topk_weights is not None:
        if handle.do_expand:
            if not allow_multiple_reduction:
                raise ValueError(
                    "topk_weights must be None for the expanded layout when the buffer is made "
                    "with allow_multiple_reduction=False"
                )
            dims: tuple[str, ...] = ("num_rows",)
            shape: tuple[int, ...] = (num_rows,)
        else:
            dims, shape = ("num_rows", "num_topk"), (num_rows, num_topk)
        checks.tensor("topk_weights", topk_weights, dims, torch.float32, shape=shape)
        _same_device("topk_weights", topk_weights, x)
    biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
    if len(biases) > 2:
        raise ValueError(f"bias must be None, a tensor or a pair, got {len(biases)} tensors")
    for place, each in enumerate(biases):
        name = f"bias[{place}]" if isinstance(bias, tuple) else "bias"
        shape = (num_tokens, x.shape[1])
        checks.tensor(name, each, ("num_tokens", "hidden"), x.dtype, shape=shape)
        _same_device(name, each, x)
    gradients = _grad_names([("x", x), ("topk_weights", topk_weights)])
    with_bias = [("bias", each) for each in biases]
    settings: Settings = {
        "handle": f"of dispatch {handle.routing.serial}",
        "x": str(Field(x.dtype, x.shape[1])),
        "topk_weights": "none" if topk_weights is None else "given",
        "gradients": gradients,
    }
    needs_grad = gradients != "none" or _grad_names(with_bias) != "none"
    reduce_first = allow_multiple_reduction
    return CombineRequest(x, handle, topk_weights, biases, reduce_first, needs_grad, settings)
