"""The reference itself: an example worked by hand, and what must hold for any routing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ep.helpers import Case
from tile_kernels.ep import ElasticBuffer, LocalGroup, reference, run_ranks
from tile_kernels.ep.topology import Topology

IDS = [torch.tensor([[0, 3], [1, 0]]), torch.tensor([[2, 3], [-1, 1]])]
DATA = [torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])]
WEIGHTS = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])]
PAD = 0.0


def example(expand: bool) -> reference.Received:
    """Rank 0 of two ranks with two experts each; at most 4 tokens, alignment 4."""
    return reference.dispatch([(x,) for x in DATA], IDS, WEIGHTS, 4, 4, expand, alignment=4)[0]


def test_worked_example_compact() -> None:
    found = example(expand=False)
    assert found.sources.tolist() == [0, 1, 5]
    assert found.payloads[0].flatten().tolist() == [10, 11, 21]
    assert found.topk_idx.tolist() == [[0, -1], [1, 0], [-1, 1]]
    assert found.topk_weights is not None
    assert found.topk_weights.tolist() == [[1, 2], [3, 4], [7, 8]]
    assert found.counts == [2, 2]


def test_worked_example_expanded() -> None:
    found = example(expand=True)
    assert found.payloads[0].flatten().tolist() == [10, 11, PAD, PAD, 11, 21, PAD, PAD]
    assert found.topk_to_pos.tolist() == [[0, -1], [4, 1], [-1, 5]]
    assert found.topk_weights is not None
    assert found.topk_weights.tolist() == [1, 4, 0, 0, 3, 8, 0, 0]


@pytest.mark.parametrize("expand", [False, True])
def test_worked_example_in_handles(expand: bool) -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=1)
        _, _, _, handle, _ = buffer.dispatch(
            DATA[group.rank], IDS[group.rank], num_experts=4, expert_alignment=4, do_expand=expand
        )
        if group.rank == 0:
            metadata = handle.recv_src_metadata
            assert metadata[:, 0].tolist() == [0, 1, 5]
            assert metadata[:, 1].tolist() == [0, 1, 3]
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == [2, 3]
            assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [2, 2]
            assert handle.num_recv_tokens_per_expert_list == [4, 4]
            ends = [2, 6] if expand else [4, 8]
            assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
            if expand:
                assert metadata[:, 2:].tolist() == [[0, -1], [4, 1], [-1, 5]]

    run_ranks(2, rank)


# ---- the order of sums --------------------------------------------------------------------------


def sum_of(values: list[float], ids: list[int], topology: Topology, **how: bool) -> float:
    """Combine one token of rank 0 whose slot `k` chose expert `ids[k]` with result `values[k]`.

    Two experts on each rank, bfloat16, expanded.
    """
    num_ranks = topology.num_ranks
    none = torch.empty(0, len(ids), dtype=torch.int64)
    topk_idx = [torch.tensor([ids]), *[none] * (num_ranks - 1)]
    payloads = [(torch.zeros(len(each), 1),) for each in topk_idx]
    received = reference.dispatch(payloads, topk_idx, None, 2 * num_ranks, 1, expand=True)
    rows: list[Tensor] = []
    for each in received:
        rows.append(torch.zeros(each.payloads[0].shape[0], 1, dtype=torch.bfloat16))
        for row, slot in (each.topk_to_pos >= 0).nonzero().tolist():
            rows[-1][each.topk_to_pos[row, slot]] = values[slot]
    found = reference.combine(
        rows, received, topk_idx, 2 * num_ranks, 1, topology, expanded=True, **how
    )
    return float(found[0])


def test_each_stage_rounds() -> None:
    """256 has a step of 2 in bfloat16: 1 is lost when added to it alone, 1 + 1 is not."""
    one_node, two_nodes = Topology(1, 4), Topology(2, 2)
    # Slots 0 and 1 on rank 0, 2 and 3 on rank 1.
    assert sum_of([256, 1, 1, 0], [0, 1, 2, 3], one_node, multiple_reduction=False) == 258
    assert sum_of([256, 1, 1, 0], [0, 1, 2, 3], one_node) == 256
    # Ranks 0 and 1 are a node: (256 + 1) rounds on the node; ranks 2 and 3 are another.
    assert sum_of([256, 1, 1], [0, 2, 4], one_node) == 258
    assert sum_of([256, 1, 1], [0, 2, 4], two_nodes) == 256
    assert sum_of([256, 1, 1], [0, 4, 6], two_nodes) == 258


def test_order_is_that_of_the_largest_slot() -> None:
    """In float32, 2**25 swallows a 1 that comes after it, and -2**25 then leaves nothing."""
    big = 2.0**25
    topology = Topology(1, 4)
    # Ranks 1, 0 and 2 by their largest slots 1, 2, 3, although rank 0 has slot 0.
    assert sum_of([0, big, 1, -big], [0, 2, 1, 4], topology) == 0
    assert sum_of([1, big, 0, -big], [0, 2, 1, 4], topology) == 0
    assert sum_of([0, big, -big, 1], [0, 2, 1, 4], topology) == 1
    assert sum_of([big, 1, -big], [0, 2, 4], topology) == 0
    assert sum_of([big, -big, 1], [0, 2, 4], topology) == 1


# ---- what must hold for any routing -------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 4))
    return Case(
        ranks_per_node=num_ranks,
        experts_per_rank=draw(st.integers(1, 4)),
        num_topk=draw(st.integers(1, 6)),
        tokens=tuple(draw(st.integers(0, 6)) for _ in range(num_ranks)),
        widths=((torch.float32, 2),),
        expand=draw(st.booleans()),
        alignment=draw(st.sampled_from([1, 4])),
        seed=draw(st.integers(0, 2**20)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_nothing_is_lost_or_invented(case: Case) -> None:
    received = case.expected()
    pairs = {(r, t, e) for r, ids in enumerate(case.topk_idx) for t, row in enumerate(ids.tolist())
             for e in row if e >= 0}  # fmt: skip
    found = set()
    for rank, each in enumerate(received):
        assert each.sources.tolist() == sorted(set(each.sources.tolist()))
        for row, source in enumerate(each.sources.tolist()):
            for slot, expert in enumerate(each.topk_idx[row].tolist()):
                if expert >= 0:
                    glob = rank * case.experts_per_rank + expert
                    found.add((source // case.max_tokens, source % case.max_tokens, glob))
                    assert 0 <= expert < case.experts_per_rank
                    row_idx = int(each.topk_to_pos[row, slot])
                    if case.expand:
                        sent = case.payloads[source // case.max_tokens][0]
                        there = each.payloads[0][row_idx]
                        assert torch.equal(there, sent[source % case.max_tokens])
        if case.expand:
            assert each.payloads[0].shape[0] % case.alignment == 0
        positions = each.topk_to_pos[each.topk_to_pos >= 0]
        assert len(set(positions.tolist())) == positions.numel()
    assert found == pairs


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans())
def test_what_is_sent_comes_back_once_for_each_copy(case: Case, multiple: bool) -> None:
    """With small integers, sums are exact in any order."""
    case.payloads = [((x * 4).round(),) for (x,) in case.payloads]
    received = case.expected()
    combined = reference.combine(
        [each.payloads[0] for each in received], received, case.topk_idx, case.num_experts,
        case.max_tokens, case.topology, case.expand, multiple,
    )  # fmt: skip
    for (x,), ids, total in zip(case.payloads, case.topk_idx, combined):
        experts = [{e if case.expand else e // case.experts_per_rank for e in row if e >= 0}
                   for row in ids.tolist()]  # fmt: skip
        copies = torch.tensor([len(each) for each in experts])
        assert torch.equal(total, x * copies[:, None])
