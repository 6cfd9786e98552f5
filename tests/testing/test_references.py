"""The references on a CPU: how they compare with straightforward code, and what made them fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import references
from tile_kernels import torch as definitions
from tile_kernels.moe.top2_sum.reference import best_experts
from tile_kernels.moe.weight import reference as weight_references
from tile_kernels.runtime import arithmetic, registry
from tile_kernels.testing.numeric import assert_equal


def test_every_operator_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = references.main(["--scale", "16", "--seconds", "0", "--output", str(tmp_path)])
    content = json.loads(path.read_text())
    names = {".".join(row["op"].split(".")[:2]) for row in content["results"]}
    assert names == {op.name for op in registry.all_ops()}
    assert {"cpu", "torch", "date", "threads"} <= set(content["machine"])
    said = capsys.readouterr().out
    for row in content["results"]:
        assert row["op"] in said
        plain = references.PLAIN.get(row["op"], references.SAME)  # of gemm: the formula
        assert (row["plain_ms"] is None) == (plain == references.SAME)


def definition(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


@pytest.mark.parametrize("k", [1, 3, 16])
def test_stable_topk_is_a_stable_sort(k: int) -> None:
    torch.manual_seed(0)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0])
    for scores in (
        torch.randn(200, 16),
        torch.randint(3, (200, 16)).float(),
        special[torch.randint(len(special), (200, 16))],
        torch.randint(5, (200, 16)),
    ):
        assert_equal(definitions.stable_topk(scores, k), definition(scores, k))
    assert definitions.stable_topk(torch.empty(0, 16), k).shape == (0, k)


@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
def test_experts_of_kept_groups_are_a_masked_stable_sort(scoring_func: str) -> None:
    torch.manual_seed(0)
    values = torch.tensor([-torch.inf, -1.0, 0.0, 0.5, 1.0, torch.nan])
    logits, bias = values[torch.randint(6, (300, 32))], torch.zeros(32)
    ranks = logits if scoring_func == "softmax" else definitions.gate_scores(logits, scoring_func)
    groups = definitions.topk_sum_and_topk_group_idx(ranks.view(300, 8, 4), 2, 3)
    keep = torch.zeros(300, 8).bool().scatter_(1, groups, True).repeat_interleave(4, 1)
    order = definition(ranks, 32)
    last = (~keep).gather(1, order).byte().sort(dim=1, stable=True).indices
    expected = order.gather(1, last)[:, :6]
    assert_equal(best_experts(logits, bias, 6, 3, 8, scoring_func), expected.contiguous())


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_scores_of_chosen_experts(scoring_func: str) -> None:
    logits, idx = torch.randn(65, 37) * 10, torch.randint(37, (65, 5))
    expected = definitions.gate_scores(logits, scoring_func).gather(1, idx)
    assert_equal(weight_references._chosen_scores(logits, idx, scoring_func), expected)


def scattered(*shape: int) -> torch.Tensor:
    """float32 of few and of many significant bits, from subnormal to large."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-80, 40, shape)
    return torch.where(torch.rand(shape) < 0.5, x.bfloat16().float(), x)


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 18])
def test_fused_multiply_add_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of rounding to odd throughout, at ties and below the normal range too."""
    monkeypatch.setattr(arithmetic, "_CHUNK", chunk)
    torch.manual_seed(0)
    a, b, c = scattered(300, 64), scattered(300, 1), scattered(300, 64)
    half = a * b  # sums near ties, and near zero
    ties = half + half.sign() * 2.0**-24 * half.abs()
    for addend in (c, torch.zeros(()), -half, ties, c * 2.0**-100):
        product = a.double() * b
        expected = arithmetic._rounded_to_odd(product, addend, product + addend)
        assert_equal(arithmetic.fused_multiply_add(a, b, addend), expected)
    assert arithmetic.fused_multiply_add(a[:0], b[:0], c[:0]).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_without_weights_are_those_with_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = scattered(400, 24).to(dtype)
    x[::7, ::5] = torch.nan
    x[::11, ::3] = -0.0
    slots = torch.randint(-1, 400, (300, 6)).int()
    expected = definitions.reduce_fused(x, torch.ones(300, 6), slots)
    assert_equal(definitions.reduce_fused(x, None, slots), expected)


@pytest.mark.parametrize("shape", [(130, 256), (131, 200), (0, 64)])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_casts_in_chunks(fmt: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = scattered(*shape)
    x[::7, ::5] = torch.nan
    x[::11, ::3] = -torch.inf
    for block in ((1, 32), (32, 32), (128, 1)):
        expected = definitions.per_block_cast(x, fmt, block)
        assert_equal(definitions.per_block_cast_with_sf_only(x, fmt, block), expected[1])
        with monkeypatch.context() as patch:
            patch.setattr(arithmetic, "_CHUNK", 1000)
            for one, other in zip(definitions.per_block_cast(x, fmt, block), expected):
                assert_equal(one, other)


@pytest.mark.slow
def test_scales_alone_and_sums_without_weights_are_cheaper() -> None:
    """By a wide margin, so that no other load on the machine matters."""
    x = torch.randn(1024, 2048)
    data, scales = references._fastest(
        [
            lambda: definitions.per_token_cast(x, "e5m6", 2048),
            lambda: definitions.per_token_cast_with_sf_only(x, "e4m3", 128),
        ],
        0.0,
    )
    assert scales < data
    slots = torch.randint(1024, (512, 8)).int()
    weights = torch.rand(512, 8)
    weighted, plain = references._fastest(
        [lambda w=w: definitions.reduce_fused(x, w, slots) for w in (weights, None)], 0.0
    )
    assert plain < weighted


def test_references_that_look_at_values_take_none() -> None:
    """On the meta device, where cases are built for warm-up."""
    x = torch.empty(130, 256, device="meta")
    data, sf = definitions.per_token_cast(x, "e4m3", 128)
    assert (data.shape, sf.shape) == ((130, 256), (130, 2))
    assert definitions.stable_topk(x, 8).shape == (130, 8)
    assert arithmetic.fused_multiply_add(x, x, x[:1]).shape == x.shape
