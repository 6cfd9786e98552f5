"""Dispatch and combine of checked requests, without autograd and without events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.ep import direct
from tile_kernels.ep.handle import EPHandle, Routing
from tile_kernels.ep.model import max_expanded_rows
from tile_kernels.ep.plan import Plan, count_ids
from tile_kernels.ep.requests import CombineRequest, DispatchRequest
from tile_kernels.ep.rows import as_bytes, field_of, on_host, pack, scatter_rows, unpack, zeros
from tile_kernels.ep.transport import (
    Fabric,
    combine_staged,
    combine_unreduced,
    dispatch_new,
    dispatch_planned,
    no_wait,
    staged_sum,
)
from tile_kernels.utils import align


@dataclass
class Dispatched:
    """What a dispatch gives this rank; payloads and weights as in `ElasticBuffer.dispatch`."""

    payloads: list[Tensor]
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


# ---- dispatch -----------------------------------------------------------------------------------


def dispatch(
    fabric: Fabric,
    request: DispatchRequest,
    serial: int,
    before_epilogue: Callable[[], None] = no_wait,
) -> Dispatched:
    """Send the tokens and lay out what arrives."""
    found = _direct(fabric, request, serial, before_epilogue)
    if found is not None:
        return found
    route, arguments = request.route, request.arguments
    parts = list(request.payloads)
    if arguments.topk_weights is not None:
        parts.append(arguments.topk_weights)
    fields = [field_of(each) for each in parts]
    handle = route.handle
    if handle is None:
        if route.hop is None:
            raise RuntimeError("a dispatch without a handle has a first hop")
        num_tokens = route.topk_idx.shape[0]
        first = fabric.rank * route.num_max_tokens_per_rank
        sources = torch.arange(first, first + num_tokens, device=parts[0].device)
        plan, rows = dispatch_new(
            fabric, route.hop, parts, sources, route.topk_idx, route.num_experts, request.agreed
        )
        before_epilogue()
        handle = _handle(fabric, request, plan, serial)
    else:
        rows = dispatch_planned(fabric, handle.routing.plan, pack(parts), request.agreed)
        before_epilogue()
    # The host takes the rows of experts right out of what arrived.
    arrived = unpack(rows, fields, views=handle.do_expand and on_host(rows))
    weights = arrived.pop() if arguments.topk_weights is not None else None
    return _layout(arrived, weights, handle, arguments.use_tma_aligned_col_major_sf)


def _direct(
    fabric: Fabric, request: DispatchRequest, serial: int, before_epilogue: Callable[[], None]
) -> Dispatched | None:
    """The dispatch through windows, if there are some with enough room."""
    route, arguments = request.route, request.arguments
    handle, hop, weights = route.handle, route.hop, arguments.topk_weights
    if fabric.window is None:
        return None
    agreed = request.agreed()
    if not agreed.windows:
        return None
    if handle is not None:
        hop, traffic = handle.routing.plan.hops[0], handle.routing.plan.traffic
    elif hop is not None and not hop.is_static:
        numbers = agreed.numbers or direct.gather_numbers(
            fabric, [*hop.send_counts, *route.choices]
        )
        traffic = direct.traffic_of(numbers)
    else:
        return None
    if traffic is None or hop is None:
        return None
    alignment, expand = route.expert_alignment, route.expand
    layout = None if handle is None else handle.routing.plan.layout
    if layout is None:
        layout = direct.layout_of(hop, route.topk_idx, traffic, fabric.rank, expand, alignment)
    if handle is None:
        first = fabric.rank * route.num_max_tokens_per_rank
        words: Tensor | None = direct.routing_words(route.topk_idx, weights, first)
    else:
        words = None if weights is None else weights.contiguous().view(torch.int32)
    num_words = 0 if words is None else words.shape[1]
    transfer = direct.dispatch_transfer(fabric, layout, request.payloads, num_words, agreed.windows)
    if transfer is None:
        return None
    payloads, words = direct.send_rows(transfer, layout, request.payloads, words)
    before_epilogue()
    if handle is None:
        plan = direct.plan_of(hop, route.topk_idx, words, traffic, fabric.rank)
        plan.layout = layout
        handle = _handle(fabric, request, plan, serial)
    if weights is not None:
        arrived = words[:, -weights.shape[1] :]  # a copy does not keep the region
        weights = arrived.clone(memory_format=torch.contiguous_format).view(torch.float32)
    if expand:
        for rows in payloads:
            direct.zero_padding(rows, traffic, fabric.rank, alignment)
    payloads = direct.settled(payloads, transfer)
    return _layout(payloads, weights, handle, arguments.use_tma_aligned_col_major_sf, in_place=True)


def _layout(
    arrived: list[Tensor],
    weights: Tensor | None,
    handle: EPHandle,
    column_major_sf: bool,
    in_place: bool = False,
) -> Dispatched:
    """Results in the layout of the handle, in which `in_place` rows are already."""
    routing = handle.routing
    topk_idx: Tensor | None = None
    if routing.topk_to_pos is None or routing.pos_to_expert is None:
        size = handle.num_recv_tokens
        payloads = [_padded(each, size) for each in arrived]
        weights = None if weights is None else _padded(weights, size)
        # The handle keeps its own, in int64.
        topk_idx = _padded(routing.recv_topk_idx, size, -1).to(handle.topk_idx.dtype, copy=True)
    else:
        size = handle.num_expanded_tokens
        if in_place:
            payloads = [_padded(each, size) for each in arrived]
        else:
            payloads = [scatter_rows(each, routing.topk_to_pos, size) for each in arrived]
        if weights is not None:
            row_weights = weights.new_zeros(size + 1)  # the last for slots without a row
            positions = torch.where(routing.topk_to_pos >= 0, routing.topk_to_pos, size)
            row_weights[positions.long()] = weights
            weights = row_weights[:size]
    if column_major_sf and len(payloads) > 1:  # without scale factors there is nothing to lay out
        payloads[1] = column_major(payloads[1])
    return Dispatched(payloads, topk_idx, weights, handle)


def _padded(rows: Tensor, size: int, fill: int = 0) -> Tensor:
    """`rows` `[n, width]`, cut off or with `fill` below: `size` in all."""
    if rows.shape[0] >= size:
        return rows[:size]
    if fill:
        below = rows.new_full((size - rows.shape[0], rows.shape[1]), fill)
    elif rows.shape[1] == 0:
        return rows.new_empty((size, 0))
    else:
        below = zeros(size - rows.shape[0], field_of(rows), rows.device)
    return torch.cat([as_bytes(rows), as_bytes(below)]).view(rows.dtype)


def column_major(sf: Tensor) -> Tensor:
    """The same scales with strides `(1, rows rounded up to a multiple of 4)`."""
    num_rows, num_packs = sf.shape
    columns = sf.new_zeros((num_packs, align(num_rows, 4)))
    return columns.T[:num_rows].copy_(sf)


def _handle(fabric: Fabric, request: DispatchRequest, plan: Plan, serial: int) -> EPHandle:
    """The handle of a new routing."""
    route, num_max_rows = request.route, request.arguments.num_max_rows
    topology, rank = fabric.topology, fabric.rank
    num_local = route.num_experts // topology.num_ranks
    max_tokens, alignment = route.num_max_tokens_per_rank, route.expert_alignment
    num_topk = plan.topk_idx.shape[1]
    local = plan.topk_idx - rank * num_local
    local.masked_fill_((plan.topk_idx < 0) | (local < 0) | (local >= num_local), -1)
    counts = count_ids(local, num_local)
    stats = request.arguments.cumulative_local_expert_recv_stats
    if stats is not None:
        stats += counts
    num_dropped = counts.new_zeros(1, dtype=torch.int32)
    if route.cpu_sync:
        num_recv, num_expanded = plan.num_arrived, 0
    else:
        num_recv = topology.num_ranks * max_tokens
        num_expanded = max_expanded_rows(num_recv, num_topk, num_local, alignment)
    if num_max_rows is not None and route.expand:
        num_expanded = num_max_rows
    elif num_max_rows is not None:
        num_recv = num_max_rows
        num_dropped += (plan.sources[num_recv:] >= 0).sum()
        local[num_recv:] = -1
        counts = count_ids(local, num_local)
    aligned = (counts + alignment - 1) // alignment * alignment
    ends = aligned.cumsum(0)
    aligned_list: list[int] = []
    if route.cpu_sync:
        aligned_list = _aligned_counts(plan, rank, num_local, alignment) or aligned.tolist()
        num_expanded = sum(aligned_list)
    topk_to_pos = pos_to_expert = None
    if route.expand:
        if num_expanded == 0:
            topk_to_pos = torch.full(local.shape, -1, dtype=torch.int32, device=local.device)
            pos_to_expert = topk_to_pos.new_empty(0)
        else:
            mapping = moe.get_fused_mapping(
                local, num_local, num_expanded, alignment, overflow=num_dropped
            )
            pos_to_expert, topk_to_pos = mapping[0], mapping[3]
        starts = ends - aligned
        if num_max_rows is not None:  # counts of the rows that fit
            starts = starts.clamp(max=num_expanded)
            counts = torch.minimum(counts, num_expanded - starts)
        ends = starts + counts
    given, copy = request.arguments.topk_idx, request.arguments.do_handle_copy
    if given is None:
        raise RuntimeError("a dispatch without a handle has topk_idx")
    kept = route.topk_idx.to(given.dtype)
    routing = Routing(plan, fabric, serial, local, topk_to_pos, pos_to_expert)
    return EPHandle(
        do_expand=route.expand,
        num_experts=route.num_experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=max_tokens,
        num_sms=route.num_sms,
        topk_idx=kept.clone() if copy else kept,
        num_recv_tokens=num_recv,
        num_expanded_tokens=num_expanded,
        num_recv_tokens_per_expert_list=aligned_list,
        psum_num_recv_tokens_per_scaleup_rank=plan.block_counts.cumsum(0).int(),
        psum_num_recv_tokens_per_expert=ends.int(),
        num_unaligned_recv_tokens_per_expert=counts.int(),
        num_dropped=num_dropped,
        recv_src_metadata=_metadata(plan, local, topk_to_pos, max_tokens),
        routing=routing,
    )


def _aligned_counts(plan: Plan, rank: int, num_local: int, alignment: int) -> list[int]:
    """The counts of the local experts where the host knows them, else none."""
    if plan.traffic is None:
        return []
    first = rank * num_local
    chosen = [plan.traffic.chosen(expert) for expert in range(first, first + num_local)]
    return [align(count, alignment) for count in chosen]


def _metadata(plan: Plan, local: Tensor, topk_to_pos: Tensor | None, max_tokens: int) -> Tensor:
    """`[N, K + 2]` int32, see `EPHandle`."""
    num_topk = local.shape[1]
    slots = torch.arange(num_topk, device=local.device)
    masters = torch.where(local >= 0, slots, -1).amax(1)
    if len(plan.hops) == 1:
        peers = plan.sources.div(max_tokens, rounding_mode="floor")
    else:  # the index of each row among those from the same peer
        counts = plan.hops[-1].recv_counts
        if plan.is_static:
            within = torch.arange(sum(counts), device=local.device) % max(1, counts[0])
        else:
            within = torch.cat([torch.arange(count) for count in counts]).to(local.device)
        peers = within[plan.order]
    out = torch.full((local.shape[0], num_topk + 2), -1, dtype=torch.int32, device=local.device)
    out[:, 0] = plan.sources
    out[:, 1] = torch.where(plan.sources >= 0, peers * num_topk + masters, -1)
    if topk_to_pos is not None:
        out[:, 2:] = topk_to_pos
    return out


# ---- combine ------------------------------------------------------------------------------------


def combine(
    fabric: Fabric, request: CombineRequest, before_epilogue: Callable[[], None] = no_wait
) -> tuple[Tensor, Tensor | None]:
    """Send results back to their sources and add them up: `[T, H]`, and weights `[T, K]`."""
    handle, x, weights = request.handle, request.x.contiguous(), request.topk_weights
    routing = handle.routing
    plan, topk_to_pos = routing.plan, routing.topk_to_pos
    if topk_to_pos is not None and not request.reduce_first:
        request.agreed()
        return combine_unreduced(fabric, plan, x, None, topk_to_pos, request.bias, before_epilogue)
    if topk_to_pos is None:
        x = _padded(x, plan.num_arrived)
        weights = None if weights is None else _padded(weights, plan.num_arrived)
    elif weights is not None:
        row_weights = torch.cat([weights, weights.new_zeros(1)])
        weights = row_weights[topk_to_pos.long()]  # -1, no row: the last, which is zero
    if not request.reduce_first:
        request.agreed()
        return combine_unreduced(fabric, plan, x, weights, None, request.bias, before_epilogue)
    if fabric.window is not None and plan.traffic is not None:
        direct.return_slots(plan, plan.traffic, fabric.rank)
        num_weights, windows = 0 if weights is None else weights.shape[1], request.agreed().windows
        transfer = direct.combine_transfer(fabric, plan, x, num_weights, windows)
        if transfer is not None:
            values, back = direct.return_rows(fabric, plan, transfer, x, weights, topk_to_pos)
            before_epilogue()
            return staged_sum(values, plan.hops[0].items, request.bias), back
    values = x if topk_to_pos is None else staged_sum(x, topk_to_pos)
    return combine_staged(
        fabric, plan, values, weights, request.agreed, request.bias, before_epilogue
    )
