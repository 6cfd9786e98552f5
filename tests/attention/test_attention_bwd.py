"""Gradients of attention over shared rows, and what the indexer learns from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels import torch as references
from tile_kernels.attention import (
    attention_target,
    hca_attention,
    hca_attention_bwd,
    indexer_kl,
    sparse_attention,
    sparse_attention_bwd,
)
from tile_kernels.attention.attention_bwd import op as bwd_op
from tile_kernels.attention.attention_bwd import plan as bwd_plan
from tile_kernels.attention.attention_bwd import reference
from tile_kernels.attention.attention_bwd.cases import (
    SPARSE_ATTENTION_BWD,
    compare,
    hca_arguments,
    sparse_arguments,
)
from tile_kernels.attention.hca import reference as hca_reference
from tile_kernels.attention.sparse import reference as sparse_reference
from tile_kernels.runtime import emulation
from tile_kernels.runtime.cases import Sample

LISTS = [[0, 3, -1, 3], [-1, 9, 2**31 - 1, -(2**31)], [8, 7, 6, 5], [1, 1, 1, 1]]


def built(label: str, build: Any) -> dict[str, Any]:
    return Sample(label, build).build("cpu")


# ---- references ---------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [6, 4])  # all channels, or the first
@pytest.mark.parametrize("lengths", [None, [4, 4, 2, 0]])
def test_sparse_reference_is_the_derivative(values: int, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    index = torch.tensor(LISTS, dtype=torch.int32)
    length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    shapes = ((4, 3, 6), (9, 6), (3,))
    q, kv, sink = (torch.randn(*shape).double().requires_grad_() for shape in shapes)
    out, _, lse = sparse_reference.attended(q, kv, index, 0.4, sink, length, values)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, kv, sink), grad)
    found = reference.sparse_attention_bwd(
        q.detach(), kv.detach(), index, grad, out.detach(), lse.detach(), 0.4,
        sink=sink.detach(), topk_length=length,
    )  # fmt: skip
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    assert not found[0][1].any()  # no row
    assert not found[1][2].any()  # chosen by nobody


@pytest.mark.parametrize("num_entries", [0, 3])
def test_hca_reference_is_the_derivative(num_entries: int) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([1, 5, 7], dtype=torch.int32)
    shapes = ((8, 2, 6), (8, 6), (num_entries, 6), (2,))
    leaves = [torch.randn(*shape).double().requires_grad_() for shape in shapes]
    q, window_kv, entries, sink = leaves
    of_entries = entries if num_entries else None
    where: dict[str, Any] = {"cu_seqlens": bounds, "ratio": 2, "window": 3}
    out, _, lse = hca_reference.attended(q, window_kv, of_entries, 0.4, **where, sink=sink, d_v=6)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    with torch.no_grad():
        found = reference.hca_attention_bwd(
            q, window_kv, of_entries, grad, out, lse, 0.4, **where, sink=sink
        )
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


def test_reference_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = built("parts", sparse_arguments(7, 3, 60, 40, sink="wild", lengths=True))
    whole = references.sparse_attention_bwd(**given)
    monkeypatch.setattr("tile_kernels.attention.attention_bwd.reference.ELEMENTS_AT_ONCE", 1)
    for one, other in zip(references.sparse_attention_bwd(**given), whole):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-4)


# ---- autograd -----------------------------------------------------------------------------------


def leaves(given: dict[str, Any], *names: str) -> list[Tensor]:
    return [given[name].requires_grad_() for name in names]


def test_sparse_attention_is_differentiable() -> None:
    given = built("autograd", sparse_arguments(3, 2, 30, 20, sink="normal", lengths=True))
    grad, _, _ = (given.pop(name) for name in ("grad", "out", "lse"))
    wanted = leaves(given, "q", "kv", "sink")
    kv = given["kv"][:, None]
    out, top, lse = sparse_attention(**{**given, "kv": kv}, return_stats=True)
    assert not top.requires_grad
    assert not lse.requires_grad
    found = torch.autograd.grad(out, wanted, grad)
    with torch.no_grad():
        expected = sparse_attention_bwd(**given, grad=grad, out=out, lse=lse)
    for one, other, leaf in zip(found, expected, wanted):
        assert torch.equal(one, other.to(leaf.dtype))


@pytest.mark.parametrize("ratio", [0, 2])
def test_hca_attention_is_differentiable(ratio: int) -> None:
    given = built("autograd", hca_arguments((0, 3, 7), 7, 2, ratio=ratio, window=3, sink="normal"))
    grad, _, _ = (given.pop(name) for name in ("grad", "out", "lse"))
    wanted = leaves(given, *("q", "window_kv", "entries", "sink")[: 4 if ratio else 2])
    out, _, lse = hca_attention(**given, return_stats=True)
    found = torch.autograd.grad(out, wanted, grad)
    with torch.no_grad():
        expected = hca_attention_bwd(**given, grad=grad, out=out, lse=lse)
    for one, other, leaf in zip(found, expected, wanted):
        assert torch.equal(one, other.to(leaf.dtype))


# ---- kernels ------------------------------------------------------------------------------------


def emulated(given: dict[str, Any], **options: Any) -> tuple[Tensor, ...]:
    with tile_kernels.backend("emulate"), emulation.emulating(**options):
        return sparse_attention_bwd(**given)


def test_bits_do_not_depend_on_the_order_or_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on that of blocks and threads, nor on how many queries have pieces at a time."""
    given = built("bits", sparse_arguments(3, 65, 40, 70, sink="normal", lengths=True))
    expected = emulated(given)
    found = [emulated(given, order="reverse")]
    monkeypatch.setattr(bwd_plan, "MAX_PIECE_BYTES", 2 * (2 * 128 * 512 * 2))
    bwd_op.SPARSE_ATTENTION_BWD.forget()
    assert bwd_plan.chunk_tokens(3, 2, 70, 512) == 2
    found.append(emulated(given))
    bwd_op.SPARSE_ATTENTION_BWD.forget()
    for each in found:
        assert all(torch.equal(one, other) for one, other in zip(each, expected))


def test_what_has_no_weight_has_no_gradient() -> None:
    """Queries without rows, rows that nobody chose, all behind an infinite sink: exact zeros."""
    given = built("zeros", sparse_arguments(4, 2, 30, 9, sink="normal"))
    given["sink"][1] = math.inf
    given["out"][:, 1] = 0
    given["indices"][2] = -1
    given["lse"][2], given["out"][2] = math.inf, 0
    given["indices"][given["indices"] == 7] = 8
    grad_q, grad_kv, grad_sink = emulated(given)
    assert not grad_q[2].any()
    assert not grad_q[:, 1].any()
    assert not grad_kv[7].any()
    assert grad_kv[8].any() or not (given["indices"] == 8).any()
    assert grad_sink[0] != 0
    assert grad_sink[1] == 0


def test_registers_of_warpgroups() -> None:
    """Together they have what the block starts with: 168 of each thread. More would never come."""
    kernel = pytest.importorskip("tile_kernels.attention.attention_bwd.kernel")
    assert 2 * kernel.CONSUMER_REGISTERS + kernel.PRODUCER_REGISTERS <= 3 * 168


def test_rows_that_are_none_have_no_weight() -> None:
    """Where logits are so low that a logit of 0 would have an infinite one."""
    (sample,) = (each for each in SPARSE_ATTENTION_BWD.small if each.label.startswith("low"))
    given = sample.build("cpu")
    assert (given["lse"] < -90).all()
    compare(emulated(given), sparse_attention_bwd(**given))


@pytest.mark.gpu
def test_ten_runs_are_equal_and_a_graph_replays_them() -> None:
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)
        given = sparse_arguments(300, 128, 900, 256, sink="normal")(torch.device("cuda"))
    expected = sparse_attention_bwd(**given)
    for _ in range(10):
        again = sparse_attention_bwd(**given)
        assert all(torch.equal(one, other) for one, other in zip(again, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = sparse_attention_bwd(**given)
    for each in replayed:
        each.fill_(math.nan)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(replayed, expected))


# ---- the indexer --------------------------------------------------------------------------------


def test_target_is_the_share_of_the_joint_softmax() -> None:
    """Entries are a part of the rows; what each head gives them is added, then normalized."""
    torch.manual_seed(0)
    q, kv, sink = torch.randn(3, 4, 6).double(), torch.randn(10, 6).double(), torch.randn(4)
    entries = torch.tensor([[9, 5, -1], [-1, -1, -1], [7, 7, 6]], dtype=torch.int32)
    window = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=torch.int32)
    both = torch.cat((window, entries), 1)
    _, _, lse = sparse_reference.attended(q, kv, both, 0.4, None, None, 6)
    full = torch.logaddexp(lse, sink.double().expand_as(lse))
    found = references.attention_target(q, kv, entries, full, 0.4)
    for t in range(3):
        rows = [*window[t].tolist(), *(e for e in entries[t].tolist() if e >= 0)]
        logits = torch.cat((0.4 * q[t] @ kv[rows].T, sink.double()[:, None]), 1)
        share = logits.softmax(1)[:, 2:-1].sum(0)
        expected = torch.zeros(3).double()
        expected[entries[t] >= 0] = share / share.sum()
        torch.testing.assert_close(found[t], expected)
    raw = references.attention_target(q, kv, entries, full, 0.4, normalize=False)
    torch.testing.assert_close(raw / raw.sum(1, keepdim=True).clamp(min=1e-300), found)


def test_target_of_ranks_adds_up() -> None:
    """Heads on two ranks: sums are added, then normalized."""
    given = built("ranks", sparse_arguments(3, 4, 40, 20))
    operands = (given["kv"], given["indices"])
    whole = attention_target(given["q"], *operands, given["lse"], given["sm_scale"])
    parts = [
        attention_target(
            given["q"][:, heads], *operands, given["lse"][:, heads], given["sm_scale"],
            normalize=False,
        )
        for heads in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    total = parts[0] + parts[1]
    torch.testing.assert_close(total / total.sum(1, keepdim=True), whole)


def test_divergence_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    logits, weights = torch.randn(4, 5).double().requires_grad_(), torch.rand(4, 5).double()
    weights[1] = 0
    total = weights.sum(1, keepdim=True)
    p = torch.where(total > 0, weights / total.clamp(min=1e-300), 0)
    kl = torch.nn.functional.kl_div(logits.log_softmax(1), p, reduction="none").sum(1)
    (grad,) = torch.autograd.grad(kl.sum(), logits)
    found, found_grad = references.indexer_kl(p, logits.detach())
    torch.testing.assert_close(found, kl.detach())
    torch.testing.assert_close(found_grad, grad.masked_fill(total == 0, 0))


def test_divergence_is_differentiable() -> None:
    p, logits = torch.rand(3, 6), torch.randn(3, 6, requires_grad=True)
    p /= p.sum(1, keepdim=True)
    loss, grad_logits = indexer_kl(p, logits)
    assert not grad_logits.requires_grad
    coefficients = torch.tensor([1.0, 0.0, -2.0])
    (grad,) = torch.autograd.grad(loss @ coefficients, logits)
    torch.testing.assert_close(grad, coefficients[:, None] * grad_logits)
    with pytest.raises(RuntimeError, match="target p has no gradient"):
        indexer_kl(p.requires_grad_(), logits)[0].sum().backward()
