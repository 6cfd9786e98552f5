"""The indexer's oracles against formulas and properties, and operators against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels.attention import (
    indexer_logits,
    indexer_ranges,
    indexer_select,
    indexer_topk,
)
from tile_kernels.attention.cases.indexer import arguments
from tile_kernels.torch import formats
from tile_kernels.torch import indexer as oracles

# ---- ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
def test_ranges_are_causal(ratio: int) -> None:
    lengths = [5, 0, 1, 300, 4, 7]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    start, end = indexer_ranges(bounds, ratio, sum(lengths))
    token = first_key = 0
    for length in lengths:
        for position in range(length):
            keys = range(length // ratio)
            seen = [first_key + s for s in keys if (s + 1) * ratio <= position + 1]
            assert list(range(start[token], end[token])) == seen
            token += 1
        first_key += length // ratio


def test_queries_outside_of_all_sequences_see_nothing() -> None:
    start, end = indexer_ranges(torch.tensor([2, 6]).int(), 2, 9)
    assert (end - start).tolist() == [0, 0, 0, 1, 1, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("bounds", "ratio", "tokens", "name"),
    [
        ([0], 2, 3, "cu_seqlens"),
        ([0, 3], 0, 3, "ratio"),
        ([0, 3], 2, -1, "num_tokens"),
        ([0, 3], True, 3, "ratio"),
    ],
)
def test_bad_ranges_are_refused(bounds: list[int], ratio: int, tokens: int, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^indexer_ranges: {name}"):
        indexer_ranges(torch.tensor(bounds).int(), ratio, tokens)
    with pytest.raises(TypeError, match=r"^indexer_ranges: cu_seqlens"):
        indexer_ranges(torch.tensor([0, 3]), 2, 3)


# ---- logits -------------------------------------------------------------------------------------


def test_scores_are_the_formula() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 5).double(), torch.randn(4, 5).double()
    weights, scales = torch.randn(3, 2).double(), torch.rand(4).double()
    found = oracles.scores(q, k, weights, scales)
    for t in range(3):
        for s in range(4):
            heads = (weights[t, h] * (q[t, h] @ k[s]).clamp(min=0) for h in range(2))
            torch.testing.assert_close(found[t, s], scales[s] * sum(heads))


@pytest.mark.parametrize("exponents", ["near", "far"])
def test_packed_operands_are_what_they_decode_to(exponents: str) -> None:
    """Against float64, which holds the sums of any exponents here."""
    given = arguments(4, 100, 3, 64, "e2m1", exponents=exponents)(torch.device("cpu"))
    decoded = []
    for data, exponent in (given["q"], given["k"]):
        scale = 2.0 ** (exponent.double() - 127)
        decoded.append(formats.decode_e2m1(data).double() * scale.repeat_interleave(32, -1))
    expected = oracles.scores(*decoded, given["weights"].double())
    with tile_kernels.backend("emulate"):
        found = indexer_logits(**given).double()
    size = oracles.scores(decoded[0].abs(), decoded[1].abs(), given["weights"].abs().double())
    assert ((found - expected).abs() <= 1e-5 * size).all()


# ---- the choice ---------------------------------------------------------------------------------


def test_chosen_values_are_those_of_torch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 500)
    end = torch.full((20,), 500, dtype=torch.int32)
    found = indexer_topk(logits, 37, end, sorted=True)
    torch.testing.assert_close(logits.gather(1, found.long()), logits.topk(37).values)
    unsorted = indexer_topk(logits, 37, end)
    assert torch.equal(found.sort(dim=1).values, unsorted)


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_no_value_is_preferred_by_its_place(backend: str) -> None:
    """What is chosen of a permuted row are the same values."""
    torch.manual_seed(0)
    row = (4 * torch.randn(1, 900)).round()
    order = torch.randperm(900)
    end = torch.tensor([900], dtype=torch.int32)
    with tile_kernels.backend(backend):
        one = indexer_topk(row, 100, end)
        other = indexer_topk(row[:, order].contiguous(), 100, end)
    chosen = row[0, one[0].long()].sort().values
    assert torch.equal(chosen, row[:, order][0, other[0].long()].sort().values)


@pytest.mark.parametrize("source", ["e4m3", "e2m1"])
def test_selection_is_the_choice_among_logits(source: str) -> None:
    """Of inexact logits too: both kernels compute the same ones."""
    given = arguments(5, 300, 4, 32, source, "causal")(torch.device("cpu"))
    with tile_kernels.backend("emulate", mode="fast"):
        logits = indexer_logits(**given)
        chosen = indexer_topk(logits, 40, given["end"], start=given["start"])
        assert torch.equal(indexer_select(**given, topk=40), chosen)


@pytest.mark.parametrize("source", ["bf16", "e4m3", "e2m1"])
def test_selection_needs_a_twentieth_of_the_memory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(4096, 65536, 64, 128, source)(torch.device("meta"))
    allocated = []

    def counted(allocate: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = allocate(*args, **kwargs)
            allocated.append(result.numel() * result.element_size())
            return result

        return count

    for place, name in ((torch.Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    logits = indexer_logits(**given)
    indexer_topk(logits, 2048, given["end"], start=given["start"])
    two_steps = sum(allocated)
    allocated.clear()
    indexer_select(**given, topk=2048)
    assert 4096 * 2048 * 4 <= sum(allocated) < two_steps / 20
