"""Attention over chosen rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.attention.helpers import each_ground
from tests.requirements import needs_nvcc
from tile_kernels.attention import (
    attention_indices,
    flash_mla_sparse_fwd,
    indexer_ranges,
    indexer_select,
    sparse_attention,
)
from tile_kernels.attention.sparse import reference
from tile_kernels.attention.sparse.cases import SPARSE_ATTENTION, arguments
from tile_kernels.attention.sparse.plan import plan
from tile_kernels.runtime import sources
from tile_kernels.runtime.cases import Sample
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.launch import Kernel


def test_reference_on_worked_lists() -> None:
    """Rows of 6 channels in float64: no key, keys by length, one key four times, sinks."""
    torch.manual_seed(0)
    q, kv = torch.randn(4, 3, 6).double(), torch.randn(9, 6).double()
    lists = [[0, 3, -1, 3], [-1, 9, 2**31 - 1, -(2**31)], [8, 7, 6, 5], [1, 1, 1, 1]]
    index = torch.tensor(lists, dtype=torch.int32)
    sink = torch.tensor([0.5, -torch.inf, torch.inf]).double()
    length = torch.tensor([4, 4, 2, 4], dtype=torch.int32)
    out, top, lse = reference.attended(q, kv, index, 0.4, sink, length, 6)
    assert not out[1].any()
    assert (lse[1] == torch.inf).all()
    assert (top[1] == -torch.inf).all()
    assert not out[:, 2].any()
    torch.testing.assert_close(out[3, 1], kv[1])
    torch.testing.assert_close(lse[3], 0.4 * (q[3] @ kv[1]) + math.log(4))
    twice = (0.4 * (q[2] @ kv[7:].T)).logsumexp(-1)
    torch.testing.assert_close(lse[2], twice)


def test_reference_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(7, 3, 60, 40, sink="wild", lengths=True)(torch.device("cpu"))
    whole = tile_kernels.torch.sparse_attention(**given)
    monkeypatch.setattr("tile_kernels.attention.softmax_reference.ELEMENTS_AT_ONCE", 1)
    for one, other in zip(tile_kernels.torch.sparse_attention(**given), whole):
        torch.testing.assert_close(one, other)


@each_ground
@pytest.mark.parametrize(("num_rows", "k"), [(0, 3), (4, 0), (0, 0), (4, 2)])
def test_no_row_gives_zeros_whatever_the_query(
    ground: tuple[str, str], num_rows: int, k: int
) -> None:
    """NaN and infinities in a query need a row to have an effect."""
    backend, device = ground
    q = torch.full((2, 3, 512), math.nan, device=device).bfloat16()
    q[0] = math.inf
    kv = torch.full((num_rows, 512), math.nan, device=device).bfloat16()
    indices = torch.full((2, k), -1, dtype=torch.int32, device=device)
    with tile_kernels.backend(backend):
        out, top, lse = sparse_attention(q, kv, indices, 1.0, return_stats=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert (top == -math.inf).all()
    assert (lse == math.inf).all()


def test_forms_of_the_arguments() -> None:
    """`[N, 1, d]` and `[T, 1, k]`, and FlashMLA's function."""
    given = arguments(3, 2, 20, 9, sink="normal", lengths=True)(torch.device("cpu"))
    expected = sparse_attention(**given)
    with_heads = {**given, "kv": given["kv"][:, None], "indices": given["indices"][:, None]}
    kv, indices = with_heads["kv"], with_heads["indices"]
    positional = (given["q"], kv, indices, given["sm_scale"])
    for results in (
        sparse_attention(**with_heads),
        flash_mla_sparse_fwd(*positional, 512, given["sink"], given["topk_length"]),
    ):
        for one, other in zip(results, expected):
            assert torch.equal(one, other)
    out = sparse_attention(**{**given, "return_stats": False})
    assert isinstance(out, Tensor)
    assert torch.equal(out, expected[0])
    with pytest.raises(ValueError, match="d_v must be 512"):
        flash_mla_sparse_fwd(*positional, 256)
    with pytest.raises(ValueError, match="kv must have"):
        sparse_attention(**{**given, "kv": given["kv"][:, None, None]})


def bounds(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`out` in float64, and how far a result may be from it: two roundings to bfloat16."""
    exact = {
        name: value.cpu().double() if name in ("q", "kv", "sink") else value
        for name, value in given.items()
        if name != "return_stats"
    }
    exact = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in exact.items()}
    out = tile_kernels.torch.sparse_attention(**exact)
    assert isinstance(out, Tensor)
    # The weights do not depend on the values: with a row's absolute values in other channels.
    q, kv = exact["q"], exact["kv"]
    wide = torch.cat((kv[:, :512].abs(), kv), 1)
    zeros = q.new_zeros(*q.shape[:2], 512)
    more = {**exact, "q": torch.cat((zeros, q), 2), "kv": wide}
    absolute = tile_kernels.torch.sparse_attention(**more)
    assert isinstance(absolute, Tensor)
    return out, absolute * 2**-7 + 1e-6


def check_bounds(given: dict[str, Any], out: Tensor) -> None:
    expected, tolerance = bounds(given)
    error = (out.cpu().double() - expected).abs()
    assert bool((error <= tolerance).all())
    assert error.norm() <= 5e-3 * expected.norm()


def test_error_of_each_element() -> None:
    given = arguments(2, 2, 150, 130, sink="normal", lengths=True)(torch.device("cpu"))
    with tile_kernels.backend("emulate"):
        results = sparse_attention(**given)
    check_bounds(given, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize(("heads", "num_rows", "k"), [(128, 592, 128), (64, 1521, 512)])
def test_error_of_each_element_on_a_gpu(width: int, heads: int, num_rows: int, k: int) -> None:
    given = arguments(62, heads, num_rows, k, width=width, sink="normal", lengths=True)(
        torch.device("cuda")
    )
    check_bounds(given, sparse_attention(**given)[0])


@pytest.mark.gpu
def test_permuted_queries_have_the_same_bits() -> None:
    given = Sample("permuted", arguments(213, 128, 1592, 384, sink="wild", lengths=True)).build(
        "cuda"
    )
    order = torch.randperm(213, device="cuda")
    names = ("q", "indices", "topk_length")
    results = sparse_attention(**given)
    permuted = sparse_attention(**{**given, **{name: given[name][order] for name in names}})
    for one, other in zip(permuted, results):
        assert torch.equal(one, other[order])


def scores(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What entries are scored from: queries, keys and weights; and the bounds of sequences."""
    torch.manual_seed(0)
    q = torch.randn(70, 4, 32, device=device).bfloat16()
    keys = torch.randn(7 + 10, 32, device=device).bfloat16()
    weights = torch.rand(70, 4, device=device)
    return q, keys, weights, torch.tensor([0, 30, 70], dtype=torch.int32, device=device)


def selected_rows(
    q: Tensor, keys: Tensor, weights: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The best entries of each query, and lists of rows from them."""
    start, end = indexer_ranges(cu_seqlens, 4, 70)
    selected = indexer_select(q, keys, weights, start, end, 5)
    indices, lengths = attention_indices(selected, cu_seqlens, window=8, ratio=4)
    return selected, indices, lengths


def check_selected(selected: Tensor, indices: Tensor, lengths: Tensor) -> None:
    assert torch.equal((selected >= 0).sum(1), (indices >= 70).sum(1))
    assert torch.equal((indices >= 0).sum(1), lengths)
    assert (lengths > 0).all()


def test_a_selection_makes_lists() -> None:
    check_selected(*selected_rows(*scores("cpu")))


@pytest.mark.gpu
def test_a_selection_makes_lists_in_a_graph() -> None:
    """From the selection to the attention nothing waits: a CUDA graph records all of it, and
    replays it for other scores."""
    rows, heads = torch.randn(87, 512, device="cuda").bfloat16(), 64
    q = torch.randn(70, heads, 512, device="cuda").bfloat16()
    operands = scores("cuda")

    def run() -> tuple[Tensor, ...]:
        selected, indices, lengths = selected_rows(*operands)
        out = sparse_attention(q, rows, indices, 512**-0.5, topk_length=lengths)
        assert isinstance(out, Tensor)
        return selected, indices, lengths, out

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    operands[0].copy_(torch.randn_like(operands[0]))
    graph.replay()
    torch.cuda.synchronize()
    expected = run()
    assert not torch.equal(first[0], expected[0])
    for one, other in zip(found, expected):
        assert torch.equal(one, other)
    check_selected(*found[:3])


def test_warpgroups_do_not_wait_for_registers_for_ever() -> None:
    """A block has 65,536 registers, divided among its threads in multiples of 8."""
    primitives = pytest.importorskip("tile_kernels.attention.softmax_primitives")
    pool = 65536 // primitives.THREADS // 8 * 8 * 3
    consumers, producer = primitives.CONSUMER_REGISTERS, primitives.PRODUCER_REGISTERS
    assert consumers % 8 == producer % 8 == 0
    assert 2 * consumers + producer <= pool


@needs_nvcc
@pytest.mark.compiled
@pytest.mark.full
def test_serialised_products_are_noticed() -> None:
    """Sums that are in flight at the end of a loop make ptxas wait after every product."""
    device = DESCRIBED["sm_90a"]
    static = plan(512, True, False, device)
    kernel = Kernel("tile_kernels.attention.sparse.kernel", "attend_rows", plan)
    source = sources.cuda_source(kernel.definition, static, device.arch)
    wait = "tl::wait_wgmma<0>();"
    assert wait in source
    for text, serialised in ((source, False), (source.replace(wait, ""), True)):
        (function,) = sources.compile_source(text, device.arch)
        assert function.serialised is serialised


def test_grid_of_samples_has_every_size() -> None:
    """The sizes of the specification in both widths and head counts."""
    labels = [sample.label for sample in SPARSE_ATTENTION.large]
    sizes = [label for label in labels if " of " in label]
    assert len(sizes) == 12 * 3 * 2 * 2
