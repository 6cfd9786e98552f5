"""The corpus of kernels in the style of TileLang's examples: each gives PyTorch's result."""

from __future__ import annotations

import pytest

from tile_kernels.emulator.jit import Settings

from .corpus import Case, cases
from .corpus.__main__ import outcome


def parameters() -> list[object]:
    """Every case; those that the default suite leaves out are marked `full`."""
    return [pytest.param(c, id=c.name, marks=() if c.quick else pytest.mark.full) for c in cases()]


@pytest.mark.parametrize("case", parameters())
def test_kernel_is_right(case: Case) -> None:
    assert outcome(case, Settings()) == ("right", "")


@pytest.mark.full
@pytest.mark.parametrize("case", parameters())
def test_kernel_is_right_in_reverse_order_with_merged_shared_memory(case: Case) -> None:
    assert outcome(case, Settings(order="reverse", split_shared=False)) == ("right", "")


def test_corpus_covers_what_it_promises() -> None:
    found = cases()
    assert len(found) >= 60
    assert len({c.family for c in found}) == 7
    assert sum(c.quick for c in found) >= 8
