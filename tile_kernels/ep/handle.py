"""The record of a dispatch: what combine and further dispatches along the same routing need."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tile_kernels.ep.plan import Plan
from tile_kernels.ep.topology import Topology


@dataclass(frozen=True, eq=False)
class Routing:
    """The internal part of a handle.

    `topk_to_pos` `[N, K]` int32 is the expanded row of each slot and `pos_to_expert` `[rows]` the
    expert of each row (-1: none); both `None` in the compact layout. `serial` counts the dispatches
    of a buffer, so that ranks can check that they use the same one.
    """

    plan: Plan
    topology: Topology
    rank: int
    serial: int
    recv_topk_idx: Tensor
    topk_to_pos: Tensor | None
    pos_to_expert: Tensor | None


@dataclass(eq=False)
class EPHandle:
    """The routing of a dispatch. `N` rows arrived, `L` experts are local, `R` ranks.

    | field | shape | meaning |
    |---|---|---|
    | `do_expand`, `num_experts`, `expert_alignment`, `num_max_tokens_per_rank`, `num_sms` | | \
as dispatched |
    | `topk_idx` | `[T, K]` int64 or int32 | the choices; a copy unless `do_handle_copy=False` |
    | `num_recv_tokens` | int | rows of the compact layout: `N`, or `R * max` without CPU sync |
    | `num_expanded_tokens` | int | rows of the expanded layout, padding included |
    | `num_recv_tokens_per_expert_list` | list of `L` | aligned counts; `[]` without CPU sync |
    | `psum_num_recv_tokens_per_scaleup_rank` | `[R]`, hybrid `[U]`, int32 | running sum of the \
rows from each peer; the last is `N` |
    | `psum_num_recv_tokens_per_expert` | `[L]` int32 | compact: running sum of aligned counts; \
expanded: one past the last token of each expert |
    | `num_unaligned_recv_tokens_per_expert` | `[L]` int32 | tokens of each expert |
    | `num_dropped` | `[1]` int32 | without CPU sync and with `num_max_rows`: tokens (expanded: \
choices) that found no row; else 0 |
    | `recv_src_metadata` | `[N, K + 2]` int32 | source rank times max plus token; peer (hybrid: \
place in its block) times `K` plus largest local slot; expanded row of each slot, -1: none |
    | `dst_buffer_slot_idx` | `[T, K]` int32 | direct mode: at the largest slot of each \
destination, this rank times max plus the index of the token among those sent there; -1 elsewhere |
    | `token_metadata_at_forward`, `channel_linked_list` | | None: what DeepEP needs to replay \
hybrid mode is in the plan of the handle |

    Fields can be assigned. What `combine` and a dispatch with the handle use is the plan.
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
        plan, rank = self.routing.plan, self.routing.rank
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
        """Sorts received rows by source, in place. They always arrive sorted: nothing is left."""

    def raise_if_dropped(self) -> None:
        """Raise if a row found no place, saying how many; waits for the device."""
        count = int(self.num_dropped)
        if count:
            what, size = "tokens", self.num_recv_tokens
            if self.do_expand:
                what, size = "choices of tokens", self.num_expanded_tokens
            raise RuntimeError(
                f"ElasticBuffer.dispatch: rank {self.routing.rank}: {count} {what} found no place "
                f"in num_max_rows = {size}"
            )
