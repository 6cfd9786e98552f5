"""The whole of dispatch and combine with ranks as threads, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ep.helpers import Case, check_rank
from tile_kernels.ep import run_ranks
from tile_kernels.ep.rows import field_of, pack, scatter_rows, unpack
from tile_kernels.testing.numeric import assert_equal

FP8 = torch.float8_e4m3fn

CASES = {
    "plain": Case(),
    "one rank": Case(ranks_per_node=1, tokens=(7,)),
    "no tokens at all": Case(tokens=(0, 0)),
    "an empty rank": Case(ranks_per_node=3, tokens=(4, 0, 2), experts_per_rank=3),
    "no token has an expert": Case(empty_slots=1.0),
    "experts without tokens": Case(experts_per_rank=4, unused_experts=6),
    "fp8 and scales": Case(widths=((FP8, 32), (torch.float32, 3))),
    "five payloads": Case(
        widths=((torch.bfloat16, 5), (torch.int16, 3), (torch.bool, 1), (torch.int64, 2),
                (torch.float8_e8m0fnu, 3)),
    ),
    "payloads of unequal alignment": Case(
        widths=((torch.int16, 3), (torch.bfloat16, 8), (torch.int64, 1), (torch.float32, 4)),
    ),
    "32 slots": Case(experts_per_rank=24, num_topk=32, tokens=(9, 6)),
    "more slots than experts": Case(experts_per_rank=1, num_topk=5),
    "float32": Case(widths=((torch.float32, 9),), num_biases=1),
    "float16": Case(widths=((torch.float16, 2),), num_biases=2),
    "no width": Case(widths=((torch.float32, 0),)),
    "room to spare": Case(max_tokens=50),
    "two biases": Case(num_biases=2, num_topk=4, experts_per_rank=5),
    "2x2": Case(2, 2, tokens=(5, 3, 0, 7), num_topk=6, experts_per_rank=3, num_biases=1),
    "3x1": Case(3, 1, tokens=(5, 3, 6), num_topk=3),
    "2x3": Case(2, 3, tokens=(5, 3, 2, 7, 1, 4), num_topk=8, experts_per_rank=5, num_biases=2),
}  # fmt: skip


@pytest.mark.parametrize("multiple", [True, False], ids=["", "one sum"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str, expand: bool, multiple: bool) -> None:
    case = CASES[name]
    case.expand, case.multiple_reduction, case.alignment = expand, multiple, 4 if multiple else 1
    run_ranks(case.num_ranks, lambda group: check_rank(group, case))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (3, 2), (2, 1)]))
    tokens = st.integers(0, 9)
    return Case(
        num_nodes=nodes,
        ranks_per_node=per_node,
        experts_per_rank=draw(st.integers(1, 5)),
        num_topk=draw(st.integers(1, 7)),
        tokens=tuple(draw(tokens) for _ in range(nodes * per_node)),
        widths=((torch.bfloat16, draw(st.integers(1, 5))),),
        expand=draw(st.booleans()),
        alignment=draw(st.sampled_from([1, 3, 8])),
        multiple_reduction=draw(st.booleans()),
        num_biases=draw(st.integers(0, 2)),
        empty_slots=draw(st.sampled_from([0.0, 0.3, 0.9])),
        seed=draw(st.integers(0, 2**20)),
        unused_experts=draw(st.integers(0, 4)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_case_against_reference(case: Case) -> None:
    run_ranks(case.num_ranks, lambda group: check_rank(group, case))


def test_rows_are_expanded_out_of_what_arrived() -> None:
    """Without a copy of the part that is taken, where its elements are aligned."""
    parts = [torch.rand(5, 6).bfloat16(), torch.rand(5, 2), torch.arange(5)[:, None]]
    packed = pack(parts)
    inside = range(packed.data_ptr(), packed.data_ptr() + packed.numel())
    fields = [field_of(each) for each in parts]
    views = unpack(packed, fields, views=True)
    assert [each.data_ptr() in inside for each in views] == [True, True, False]
    slots = torch.tensor([[3, 0], [-1, 1], [6, 9], [2, -1], [4, 5]], dtype=torch.int32)
    for view, wanted in zip(views, unpack(packed, fields)):
        assert wanted.is_contiguous()
        assert wanted.data_ptr() not in inside
        assert_equal(view.contiguous(), wanted)
        assert_equal(scatter_rows(view, slots, 8), scatter_rows(wanted, slots, 8))
