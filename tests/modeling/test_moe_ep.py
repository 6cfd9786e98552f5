"""The mixture-of-experts layer with its experts spread over ranks, against one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ep.processes import run_processes
from tests.ep.test_no_sync import NoWaiting, unwatched
from tile_kernels.ep import ElasticBuffer, LocalGroup, rows, run_ranks, transport
from tile_kernels.modeling import bf16_experts
from tile_kernels.modeling.moe import MoELayer
from tile_kernels.runtime.operator import Operator

TOKENS = (9, 0, 14, 5)
SETTINGS: dict[str, Any] = {"hidden": 24, "intermediate": 32, "num_experts": 8, "num_topk": 3}


def whole(**changes: Any) -> MoELayer:
    """With parameters of its own generator: ranks may be threads, which share the global one."""
    layer = MoELayer(**{**SETTINGS, **changes})
    generator = torch.Generator().manual_seed(1)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
    return layer


def part_of(layer: MoELayer, buffer: ElasticBuffer, **changes: Any) -> MoELayer:
    """The same layer with only the experts of a rank."""
    part = MoELayer(**{**SETTINGS, **changes}, ep=buffer)
    count = layer.num_experts // buffer.num_ranks
    mine = slice(buffer.rank_idx * count, (buffer.rank_idx + 1) * count)
    state = layer.state_dict()
    state.update(w_in=state["w_in"][mine], w_out=state["w_out"][mine])
    part.load_state_dict(state)
    return part


def tokens_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(TOKENS[rank], 24, generator=generator)


def one_rank(group: Any, options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=24, num_topk=3, **options)
    layer = part_of(whole(**changes), buffer, **changes)
    x = tokens_of(buffer.rank_idx).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    layer.update_bias(0.5)
    found = {"y": y, "x": x.grad, "w_in": layer.w_in.grad, "w_out": layer.w_out.grad}
    found |= {"router": layer.router.grad, "bias": layer.expert_bias, "load": layer.load}
    return {name: each.detach().tolist() for name, each in found.items()}


def check(results: list[dict[str, Any]], changes: dict[str, Any]) -> None:
    layer = whole(**changes)
    x = torch.cat([tokens_of(rank) for rank in range(4)]).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    layer.update_bias(0.5)
    wanted = {"y": y, "x": x.grad, "w_in": layer.w_in.grad, "w_out": layer.w_out.grad}
    for name, whole_one in wanted.items():
        parts = [torch.tensor(each[name]).view(-1, *whole_one.shape[1:]) for each in results]
        torch.testing.assert_close(torch.cat(parts), whole_one.detach(), rtol=1e-4, atol=1e-4)
    for name, whole_one in (("router", layer.router.grad), ("load", layer.load)):
        total = sum(torch.tensor(each[name]) for each in results)
        torch.testing.assert_close(total, whole_one, rtol=1e-4, atol=1e-4, check_dtype=False)
    for each in results:
        assert torch.equal(torch.tensor(each["bias"]), layer.expert_bias)


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared and scaled": {"num_shared_experts": 1, "routed_scaling_factor": 2.5},
    "softmax": {"scoring_func": "softmax"},
}


@pytest.mark.parametrize("nodes", [1, 2], ids=["direct", "hybrid"])
@pytest.mark.parametrize("name", CHANGES)
def test_ranks_together_are_the_whole_layer(name: str, nodes: int) -> None:
    changes = CHANGES[name]
    options = {"num_scaleup_ranks": 4 // nodes}
    check(run_ranks(4, lambda group: one_rank(group, options, changes)), changes)


def test_between_processes() -> None:
    check(run_processes(4, one_rank, {"engine": "mmap"}, {}), {})


def test_bfloat16_with_fp8_inside() -> None:
    """Rounding apart, the same."""
    changes = {"fp8": True, "dtype": torch.bfloat16}

    def rank(group: LocalGroup) -> Tensor:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=24, num_topk=3)
        layer = part_of(whole(**changes), buffer, **changes)
        return layer(tokens_of(group.rank).bfloat16()).detach()

    with torch.backends.mkldnn.flags(enabled=False):
        found = torch.cat(run_ranks(4, rank))
        x = torch.cat([tokens_of(rank) for rank in range(4)]).bfloat16()
        wanted = whole(**changes)(x).detach()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)


def fp8_rank(group: LocalGroup, tokens: int, **options: Any) -> dict[str, Tensor]:
    """Results and gradients of a rank with FP8 experts, and the bytes of a row that was sent."""
    sent: list[Any] = []
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=48, hidden=256, num_topk=3, **options)
    dispatch = buffer.dispatch
    buffer.dispatch = lambda x, *args, **kwargs: (  # type: ignore[method-assign]
        sent.append(x) or dispatch(x, *args, **kwargs)
    )
    layer = part_of(whole(**FP8), buffer, **FP8)
    x = fp8_tokens(group.rank, tokens).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    assert [each.dtype for each in sent[0]] == [torch.float8_e4m3fn, torch.float32]
    assert sent[1].dtype is torch.bfloat16  # gradients
    found = {"y": y, "x": x.grad, "w_in": layer.w_in.grad, "w_out": layer.w_out.grad}
    return {name: each.detach() for name, each in {**found, "router": layer.router.grad}.items()}


FP8: dict[str, Any] = {
    "hidden": 256, "intermediate": 128, "precision": "fp8", "dtype": torch.bfloat16,
}  # fmt: skip


def fp8_tokens(rank: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randn(count, 256, generator=generator).bfloat16()


@pytest.mark.parametrize("options", [{}, {"check_ranks": False}], ids=["counted", "static"])
def test_fp8_tokens_travel_quantized(options: dict[str, Any]) -> None:
    """Beside the sum over ranks, which is rounded on each, the numbers are those of one rank."""
    counts = (40, 0)
    results = run_ranks(2, lambda group: fp8_rank(group, counts[group.rank], **options))
    layer = whole(**FP8)
    x = torch.cat([fp8_tokens(rank, count) for rank, count in enumerate(counts)]).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    wanted = {"y": y, "x": x.grad, "w_in": layer.w_in.grad, "w_out": layer.w_out.grad}
    for name, expected in wanted.items():
        found = torch.cat([each[name] for each in results])
        assert found.shape == expected.shape
        assert (found - expected).float().norm() < 0.02 * expected.float().norm(), name
    total = sum(each["router"] for each in results)
    assert (total - layer.router.grad).norm() < 0.05 * layer.router.grad.norm()


@pytest.mark.parametrize("changes", [{}, {"fp8": True}, {"precision": "fp8"}], ids=str)
def test_the_host_does_not_wait(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, as a CUDA graph records them; operators are kernels there."""
    monkeypatch.setattr(Operator, "_refer", unwatched(Operator._refer))
    monkeypatch.setattr(bf16_experts, "grouped_mm_is_available", lambda _: True)
    product = torch.ops.tile_kernels.grouped_product  # what it does inside is not seen
    monkeypatch.setattr(bf16_experts, "grouped_product", product)
    for module in (transport, rows):  # as tensors on a GPU
        monkeypatch.setattr(module, "on_host", lambda _: False)

    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=256, check_ranks=False)
        layer = MoELayer(256, 128, 8, 3, ep=buffer, dtype=torch.bfloat16, **changes)
        x = fp8_tokens(group.rank, 5 * group.rank).requires_grad_()
        with NoWaiting():
            layer(x).sum().backward()
        assert x.grad is not None
        layer.ep = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=256)
        if not changes:
            with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
                layer(x)

    run_ranks(2, rank)


def test_errors_and_words() -> None:
    def rank(group: LocalGroup) -> str:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=24)
        with pytest.raises(ValueError, match="num_experts must be a multiple of the 3 ranks of ep"):
            MoELayer(**SETTINGS, ep=buffer)
        return repr(MoELayer(**{**SETTINGS, "num_experts": 9}, ep=buffer))

    assert "3 of 9 experts (3 here)" in run_ranks(3, rank)[0]
