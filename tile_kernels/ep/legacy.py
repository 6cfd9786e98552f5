"""DeepEP's first interface, `Buffer`, over `ElasticBuffer`: normal and low-latency mode.

Frameworks that were written for it (Megatron, vLLM, SGLang) call it with these names. All data
goes through one `ElasticBuffer`, made at the first dispatch, when the shape of a token is known.
As in DeepEP a handle serves every `Buffer` of its group: Megatron makes a larger one between the
forward and the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from tile_kernels import quant
from tile_kernels.ep import model
from tile_kernels.ep.agreement import agree, checked, unreachable
from tile_kernels.ep.buffer import ElasticBuffer
from tile_kernels.ep.engines import check_engine, make_engine
from tile_kernels.ep.events import EventHandle, EventOverlap, comm_stream
from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.requests import MAX_ALIGNMENT
from tile_kernels.ep.setup import identity
from tile_kernels.runtime import checks
from tile_kernels.utils import align

RANKS_PER_NODE = 8  # of the interface: more ranks are several nodes, connected by RDMA
SCALE_CHANNELS = 128  # channels that share a scale in low-latency mode
_FULL_CHUNKS = 256
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Config:
    """Chunk sizes of DeepEP's kernels. They are kept for size hints and have no other effect.

    Args:
        num_sms: The number of SMs.
        num_max_nvl_chunked_send_tokens: Tokens that are sent at once over NVLink.
        num_max_nvl_chunked_recv_tokens: Tokens for which there is room over NVLink.
        num_max_rdma_chunked_send_tokens: Tokens that are sent at once over RDMA.
        num_max_rdma_chunked_recv_tokens: Tokens for which there is room over RDMA.

    Example:
        >>> Config(20).get_nvl_buffer_size_hint(hidden_bytes=14336, num_ranks=8) % 128
        0
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = _FULL_CHUNKS
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = _FULL_CHUNKS

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes that receive these tokens from each rank of a node on each pair of SMs.

        Args:
            hidden_bytes: Bytes of a token.
            num_ranks: The number of ranks.
        """
        return self._hint(hidden_bytes, num_ranks, self.num_max_nvl_chunked_recv_tokens)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the same between nodes; 0 if all ranks are on one node.

        Args:
            hidden_bytes: Bytes of a token.
            num_ranks: The number of ranks.
        """
        if num_ranks <= RANKS_PER_NODE:
            return 0
        return 2 * self._hint(hidden_bytes, num_ranks, self.num_max_rdma_chunked_recv_tokens)

    def _hint(self, hidden_bytes: int, num_ranks: int, tokens: int) -> int:
        checks.integer("hidden_bytes", hidden_bytes, 1)
        checks.integer("num_ranks", num_ranks, 1)
        token = hidden_bytes + model.dispatch_row_bytes((), model.MAX_TOPK)
        return align(self.num_sms // 2 * num_ranks * tokens * token, SCALE_CHANNELS)


class NormalHandle(NamedTuple):
    """The routing of a dispatch, and the buffer that made it and serves later calls."""

    buffer: ElasticBuffer
    routing: EPHandle


class LowLatencyHandle(NamedTuple):
    """What `low_latency_combine` needs: also the place of each expanded row."""

    buffer: ElasticBuffer
    routing: EPHandle
    places: Tensor  # [rows] int64: the row of `[L * capacity]`, and one past it for padding
    capacity: int
    hidden: int


Handle = TypeVar("Handle", NormalHandle, LowLatencyHandle)
Result = TypeVar("Result")


class Buffer:
    """DeepEP's `Buffer`: dispatch and combine in the calls that its users make.

    Making one is collective. As with `ElasticBuffer`, an error of one rank in a collective call is
    raised on all of them before any data moves.

    Args:
        group: A `torch.distributed` process group, or a `LocalGroup`.
        num_nvl_bytes, num_rdma_bytes: Recorded. The engines allocate what a call needs.
        low_latency_mode: Whether `low_latency_*` will be called.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, comm: Recorded.
        explicitly_destroy: Whether `destroy` will be called, as in `ElasticBuffer`.
        enable_shrink: Whether ranks can be masked (`low_latency_update_mask_buffer`).
        engine: As in `ElasticBuffer`.

    Example:
        >>> from tile_kernels.ep import LocalGroup
        >>> buffer = Buffer(LocalGroup())
        >>> topk_idx = torch.tensor([[0, 1], [1, -1]])
        >>> per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
        >>> x = torch.ones(2, 8).bfloat16()
        >>> rows, ids, _, counts, handle, _ = buffer.dispatch(
        ...     x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
        ...     num_tokens_per_expert=per_expert, topk_idx=topk_idx,
        ...     topk_weights=torch.ones(2, 2))
        >>> counts
        [1, 2]
        >>> buffer.combine(rows, handle)[0].equal(x)
        True
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        engine: str = "auto",
    ) -> None:
        del allow_nvlink_for_low_latency_mode, allow_mnnvl, comm  # of other transports
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = bool(low_latency_mode)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.enable_shrink = bool(enable_shrink)
        self._world = make_engine(group)
        self.rank, self.group_size = self._world.index, self._world.size
        self._engine = engine
        self._identity = identity(group, "Buffer")
        self._buffer: ElasticBuffer | None = None
        self._masked = torch.zeros(self.group_size, dtype=torch.bool)
        self._destroyed = False

        def check() -> None:
            checks.integer("num_nvl_bytes", num_nvl_bytes, 0)
            checks.integer("num_rdma_bytes", num_rdma_bytes, 0)
            checks.integer("num_qps_per_rank", num_qps_per_rank, 0)
            check_engine(self._world, engine)

        agree(self._world, "Buffer", self._identity, checked(check)[1])

    # ---- static ---------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether instructions of Hopper are used, which is so where the GPU has them."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the number of SMs that configurations have by default.

        Args:
            new_num_sms: An even number.
        """
        with checks.named("Buffer.set_num_sms"):
            checks.integer("new_num_sms", new_num_sms, 2)
            if new_num_sms % 2:
                raise ValueError(f"new_num_sms must be even, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream, for `previous_event`."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns the configuration for a number of ranks. It has no effect on the engines here.

        Args:
            num_ranks: The number of ranks.
        """
        checks.integer("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Returns the configuration for a number of ranks. It has no effect on the engines here.

        Args:
            num_ranks: The number of ranks.
        """
        return Buffer.get_dispatch_config(num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes of received tokens and of their results in low-latency mode, in whole
        pages.

        Args:
            num_max_dispatch_tokens_per_rank: The largest number of tokens of a rank.
            hidden: Channels of a token.
            num_ranks: The number of ranks.
            num_experts: The number of experts.
        """
        del num_ranks
        token = align(2 * hidden, model.SECTION) + model.SECTION
        return align(2 * num_experts * num_max_dispatch_tokens_per_rank * token, model.PAGE)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that communication on the current CUDA device uses."""
        if not torch.cuda.is_available():
            raise RuntimeError("Buffer.get_comm_stream: there is no CUDA device")
        return comm_stream(torch.device("cuda"))

    def destroy(self) -> None:
        """End the use of the buffer. Collective; needs `explicitly_destroy=True`."""
        if not self.explicitly_destroy:
            raise RuntimeError("Buffer.destroy: the buffer was made with explicitly_destroy=False")
        if self._destroyed:
            return
        if self._buffer is None:
            agree(self._world, "Buffer.destroy", self._identity, None)
        else:
            self._buffer.destroy()
        self._destroyed = True

    # ---- normal mode ----------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts what `dispatch` will send.

        Args:
            topk_idx: `[T, K]`, int64 or int32; -1 for no expert.
            num_experts: Experts of all ranks.
            previous_event: What the counting waits for.
            async_finish, allocate_on_comm_stream: Accepted; counting runs on the current stream.

        Returns:
            `(num_tokens_per_rank [R], num_tokens_per_rdma_rank [nodes] or None,
            num_tokens_per_expert [E], is_token_in_rank [T, R], event)`: int32 counts, bool.
        """
        del allocate_on_comm_stream
        with checks.named("Buffer.get_dispatch_layout"):
            checks.tensor("topk_idx", topk_idx, ("num_tokens", "num_topk"), checks.INTEGERS)
            self._check_num_experts(num_experts)
        if previous_event is not None:
            previous_event.current_stream_wait()
        ids, size = topk_idx.long(), self.group_size
        experts = torch.where(ids >= 0, ids, num_experts)
        per_expert = ids.new_zeros(num_experts + 1)
        per_expert.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        ranks = torch.where(ids >= 0, ids // (num_experts // size), size)
        in_rank = torch.zeros(len(ids), size + 1, dtype=torch.bool, device=ids.device)
        in_rank = in_rank.scatter(1, ranks, True)[:, :size]
        per_node = None
        if size > RANKS_PER_NODE:
            in_node = in_rank.view(len(ids), -1, RANKS_PER_NODE).any(2)
            per_node = in_node.sum(0).int()
        event = EventOverlap(EventHandle() if async_finish else None)
        return in_rank.sum(0).int(), per_node, per_expert[:-1].int(), in_rank, event

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: NormalHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Any, Tensor | None, Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
    ]:
        """Sends each token to the ranks of its experts. Collective.

        Args:
            x: `[T, H]`, or e4m3 `[T, H]` and float32 `[T, H / 128]`.
            handle: The handle of an earlier dispatch; then nothing else is needed.
            num_tokens_per_rank, num_tokens_per_rdma_rank: Accepted; they are counted again.
            is_token_in_rank: `[T, R]` bool, of `get_dispatch_layout`.
            num_tokens_per_expert: `[E]` int32, of `get_dispatch_layout`.
            topk_idx: `[T, K]`, or None to send by `is_token_in_rank` alone.
            topk_weights: `[T, K]` float32, sent with the tokens.
            expert_alignment: Multiples of which the returned counts are.
            num_worst_tokens: If positive, the number of rows of the results, whatever arrives.
            config: Has no effect.
            previous_event: What the call waits for instead of the current stream.
            async_finish: Whether the current stream does not wait; see `event`.
            allocate_on_comm_stream: As in `ElasticBuffer`.

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
            event)`. Ids are local, -1 and weight 0 for experts of other ranks. With a handle all
            but the first and the last are None.
        """
        del config, num_tokens_per_rank, num_tokens_per_rdma_rank  # counted again
        common = self._common(previous_event, async_finish, allocate_on_comm_stream)
        call = "Buffer.dispatch"
        self._check_alive(call)
        if handle is not None:
            handle = self._agreed(call, lambda: self._checked_handle(handle, NormalHandle))
            rows, _, _, _, event = handle.buffer.dispatch(x, handle=handle.routing, **common)
            return rows, None, None, None, None, event

        def check() -> tuple[Tensor, Tensor, int]:
            checks.integer("num_worst_tokens", num_worst_tokens, 0)
            checks.integer("expert_alignment", expert_alignment, 1, MAX_ALIGNMENT)
            return self._choices(x, is_token_in_rank, num_tokens_per_expert, topk_idx)

        found, error = checked(check)
        counts = [0 if found is None else len(found[0])] * self.group_size
        max_tokens = max(1, *agree(self._world, call, self._identity, error, counts).counts)
        if found is None:
            raise unreachable()
        data, ids, num_experts = found
        buffer = self._ready(data, ids.shape[1], max_tokens)
        rows, local, weights, new, event = buffer.dispatch(
            x, ids, topk_weights, num_experts=num_experts, num_max_tokens_per_rank=max_tokens,
            expert_alignment=expert_alignment, do_cpu_sync=not num_worst_tokens,
            num_max_rows=num_worst_tokens or None, **common,
        )  # fmt: skip
        if weights is not None and local is not None:
            weights = torch.where(local >= 0, weights, 0)
        counts = new.num_recv_tokens_per_expert_list
        local = None if topk_idx is None else local
        return rows, local, weights, counts, NormalHandle(buffer, new), event

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sends results back and sums them. Collective.

        Args:
            x: `[N, H]`, as `dispatch` laid rows out.
            handle: Of the dispatch.
            topk_weights: `[N, K]` float32, sent back and not applied.
            bias: `[T, H]`, or two of them, added to the sums.
            config, previous_event, async_finish, allocate_on_comm_stream: As in `dispatch`.

        Returns:
            `(y [T, H], weights [T, K] or None, event)`.
        """
        del config
        call = "Buffer.combine"
        self._check_alive(call)
        handle = self._agreed(call, lambda: self._checked_handle(handle, NormalHandle))
        common = self._common(previous_event, async_finish, allocate_on_comm_stream)
        return handle.buffer.combine(x, handle.routing, topk_weights, bias, **common)

    # ---- low latency ----------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]]:
        """Sends tokens to a fixed number of rows for each local expert. Collective.

        Args:
            x: `[T, H]` bfloat16, `H` a multiple of 128.
            topk_idx: `[T, K]`, -1 for no expert.
            num_max_dispatch_tokens_per_rank: At least `T`, the same everywhere.
            num_experts: Experts of all ranks.
            cumulative_local_expert_recv_stats: `[L]` int32, to which counts are added.
            dispatch_wait_recv_cost_stats: Accepted; nothing is added, since no kernel waits.
            use_fp8: Send e4m3 with a scale for each 128 channels.
            round_scale: Scales are powers of two.
            use_ue8m0: Scales are packed exponents; needs `round_scale`.
            async_finish, return_recv_hook: Accepted; data has been requested when this returns.

        Returns:
            `(recv_x, recv_count, handle, event, hook)`: `[L, max * R, H]` bfloat16, or e4m3 with
            column-major scales `[L, max * R, H / 128]` (packed: `[..., H / 512]` int32); int32
            `[L]` rows that are valid; the others are zero.
        """
        del dispatch_wait_recv_cost_stats, return_recv_hook
        call, most = "Buffer.low_latency_dispatch", num_max_dispatch_tokens_per_rank
        self._check_alive(call)

        def check() -> Tensor:
            checks.tensor("x", x, ("num_tokens", "hidden"), torch.bfloat16)
            checks.integer("num_max_dispatch_tokens_per_rank", most, max(1, len(x)))
            self._check_num_experts(num_experts)
            self._check_choices(topk_idx, len(x))
            if x.shape[1] % SCALE_CHANNELS:
                raise ValueError(f"x must have a multiple of 128 channels, got {x.shape[1]}")
            if use_ue8m0 and not (use_fp8 and round_scale):
                raise ValueError("use_ue8m0 needs use_fp8=True and round_scale=True")
            return self._without_masked(topk_idx, num_experts)

        ids = self._agreed(call, check)
        parts: Any = x
        if use_fp8:
            parts = quant.per_token_cast(
                x, "e4m3", SCALE_CHANNELS, round_sf=round_scale,
                use_tma_aligned_col_major_sf=use_ue8m0, use_packed_ue8m0=use_ue8m0,
            )  # fmt: skip
        buffer = self._ready(x, ids.shape[1], most)
        received, _, _, routing, event = buffer.dispatch(
            parts, ids, None, cumulative_local_expert_recv_stats, num_experts=num_experts,
            num_max_tokens_per_rank=most, do_expand=True, do_cpu_sync=False,
        )  # fmt: skip
        num_local, capacity = num_experts // self.group_size, most * self.group_size
        counts = routing.num_unaligned_recv_tokens_per_expert
        experts = routing.routing.pos_to_expert
        if experts is None:
            raise RuntimeError("a dispatch with do_expand has the expert of each row")
        starts = (counts.cumsum(0) - counts).long()
        rows = torch.arange(len(experts), device=experts.device)
        own = experts.clamp(min=0).long()
        places = torch.where(
            experts >= 0, own * capacity + rows - starts[own], num_local * capacity
        )
        handle = LowLatencyHandle(buffer, routing, places, capacity, x.shape[1])
        outs = [
            self._placed(part, places, num_local, capacity)
            for part in (received if isinstance(received, tuple) else (received,))
        ]
        if use_fp8:
            outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
        event = EventOverlap(EventHandle()) if async_finish else event
        return (tuple(outs) if use_fp8 else outs[0]), counts, handle, event, _no_hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Sends results back and sums them with their weights, in float32. Collective.

        Args:
            x: `[L, max * R, H]` bfloat16, as `low_latency_dispatch` laid rows out.
            topk_idx: `[T, K]`, as dispatched.
            topk_weights: `[T, K]` float32.
            handle: Of the dispatch.
            use_logfmt: Accepted; values are sent without compression.
            zero_copy: Accepted; `x` is what is sent in either case.
            async_finish, return_recv_hook: As in `low_latency_dispatch`.
            out: `[T, H]` bfloat16 for the result.
            combine_wait_recv_cost_stats: Accepted; nothing is added.

        Returns:
            `(y [T, H] bfloat16, event, hook)`.
        """
        del use_logfmt, zero_copy, return_recv_hook, combine_wait_recv_cost_stats
        call = "Buffer.low_latency_combine"
        self._check_alive(call)

        def check() -> LowLatencyHandle:
            found = self._checked_handle(handle, LowLatencyHandle)
            (num_tokens, num_topk), hidden = found.routing.topk_idx.shape, found.hidden
            chosen, shape = ("num_tokens", "num_topk"), (num_tokens, num_topk)
            checks.tensor("topk_idx", topk_idx, chosen, checks.INTEGERS, shape=shape)
            checks.tensor("topk_weights", topk_weights, chosen, torch.float32, shape=shape)
            dims = ("num_local_experts", "rows", "hidden")
            num_local = found.routing.num_experts // self.group_size
            checks.tensor("x", x, dims, BF16, shape=(num_local, found.capacity, hidden))
            if out is not None:
                size = (num_tokens, hidden)
                checks.tensor("out", out, ("num_tokens", "hidden"), BF16, shape=size)
            return found

        handle = self._agreed(call, check)
        buffer, nothing = handle.buffer, x.new_empty(len(topk_idx), 0)
        _, _, weights, _, _ = buffer.dispatch(
            nothing, handle=handle.routing, topk_weights=topk_weights
        )
        if weights is None:
            raise RuntimeError("weights that are sent arrive")
        flat = torch.cat([x.flatten(0, 1), x.new_zeros(1, x.shape[2])])
        rows = flat.index_select(0, handle.places).float() * weights[:, None]
        y, _, event = buffer.combine(rows, handle.routing)
        result = y.bfloat16() if out is None else out.copy_(y)
        event = EventOverlap(EventHandle()) if async_finish else event
        return result, event, _no_hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Returns memory for the argument of `low_latency_combine`.

        Args:
            handle: The handle of the dispatch.

        Returns:
            `[L, max * R, H]`, bfloat16.
        """
        num_local = handle.routing.num_experts // self.group_size
        size = (num_local, handle.capacity, handle.hidden)
        return torch.empty(size, dtype=torch.bfloat16, device=handle.places.device)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing, because no call leaves data in the memory of another one.

        Args:
            num_max_dispatch_tokens_per_rank: Not used.
            hidden: Not used.
            num_experts: Not used.
        """
        del num_max_dispatch_tokens_per_rank, hidden, num_experts

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank or unmasks it; the experts of masked ranks receive no tokens from this rank.

        Args:
            rank_to_mask: The rank.
            mask: Whether it is masked.
        """
        with checks.named("Buffer.low_latency_update_mask_buffer"):
            if not self.enable_shrink:
                raise ValueError("the buffer must be made with enable_shrink=True")
            checks.integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        self._masked[rank_to_mask] = bool(mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes which ranks are masked.

        Args:
            mask_status: `[R]`, int32: receives 1 for each masked rank, and 0 for the others.
        """
        mask_status.copy_(self._masked)

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all masked ranks back."""
        self._masked.zero_()

    # ---- shared ---------------------------------------------------------------------------------

    def _check_num_experts(self, num_experts: int) -> None:
        checks.integer("num_experts", num_experts, 1)
        if num_experts % self.group_size:
            raise ValueError(
                f"num_experts must be a multiple of the {self.group_size} ranks, got {num_experts}"
            )

    def _check_alive(self, call: str) -> None:
        if self._destroyed:
            raise RuntimeError(f"{call}: the buffer was destroyed")

    def _agreed(self, call: str, check: Callable[[], Result]) -> Result:
        """The result of a check. An error of this rank is raised on all, in what they call next."""
        found, error = checked(check)
        if error is not None:
            agree(self._world, call, self._identity, error)
        if found is None:
            raise unreachable()
        return found

    def _checked_handle(self, handle: object, kind: type[Handle]) -> Handle:
        if not isinstance(handle, kind):
            got = type(handle).__name__
            raise TypeError(f"handle must be a {kind.__name__} of a dispatch, got {got}")
        if handle.buffer.group != self.group:
            raise ValueError("handle must come from this group, got one of another group")
        return handle

    @staticmethod
    def _check_choices(topk_idx: Tensor, num_tokens: int) -> None:
        dims = ("num_tokens", "num_topk")
        checks.tensor("topk_idx", topk_idx, dims, checks.INTEGERS, shape=(num_tokens, None))

    def _choices(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        in_rank: Tensor | None,
        per_expert: Tensor | None,
        topk_idx: Tensor | None,
    ) -> tuple[Tensor, Tensor, int]:
        """The data, the experts of each token and the number of experts of a new routing."""
        if in_rank is None or per_expert is None:
            raise ValueError(
                "is_token_in_rank and num_tokens_per_expert must be given without a handle: they "
                "come from get_dispatch_layout"
            )
        data = x[0] if isinstance(x, tuple) and x else x
        checks.tensor("x", data, ("num_tokens", "hidden"))
        checks.tensor("num_tokens_per_expert", per_expert, ("num_experts",))
        num_experts = len(per_expert)
        self._check_num_experts(num_experts)
        if topk_idx is not None:
            self._check_choices(topk_idx, len(data))
            return data, topk_idx, num_experts
        dims, shape = ("num_tokens", "num_ranks"), (len(data), self.group_size)
        checks.tensor("is_token_in_rank", in_rank, dims, torch.bool, shape=shape)
        # One expert of each rank stands for the rank.
        first = torch.arange(self.group_size, device=in_rank.device)
        ids = torch.where(in_rank, first * (num_experts // self.group_size), -1)
        return data, ids, num_experts

    def _ready(self, x: Tensor, num_topk: int, max_tokens: int) -> ElasticBuffer:
        """The buffer for such tokens, of which a rank has at most `max_tokens`. Collective."""
        if self._buffer is None:
            self._buffer = ElasticBuffer(
                self.group, num_max_tokens_per_rank=max_tokens, hidden=x.shape[1],
                num_topk=num_topk, explicitly_destroy=self.explicitly_destroy,
                engine=self._engine, allow_hybrid_mode=False,
            )  # fmt: skip
        return self._buffer

    @staticmethod
    def _common(
        previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
    ) -> dict[str, Any]:
        event = previous_event.event if isinstance(previous_event, EventOverlap) else previous_event
        return {
            "previous_event": event,
            "async_with_compute_stream": bool(async_finish),
            "allocate_on_comm_stream": bool(allocate_on_comm_stream) or event is not None,
        }

    def _without_masked(self, topk_idx: Tensor, num_experts: int) -> Tensor:
        if not self._masked.any():
            return topk_idx
        ranks = topk_idx.clamp(0, num_experts - 1) // (num_experts // self.group_size)
        masked = self._masked.to(topk_idx.device)[ranks.long()]
        # Experts that do not exist stay, for the dispatch to name them.
        return topk_idx.masked_fill(masked & (topk_idx < num_experts), -1)

    @staticmethod
    def _placed(rows: Tensor, places: Tensor, num_local: int, capacity: int) -> Tensor:
        """Rows at their places of `[L, capacity, width]`; the others are zero."""
        flat = rows.view(torch.uint8)
        out = flat.new_zeros(num_local * capacity + 1, flat.shape[1])
        out[places] = flat
        return out[:-1].view(rows.dtype).view(num_local, capacity, -1)


def _no_hook() -> None:
    """What is called before received data is used: nothing is left to wait for."""


def install_as_deep_ep() -> ModuleType:
    """Make `import deep_ep` find this package, for programs that were written for DeepEP.

    Returns:
        The module, which has `ElasticBuffer`, `EPHandle`, `EventHandle`, `EventOverlap`, `Buffer`,
        `Config`, `get_logical_domain_size`, `get_physical_domain_size`, `topk_idx_t` and `utils`.

    Raises:
        RuntimeError: If another `deep_ep` is installed.
    """
    from tile_kernels import ep

    existing = sys.modules.get("deep_ep")
    if existing is not None and existing.__dict__.get("ElasticBuffer") is ElasticBuffer:
        return existing
    if existing is not None or find_spec("deep_ep") is not None:
        raise RuntimeError(
            "install_as_deep_ep: a package deep_ep is installed; uninstall it, or import "
            "tile_kernels.ep instead"
        )
    module = ModuleType("deep_ep", "DeepEP's interface, by tile_kernels.ep.")
    utils = ModuleType("deep_ep.utils", "Events of DeepEP, by tile_kernels.ep.")
    for name in ("EventHandle", "EventOverlap"):
        setattr(utils, name, getattr(ep, name))
    for name in (
        "Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap",
        "get_logical_domain_size", "get_physical_domain_size", "topk_idx_t",
    ):  # fmt: skip
        setattr(module, name, getattr(ep, name))
    for name, value in (("utils", utils), ("__path__", [])):
        setattr(module, name, value)
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = module, utils
    return module
