"""Logits of the indexer: the formula, other matrix units, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.host_cost import counting, pytorch_operators
from tile_kernels import torch as references
from tile_kernels.attention import (
    indexer,
    indexer_logits,
    indexer_logits_bwd,
    indexer_select,
)
from tile_kernels.attention.indexer_reference import scores
from tile_kernels.attention.logits import op as logits_op
from tile_kernels.attention.logits import plan as logits_plan
from tile_kernels.attention.logits.cases import arguments
from tile_kernels.attention.logits.reference import selected_gradients
from tile_kernels.quant import formats
from tile_kernels.runtime import emulation

# ---- logits -------------------------------------------------------------------------------------


def test_scores_are_the_formula() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 5).double(), torch.randn(4, 5).double()
    weights, scales = torch.randn(3, 2).double(), torch.rand(4).double()
    found = scores(q, k, weights, scales)
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
    expected = scores(*decoded, given["weights"].double())
    with tile_kernels.backend("emulate"):
        found = indexer_logits(**given).double()
    size = scores(decoded[0].abs(), decoded[1].abs(), given["weights"].abs().double())
    assert ((found - expected).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize(
    ("arch", "source"), [("sm_80", "e4m3"), ("sm_80", "e2m1"), ("sm_89", "e4m3")]
)
@pytest.mark.parametrize("tokens", [5, 66])
def test_other_matrix_units(arch: str, source: str, tokens: int) -> None:
    """Without wgmma; and without e4m3 on sm_80, where it is expanded to bfloat16."""
    given = arguments(tokens, 70, 4, 32, source, "causal", exact=True)(torch.device("cpu"))
    with tile_kernels.backend("emulate", arch=arch):
        assert torch.equal(indexer_logits(**given), references.indexer_logits(**given))
        chosen = indexer_select(**given, topk=20)
    assert torch.equal(chosen, references.indexer_select(**given, topk=20))


@pytest.mark.parametrize("exponents", ["near", "far", "special"])
def test_keys_expanded_before_change_no_bit(
    exponents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(5, 300, 4, 128, "e2m1", "causal", exponents)(torch.device("cpu"))
    results = []
    for many in (5, 6):
        monkeypatch.setattr(indexer, "MIN_QUERIES_TO_EXPAND", many)
        with tile_kernels.backend("emulate", mode="fast"):
            results.append((indexer_logits(**given), indexer_select(**given, topk=20)))
    (logits, chosen), (others, other_chosen) = results
    assert torch.equal(logits.view(torch.int32), others.view(torch.int32))
    assert torch.equal(chosen, other_chosen)


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "depth", "source", "ranges"),
    [
        (11, 400, 64, 128, "e4m3", "wild"),
        (20, 1700, 64, 128, "e4m3", "window"),  # more tiles than slots
        (5, 300, 128, 256, "e4m3", "causal"),
        (9, 200, 40, 32, "e4m3", "all"),
        (10, 300, 64, 128, "bf16", "causal"),
        (17, 300, 128, 64, "bf16", "wild"),
        (12, 200, 64, 128, "e2m1", "causal"),
    ],
)
def test_pipelined_blocks_change_no_bit(
    tokens: int,
    keys: int,
    heads: int,
    depth: int,
    source: str,
    ranges: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many queries, against the blocks that few of them get; e2m1 with marks of both kinds."""
    exponents = "far" if source == "e2m1" else "near"
    build = arguments(tokens, keys, heads, depth, source, ranges, exponents)
    given = build(torch.device("cpu"))
    monkeypatch.setattr(indexer, "MIN_QUERIES_TO_EXPAND", 12)
    results = []
    for many, mode in ((1, "check"), (10**9, "fast")):
        monkeypatch.setattr(indexer, "MANY_QUERIES", many)
        with tile_kernels.backend("emulate", mode=mode), emulation.reports() as reports:
            results.append(indexer_logits(**given).view(torch.int32))
        blocks = {run.block[0] for report in reports for run in report.kernels}
        assert (384 in blocks) == (many == 1)  # two warpgroups that multiply and one that copies
    assert torch.equal(*results)


def test_scales_of_keys_may_begin_anywhere() -> None:
    """Tiles are copied whole from multiples of 16 bytes; scales elsewhere are moved before."""
    given = arguments(3, 200, 4, 64, "e4m3", "causal")(torch.device("cpu"))
    data, scales = given["k"]
    moved = torch.cat([scales.new_zeros(1), scales])[1:]
    assert moved.data_ptr() % 16 != 0
    with tile_kernels.backend("emulate"):
        logits, chosen = indexer_logits(**given), indexer_select(**given, topk=20)
        given["k"] = data, moved
        assert torch.equal(indexer_logits(**given), logits)
        assert torch.equal(indexer_select(**given, topk=20), chosen)


# ---- gradients ----------------------------------------------------------------------------------


def test_gradients_are_those_of_the_formula() -> None:
    """In float64 against autograd, which gradcheck holds against differences."""
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 5).double(), torch.randn(6, 5).double()
    weights, scales = torch.randn(3, 2).double(), torch.rand(6).double()
    indices = torch.tensor([[0, 3, 5, -1], [1, 1, 4, -1], [2, 3, 9, -7]], dtype=torch.int32)
    present = (indices >= 0) & (indices < 6)
    chosen = indices.long().masked_fill(~present, 0)

    def selected(*operands: torch.Tensor) -> torch.Tensor:
        return scores(*operands, scales).gather(1, chosen).masked_fill(~present, 0)

    operands = tuple(x.requires_grad_() for x in (q, k, weights))
    assert torch.autograd.gradcheck(selected, operands)
    grad = torch.randn(3, 4).double()
    expected = torch.autograd.grad(selected(*operands), operands, grad)
    detached = (x.detach() for x in operands)
    found = selected_gradients(*detached, scales, indices, grad)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


def test_gradient_of_a_key_does_not_depend_on_the_order_of_queries() -> None:
    """To the bit: all queries have the same keys, whose shares are added in any order."""
    torch.manual_seed(0)
    tokens, keys, chosen = 9, 12, 12
    q, k = torch.randn(tokens, 4, 32).bfloat16(), torch.randn(keys, 32).bfloat16()
    weights, grad = torch.randn(tokens, 4), torch.randn(tokens, chosen)
    indices = torch.arange(keys).expand(tokens, chosen).int().contiguous()
    order = torch.randperm(tokens)
    found = []
    for block_order in ("forward", "reverse", "random"):
        with tile_kernels.backend("emulate", order=block_order):
            found.append(indexer_logits_bwd(q, k, weights, indices, grad)[1])
    with tile_kernels.backend("emulate"):
        shuffled = (x[order] for x in (q, weights, grad))
        q, weights, grad = (x.contiguous() for x in shuffled)
        found.append(indexer_logits_bwd(q, k, weights, indices, grad)[1])
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_gradients_of_any_size(backend: str) -> None:
    """From the smallest to the largest numbers nothing overflows, and small ones are not lost."""
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 32).bfloat16(), torch.randn(7, 32).bfloat16()
    weights, grad = torch.randn(5, 4), torch.randn(5, 6)
    indices = torch.randint(7, (5, 6)).int()
    with tile_kernels.backend(backend):
        expected = indexer_logits_bwd(q, k, weights, indices, grad)[1]
        for exponent in (-80, 60):
            size = 2.0**exponent
            found = indexer_logits_bwd(q, k, weights, indices, grad * size)[1]
            torch.testing.assert_close(found, expected * size, rtol=1e-5, atol=0)
        nothing = indexer_logits_bwd(q, k, weights, indices, torch.zeros_like(grad))[1]
        assert torch.equal(nothing, torch.zeros_like(nothing))


def unit_of_shares(
    q: Tensor, k_sf: Tensor | None, weights: Tensor, indices: Tensor, grad: Tensor, keys: int
) -> float:
    """The inverse of the unit in which gradients of keys are counted, by the formula."""
    present = (indices >= 0) & (indices < keys)
    if k_sf is not None:
        grad = grad * k_sf[indices.where(present, 0)]
    largest = torch.where(present, grad, 0).abs().amax() * weights.abs().sum(-1).amax()
    largest = largest * (448 if k_sf is not None else q.abs().amax().float())
    bits = 61 - math.ceil(math.log2(max(2, grad.numel())))
    exponent = (bits - largest.log2().ceil()).clamp(-126, 126)
    return torch.where(largest.isfinite(), exponent.exp2(), torch.nan).item()


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        (torch.bfloat16, 9),
        (torch.float8_e4m3fn, 9),
        (torch.float8_e4m3fn, logits_plan.MAX_SCALE_BLOCKS + 3),
    ],
)
def test_unit_of_the_gradients_of_keys(dtype: torch.dtype, tokens: int) -> None:
    """That of the formula, wherever the largest values are; and the integers become zero."""
    torch.manual_seed(0)
    heads, depth, keys, chosen = 5, 32, 100, 3
    given = [
        torch.randn(tokens, heads, depth).to(dtype),
        torch.rand(keys) if dtype == torch.float8_e4m3fn else None,
        torch.randn(tokens, heads),
        torch.randint(-1, keys + 1, (tokens, chosen)).int(),
        torch.randn(tokens, chosen),
    ]
    q, k_sf, weights, indices, grad = given
    indices[-1] = torch.tensor([0, 1, 2])

    def check(expected: float | None = None) -> None:
        counted = torch.full((keys, depth), 7, dtype=torch.int64)
        partials = torch.empty(logits_plan.MAX_SCALE_BLOCKS, 3, dtype=torch.int32)
        scale, ticket = torch.empty(1), torch.zeros(1, dtype=torch.int32)
        bits = 61 - math.ceil(math.log2(tokens * chosen))
        problem = (indexer.SOURCES[dtype], heads, depth)
        arguments = (*given, counted, partials, scale, ticket, 0, bits)
        emulation.run(logits_op._SCALE, problem, *arguments)
        assert not counted.any()
        assert ticket.item() == 0
        found = scale.item()
        wanted = unit_of_shares(q, k_sf, weights, indices, grad, keys)
        assert str(found) == str(wanted)  # so that NaN equals NaN
        assert expected is None or str(found) == str(expected)

    grad[-1, 2] = 2.0**40  # in the last token
    check()
    if tokens > logits_plan.MAX_SCALE_BLOCKS:
        return
    weights[3, 4] = -(2.0**20)
    check()
    if k_sf is None:
        q[7, 2, 31] = -(2.0**9)
        check()
    grad *= 2.0**-120
    weights *= 2.0**-60
    check(2.0**126)
    grad[-1, 2] = torch.nan
    check(math.nan)
    indices[-1, 2] = -1
    check(2.0**126)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_gradients_take_three_launches(dtype: torch.dtype) -> None:
    """And no step of PyTorch between them."""
    q, k = torch.zeros(5, 4, 32).to(dtype), torch.zeros(7, 32).to(dtype)
    keys = k if dtype == torch.bfloat16 else (k, torch.zeros(7))
    weights, indices, grad = torch.zeros(5, 4), torch.zeros(5, 6).int(), torch.zeros(5, 6)

    def step() -> None:
        indexer_logits_bwd(q, keys, weights, indices, grad)

    with counting() as counts:
        step()
        counts.clear()
        step()
        assert counts.launches == ["gradient_scale", "selected_gradients", "counted_gradient"]
        assert (counts.slow, counts.allocations) == (0, 6)
        assert not pytorch_operators(step)


def test_gradients_that_are_not_finite_show() -> None:
    q, k = torch.ones(2, 1, 32).bfloat16(), torch.ones(3, 32).bfloat16()
    grad = torch.tensor([[1.0], [float("inf")]])
    with tile_kernels.backend("emulate"):
        found = indexer_logits_bwd(q, k, torch.ones(2, 1), torch.tensor([[0], [1]]).int(), grad)
    assert found[1].isnan().all()


def test_gradients_where_nothing_counts() -> None:
    """NaN at an index of -1, and in the scale of a key that nobody chose, harms nothing."""
    torch.manual_seed(0)
    q = torch.randn(3, 4, 32).to(torch.float8_e4m3fn)
    k = torch.randn(9, 32).to(torch.float8_e4m3fn)
    k_sf = torch.rand(9) + 0.5
    k_sf[7] = float("nan")
    indices = torch.tensor([[0, 3, -1], [5, -1, -1], [8, 1, 2]], dtype=torch.int32)
    grad = torch.randn(3, 3).masked_fill(indices < 0, float("nan"))
    weights = torch.randn(3, 4)
    with tile_kernels.backend("emulate"):
        found = indexer_logits_bwd(q, (k, k_sf), weights, indices, grad)
    expected = indexer_logits_bwd(q, (k, k_sf), weights, indices, grad)
    for one, other in zip(found, expected):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_logits_are_differentiable() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 32).bfloat16().requires_grad_()
    k = torch.randn(5, 32).bfloat16().requires_grad_()
    weights = torch.randn(2, 4).requires_grad_()
    start, end = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    logits = indexer_logits(q, k, weights, start, end)
    inside = logits.isfinite()
    grad = torch.randn(2, 5)
    logits.masked_fill(~inside, 0).backward(grad)
    copies = [x.detach().float().requires_grad_() for x in (q, k, weights)]
    dots = torch.einsum("thd,sd->ths", copies[0], copies[1])
    plain = torch.einsum("ths,th->ts", dots.relu(), copies[2])
    plain.masked_fill(~inside, 0).backward(grad)
    for one, other in zip((q, k, weights), copies):
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=2e-2, atol=2e-2)


def test_scales_of_keys_have_no_gradient_and_say_so() -> None:
    given = arguments(2, 5, 2, 32, "e4m3", "all")(torch.device("cpu"))
    k, scales = given["k"]
    given["k"] = (k, scales.requires_grad_())
    with pytest.raises(RuntimeError, match="the scales of k have no gradient; detach them"):
        indexer_logits(**given).sum().backward()
