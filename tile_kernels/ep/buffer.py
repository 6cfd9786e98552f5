"""`ElasticBuffer`: tokens to the ranks of their experts, and results back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.ep import exchange, gather, model, pipeline
from tile_kernels.ep.agreement import agree
from tile_kernels.ep.autograd import CombineFn, DispatchFn
from tile_kernels.ep.domains import topology_of
from tile_kernels.ep.engines import (
    ActiveEngine,
    Engine,
    check_engine,
    chosen_engine,
    make_engine,
)
from tile_kernels.ep.engram import EngramStore
from tile_kernels.ep.events import (
    EventHandle,
    EventOverlap,
    Finish,
    comm_stream,
    on_comm_stream,
)
from tile_kernels.ep.gather import GatherSessions
from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.journey import Fabric
from tile_kernels.ep.pipeline import Pipeline
from tile_kernels.ep.requests import Settings, combine_request, dispatch_request
from tile_kernels.ep.rows import as_bytes
from tile_kernels.runtime import checks
from tile_kernels.utils import align

Request = TypeVar("Request")
Received = Tensor | tuple[Tensor, ...]


class ElasticBuffer:
    """Expert-parallel dispatch and combine over a group of ranks. Making one is collective.

    | argument | meaning |
    |---|---|
    | `group` | a `torch.distributed` process group, or a `LocalGroup` (ranks as threads) |
    | `num_bytes` | size of the buffer, or give the shape below |
    | `num_max_tokens_per_rank`, `hidden`, `num_topk`, `use_fp8_dispatch` | the shape |
    | `allow_hybrid_mode` | send tokens once to each node, then on to its ranks |
    | `allow_multiple_reduction` | add results on each rank and node on their way back, rounding \
each time; otherwise the source adds them all up, rounding once |
    | `engine` | `collective`, `mmap`, `symm`, `local`, or `auto`: what the group is made for |
    | `num_scaleup_ranks` | ranks of a node; by default those of a host |
    | `num_cpu_timeout_secs` | how long to wait for another rank before an error names it |
    | `num_gpu_timeout_secs` | the same for data that a CUDA stream waits for (`symm`) |
    | `check_ranks` | compare notes before every call; without it, only where counts are needed |
    | `active_ranks` | a bool for each rank of the group: False for those to go on without |

    What the others say is checked and recorded, but has no effect on these engines: received rows
    are always in the deterministic order, and there are no queue pairs and no kernels that wait.

    Errors of one rank are raised on all of them, before any data moves, and say which rank it was.
    A rank that dies or hangs is an error on all others within the timeout, which names it. The
    buffer is then of no more use; a new one with `active_ranks` works among the others: choices
    of experts on inactive ranks count as none, and tokens travel in direct mode.

    `EP_OVERRIDE_RDMA_SL` in the environment replaces `sl_idx`, `EP_AVOID_RECORD_STREAM=1` keeps
    tensors of asynchronous calls alive in their event, `EP_BUFFER_DEBUG=1` prints the settings.

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
        world = _active_part(make_engine(group), active_ranks, num_cpu_timeout_secs)
        settings: Settings = {
            "num_bytes": num_bytes,
            "num_cpu_bytes": num_cpu_bytes,
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "hidden": hidden,
            "num_topk": num_topk,
            "use_fp8_dispatch": str(use_fp8_dispatch),
            "allow_hybrid_mode": str(allow_hybrid_mode),
            "allow_multiple_reduction": str(allow_multiple_reduction),
            "num_scaleup_ranks": num_scaleup_ranks,
            "check_ranks": str(check_ranks),
            "engine": str(engine),
        }
        error: Exception | None = None
        keep_tensors = speak = False
        try:
            check_engine(world, engine)
            flags = {
                "use_fp8_dispatch": use_fp8_dispatch,
                "deterministic": deterministic,
                "allow_hybrid_mode": allow_hybrid_mode,
                "allow_multiple_reduction": allow_multiple_reduction,
                "prefer_overlap_with_compute": prefer_overlap_with_compute,
                "explicitly_destroy": explicitly_destroy,
                "check_ranks": check_ranks,
            }
            for name, flag in flags.items():
                checks.boolean(name, flag)
            sl_idx = _from_environment("EP_OVERRIDE_RDMA_SL", sl_idx)
            checks.integer("sl_idx", sl_idx, 0, 15)
            checks.integer("num_allocated_qps", num_allocated_qps, 0)
            checks.integer("num_cpu_timeout_secs", num_cpu_timeout_secs, 1)
            checks.integer("num_gpu_timeout_secs", num_gpu_timeout_secs, 1)
            _check_sizes(num_bytes, num_cpu_bytes, num_max_tokens_per_rank, hidden, num_topk)
            if _from_environment("EP_NUM_TOPK_IDX_BITS", 64) != 64:
                raise ValueError("EP_NUM_TOPK_IDX_BITS must be 64: topk_idx is int64 here")
            keep_tensors = bool(_from_environment("EP_AVOID_RECORD_STREAM", 0))
            speak = bool(_from_environment("EP_BUFFER_DEBUG", 0))
        except (TypeError, ValueError) as problem:
            error = problem
        agree(world, "ElasticBuffer", settings, error, [0] * world.size)
        all_active = len(world.active) == world.size
        topology, physical = topology_of(
            world, allow_hybrid_mode and all_active, num_scaleup_ranks if all_active else world.size
        )
        self.num_bytes = num_bytes or model.buffer_bytes(
            topology.num_scaleout_ranks,
            topology.num_scaleup_ranks,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
            all_nvlink=topology.is_hybrid or physical[0] == 1,
        )
        if isinstance(world, ActiveEngine):
            part = chosen_engine(world.part, engine, self.num_bytes, num_gpu_timeout_secs)
            world = ActiveEngine(part, world.active, world.size)
        else:
            world = chosen_engine(world, engine, self.num_bytes, num_gpu_timeout_secs)

        self.group = group
        self.rank_idx, self.num_ranks = world.index, world.size
        self.engine = world.name
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.sl_idx = sl_idx
        self.num_allocated_qps = num_allocated_qps or model.default_num_qps(allow_hybrid_mode)
        self.num_cpu_timeout_secs = num_cpu_timeout_secs
        self.num_gpu_timeout_secs = num_gpu_timeout_secs
        self.explicitly_destroy = explicitly_destroy
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_cpu_bytes = num_cpu_bytes
        self.num_rdma_ranks, self.num_nvlink_ranks = physical
        self.num_scaleout_ranks = topology.num_scaleout_ranks
        self.num_scaleup_ranks = topology.num_scaleup_ranks
        self.scaleout_rank_idx = topology.node_of(world.index)
        self.scaleup_rank_idx = topology.place_of(world.index)
        self._check_ranks = check_ranks
        self._fabric = Fabric.of(world, topology)
        self._engram = EngramStore(world, self.num_bytes - num_cpu_bytes, num_cpu_bytes)
        self._pipeline: Pipeline | None = None
        self._sessions: GatherSessions | None = None
        self._num_dispatches = 0
        self._destroyed = False
        self._settle = world.settle if check_ranks else None
        self._keep_tensors = keep_tensors
        if speak:
            print(  # noqa: T201 - as asked for
                f"ElasticBuffer: rank {self.rank_idx} of {self.num_ranks}, engine {self.engine}, "
                f"{self.num_scaleout_ranks} x {self.num_scaleup_ranks} ranks, {self.num_bytes} "
                f"bytes, settings {settings}",
                flush=True,
            )

    # ---- life and properties ------------------------------------------------------------------

    def destroy(self) -> None:
        """Wait for all ranks and end the use of the buffer; needs `explicitly_destroy=True`."""
        if not self.explicitly_destroy:
            raise RuntimeError(
                "ElasticBuffer.destroy: the buffer was made with explicitly_destroy=False"
            )
        if not self._destroyed:
            self._destroyed = True
            self._fabric.world.settle()
            self._fabric.world.barrier("ElasticBuffer.destroy")

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait for all ranks; `with_cpu_sync` for their devices as well."""
        del use_comm_stream, sequential  # the host waits, so streams have nothing to order
        if with_cpu_sync and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._fabric.world.barrier("ElasticBuffer.barrier")

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that communication on the current CUDA device uses."""
        if not torch.cuda.is_available():
            raise RuntimeError("ElasticBuffer.get_comm_stream: there is no CUDA device")
        return comm_stream(torch.device("cuda"))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """`(nodes, ranks of each)`."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """`(nodes, ranks of each)` as tokens travel."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    # ---- sizes and counts ---------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that a buffer for this shape needs on each rank. Collective."""
        topology, physical = topology_of(make_engine(group), allow_hybrid_mode, None)
        return model.buffer_bytes(
            topology.num_scaleout_ranks, topology.num_scaleup_ranks, num_max_tokens_per_rank,
            hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction,
            all_nvlink=topology.is_hybrid or physical[0] == 1,
        )  # fmt: skip

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, int]:
        """Bytes on the GPU for fetched rows, and in host memory for the entries."""
        return model.engram_bytes(num_entries, hidden, num_max_tokens_per_rank, dtype)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes for tensors in flight to and from both neighbours."""
        return model.pp_bytes(num_max_tensor_bytes, num_max_inflight_tensors)

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: Any, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> int:
        """Bytes of a session that gathers a tensor of each shape."""
        return model.all_gather_session_bytes(make_engine(group).size, shapes, dtype)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Bytes of a buffer for such sessions."""
        make_engine(group)
        return align(num_max_session_bytes, model.PAGE)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """How many SMs would keep the links busy: see `model.num_sms`.

        Bandwidths are not detected: those that matter for the topology must be given. On a machine
        without a GPU the SMs are those of the default device (`config.get_device_num_sms`).
        """
        if num_scaleout_topk != 0:
            raise ValueError(
                "ElasticBuffer.get_theoretical_num_sms: num_scaleout_topk must be 0, got "
                f"{num_scaleout_topk}"
            )
        with _named("ElasticBuffer.get_theoretical_num_sms"):
            return model.num_sms(
                self.num_scaleout_ranks,
                self.num_scaleup_ranks,
                num_experts,
                num_topk,
                rdma_gbs=rdma_gbs,
                nvlink_gbs=nvlink_gbs,
                num_device_sms=config.get_device_num_sms(),
                num_physical_nvlink_ranks=self.num_nvlink_ranks,
                prefer_overlap_with_compute=self.prefer_overlap_with_compute,
                sm_read_gbs=sm_read_gbs,
                sm_write_gbs=sm_write_gbs,
            )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """How many of the allocated queue pairs a transfer on `num_sms` SMs would use."""
        return model.num_qps(num_sms, self.num_allocated_qps, self.allow_hybrid_mode)

    # ---- dispatch and combine -----------------------------------------------------------------

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
        """Send each token to the ranks of its experts. Collective.

        | argument | shape | dtype | meaning |
        |---|---|---|---|
        | `x` | `[T, H]`, or a tuple of `[T, width]` | any | data; or data, scale factors, more |
        | `topk_idx` | `[T, K]` | int64 | experts, -1: none, each once; `K` up to 32 |
        | `topk_weights` | `[T, K]` | float32, or None | carried along |
        | `cumulative_local_expert_recv_stats` | `[L]` | int32, or None | counts are added to it |
        | `num_experts` | | int | a multiple of the ranks |
        | `num_max_tokens_per_rank` | | int | at least `T` everywhere, the same everywhere |
        | `expert_alignment` | | int | rows of an expert start at its multiples |
        | `handle` | | `EPHandle` | send along the routing of an earlier dispatch |
        | `do_handle_copy` | | bool | keep a copy of `topk_idx`, not the tensor itself |
        | `do_cpu_sync` | | bool | results have as many rows as arrived, not as many as could |
        | `do_expand` | | bool | one row for each token and local expert, by expert |
        | `use_tma_aligned_col_major_sf` | | bool | the second of `x` comes with columns in a row |
        | `num_max_rows` | | int, or None | without `do_cpu_sync`: rows of the results |
        | returns `recv_x` | `[N, H]`, or `[rows, H]` expanded | as `x` | tuple if `x` is one |
        | returns `recv_topk_idx` | `[N, K]` | int64 | local experts, -1: none here; None expanded |
        | returns `recv_topk_weights` | `[N, K]`, or `[rows]` | float32 | None if none came |
        | returns `handle` | | `EPHandle` | |
        | returns `event` | | `EventOverlap` | |

        Rows are in ascending order of source rank and token, in the expanded layout inside each
        expert. Padding is zero, also without `do_zero_padding`; below the rows that arrived there
        are zeros without `do_cpu_sync` (ids: -1). With a handle the layout is the handle's.

        Without `do_cpu_sync`, on a buffer with `check_ranks=False` and `allow_multiple_reduction`,
        the host never waits for the device: as much is sent as could be needed, and the values of
        `topk_idx` are not looked at (ids out of range are dropped). CUDA graphs can record such a
        dispatch and the combine after it, on engines that do not wait on the host.

        `num_max_rows` makes results smaller than what could be needed. Tokens (expanded: choices)
        that find no row there are left out, from the end, and add nothing to what `combine` sums;
        `handle.num_dropped` counts them, `handle.raise_if_dropped()` looks at that.

        Differentiable with respect to floating-point `x` and `topk_weights`; the gradient is
        `combine`. Weights of slots on other ranks have none.
        """
        common = (
            num_sms, num_qps, previous_event, previous_event_before_epilogue,
            async_with_compute_stream, allocate_on_comm_stream,
        )  # fmt: skip
        may_be_static = not self._check_ranks and self.allow_multiple_reduction
        request, error = _checked(
            lambda: dispatch_request(
                self._fabric,
                self.num_max_tokens_per_rank,
                x,
                topk_idx,
                topk_weights,
                cumulative_local_expert_recv_stats,
                num_experts,
                num_max_tokens_per_rank,
                expert_alignment,
                common,
                handle,
                do_handle_copy,
                do_cpu_sync,
                do_expand,
                do_zero_padding,
                use_tma_aligned_col_major_sf,
                num_max_rows,
                static=may_be_static,
            )
        )
        leg = None if request is None else request.leg
        counts = [0] * self.num_ranks if leg is None else self._fabric.counts_by_rank(leg)
        must_count = handle is None and not (may_be_static and do_cpu_sync is False)
        settings = {} if request is None else request.settings
        heard = self._agree("ElasticBuffer.dispatch", settings, error, counts, must_count)
        if request is None:
            raise RuntimeError("unreachable: a bad request is an error of every rank")
        if leg is not None:
            self._num_dispatches += 1
            if not leg.is_static:
                leg.recv_counts = self._fabric.counts_on_first_leg(heard)
        serial = self._num_dispatches
        static = leg is not None and leg.is_static  # then the leg may still be in the making
        with self._on_comm_stream(request.payloads[0].device, previous_event, static) as finish:
            before = _waiting_for(previous_event_before_epilogue)

            def run() -> exchange.Dispatched:
                return exchange.dispatch(self._fabric, request, serial, before)

            if request.needs_grad:
                kept: list[exchange.Dispatched] = []
                given = (request.topk_weights, *request.payloads)
                weights, *payloads = DispatchFn.apply(self, run, kept, *given)
                result = exchange.Dispatched(payloads, kept[0].topk_idx, weights, kept[0].handle)
            else:
                result = run()
            tensors = [*request.payloads, request.topk_idx, request.topk_weights, request.stats]
            tensors += [*result.payloads, result.topk_idx, result.topk_weights]
            tensors += result.handle.tensors() + ([] if leg is None else leg.tensors())
            event = finish(tensors, async_with_compute_stream)
        received = tuple(result.payloads) if request.is_tuple else result.payloads[0]
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
        """Send results back to the tokens' ranks and add them up. Collective.

        | argument | shape | dtype | meaning |
        |---|---|---|---|
        | `x` | `[N, H]`, or `[rows, H]` | bfloat16, float16, float32 | in the handle's layout |
        | `handle` | | `EPHandle` | of the dispatch |
        | `topk_weights` | `[N, K]`, or `[rows]` | float32, or None | sent back, not applied |
        | `bias` | `[T, H]`, or two of them | as `x` | what the sum begins with |
        | returns `combined_x` | `[T, H]` | as `x` | sums; zero for a token without experts |
        | returns `combined_topk_weights` | `[T, K]` | float32 | of each slot, from its expert's \
rank |
        | returns `event` | | `EventOverlap` | |

        Every sum is made in float32, from +0.0, in the order of the slots (of a rank or node: its
        largest slot), and rounded to the dtype of `x`: on each rank (expanded layout), on each node
        (hybrid mode), and at the source, there after the biases. With
        `allow_multiple_reduction=False` only the last of these sums is made. The result depends on
        neither the engine nor timing.

        Differentiable with respect to `x`, `topk_weights` and `bias`; the gradient is `dispatch`.
        """
        common = (
            num_sms, num_qps, previous_event, previous_event_before_epilogue,
            async_with_compute_stream, allocate_on_comm_stream,
        )  # fmt: skip
        request, error = _checked(
            lambda: combine_request(
                self._fabric, self.allow_multiple_reduction, x, handle, topk_weights, bias, common
            )
        )
        counts = [0] * self.num_ranks
        settings = {} if request is None else request.settings
        self._agree("ElasticBuffer.combine", settings, error, counts, must_count=False)
        if request is None:
            raise RuntimeError("unreachable: a bad request is an error of every rank")
        with self._on_comm_stream(request.x.device, previous_event) as finish:
            before = _waiting_for(previous_event_before_epilogue)

            def run() -> tuple[Tensor, Tensor | None]:
                return exchange.combine(self._fabric, request, before)

            if request.needs_grad:
                given = (request.x, request.topk_weights, *request.bias)
                combined, weights = CombineFn.apply(self, run, request.handle, *given)
            else:
                combined, weights = run()
            tensors = [request.x, topk_weights, *request.bias, combined, weights]
            event = finish(tensors, async_with_compute_stream)
        return combined, weights, event

    def _on_comm_stream(
        self, device: torch.device, previous_event: EventHandle | None, after_caller: bool = False
    ) -> AbstractContextManager[Finish]:
        return on_comm_stream(
            device, previous_event, after_caller, self._settle, self._keep_tensors
        )

    # ---- pipeline neighbours ------------------------------------------------------------------

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Prepare for sends between ring neighbours. Collective."""
        self._configure(
            "ElasticBuffer.pp_set_config",
            lambda: pipeline.check_config(num_max_tensor_bytes, num_max_inflight_tensors),
            {
                "num_max_tensor_bytes": num_max_tensor_bytes,
                "num_max_inflight_tensors": num_max_inflight_tensors,
            },
        )
        if self._pipeline is not None:
            self._pipeline.finish()
        world = self._fabric.world
        self._pipeline = Pipeline(world, num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Send a contiguous tensor, a multiple of 32 bytes, to the next or the previous rank.

        Returns before it is received, unless too many are under way.
        """
        checks.integer("num_sms", num_sms, 0)
        if self._pipeline is None:
            raise RuntimeError("ElasticBuffer.pp_send: pp_set_config must come first")
        with _named(f"ElasticBuffer.pp_send: rank {self.rank_idx}"):
            self._pipeline.send(t, dst_rank_idx)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Fill `t` with the next tensor from the next or the previous rank; they come in order."""
        checks.integer("num_sms", num_sms, 0)
        if self._pipeline is None:
            raise RuntimeError("ElasticBuffer.pp_recv: pp_set_config must come first")
        with _named(f"ElasticBuffer.pp_recv: rank {self.rank_idx}"):
            self._pipeline.receive(t, src_rank_idx)

    # ---- all-gather and reduce-scatter --------------------------------------------------------

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        """Prepare for sessions of at most so many bytes and all-gathers. Collective."""
        most = num_max_all_gathers_per_session
        self._configure(
            "ElasticBuffer.agrs_set_config",
            lambda: gather.check_config(num_max_session_bytes, most, self.num_ranks),
            {
                "num_max_session_bytes": num_max_session_bytes,
                "num_max_all_gathers_per_session": most,
            },
        )
        self._sessions = GatherSessions(self._fabric.world, num_max_session_bytes, most)

    def _agrs(self, call: str) -> GatherSessions:
        if self._sessions is None:
            raise RuntimeError(f"ElasticBuffer.{call}: agrs_set_config must come first")
        return self._sessions

    def create_agrs_session(self) -> None:
        """Open a session. All ranks must gather the same things in the same order."""
        self._agrs("create_agrs_session").begin()

    def destroy_agrs_session(self) -> None:
        """Close the session; what it gathered is overwritten by the next. Collective."""
        self._agrs("destroy_agrs_session").end()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session for the length of a `with`; nothing unless `enabled`."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        except BaseException:
            self._agrs("agrs_new_session").abandon()
            raise
        self.destroy_agrs_session()

    def agrs_get_inplace_tensor(
        self,
        shapes: Sequence[int] | Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor | tuple[Tensor, ...]:
        """Where this rank's part of the next all-gather lies: fill it, then gather it.

        One shape gives a tensor, a sequence of shapes a tuple.
        """
        several = len(shapes) > 0 and not isinstance(shapes[0], int)
        wanted = shapes if several else [shapes]
        sessions = self._agrs("agrs_get_inplace_tensor")
        views = sessions.own_places(wanted, dtype, torch.device(device))  # type: ignore[arg-type]
        return tuple(views) if several else views[0]

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """`([R, *shape], wait)`, or for a sequence `(*outs, wait)`; `wait()` before using them.

        On a CUDA device the transfer runs beside the current stream, which `wait()` lets wait.
        Results lie in the memory of the session. A sequence counts as one all-gather.
        """
        return self._gathered("all_gather", t)

    def reduce_scatter(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """For `t` `[R, *shape]`: `([*shape], wait)`, this rank's part of the sum over ranks.

        In float32, in the order of the ranks, rounded once.
        """
        return self._gathered("reduce_scatter", t)

    def _gathered(self, call: str, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        sessions = self._agrs(call)
        tensors: list[Any] = list(t) if isinstance(t, (tuple, list)) else [t]
        first = tensors[0] if tensors else None
        device = first.device if isinstance(first, Tensor) else torch.device("cpu")
        with self._on_comm_stream(device, None) as finish:
            outs = getattr(sessions, call)(tensors)
            event = finish([*tensors, *outs], True)
        return (*outs, event.current_stream_wait)

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        """The sum of an integer tensor over all active ranks, for statistics. Collective.

        >>> from tile_kernels.ep import run_ranks
        >>> def load(group):
        ...     buffer = ElasticBuffer(group, num_bytes=2 << 20)
        ...     return buffer.sum_over_ranks(torch.tensor([1, group.rank])).tolist()
        >>> run_ranks(3, load)[0]
        [3, 3]
        """
        call = "ElasticBuffer.sum_over_ranks"
        _, error = _checked(lambda: _check_counts(t))
        settings: Settings = {} if error else {"t": f"{t.dtype} {tuple(t.shape)}"}
        self._agree(call, settings, error, [0] * self.num_ranks, must_count=True)
        if t.numel() == 0:
            return t.clone()
        rows = self._fabric.world.gather(as_bytes(t.cpu().reshape(1, -1))[0], call)
        return rows.view(t.dtype).sum(0, dtype=t.dtype).view(t.shape).to(t.device)

    # ---- engram -------------------------------------------------------------------------------

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Give this rank's rows of the table: `[n, H]`, `n` the same everywhere. Collective.

        `sf` `[R * n, P]`, of 4-byte elements and the same on all ranks, belongs to float8 rows.
        """
        with _named("ElasticBuffer.engram_write"):
            self._check_all_active(lambda: None)
        self._engram.write(storage, sf)

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Fetch the rows at global `indices` `[T, Q]` int32. Collective on these engines.

        Returns a function that returns `[T, Q * H]` and scale factors `[T, Q * P]`, or None.
        """
        checks.integer("num_qps", num_qps, 0)
        checks.boolean("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
        data, sf = self._engram.fetch(indices)
        if sf is not None and use_tma_aligned_col_major_sf:
            sf = exchange.column_major(sf)
        return lambda: (data, sf)

    def _configure(self, call: str, check: Callable[[], None], settings: Settings) -> None:
        _, error = _checked(lambda: self._check_all_active(check))
        self._agree(call, settings, error, [0] * self.num_ranks, must_count=True)

    def _check_all_active(self, check: Callable[[], None]) -> None:
        if len(self._fabric.world.active) < self.num_ranks:
            raise ValueError(
                f"all ranks must be active, but only {list(self._fabric.world.active)} of "
                f"{self.num_ranks} are"
            )
        check()

    def _agree(
        self,
        call: str,
        settings: Settings,
        error: Exception | None,
        counts: list[int],
        must_count: bool,
    ) -> list[int]:
        """Compare notes with the other ranks, unless neither counts nor checks are wanted."""
        if self._destroyed:
            raise RuntimeError(f"{call}: the buffer was destroyed")
        if must_count or self._check_ranks:
            return agree(self._fabric.world, call, settings, error, counts)
        if error is not None:
            raise type(error)(f"{call}: rank {self.rank_idx}: {error}") from error
        return counts


def _active_part(world: Engine, active_ranks: object, patience: object) -> Engine:
    """The ranks that take part, waiting for each other for so long. Collective among them."""
    if isinstance(patience, int) and patience >= 1:  # if not, all ranks will hear of it
        world.patience = patience
    with _named("ElasticBuffer"):
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
    places = [rank for rank, takes_part in enumerate(active_ranks) if takes_part]
    if len(places) == world.size:
        return world
    return ActiveEngine(world.split(places), places, world.size)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ValueError(f"{name} must be a number, got {text!r}")
    return int(text)


def _checked(build: Callable[[], Request]) -> tuple[Request | None, Exception | None]:
    """The request, or what is wrong with it."""
    try:
        return build(), None
    except (TypeError, ValueError) as problem:
        return None, problem


@contextmanager
def _named(call: str) -> Iterator[None]:
    """Put the call in front of what is wrong."""
    try:
        yield
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"{call}: {problem}") from problem


def _check_counts(t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"t must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"t must be int32 or int64, got {t.dtype}")


def _waiting_for(event: EventHandle | None) -> Callable[[], None]:
    return (lambda: None) if event is None else event.current_stream_wait


def _check_sizes(
    num_bytes: int | None, num_cpu_bytes: int, most_tokens: int, hidden: int, num_topk: int
) -> None:
    checks.integer("num_max_tokens_per_rank", most_tokens, 0)
    checks.integer("hidden", hidden, 0)
    checks.integer("num_topk", num_topk, 0, model.MOST_TOPK)
    checks.integer("num_cpu_bytes", num_cpu_bytes, 0)
    if num_bytes is None:
        if num_cpu_bytes:
            raise ValueError(f"num_cpu_bytes needs num_bytes, got {num_cpu_bytes} and None")
        if not (most_tokens and hidden):
            raise ValueError(
                "give num_bytes, or num_max_tokens_per_rank and hidden, got num_bytes=None, "
                f"num_max_tokens_per_rank={most_tokens}, hidden={hidden}"
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
