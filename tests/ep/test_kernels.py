"""What moves and adds rows on a GPU: this package's kernels, here emulated, give the same bits."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.ep.helpers import Case, check_rank
from tests.ep.test_no_sync import check_loose
from tile_kernels.ep import LocalGroup, run_ranks
from tile_kernels.runtime import emulation


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_dispatch_and_combine_run_on_kernels(expand: bool) -> None:
    """Packing to peers, the expanded layout, its map, and the sums with their biases."""
    case = Case(
        ranks_per_node=1, tokens=(7,), experts_per_rank=5, num_topk=3, num_biases=2, expand=expand,
        widths=((torch.bfloat16, 24), (torch.float32, 3)), alignment=4,
    )  # fmt: skip
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        check_rank(LocalGroup(), case)
    ran = " ".join(str(report) for report in reports)
    assert "expand" in ran
    assert "reduce" in ran
    assert ("fused_mapping" in ran) == expand


def test_ranks_of_two_nodes_run_on_kernels() -> None:
    """Rows that are forwarded and put into order, without waiting for counts."""
    case = Case(2, 2, 2, num_topk=3, tokens=(3, 0, 4, 2), expand=True, alignment=4, max_tokens=5)
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        run_ranks(case.num_ranks, lambda group: check_loose(group, case, check_ranks=False))
    assert len(reports) > 50
