"""`torch.compile` of functions that dispatch and combine: one graph, the results of eager calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ep.processes import run_processes
from tile_kernels.ep import ElasticBuffer, LocalGroup, compiled
from tile_kernels.modeling.moe import MoELayer
from tile_kernels.testing.numeric import assert_equal

EXPERTS, HIDDEN, TOKENS, TOPK = 4, 16, 6, 2


def inputs(rank: int, num_tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    chosen = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    return x, chosen, torch.rand(num_tokens, TOPK, generator=generator)


def graph(function: Callable[..., Any], dynamic: bool | None = False) -> Any:
    """Compiled without breaks in the graph."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


def buffer_of(group: Any, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=HIDDEN, **options)


def round_trip(buffer: ElasticBuffer, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rows that are squared and weighted on their way."""

    def run(x: Tensor, chosen: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows, ids, row_weights, handle, _ = buffer.dispatch(
            x, chosen, weights, num_experts=EXPERTS, **options
        )
        if ids is None:
            rows = rows * rows * row_weights[:, None]
        else:
            rows = rows * rows * (row_weights * (ids >= 0)).sum(1, keepdim=True)
        total, back, _ = buffer.combine(rows, handle, row_weights * 2, bias=bias)
        return total, back

    return run


def compare(group: Any, **options: Any) -> None:
    """Results and gradients of the compiled function are those of the eager one."""
    rank = group.rank() if callable(group.rank) else group.rank
    check_ranks = options.pop("check_ranks", True)
    run = round_trip(buffer_of(group, check_ranks=check_ranks), **options)
    results = []
    for function in (run, graph(run)):
        x, chosen, weights = inputs(rank)
        bias = torch.ones_like(x)
        for each in (x, weights, bias):
            each.requires_grad_()
        total, back = function(x, chosen, weights, bias)
        (total.sum() + back.square().sum()).backward()
        results.append([total, back, x.grad, weights.grad, bias.grad])
    for wanted, found in zip(*results):
        assert_equal(found.detach(), wanted.detach())


OPTIONS: dict[str, dict[str, Any]] = {
    "compact": {},
    "expanded": {"do_expand": True, "expert_alignment": 4},
    "worst case": {"do_expand": True, "do_cpu_sync": False},
    "static": {"do_cpu_sync": False, "check_ranks": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_graph_on_one_rank(options: dict[str, Any]) -> None:
    compare(LocalGroup(), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_graph_for_any_number_of_tokens(options: dict[str, Any]) -> None:
    options = dict(options)
    buffer = buffer_of(LocalGroup(), check_ranks=options.pop("check_ranks", True))
    run = round_trip(buffer, **options)
    compiled_run = graph(run, dynamic=True)
    for num_tokens in (6, 3, 8):
        x, chosen, weights = inputs(0, num_tokens)
        given = (x, chosen, weights, torch.ones_like(x))
        for found, wanted in zip(compiled_run(*given), run(*given)):
            assert_equal(found, wanted)


def test_one_function_with_several_buffers() -> None:
    """Numbers that change from call to call become symbols; what names a buffer must not."""
    x, chosen, _ = inputs(0)

    def run(buffer: ElasticBuffer, x: Tensor) -> Tensor:
        rows, _, _, handle, _ = buffer.dispatch(x, chosen, num_experts=EXPERTS)
        return buffer.combine(rows, handle)[0]

    compiled_run = graph(run, dynamic=None)
    for _ in range(3):
        assert_equal(compiled_run(buffer_of(LocalGroup()), x), x)


def every_option(group: Any) -> None:
    for options in OPTIONS.values():
        compare(group, **options)


@pytest.mark.multiprocess
def test_one_graph_on_two_ranks() -> None:
    run_processes(2, every_option, timeout=200)


def layers(group: Any) -> None:
    """A layer whose experts are on two ranks, compiled: outputs and gradients."""
    torch.manual_seed(0)
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=HIDDEN)
    layer = MoELayer(HIDDEN, 32, 8, 2, ep=buffer)
    for weight in layer.parameters():
        torch.distributed.broadcast(weight.data, 0)
    results = []
    for function in (layer, graph(layer)):
        layer.zero_grad()
        x = inputs(group.rank(), 12)[0].requires_grad_()
        y = function(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(each.grad for each in layer.parameters())])
    for wanted, found in zip(*results):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.multiprocess
def test_a_layer_is_one_graph() -> None:
    run_processes(2, layers, timeout=200)


def test_scale_factors_and_other_data_along_the_routing() -> None:
    buffer = buffer_of(LocalGroup())

    def run(x: Tensor, sf: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        (rows, scales), ids, weights, handle, _ = buffer.dispatch(
            (x, sf), chosen, num_experts=EXPERTS, do_expand=True, use_tma_aligned_col_major_sf=True
        )
        assert ids is None
        assert weights is None
        again = buffer.dispatch(x * 2, handle=handle)[0]
        counts = handle.num_unaligned_recv_tokens_per_expert
        return rows, scales, again, counts, handle.psum_num_recv_tokens_per_expert

    x, chosen, _ = inputs(0)
    given = (x, torch.rand(TOKENS, 3), chosen)
    for found, wanted in zip(graph(run)(*given), run(*given)):
        assert_equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_handles_are_dropped_with_the_last_use() -> None:
    """Also those that a backward pass keeps."""
    run = graph(round_trip(buffer_of(LocalGroup()), do_expand=True))
    x, chosen, weights = inputs(0)
    before = len(compiled._handles)
    for _ in range(3):
        total, back = run(x.requires_grad_(), chosen, weights, torch.ones_like(x))
        assert len(compiled._handles) > before
        total.sum().backward()
        del total, back
        gc.collect()
        assert len(compiled._handles) == before


def test_a_traced_handle_serves_eager_calls() -> None:
    buffer = buffer_of(LocalGroup())
    x, chosen, _ = inputs(0)
    run = graph(lambda x: buffer.dispatch(x, chosen, num_experts=EXPERTS)[:4:3])
    rows, handle = run(x)
    assert_equal(buffer.combine(rows, handle)[0], x)
    assert_equal(buffer.dispatch(x, handle=handle)[0], rows)


def test_what_a_graph_cannot_do_is_refused() -> None:
    buffer = buffer_of(LocalGroup())
    x, chosen, _ = inputs(0)
    eager = buffer.dispatch(x, chosen, num_experts=EXPERTS)[3]
    stats = torch.zeros(EXPERTS, dtype=torch.int32)
    single = buffer_of(LocalGroup(), allow_multiple_reduction=False)
    weights = torch.rand(chosen.shape, requires_grad=True)
    for call, message in (
        (lambda: buffer.combine(x, eager), "handle must come from a dispatch in a compiled"),
        (lambda: buffer.dispatch((x, x, x), chosen, num_experts=4), "x must be a tensor or a pair"),
        (
            lambda: buffer.dispatch(x, chosen, num_experts=4, async_with_compute_stream=True),
            "async_with_compute_stream and previous_event must not",
        ),
        (
            lambda: buffer.dispatch(
                x, chosen, num_experts=4, cumulative_local_expert_recv_stats=stats
            ),
            "cumulative_local_expert_recv_stats must be None",
        ),
        (
            lambda: single.dispatch(x, chosen, weights, num_experts=4, do_expand=True),
            "topk_weights must not require gradients",
        ),
    ):
        with pytest.raises(Exception, match=message):
            graph(lambda call=call: call())()
