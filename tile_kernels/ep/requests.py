"""The arguments of dispatch and combine, checked on this rank before the agreement check."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.agreement import Agreed, Settings
from tile_kernels.ep.arguments import (
    COMMON_FLAGS,
    DISPATCH_FLAGS,
    CombineArguments,
    DispatchArguments,
    with_flags,
)
from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.model import (
    MAX_TOPK,
    PAGE,
    combine_slots,
    combine_token_bytes,
    dispatch_row_bytes,
    dispatch_slots,
)
from tile_kernels.ep.plan import Hop, count_ids, counted_hop, plan_static_hop
from tile_kernels.ep.rows import Field, field_of
from tile_kernels.ep.transport import Fabric
from tile_kernels.moe.mapping.plan import MAX_EXPERTS
from tile_kernels.runtime import checks
from tile_kernels.utils import align

MAX_PAYLOADS = 8
MAX_ALIGNMENT = 2**16
SUMMED = (torch.float32, torch.float16, torch.bfloat16)
NO_WAY_BACK = (
    "topk_weights must not require gradients for the expanded layout when the buffer is made with "
    "allow_multiple_reduction=False: combine cannot return them"
)
topk_idx_t = torch.int32 if os.environ.get("EP_NUM_TOPK_IDX_BITS") == "32" else torch.int64


@dataclass(frozen=True)
class Route:
    """Where the tokens of a dispatch go, and the layout in which they arrive.

    It is that of `handle`, or a new one, of which `hop` is the first. `topk_idx` is int64,
    whatever was given. `choices` counts how often each expert is chosen, for engines with a window.
    """

    topk_idx: Tensor
    num_experts: int
    num_max_tokens_per_rank: int
    expert_alignment: int
    expand: bool
    cpu_sync: bool
    num_sms: int
    handle: EPHandle | None = None
    hop: Hop | None = None
    choices: Sequence[int] = ()


def not_agreed() -> Agreed:
    """Of a request that was not proposed to the other ranks yet."""
    raise RuntimeError("the ranks have not agreed on this request")


@dataclass(frozen=True)
class DispatchRequest:
    """A dispatch whose arguments are valid on this rank."""

    arguments: DispatchArguments
    payloads: list[Tensor]
    route: Route
    settings: Settings
    agreed: Callable[[], Agreed] = not_agreed  # waits for the other ranks; before data is sent

    @property
    def needs_grad(self) -> bool:
        """Whether autograd must record the call."""
        return self.settings["gradients"] != "none"


@dataclass(frozen=True)
class CombineRequest:
    """A combine whose arguments are valid on this rank."""

    x: Tensor
    handle: EPHandle
    topk_weights: Tensor | None
    bias: list[Tensor]
    reduce_first: bool
    needs_grad: bool
    settings: Settings
    agreed: Callable[[], Agreed] = not_agreed


def _grad_names(named: Sequence[tuple[str, Tensor | None]]) -> str:
    if not torch.is_grad_enabled():
        return "none"
    names = [name for name, tensor in named if tensor is not None and tensor.requires_grad]
    return ", ".join(names) or "none"


def _check_handle(handle: object, fabric: Fabric) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle must be an EPHandle, got {type(handle).__name__}")
    if handle.routing.fabric is not fabric:
        raise ValueError("handle must come from this buffer, got one of another buffer")
    return handle


def _same_device(name: str, tensor: Tensor, x: Tensor, like: str = "x") -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on {x.device} as {like} is, got {tensor.device}")


def _payloads(x: Any) -> list[Tensor]:
    """`x` as a list of `[T, width]` on one device."""
    if not isinstance(x, tuple):
        checks.tensor("x", x, ("num_tokens", "hidden"))
        return [x]
    if not 1 <= len(x) <= MAX_PAYLOADS:
        raise ValueError(f"x must have 1..{MAX_PAYLOADS} tensors, got {len(x)}")
    checks.tensor("x[0]", x[0], ("num_tokens", "width"))
    for index, tensor in enumerate(x):
        checks.tensor(f"x[{index}]", tensor, ("num_tokens", "width"), shape=(len(x[0]), None))
        _same_device(f"x[{index}]", tensor, x[0])
    return list(x)


def _bad_choices(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids sorted in each row; those out of `-1..num_experts-1`; those that come twice in a row."""
    ordered = topk_idx.sort(dim=1).values
    outside = (ordered < -1) | (ordered >= num_experts)
    return ordered, outside, (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)


def _counted_hop(
    fabric: Fabric, topk_idx: Tensor, given: Tensor, num_experts: int
) -> tuple[Hop, list[int]]:
    """The first hop, and with a window how often each expert is chosen.

    The values of `given` are checked. The host waits for the device once, for all numbers.
    """
    groups, num_peers = fabric.peers_on_first_hop(topk_idx, num_experts)
    hop, counts = counted_hop(groups, num_peers)
    ordered, outside, twice = _bad_choices(given, num_experts)
    parts = [outside.sum()[None], twice.sum()[None], counts]
    if fabric.window is not None:
        parts.append(count_ids(topk_idx, num_experts))
    num_outside, num_twice, *numbers = torch.cat(parts).tolist()
    if num_outside:
        checks.in_range("topk_idx", given, -1, num_experts - 1)
    if num_twice:
        token, slot = twice.nonzero()[0].tolist()
        raise ValueError(
            f"topk_idx must name an expert once for each token, but token {token} names expert "
            f"{ordered[token, slot].item()} more often"
        )
    hop.send_counts = numbers[:num_peers]
    return hop, numbers[num_peers:]


@dataclass(frozen=True)
class Limits:
    """What the buffer of a request allows.

    `num_bytes` is None where the caller did not give it: the engines then allocate what they need.
    `num_cpu_bytes` of them are for the Engram table alone.
    """

    num_max_tokens_per_rank: int
    num_allocated_qps: int
    num_bytes: int | None
    num_cpu_bytes: int
    all_nvlink: bool
    allow_multiple_reduction: bool
    may_be_static: bool  # a dispatch without CPU sync reads no value on the device

    def check_size(self, needed: int) -> None:
        """`needed` bytes fit the buffer."""
        needed = align(needed, PAGE) + self.num_cpu_bytes
        if self.num_bytes is not None and needed > self.num_bytes:
            beside = f" with {self.num_cpu_bytes} num_cpu_bytes" if self.num_cpu_bytes else ""
            raise ValueError(
                f"num_bytes of the buffer must be at least {needed} for this call{beside}, got "
                f"{self.num_bytes}"
            )

    def check_num_qps(self, num_qps: int) -> None:
        """So many queue pairs were allocated."""
        checks.integer("num_qps", num_qps, 0)
        if num_qps > self.num_allocated_qps:
            raise ValueError(
                f"num_qps must be at most the {self.num_allocated_qps} queue pairs of the buffer "
                f"(num_allocated_qps), got {num_qps}"
            )


def dispatch_request(
    fabric: Fabric, arguments: DispatchArguments, limits: Limits
) -> DispatchRequest:
    """Check the arguments of `ElasticBuffer.dispatch`."""
    arguments = with_flags(arguments, DISPATCH_FLAGS)
    arguments.check()
    limits.check_num_qps(arguments.num_qps)
    for name in (
        "do_handle_copy", "do_expand", "do_zero_padding", "use_tma_aligned_col_major_sf"
    ):  # fmt: skip
        checks.boolean(name, getattr(arguments, name))
    payloads = _payloads(arguments.x)
    if (
        arguments.use_tma_aligned_col_major_sf
        and len(payloads) > 1
        and payloads[1].element_size() != 4
    ):
        raise ValueError(
            "use_tma_aligned_col_major_sf needs scale factors of 4 bytes as the second of x, got "
            f"{', '.join(str(field_of(each)) for each in payloads)}"
        )
    if arguments.handle is None:
        route = _new_route(
            fabric, arguments, payloads[0], limits.num_max_tokens_per_rank, limits.may_be_static
        )
    else:
        route = _route_of_handle(fabric, arguments, payloads[0], arguments.handle)
    nodes, per_node = fabric.topology.num_scaleout_ranks, fabric.topology.num_scaleup_ranks
    slots = dispatch_slots(nodes, per_node, route.num_max_tokens_per_rank, limits.all_nvlink)
    parts = [field_of(each).num_bytes for each in payloads]
    limits.check_size(slots * dispatch_row_bytes(parts, route.topk_idx.shape[1]))
    if arguments.do_zero_padding and not route.expand:
        raise ValueError("do_zero_padding needs the expanded layout (do_expand=True)")
    weights, stats = arguments.topk_weights, arguments.cumulative_local_expert_recv_stats
    if weights is not None:
        dims, shape = ("num_tokens", "num_topk"), tuple(route.topk_idx.shape)
        checks.tensor("topk_weights", weights, dims, torch.float32, shape=shape)
        _same_device("topk_weights", weights, payloads[0])
        if weights_cannot_return(weights, route.expand, limits.allow_multiple_reduction):
            raise ValueError(NO_WAY_BACK)
    if stats is not None:
        name, shape = "cumulative_local_expert_recv_stats", (_num_local(route.num_experts, fabric),)
        checks.tensor(name, stats, ("num_local_experts",), torch.int32, shape=shape)
        _same_device(name, stats, payloads[0])
    return DispatchRequest(arguments, payloads, route, _dispatch_settings(route, payloads, weights))


def weights_cannot_return(
    weights: Tensor | None, expand: bool, allow_multiple_reduction: bool
) -> bool:
    """Whether gradients of `weights` are wanted, which combine does not send back."""
    needs_grad = weights is not None and torch.is_grad_enabled() and weights.requires_grad
    return bool(needs_grad and expand and not allow_multiple_reduction)


def _dispatch_settings(route: Route, payloads: list[Tensor], weights: Tensor | None) -> Settings:
    """The settings that must be equal on all ranks."""
    named = [(f"x[{index}]", payload) for index, payload in enumerate(payloads)]
    handle = route.handle
    return {
        "handle": "none" if handle is None else f"of dispatch {handle.routing.serial}",
        "x": ", ".join(str(field_of(each)) for each in payloads),
        "the number of columns of topk_idx": route.topk_idx.shape[1],
        "topk_weights": "none" if weights is None else "given",
        "num_experts": route.num_experts,
        "num_max_tokens_per_rank": route.num_max_tokens_per_rank,
        "expert_alignment": route.expert_alignment,
        "do_expand": str(route.expand),
        "gradients": _grad_names([*named, ("topk_weights", weights)]),
    }


def _route_of_handle(
    fabric: Fabric, arguments: DispatchArguments, x: Tensor, handle: EPHandle
) -> Route:
    """The route that a handle recorded; other arguments must not contradict it."""
    handle = _check_handle(handle, fabric)
    for name in ("topk_idx", "cumulative_local_expert_recv_stats"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"{name} must be None with a handle")
    if arguments.do_cpu_sync:
        raise ValueError("do_cpu_sync must not be True with a handle")
    if arguments.num_max_rows is not None:
        raise ValueError("num_max_rows must be None with a handle, which has its own")
    if arguments.do_expand and not handle.do_expand:
        raise ValueError("do_expand must be False with a handle of the compact layout")
    _same_device("x", x, handle.topk_idx, "the handle")
    for name in ("num_experts", "num_max_tokens_per_rank", "expert_alignment"):
        given, recorded = getattr(arguments, name), getattr(handle, name)
        if given is not None and given != recorded:
            raise ValueError(f"{name} must be that of the handle, {recorded}, got {given}")
    num_tokens = handle.topk_idx.shape[0]
    if x.shape[0] != num_tokens:
        raise ValueError(f"x must have the {num_tokens} tokens of the handle, got {x.shape[0]}")
    return Route(
        handle.topk_idx.long(),
        handle.num_experts,
        handle.num_max_tokens_per_rank,
        handle.expert_alignment,
        handle.do_expand,
        cpu_sync=bool(handle.num_recv_tokens_per_expert_list),
        num_sms=arguments.num_sms or handle.num_sms,
        handle=handle,
    )


def _new_route(
    fabric: Fabric,
    arguments: DispatchArguments,
    x: Tensor,
    default_max_tokens: int,
    may_be_static: bool,
) -> Route:
    """The route that `topk_idx` asks for."""
    topk_idx, num_max_rows = arguments.topk_idx, arguments.num_max_rows
    if topk_idx is None:
        raise ValueError("topk_idx must be given unless there is a handle")
    cpu_sync = True if arguments.do_cpu_sync is None else arguments.do_cpu_sync
    checks.boolean("do_cpu_sync", cpu_sync)
    if num_max_rows is not None:
        if cpu_sync:
            raise ValueError("num_max_rows needs do_cpu_sync=False: with it, all rows fit")
        checks.integer("num_max_rows", num_max_rows, 1)
    alignment = 1 if arguments.expert_alignment is None else arguments.expert_alignment
    checks.integer("expert_alignment", alignment, 1, MAX_ALIGNMENT)
    num_experts = _num_experts(arguments.num_experts, fabric.topology.num_ranks)
    num_local = _num_local(num_experts, fabric)
    if arguments.do_expand and num_local > MAX_EXPERTS:
        raise ValueError(
            f"num_experts must be at most {MAX_EXPERTS} on each rank for the expanded layout, "
            f"got {num_local}"
        )
    max_tokens = _max_tokens(fabric, arguments.num_max_tokens_per_rank, default_max_tokens)
    num_tokens, dims = x.shape[0], ("num_tokens", "num_topk")
    checks.tensor("topk_idx", topk_idx, dims, checks.INTEGERS, shape=(num_tokens, None))
    topk_idx = topk_idx.long()
    _same_device("topk_idx", topk_idx, x)
    checks.integer("the number of columns of topk_idx", topk_idx.shape[1], 1, MAX_TOPK)
    if num_tokens > max_tokens:
        raise ValueError(
            f"x must have at most num_max_tokens_per_rank = {max_tokens} tokens, got {num_tokens}"
        )
    is_static = may_be_static and not cpu_sync
    given, topk_idx = topk_idx, fabric.without_inactive(topk_idx, num_experts)
    choices: list[int] = []
    if is_static:
        hop = plan_static_hop(*fabric.peers_on_first_hop(topk_idx, num_experts), max_tokens)
    else:
        hop, choices = _counted_hop(fabric, topk_idx, given, num_experts)
    return Route(
        topk_idx,
        num_experts,
        max_tokens,
        alignment,
        arguments.do_expand,
        cpu_sync,
        arguments.num_sms,
        hop=hop,
        choices=choices,
    )


def _max_tokens(fabric: Fabric, given: int | None, default: int) -> int:
    if given is None and not default:
        raise ValueError("num_max_tokens_per_rank must be given here or when the buffer is made")
    max_tokens = default if given is None else given
    limit = checks.MOST_SIZE // fabric.topology.num_ranks
    checks.integer("num_max_tokens_per_rank", max_tokens, 1, limit)
    return max_tokens


def _num_local(num_experts: int, fabric: Fabric) -> int:
    return num_experts // fabric.topology.num_ranks


def _num_experts(num_experts: int | None, num_ranks: int) -> int:
    if num_experts is None:
        raise ValueError("num_experts must be given unless there is a handle")
    checks.integer("num_experts", num_experts, 1)
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of the {num_ranks} ranks, got {num_experts}"
        )
    return num_experts


def combine_request(fabric: Fabric, arguments: CombineArguments, limits: Limits) -> CombineRequest:
    """Check the arguments of `ElasticBuffer.combine`."""
    x, weights, bias = arguments.x, arguments.topk_weights, arguments.bias
    allow_multiple_reduction = limits.allow_multiple_reduction
    arguments = with_flags(arguments, COMMON_FLAGS)
    arguments.check()
    limits.check_num_qps(arguments.num_qps)
    handle = _check_handle(arguments.handle, fabric)
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
    checks.tensor("x", x, ("num_rows", "hidden"), SUMMED, shape=(num_rows, None))
    _same_device("x", x, handle.topk_idx, "the handle")
    num_tokens, num_topk = handle.topk_idx.shape
    slots = combine_slots(
        fabric.topology.num_scaleout_ranks, fabric.topology.num_scaleup_ranks,
        handle.num_max_tokens_per_rank, num_topk, allow_multiple_reduction, limits.all_nvlink,
    )  # fmt: skip
    limits.check_size(slots * combine_token_bytes(x.shape[1], num_topk, x.element_size()))
    if weights is not None:
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
        checks.tensor("topk_weights", weights, dims, torch.float32, shape=shape)
        _same_device("topk_weights", weights, x)
    biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
    if len(biases) > 2:
        raise ValueError(f"bias must be None, a tensor or a pair, got {len(biases)} tensors")
    for index, each in enumerate(biases):
        name = f"bias[{index}]" if isinstance(bias, tuple) else "bias"
        shape = (num_tokens, x.shape[1])
        checks.tensor(name, each, ("num_tokens", "hidden"), x.dtype, shape=shape)
        _same_device(name, each, x)
    gradients = _grad_names([("x", x), ("topk_weights", weights)])
    settings: Settings = {
        "handle": f"of dispatch {handle.routing.serial}",
        "x": str(Field(x.dtype, x.shape[1])),
        "topk_weights": "none" if weights is None else "given",
        "gradients": gradients,
    }
    needs_grad = gradients != "none" or _grad_names([("bias", each) for each in biases]) != "none"
    reduce_first = allow_multiple_reduction
    return CombineRequest(x, handle, weights, biases, reduce_first, needs_grad, settings)
