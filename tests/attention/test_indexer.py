"""The indexer's references against formulas and properties, and operators against each other."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels import torch as references
from tile_kernels.attention import (
    indexer,
    indexer_logits,
    indexer_logits_bwd,
    indexer_ranges,
    indexer_select,
    indexer_topk,
)
from tile_kernels.attention.indexer import share_of_keys
from tile_kernels.attention.indexer_plan import KEYS
from tile_kernels.attention.indexer_reference import scores
from tile_kernels.attention.logits.cases import arguments
from tile_kernels.attention.logits.reference import selected_gradients
from tile_kernels.attention.select import op as select_op
from tile_kernels.quant import formats
from tile_kernels.runtime import emulation
from tile_kernels.runtime.cases import moved
from tile_kernels.runtime.device import DESCRIBED

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


NO_LIMIT = 4096
FORMATS = ("bfloat16", "float8_e4m3fn", "e2m1")
# As in docs/indexer.md: arch, format, channels, heads, the largest topk of blocks with few keys and
# of others, logits too.
LIMITS = [
    *(("sm_80", source, 256, 128, NO_LIMIT, 3264, True) for source in FORMATS),
    *((arch, *limit) for arch in ("sm_89", "sm_120a") for limit in (
        ("bfloat16", 128, 64, NO_LIMIT, NO_LIMIT, True),
        ("bfloat16", 128, 128, NO_LIMIT, 3264, True),
        ("bfloat16", 256, 8, 4032, 2496, True), ("bfloat16", 256, 16, 3264, 2240, True),
        ("bfloat16", 256, 32, 1984, 1216, True), ("bfloat16", 256, 64, 0, 0, True),
        ("bfloat16", 256, 128, 0, 0, False), ("float8_e4m3fn", 256, 64, NO_LIMIT, NO_LIMIT, True),
        ("float8_e4m3fn", 256, 128, NO_LIMIT, 3264, True),
        ("e2m1", 128, 128, NO_LIMIT, NO_LIMIT, True), ("e2m1", 256, 32, NO_LIMIT, NO_LIMIT, True),
        ("e2m1", 256, 64, NO_LIMIT, 3264, True), ("e2m1", 256, 128, 0, 0, True),
    )),
    *((arch, source, 256, 128, NO_LIMIT, NO_LIMIT, True) for arch in ("sm_90a", "sm_100a")
      for source in FORMATS),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "source", "depth", "heads", "few", "many", "logits"), LIMITS)
def test_limits_are_as_documented(
    arch: str, source: str, depth: int, heads: int, few: int, many: int, logits: bool
) -> None:
    """Plans are made up to the limit, and refused above it with a reason."""
    from tile_kernels.attention.logits.plan import plan as plan_logits
    from tile_kernels.attention.select.plan import plan as plan_select

    device = DESCRIBED[arch]
    keys_and_roles = [(source, "all")]
    if source == "e2m1":
        keys_and_roles = [(source, "marking"), ("float8_e4m3fn", "marking"), (source, "marked")]

    def select(topk: int, short: bool) -> None:
        for of_keys, role in keys_and_roles:
            plan_select(source, of_keys, heads, depth, topk, short, False, role, device)

    for short, most in ((True, few), (False, many)):
        if most:
            select(most, short)
        if most < NO_LIMIT:
            with pytest.raises(ValueError, match="fewer heads or channels, or topk smaller"):
                select(most + 1, short)
    with contextlib.nullcontext() if logits else pytest.raises(ValueError, match="fewer heads"):
        for of_keys, role in keys_and_roles:
            plan_logits(source, of_keys, heads, depth, "float32", role, device)


@pytest.mark.parametrize("tokens", [5, 70])
def test_nothing_runs_where_the_last_launch_does_not_fit(tokens: int) -> None:
    given = arguments(tokens, 130, 128, 256, "e2m1")(torch.device("cpu"))
    with (
        tile_kernels.backend("emulate", arch="sm_89"),
        emulation.reports() as reports,
        pytest.raises(ValueError, match="fewer heads or channels, or topk smaller"),
    ):
        indexer_select(**given, topk=8)
    assert not reports


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["ascending", "steps", "equal"])
@pytest.mark.parametrize("ranges", ["all", "ragged"])
@pytest.mark.parametrize("short", [True, False])
def test_lists_that_fill_up(
    scales: str, ranges: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block has all keys, and its lists are shortened again and again, or bounds stay."""
    monkeypatch.setattr(indexer, "MIN_TILES", 10**6)
    monkeypatch.setattr(select_op, "MAX_SHORT", 1 << 16 if short else 0)
    num_keys, heads, depth = 1500, 4, 128
    generator = torch.Generator().manual_seed(0)
    factors = {
        "ascending": torch.arange(1.0, num_keys + 1),
        "steps": torch.randint(1, 6, (num_keys,), generator=generator).float().sort().values,
        "equal": torch.ones(num_keys),
    }[scales]
    weights = torch.ones(4, heads)
    weights[1], weights[2], weights[3, 0] = -1, 0, torch.nan
    start, end = torch.zeros(4).int(), torch.full((4,), num_keys).int()
    if ranges == "ragged":
        start, end = torch.tensor([[5, 300, 0, 129], [1400, 1301, 1500, 999]]).int()
    q, k = torch.ones(4, heads, depth), torch.ones(num_keys, depth)
    given = {
        "q": q.to(torch.float8_e4m3fn),
        "k": (k.to(torch.float8_e4m3fn), factors),
        "weights": weights,
        "start": start,
        "end": end,
        "topk": 20,
    }
    with tile_kernels.backend("emulate"):
        chosen = indexer_select(**given)
    assert torch.equal(chosen, references.indexer_select(**given))


@pytest.mark.parametrize("source", ["bf16", "e4m3", "e2m1"])
@pytest.mark.parametrize("ground", ["torch", "emulate", "meta", "compile"])
def test_all_keys_count_without_bounds(source: str, ground: str) -> None:
    given = arguments(5, 70, 2, 32, source)(torch.device("cpu"))
    q, k, weights = given["q"], given["k"], given["weights"]
    logits = indexer_logits(q, k, weights, given["start"], given["end"])
    start, end = torch.zeros(5, dtype=torch.int32), torch.full((5,), 70, dtype=torch.int32)
    expected = indexer_select(q, k, weights, start, end, 20), indexer_topk(logits, 20, end)
    later = start + 30
    from_later = indexer_select(q, k, weights, later, end, 20)

    def without_bounds(*arguments: Any) -> tuple[torch.Tensor, ...]:
        q, k, weights, logits, later = arguments
        return (
            indexer_select(q, k, weights, topk=20),
            indexer_topk(logits, 20),
            indexer_select(q, k, weights, later, None, 20),
        )

    values = (q, k, weights, logits, later)
    if ground == "meta":
        for result in without_bounds(*moved(values, "meta")):
            assert (result.shape, result.dtype, result.is_meta) == ((5, 20), torch.int32, True)
        return
    function = without_bounds
    if ground == "compile":
        torch._dynamo.reset()
        function = torch.compile(without_bounds, fullgraph=True, backend="aot_eager")
    with tile_kernels.backend("emulate" if ground == "emulate" else "torch"):
        results = function(*values)
    for result, wanted in zip(results, (*expected, from_later), strict=True):
        assert torch.equal(result, wanted)
    with pytest.raises(TypeError, match="indexer_select: topk must be an int, got NoneType"):
        indexer_select(q, k, weights)
    with pytest.raises(ValueError, match=r"indexer_select: k must have 2 dimensions"):
        indexer_select(q, torch.ones(()).bfloat16(), weights, topk=1)


@pytest.mark.parametrize("num_queries", [1, 4096])
@pytest.mark.parametrize("num_keys", [1, 65536, 2**28, 2**31 - 2**16])
def test_blocks_fit_a_grid(num_queries: int, num_keys: int) -> None:
    share = share_of_keys(num_queries, num_keys, torch.device("cpu"))
    assert share % KEYS == 0
    assert -(-num_keys // share) <= 65535


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
@pytest.mark.parametrize("short", [False, True])
def test_selection_is_the_choice_among_logits(
    source: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of inexact logits too: both kernels compute the same ones. Keys of 16 or 32 bits in lists."""
    monkeypatch.setattr(select_op, "MAX_SHORT", 2**16 if short else 0)
    given = arguments(5, 900, 4, 32, source, "causal")(torch.device("cpu"))
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

    for module, name in (
        (torch.Tensor, "new_empty"), (torch.Tensor, "new_full"), (torch, "empty"),
        (torch, "empty_like"), (torch, "empty_strided"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    logits = indexer_logits(**given)
    indexer_topk(logits, 2048, given["end"], start=given["start"])
    two_steps = sum(allocated)
    allocated.clear()
    indexer_select(**given, topk=2048)
    assert 4096 * 2048 * 4 <= sum(allocated) < two_steps / 20


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
