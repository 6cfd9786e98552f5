"""The record of a dispatch: what combine and further dispatches along the same routing need."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tile_kernels.ep.plan import Plan
from tile_kernels.ep.transport import Fabric


@dataclass(frozen=True, eq=False)
class Routing:
    """The internal part of a handle.

    `topk_to_pos` `[N, K]` int32 is the expanded row of each slot and `pos_to_expert` `[rows]` the
    expert of each row (-1: none); both `None` in the compact layout. `fabric` is that of the
    buffer, and `serial` counts its dispatches, so that ranks can check that they use the same one.
    """

    plan: Plan
    fabric: Fabric
    serial: int
    recv_topk_idx: Tensor
    topk_to_pos: Tensor | None
    pos_to_expert: Tensor | None


@dataclass(eq=False)
class EPHandle:
    """The routing of a dispatch: `N` rows arrived, `L` experts are local, and there are `R` ranks.

    Attributes can be assigned, but `combine` and a dispatch with the handle use an internal plan.

    Attributes:
        do_expand: As in the dispatch.
        num_experts: As in the dispatch.
        expert_alignment: As in the dispatch.
        num_max_tokens_per_rank: As in the dispatch.
        num_sms: As in the dispatch.
        topk_idx: `[T, K]`, int64 or int32: the selected experts; a copy unless
            `do_handle_copy=False`.
        num_recv_tokens: Rows of the compact layout: `N`, or `R * max` without CPU sync.
        num_expanded_tokens: Rows of the expanded layout, including padding.
        num_recv_tokens_per_expert_list: List of `L` aligned counts; empty without CPU sync.
        psum_num_recv_tokens_per_scaleup_rank: `[R]`, in hybrid mode `[U]`, int32: running sum of
            the rows from each peer; the last is `N`.
        psum_num_recv_tokens_per_expert: `[L]`, int32: in the compact layout, the running sum of
            aligned counts; in the expanded layout, one past the last token of each expert.
        num_unaligned_recv_tokens_per_expert: `[L]`, int32: tokens of each expert.
        num_dropped: `[1]`, int32: without CPU sync and with `num_max_rows`, the tokens (in the
            expanded layout: selections) for which there was no row; else 0.
        recv_src_metadata: `[N, K + 2]`, int32: source rank times max plus token; peer (in hybrid
            mode its index in the block) times `K` plus largest local slot; expanded row of each
            slot, -1 for none.
        dst_buffer_slot_idx: `[T, K]`, int32: in direct mode, at the largest slot of each
            destination, this rank times max plus the index of the token among those sent there; -1
            elsewhere.
        routing: The internal plan.
        token_metadata_at_forward: None. What DeepEP needs to replay hybrid mode is in the plan.
        channel_linked_list: None.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    num_dropped: Tensor
    recv_src_metadata: Tensor
    routing: Routing = field(repr=False)

    def tensors(self) -> list[Tensor]:
        """Those that a dispatch makes."""
        return [
            self.psum_num_recv_tokens_per_scaleup_rank,
            self.psum_num_recv_tokens_per_expert,
            self.num_unaligned_recv_tokens_per_expert,
            self.num_dropped,
            self.recv_src_metadata,
        ]

    @property
    def dst_buffer_slot_idx(self) -> Tensor | None:
        """The slot of each token in the buffers of its destinations; None in hybrid mode."""
        plan, rank = self.routing.plan, self.routing.fabric.rank
        if len(plan.hops) > 1:
            return None
        hop = plan.hops[0]
        starts = hop.items.new_tensor([0, *hop.send_counts]).cumsum(0)[:-1]
        slots = hop.items - starts[hop.groups.clamp(min=0)]
        return torch.where(hop.masters, rank * self.num_max_tokens_per_rank + slots, -1).int()

    @property
    def token_metadata_at_forward(self) -> None:
        """Replay state of DeepEP's hybrid kernels, which the engines here do not have."""

    @property
    def channel_linked_list(self) -> None:
        """Replay state of DeepEP's hybrid kernels, which the engines here do not have."""

    def deterministic_sort(self, *_: Tensor | None) -> None:
        """Sorts received rows by source, in place. They always arrive sorted, so this does nothing.

        Args:
            _: Not used.
        """

    def raise_if_dropped(self) -> None:
        """Raise if a row found no place, saying how many; waits for the device."""
        count = int(self.num_dropped)
        if count:
            what, size, rank = "tokens", self.num_recv_tokens, self.routing.fabric.rank
            if self.do_expand:
                what, size = "choices of tokens", self.num_expanded_tokens
            raise RuntimeError(
                f"ElasticBuffer.dispatch: rank {rank}: {count} {what} found no place "
                f"in num_max_rows = {size}"
            )
