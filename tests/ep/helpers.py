"""Routings, expert outputs, and the comparison of a rank's results with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep import ElasticBuffer, reference
from tile_kernels.ep.topology import Topology
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.utils import align


@dataclass
class Case:
    """The inputs of all ranks. `tokens[r]` is how many rank `r` has."""

    num_nodes: int = 1
    ranks_per_node: int = 2
    experts_per_rank: int = 2
    num_topk: int = 2
    tokens: tuple[int, ...] = (5, 3)
    widths: tuple[tuple[torch.dtype, int], ...] = ((torch.bfloat16, 6),)
    expand: bool = False
    alignment: int = 1
    multiple_reduction: bool = True
    num_biases: int = 0
    empty_slots: float = 0.2
    seed: int = 0
    unused_experts: int = 0
    max_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.topology = Topology(self.num_nodes, self.ranks_per_node)
        self.num_ranks = self.topology.num_ranks
        self.num_experts = self.experts_per_rank * self.num_ranks
        self.max_tokens = self.max_tokens or max(1, *self.tokens)
        used = max(1, self.num_experts - self.unused_experts)
        self.topk_idx, self.topk_weights, self.payloads, self.bias = [], [], [], []
        for num_tokens in self.tokens:
            scores = torch.rand(num_tokens, max(used, self.num_topk), generator=generator)
            ids = scores.argsort(1)[:, : self.num_topk]
            ids[ids >= used] = -1
            ids[torch.rand(ids.shape, generator=generator) < self.empty_slots] = -1
            self.topk_idx.append(ids.contiguous())
            self.topk_weights.append(torch.rand(ids.shape, generator=generator))
            self.payloads.append(
                tuple(random_rows(num_tokens, *width, generator) for width in self.widths)
            )
            hidden, dtype = self.widths[0][1], self.result_dtype
            self.bias.append(
                tuple(
                    torch.randn(num_tokens, hidden, generator=generator).to(dtype)
                    for _ in range(self.num_biases)
                )
            )

    @property
    def result_dtype(self) -> torch.dtype:
        dtype = self.widths[0][0]
        return dtype if dtype in (torch.float32, torch.float16) else torch.bfloat16

    def expected(self) -> list[reference.Received]:
        return reference.dispatch(
            self.payloads,
            self.topk_idx,
            self.topk_weights,
            self.num_experts,
            self.max_tokens,
            self.expand,
            self.alignment,
        )

    def outputs(self, received: list[reference.Received]) -> list[Tensor]:
        """What the experts of each rank return, in the layout of the dispatch."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        hidden = self.widths[0][1]
        sizes = [each.payloads[0].shape[0] for each in received]
        return [
            torch.randn(size, hidden, generator=generator).to(self.result_dtype) for size in sizes
        ]


def random_rows(rows: int, dtype: torch.dtype, width: int, generator: torch.Generator) -> Tensor:
    """Any bytes for an integer, ordinary numbers for a float."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(rows, width, generator=generator).to(dtype)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (rows, width * dtype.itemsize), generator=generator)
    data = data.to(torch.uint8)
    return data.view(dtype) if data.numel() else torch.empty(rows, width, dtype=dtype)


def make_buffer(group: Any, case: Case, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(
        group,
        num_max_tokens_per_rank=case.max_tokens,
        hidden=max(1, case.widths[0][1]),
        allow_multiple_reduction=case.multiple_reduction,
        num_scaleup_ranks=case.ranks_per_node,
        **options,
    )


def check_rank(group: Any, case: Case, **options: Any) -> None:
    """Dispatch, dispatch again along the handle, combine: on this rank all is as it should be."""
    buffer = make_buffer(group, case, **options)
    rank = buffer.rank_idx
    everything = case.expected()
    expected = everything[rank]
    payloads = case.payloads[rank]
    stats = torch.full((case.experts_per_rank,), 10, dtype=torch.int32)
    received, ids, weights, handle, _ = buffer.dispatch(
        payloads,
        case.topk_idx[rank],
        case.topk_weights[rank],
        stats,
        num_experts=case.num_experts,
        expert_alignment=case.alignment,
        do_expand=case.expand,
        do_zero_padding=case.expand,
    )
    for found, wanted in zip(received, expected.payloads):
        assert_equal(found, wanted)
    assert (weights is None) == (expected.topk_weights is None)
    assert_equal(weights, expected.topk_weights)
    if case.expand:
        assert ids is None
    else:
        assert_equal(ids, expected.topk_idx)
    assert (stats - 10).tolist() == expected.counts
    check_handle(handle, case, expected, rank)

    again, ids_again, no_weights, same, _ = buffer.dispatch(payloads, handle=handle)
    assert same is handle
    assert no_weights is None
    for found, wanted in zip(again, expected.payloads):
        assert_equal(found, wanted)
    assert case.expand or torch.equal(ids_again, ids)

    outputs = case.outputs(everything)
    combined, _, _ = buffer.combine(outputs[rank], handle, bias=case.bias[rank])
    wanted = reference.combine(
        outputs,
        everything,
        case.topk_idx,
        case.num_experts,
        case.max_tokens,
        case.topology,
        case.expand,
        case.multiple_reduction,
        case.bias,
    )
    assert_equal(combined, wanted[rank])
    if case.multiple_reduction or not case.expand:
        _, back, _ = buffer.combine(outputs[rank], handle, topk_weights=weights)
        assert_equal(back, case.topk_weights[rank] * (case.topk_idx[rank] >= 0))


def check_handle(handle: Any, case: Case, expected: reference.Received, rank: int) -> None:
    num_arrived = expected.sources.numel()
    assert handle.num_recv_tokens == num_arrived
    aligned = [align(count, case.alignment) for count in expected.counts]
    assert handle.num_expanded_tokens == sum(aligned)
    assert handle.num_recv_tokens_per_expert_list == aligned
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == expected.counts
    ends = torch.tensor(aligned).cumsum(0)
    if case.expand:
        ends += torch.tensor(expected.counts) - torch.tensor(aligned)
    assert_equal(handle.psum_num_recv_tokens_per_expert, ends.int())
    sources = expected.sources // case.max_tokens
    peers = sources % case.ranks_per_node if case.num_nodes > 1 else sources
    counts = torch.bincount(peers, minlength=case.ranks_per_node)
    assert_equal(handle.psum_num_recv_tokens_per_scaleup_rank, counts.cumsum(0).int())
    metadata = handle.recv_src_metadata
    assert metadata.dtype == torch.int32
    assert metadata[:, 0].tolist() == expected.sources.tolist()
    topk_to_pos = expected.topk_to_pos if case.expand else torch.full_like(expected.topk_to_pos, -1)
    assert metadata[:, 2:].tolist() == topk_to_pos.tolist()
    seen: dict[int, list[int]] = {}
    for row, peer in enumerate(peers.tolist()):
        ids = expected.topk_idx[row].tolist()
        master = max(slot for slot, expert in enumerate(ids) if expert >= 0)
        seen.setdefault(peer, []).append(row)
        first = len(seen[peer]) - 1 if case.num_nodes > 1 else peer
        assert metadata[row, 1] == first * case.num_topk + master
