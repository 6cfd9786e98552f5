"""`ElasticBuffer`: tokens to the ranks of their experts, and results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep import compiled, exchange, model
from tile_kernels.ep.agreement import Agreed, agree, checked, unreachable
from tile_kernels.ep.arguments import CombineArguments, DispatchArguments, with_flags
from tile_kernels.ep.autograd import CombineFn, DispatchFn
from tile_kernels.ep.domains import topology_of
from tile_kernels.ep.engines import make_engine
from tile_kernels.ep.engram import EngramMethods, EngramStore
from tile_kernels.ep.events import EventHandle, EventOverlap, reading_after
from tile_kernels.ep.gather import GatherMethods
from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.pipeline import PipelineMethods
from tile_kernels.ep.requests import Limits, combine_request, dispatch_request
from tile_kernels.ep.setup import (
    BUFFER_FLAGS,
    BufferArguments,
    active_engine,
    check_arguments,
    data_engine,
    identity,
)
from tile_kernels.ep.sizes import SizeHints, buffer_bytes
from tile_kernels.ep.transport import Fabric, no_wait

Received = Tensor | tuple[Tensor, ...]


class ElasticBuffer(PipelineMethods, GatherMethods, EngramMethods, SizeHints):
    """Expert-parallel dispatch and combine over a group of ranks. Creating one is collective.

    Errors of one rank are raised on all of them before any data moves, and name the rank. If a rank
    dies or hangs, all others raise an error that names it within the timeout. The buffer cannot be
    used after that. Create a new one with `active_ranks` among the remaining ranks: experts of
    inactive ranks are never selected, and tokens are sent in direct mode.

    The environment variable `EP_OVERRIDE_RDMA_SL` replaces `sl_idx`, `EP_AVOID_RECORD_STREAM=1`
    keeps tensors of asynchronous calls alive in their event, and `EP_BUFFER_DEBUG=1` prints the
    settings.

    Args:
        group: A `torch.distributed` process group, or a `LocalGroup` (ranks as threads).
        num_bytes: The size of the buffer; or None, and the shape below. A call that needs more
            raises an error with the number of bytes that it needs.
        num_cpu_bytes: The part of `num_bytes` that is in host memory, for Engram tables.
        num_max_tokens_per_rank: The largest number of tokens of a rank.
        hidden: Channels of a token.
        num_topk: Experts per token.
        use_fp8_dispatch: Whether tokens are sent as FP8 with scales.
        deterministic: Recorded; received rows always have the deterministic order.
        allow_hybrid_mode: Whether tokens are sent once to each node, and from there to its ranks.
        allow_multiple_reduction: Whether results are summed on each rank and node before
            they are sent back, with a rounding each time. Otherwise the source computes the only
            sum and rounds once.
        prefer_overlap_with_compute: Affects only `get_theoretical_num_sms`.
        sl_idx: Recorded; has no effect on these engines.
        num_allocated_qps: Affects only `get_theoretical_num_qps`; these engines have no queue
            pairs.
        num_cpu_timeout_secs: Seconds to wait for another rank before an error names it.
        num_gpu_timeout_secs: Seconds to wait for data for which a CUDA stream waits (`symm`).
        explicitly_destroy: Whether `destroy` will be called.
        engine: `"collective"`, `"mmap"`, `"symm"`, `"local"`, or `"auto"`, which selects the engine
            that fits the group.
        num_scaleup_ranks: Ranks of a node; by default those of a host.
        check_ranks: Whether ranks compare their arguments before every call; otherwise only where
            counts are needed.
        active_ranks: A bool for each rank of the group: False for ranks that do not take part.

    Example:
        >>> import torch
        >>> from tile_kernels.ep import LocalGroup
        >>> buffer = ElasticBuffer(LocalGroup(), num_max_tokens_per_rank=8, hidden=4, num_topk=2)
        >>> x, topk_idx = torch.ones(3, 4), torch.tensor([[0, 1], [1, -1], [-1, -1]])
        >>> rows, ids, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=2)
        >>> ids.tolist()
        [[0, 1], [1, -1]]
        >>> buffer.combine(rows * 2, handle)[0].tolist()
        [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        engine: str = "auto",
        num_scaleup_ranks: int | None = None,
        check_ranks: bool = True,
        active_ranks: Sequence[bool] | None = None,
    ) -> None:
        arguments = BufferArguments(
            num_bytes=num_bytes, num_cpu_bytes=num_cpu_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch, deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode, allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute, sl_idx=sl_idx,
            num_allocated_qps=num_allocated_qps, num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs, explicitly_destroy=explicitly_destroy,
            engine=engine, num_scaleup_ranks=num_scaleup_ranks, check_ranks=check_ranks,
            active_ranks=active_ranks,
        )  # fmt: skip
        arguments = with_flags(arguments, BUFFER_FLAGS)
        world = active_engine(make_engine(group), arguments)
        environment, error = checked(lambda: check_arguments(world, arguments))
        agree(world, "ElasticBuffer", arguments.settings(), error)
        if environment is None:
            raise unreachable()
        all_active = len(world.active) == world.size
        self.deterministic = arguments.deterministic
        self.allow_hybrid_mode = arguments.allow_hybrid_mode
        self.allow_multiple_reduction = arguments.allow_multiple_reduction
        self.prefer_overlap_with_compute = arguments.prefer_overlap_with_compute
        self.explicitly_destroy = arguments.explicitly_destroy
        topology, physical = topology_of(
            world, self.allow_hybrid_mode and all_active,
            num_scaleup_ranks if all_active else world.size,
        )  # fmt: skip
        self.num_bytes = num_bytes or buffer_bytes(
            topology, physical, num_max_tokens_per_rank, hidden, num_topk,
            arguments.use_fp8_dispatch, self.allow_multiple_reduction,
        )  # fmt: skip
        world = data_engine(world, arguments, self.num_bytes)

        self.group = group
        self.rank_idx, self.num_ranks = world.index, world.size
        self.engine = world.name
        self.sl_idx = environment.sl_idx
        self.num_allocated_qps = num_allocated_qps or model.default_num_qps(self.allow_hybrid_mode)
        self.num_cpu_timeout_secs = num_cpu_timeout_secs
        self.num_gpu_timeout_secs = num_gpu_timeout_secs
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_cpu_bytes = num_cpu_bytes
        self.num_rdma_ranks, self.num_nvlink_ranks = physical
        self.num_scaleout_ranks = topology.num_scaleout_ranks
        self.num_scaleup_ranks = topology.num_scaleup_ranks
        self.scaleout_rank_idx = topology.node_of(world.index)
        self.scaleup_rank_idx = topology.index_in_node(world.index)
        self._check_ranks = arguments.check_ranks
        self._identity = identity(group, tuple(world.active))
        self._limits = Limits(
            num_max_tokens_per_rank, self.num_allocated_qps, num_bytes, num_cpu_bytes,
            topology.is_hybrid or physical[0] == 1, self.allow_multiple_reduction,
            self.can_avoid_host_waits,
        )  # fmt: skip
        self._keep_tensors = environment.keep_tensors
        self._fabric = Fabric.of(world, topology)
        self._engram = EngramStore(
            world, self._identity, self.num_bytes - num_cpu_bytes, num_cpu_bytes
        )
        self._num_dispatches = 0
        self.name = compiled.register_buffer(self)  # in this process, for operators
        if environment.verbose:
            print(  # noqa: T201 - as asked for
                f"ElasticBuffer: rank {self.rank_idx} of {self.num_ranks}, engine {self.engine}, "
                f"{self.num_scaleout_ranks} x {self.num_scaleup_ranks} ranks, {self.num_bytes} "
                f"bytes, settings {arguments.settings()}",
                flush=True,
            )

    @property
    def can_avoid_host_waits(self) -> bool:
        """Whether a dispatch with `do_cpu_sync=False` never waits for the device."""
        return not self._check_ranks and self.allow_multiple_reduction

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, ...],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        *,
        num_max_rows: int | None = None,
    ) -> tuple[Received, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token to the ranks of its experts. Collective.

        Rows are in ascending order of source rank and token, in the expanded layout inside each
        expert. Padding is zero. Without `do_cpu_sync`, rows after those that arrived are zero (ids:
        -1). With a handle the layout is that of the handle.

        Without `do_cpu_sync`, on a buffer with `check_ranks=False` and `allow_multiple_reduction`,
        the host never waits for the device: as much is sent as could be needed, and the values of
        `topk_idx` are not inspected (ids out of range are dropped). CUDA graphs can capture such a
        dispatch and the combine after it, on engines that do not wait on the host.

        `num_max_rows` makes results smaller than what could be needed. Tokens (in the expanded
        layout: selections) for which there is no row are dropped, from the end, and add nothing to
        the sums of `combine`. `handle.num_dropped` counts them, and `handle.raise_if_dropped()`
        reads that count.

        Differentiable with respect to floating-point `x` and `topk_weights`; the gradient is
        `combine`. Weights of slots on other ranks have no gradient.

        Args:
            x: `[T, H]` of any dtype, or a tuple of `[T, width]`: the data, or data, scale factors
                and more.
            topk_idx: `[T, K]`, int64 or int32: the experts of each token, each at most once; -1 for
                none. `K` is up to 32.
            topk_weights: `[T, K]`, float32, or None: sent with the tokens.
            cumulative_local_expert_recv_stats: `[L]`, int32, or None: the counts are added to it.
            num_experts: The number of experts, a multiple of the number of ranks.
            num_max_tokens_per_rank: At least `T` on every rank, and the same on all ranks.
            expert_alignment: The rows of an expert start at multiples of this number.
            num_sms: Recorded; has no effect on these engines.
            num_qps: Recorded; has no effect on these engines.
            previous_event: An event after which communication begins; None: it begins after the
                work of the current stream.
            previous_event_before_epilogue: An event for which the last step waits in addition; or
                None.
            async_with_compute_stream: Whether the current stream does not wait for the result; the
                returned event does.
            allocate_on_comm_stream: Whether results are allocated on the communication stream;
                required with a `previous_event`.
            handle: The handle of an earlier dispatch, whose routing is used again; or None.
            do_handle_copy: Whether the handle has a copy of `topk_idx` instead of the tensor
                itself.
            do_cpu_sync: Whether results have as many rows as arrived, instead of as many as could
                arrive.
            do_expand: Whether the result has one row for each token and local expert, sorted by
                expert.
            do_zero_padding: Has no effect: padding is always zero.
            use_tma_aligned_col_major_sf: Whether the second tensor of `x` arrives column-major.
            num_max_rows: Without `do_cpu_sync`, the number of rows of the results; or None.

        Returns:
            `recv_x` `[N, H]`, or `[rows, H]` expanded, a tuple if `x` is one; `recv_topk_idx` `[N,
            K]`, the local experts, -1 for those of other ranks, None if expanded;
            `recv_topk_weights` `[N, K]` or `[rows]`, float32, None if there are none; the
            `EPHandle`; and an `EventOverlap`.
        """
        return self._dispatch(
            DispatchArguments(
                x=x, topk_idx=topk_idx, topk_weights=topk_weights,
                cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
                num_experts=num_experts, num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment, num_sms=num_sms, num_qps=num_qps,
                previous_event=previous_event,
                previous_event_before_epilogue=previous_event_before_epilogue,
                async_with_compute_stream=async_with_compute_stream,
                allocate_on_comm_stream=allocate_on_comm_stream, handle=handle,
                do_handle_copy=do_handle_copy, do_cpu_sync=do_cpu_sync, do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
                num_max_rows=num_max_rows,
            )
        )  # fmt: skip

    def _dispatch(
        self, arguments: DispatchArguments
    ) -> tuple[Received, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        if torch.compiler.is_compiling():
            return (*compiled.dispatch(self, arguments), EventOverlap())
        arguments = replace(arguments, handle=compiled.resolved(arguments.handle))
        first = arguments.x[0] if isinstance(arguments.x, tuple) and arguments.x else arguments.x
        with reading_after(arguments.previous_event, first):
            request, error = checked(
                lambda: dispatch_request(self._fabric, arguments, self._limits)
            )
        if request is not None:
            arguments = request.arguments
        is_static = self.can_avoid_host_waits and arguments.do_cpu_sync is False
        needs_counts = arguments.handle is None and not is_static
        hop = None if request is None else request.route.hop
        proposed = self._propose(
            "ElasticBuffer.dispatch",
            {} if request is None else request.settings,
            error,
            None if hop is None else self._fabric.counts_by_rank(hop),
            [] if request is None or hop is None else [*hop.send_counts, *request.route.choices],
            needs_counts,
        )
        if request is None:
            proposed()
            raise unreachable()

        @cache
        def agreed() -> Agreed:
            found = proposed()
            if hop is not None:
                self._num_dispatches += 1
                if not hop.is_static:
                    hop.recv_counts = self._fabric.counts_on_first_hop(found.counts)
            return found

        request = replace(request, agreed=agreed)
        serial, device = self._num_dispatches + 1, request.payloads[0].device
        with self._on_comm_stream(device, arguments.previous_event) as finish:
            before_epilogue = _wait_of(arguments.previous_event_before_epilogue)

            def run() -> exchange.Dispatched:
                return exchange.dispatch(self._fabric, request, serial, before_epilogue)

            weights = arguments.topk_weights
            if request.needs_grad:
                results: list[exchange.Dispatched] = []
                outputs = DispatchFn.apply(self, run, results, weights, *request.payloads)
                recv_weights, *payloads = outputs
                ids, handle = results[0].topk_idx, results[0].handle
                result = exchange.Dispatched(payloads, ids, recv_weights, handle)
            else:
                result = run()
            stats = arguments.cumulative_local_expert_recv_stats
            tensors = [*request.payloads, request.route.topk_idx, weights, stats]
            tensors += [*result.payloads, result.topk_idx, result.topk_weights]
            tensors += result.handle.tensors() + ([] if hop is None else hop.tensors())
            event = finish(tensors, arguments.async_with_compute_stream)
        is_tuple = isinstance(arguments.x, tuple)
        received = tuple(result.payloads) if is_tuple else result.payloads[0]
        return received, result.topk_idx, result.topk_weights, result.handle, event

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sends results back to the ranks of their tokens and sums them. Collective.

        Every sum is computed in float32, from +0.0, in the order of the slots (of a rank or node:
        its largest slot), and rounded to the dtype of `x`: on each rank (expanded layout), on each
        node (hybrid mode), and at the source, there after the biases. With
        `allow_multiple_reduction=False` only the last of these sums is computed. The result depends
        on neither the engine nor timing.

        Differentiable with respect to `x`, `topk_weights` and `bias`; the gradient is `dispatch`.

        Args:
            x: `[N, H]` or `[rows, H]`, bfloat16, float16 or float32, in the layout of the handle.
            handle: The handle of the dispatch.
            topk_weights: `[N, K]` or `[rows]`, float32, or None: sent back, but not applied.
            bias: `[T, H]`, dtype of `x`, or two of them: the sum begins with it.
            num_sms: Recorded; has no effect on these engines.
            num_qps: Recorded; has no effect on these engines.
            previous_event: As in `dispatch`.
            previous_event_before_epilogue: As in `dispatch`.
            async_with_compute_stream: As in `dispatch`.
            allocate_on_comm_stream: As in `dispatch`.

        Returns:
            `combined_x` `[T, H]`, zero for a token without experts; `combined_topk_weights` `[T,
            K]`, float32, each from the rank of its expert, or None; and an `EventOverlap`.
        """
        return self._combine(
            CombineArguments(
                x=x, handle=handle, topk_weights=topk_weights, bias=bias, num_sms=num_sms,
                num_qps=num_qps, previous_event=previous_event,
                previous_event_before_epilogue=previous_event_before_epilogue,
                async_with_compute_stream=async_with_compute_stream,
                allocate_on_comm_stream=allocate_on_comm_stream,
            )
        )  # fmt: skip

    def _combine(self, arguments: CombineArguments) -> tuple[Tensor, Tensor | None, EventOverlap]:
        if torch.compiler.is_compiling():
            return (*compiled.combine(self, arguments), EventOverlap())
        arguments = replace(arguments, handle=compiled.resolved(arguments.handle))
        request, error = checked(lambda: combine_request(self._fabric, arguments, self._limits))
        settings = {} if request is None else request.settings
        agreed = self._propose("ElasticBuffer.combine", settings, error, needs_counts=False)
        if request is None:
            agreed()
            raise unreachable()
        request = replace(request, agreed=cache(agreed))
        with self._on_comm_stream(request.x.device, arguments.previous_event) as finish:
            before_epilogue = _wait_of(arguments.previous_event_before_epilogue)

            def run() -> tuple[Tensor, Tensor | None]:
                return exchange.combine(self._fabric, request, before_epilogue)

            inputs = (request.x, request.topk_weights, *request.bias)
            if request.needs_grad:
                combined, weights = CombineFn.apply(self, run, request.handle, *inputs)
            else:
                combined, weights = run()
            is_async = bool(arguments.async_with_compute_stream)
            event = finish([*inputs, combined, weights], is_async)
        return combined, weights, event


def _wait_of(event: EventHandle | None) -> Callable[[], None]:
    return no_wait if event is None else event.current_stream_wait
