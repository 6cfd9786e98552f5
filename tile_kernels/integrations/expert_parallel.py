"""Expert parallelism in the forms that training frameworks call.

`TokenDispatcher` has the methods of torchtitan's token dispatchers, `fused_dispatch` and
`fused_combine` the signatures of Megatron's fused all-to-all. All are differentiable and work on
any engine of `tile_kernels.ep`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep import Buffer, ElasticBuffer, EPHandle, LocalGroup
from tile_kernels.ep.legacy import NormalHandle
from tile_kernels.runtime import checks

__all__ = ["DispatchMetadata", "TokenDispatcher", "fused_combine", "fused_dispatch"]

# ---- torchtitan ---------------------------------------------------------------------------------


@dataclass
class DispatchMetadata:
    """What `TokenDispatcher.combine` needs of a dispatch.

    Attributes:
        handle: Of `ElasticBuffer.dispatch`.
        row_scores: `[rows]`, float32: the scores of the rows.
    """

    handle: EPHandle
    row_scores: Tensor


class TokenDispatcher:
    """Tokens to the experts of a device mesh and back, as torchtitan's dispatchers.

    Args:
        config: What `TokenDispatcher.Config` holds.

    >>> config = TokenDispatcher.Config(num_experts=2, top_k=1, num_max_tokens_per_rank=8)
    >>> dispatcher = config.build()
    >>> dispatcher.wire_meshes(ep_mesh=None)
    >>> x, scores, ids = torch.ones(3, 4), torch.ones(3, 1), torch.tensor([[1], [0], [1]])
    >>> rows, counts, metadata = dispatcher.dispatch(x, scores, ids, torch.tensor([1, 2]))
    >>> counts.tolist(), dispatcher.combine(rows * 2, metadata, x)[0].tolist()
    ([1, 2], [2.0, 2.0, 2.0, 2.0])
    """

    @dataclass(kw_only=True)
    class Config:
        """The arguments of a dispatcher; `engine` is that of `ElasticBuffer`."""

        num_experts: int
        top_k: int
        num_max_tokens_per_rank: int
        engine: str = "auto"

        def build(self) -> TokenDispatcher:
            """The dispatcher."""
            return TokenDispatcher(self)

    def __init__(self, config: TokenDispatcher.Config) -> None:
        with checks.named("TokenDispatcher"):
            checks.integer("num_experts", config.num_experts, 1)
            checks.integer("top_k", config.top_k, 1, config.num_experts)
            checks.integer("num_max_tokens_per_rank", config.num_max_tokens_per_rank, 1)
        self.config = config
        self._group: Any = None
        self._buffer: ElasticBuffer | None = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Names the ranks.

        Args:
            ep_mesh: A one-dimensional `DeviceMesh`, a group, or None for a single rank.
        """
        if ep_mesh is None:
            ep_mesh = LocalGroup()
        self._group = ep_mesh.get_group() if hasattr(ep_mesh, "get_group") else ep_mesh
        self._buffer = None

    def init_buffer(self) -> None:
        """The buffer is made at the first dispatch, which tells the number of channels."""

    def _buffer_for(self, x: Tensor) -> ElasticBuffer:
        if self._group is None:
            raise RuntimeError("TokenDispatcher: wire_meshes must be called before dispatch")
        if self._buffer is None:
            self._buffer = ElasticBuffer(
                self._group, num_max_tokens_per_rank=self.config.num_max_tokens_per_rank,
                hidden=x.shape[1], num_topk=self.config.top_k, engine=self.config.engine,
            )  # fmt: skip
        return self._buffer

    def dispatch(
        self,
        x_TD: Tensor,  # noqa: N803 - torchtitan's names
        topk_scores_TK: Tensor,  # noqa: N803
        topk_expert_ids_TK: Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: Tensor | None = None,  # noqa: N803
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """Sends tokens to the ranks of their experts. Collective, and differentiable.

        Args:
            x_TD: `[T, H]`.
            topk_scores_TK: `[T, K]`; they multiply the results of the experts, in float32.
            topk_expert_ids_TK: `[T, K]`, int32 or int64.
            num_local_tokens_per_expert_E: Not used: the buffer counts.

        Returns:
            `(rows, counts, metadata)`: the rows of the experts of this rank, expert after expert,
            by source rank and token inside; `counts` `[E / ranks]` of each expert.
        """
        del num_local_tokens_per_expert_E
        rows: Tensor
        rows, _, row_scores, handle, _ = self._buffer_for(x_TD).dispatch(  # type: ignore[assignment]
            x_TD, topk_expert_ids_TK, topk_scores_TK.float(), num_experts=self.config.num_experts,
            do_expand=True,
        )  # fmt: skip
        if row_scores is None:
            raise RuntimeError("unreachable: scores were sent")
        counts = handle.num_unaligned_recv_tokens_per_expert
        return rows, counts, DispatchMetadata(handle, row_scores)

    def combine(
        self,
        routed_out_RD: Tensor,  # noqa: N803
        metadata: DispatchMetadata,
        x_TD: Tensor,  # noqa: N803
    ) -> Tensor:
        """Sums the results of a token's experts, times its scores. Collective, differentiable.

        Args:
            routed_out_RD: `[R, H]`, in the order of the dispatched rows.
            metadata: Of the dispatch.
            x_TD: `[T, H]`, the tokens, for the device and the dtype of the result.
        """
        weighted = routed_out_RD.float() * metadata.row_scores[:, None]
        rows = weighted.to(x_TD.dtype)
        return self._buffer_for(x_TD).combine(rows, metadata.handle)[0]


# ---- Megatron -----------------------------------------------------------------------------------

_made: weakref.WeakKeyDictionary[Any, Buffer] = weakref.WeakKeyDictionary()


def _buffer_of(group: Any) -> Buffer:
    """One buffer for each group."""
    if group not in _made:
        _made[group] = Buffer(group)
    return _made[group]


def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, NormalHandle]:
    """Sends each token to the ranks of its experts, as Megatron's function of this name.

    Args:
        x: `[T, H]`.
        token_indices: `[T, K]`: experts, -1 for none.
        token_probs: `[T, K]`, float32.
        num_experts: Of all ranks.
        group: A process group, or a `LocalGroup`.
        async_finish, allocate_on_comm_stream: As in `ElasticBuffer.dispatch`; the results are
            waited for by the current stream in any case.

    Returns:
        `(recv_x, recv_token_indices, recv_token_probs, tokens_per_expert, handle)`: a row for each
        token that arrived, with local experts and the probabilities of those, and how many tokens
        each expert has, on the host.
    """
    buffer = _buffer_of(group)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(token_indices, num_experts)
    previous = buffer.capture() if async_finish else None
    rows, ids, probs, counts, handle, event = buffer.dispatch(
        x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=token_indices,
        topk_weights=token_probs, previous_event=previous, async_finish=async_finish,
        allocate_on_comm_stream=allocate_on_comm_stream,
    )  # fmt: skip
    if async_finish:
        event.current_stream_wait()
    if ids is None or probs is None or counts is None or handle is None:
        raise RuntimeError("unreachable: indices and probabilities were sent")
    return rows, ids, probs, torch.tensor(counts), handle


def fused_combine(
    x: Tensor,
    group: Any,
    handle: NormalHandle,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[Tensor, None]:
    """Sends results back and sums them, as Megatron's function of this name.

    Args:
        x: `[N, H]`, as the rows of `fused_dispatch`; probabilities are applied by the caller.
        group, async_finish, allocate_on_comm_stream: As in `fused_dispatch`.
        handle: Of `fused_dispatch`.

    Returns:
        `([T, H], None)`.
    """
    buffer = _buffer_of(group)
    previous = buffer.capture() if async_finish else None
    total, _, event = buffer.combine(
        x, handle, previous_event=previous, async_finish=async_finish,
        allocate_on_comm_stream=allocate_on_comm_stream,
    )  # fmt: skip
    if async_finish:
        event.current_stream_wait()
    return total, None
