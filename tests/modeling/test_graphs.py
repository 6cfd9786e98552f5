"""Layers and the demo's model as one graph: `torch.compile`, CUDA graphs, no host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.tiny_v4.model import Config, TinyV4
from examples.tiny_v4.plain import PlainTinyV4
from examples.tiny_v4.speed import captured
from examples.tiny_v4.step import EAGER_STEPS, TrainingStep, loss_of, optimizer_of
from tests.ep.processes import run_processes
from tests.ep.test_gpu import share_the_gpu
from tests.examples.small import distance
from tile_kernels.ep import ElasticBuffer, LocalGroup
from tile_kernels.modeling.attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    KVCompressor,
)
from tile_kernels.modeling.engram import EngramHasher, EngramModule
from tile_kernels.modeling.mhc import HyperConnection, HyperHead
from tile_kernels.modeling.moe import MoELayer

VOCAB = 20


class Built(NamedTuple):
    """A layer and its arguments."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]


def streams(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device).bfloat16().requires_grad_()


def ids(*shape: int, device: str) -> Tensor:
    return torch.randint(1, VOCAB, shape, device=device)


def connection(device: str) -> Built:
    block = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)).to(device, torch.bfloat16)
    layer = HyperConnection(block, 64, 4, norm_weight=True, device=device)
    return Built(layer, (streams(2, 33, 4, 64, device=device),))


def head(device: str) -> Built:
    return Built(HyperHead(64, 4, device=device), (streams(2, 33, 4, 64, device=device),))


def engram(device: str) -> Built:
    hasher = EngramHasher(1, VOCAB, table_rows=64, num_tables=2)
    layer = EngramModule(hasher, 0, 64, 4, embed_dim=16, device=device)
    nn.init.normal_(layer.convolution.taps)
    return Built(layer, (streams(2, 33, 4, 64, device=device), ids(2, 33, device=device)))


def compressor(overlap: bool) -> Callable[[str], Built]:
    def build(device: str) -> Built:
        layer = KVCompressor(64, 32, 4, overlap=overlap, device=device, dtype=torch.bfloat16)
        return Built(layer, (streams(2, 34, 64, device=device),))

    return build


class WithLoss(nn.Module):
    """The result of sparse attention, with the loss of its indexer added to it."""

    def __init__(self, layer: CompressedSparseAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y, loss = self.layer(x, indexer_loss=True)
        return y + loss


def sparse_attention(device: str) -> Built:
    layer = CompressedSparseAttention(
        64, heads=4, q_rank=32, out_groups=2, out_rank=32, window=8, topk=4, index_heads=2,
        device=device, dtype=torch.bfloat16,
    )  # fmt: skip
    return Built(WithLoss(layer), (streams(2, 33, 64, device=device),))


def heavy_attention(ratio: int) -> Callable[[str], Built]:
    def build(device: str) -> Built:
        layer = HeavilyCompressedAttention(
            64, heads=4, q_rank=32, out_groups=2, out_rank=32, window=8, ratio=ratio,
            device=device, dtype=torch.bfloat16,
        )  # fmt: skip
        return Built(layer, (streams(2, 33, 64, device=device),))

    return build


def experts(precision: str) -> Callable[[str], Built]:
    def build(device: str) -> Built:
        layer = MoELayer(
            128, 128, 8, 2, precision=precision, num_shared_experts=1, device=device,
            dtype=torch.bfloat16,
        )  # fmt: skip
        return Built(layer, (streams(2, 33, 128, device=device),))

    return build


def experts_over_ranks(precision: str) -> Callable[[str], Built]:
    """One rank, which sends all rows to itself, on a buffer that never waits."""

    def build(device: str) -> Built:
        buffer = ElasticBuffer(
            LocalGroup(), num_max_tokens_per_rank=80, hidden=128, num_topk=2, check_ranks=False
        )
        layer = MoELayer(
            128, 128, 8, 2, precision=precision, num_shared_experts=1, ep=buffer, device=device,
            dtype=torch.bfloat16,
        )  # fmt: skip
        return Built(layer, (streams(2, 33, 128, device=device),))

    return build


def demo(**changes: Any) -> Callable[[str], Built]:
    def build(device: str) -> Built:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = TinyV4(Config(VOCAB, dtype=dtype, **changes)).to(device)
        return Built(model, (ids(2, 33, device=device),))

    return build


LAYERS = {
    "HyperConnection": connection,
    "HyperHead": head,
    "EngramModule": engram,
    "KVCompressor": compressor(overlap=True),
    "KVCompressor without overlap": compressor(overlap=False),
    "CompressedSparseAttention": sparse_attention,
    "HeavilyCompressedAttention": heavy_attention(16),
    "HeavilyCompressedAttention, window alone": heavy_attention(0),
    "MoELayer bf16": experts("bf16"),
    "MoELayer fp8": experts("fp8"),
    "TinyV4": demo(),
    "TinyV4 fp8": demo(fp8=False, precision="fp8", hidden=128, intermediate=128),
    "TinyV4 without streams": demo(mhc=False),
    "TinyV4 with dense attention": demo(sparse=False),
}
OVER_RANKS = {
    "MoELayer bf16 over ranks": experts_over_ranks("bf16"),
    "MoELayer fp8 over ranks": experts_over_ranks("fp8"),
}
CAPTURED = LAYERS | OVER_RANKS
each_layer = pytest.mark.parametrize("build", CAPTURED.values(), ids=list(CAPTURED))


def step_of(function: Callable[..., Tensor], built: Built) -> Callable[[], list[Tensor]]:
    """The result and the gradients of all that is trained."""
    trained = [x for x in (*built.inputs, *built.layer.parameters()) if x.requires_grad]
    direction: list[Tensor] = []

    def step() -> list[Tensor]:
        y = function(*built.inputs)
        if not direction:
            direction.append(torch.randn_like(y))
        grads = torch.autograd.grad(y, trained, direction[0], allow_unused=True)
        return [y.detach(), *(grad for grad in grads if grad is not None)]

    return step


def steps_of(built: Built, other: Any) -> list[list[Tensor]]:
    """What a step returns, of the layer and of another form of it, for the same gradient."""
    results = []
    for function in (built.layer, other):
        torch.manual_seed(1)
        results.append([x.clone() for x in step_of(function, built)()])
    return results


# ---- anywhere -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HyperHead", "TinyV4", "TinyV4 without streams"])
def test_one_graph(name: str) -> None:
    """The other layers have such a test beside their own ones."""
    torch.manual_seed(0)
    built = LAYERS[name]("cpu")
    torch._dynamo.reset()
    compiled = torch.compile(built.layer, fullgraph=True, backend="aot_eager")
    expected, found = steps_of(built, compiled)
    assert len(found) == len(expected)
    assert torch.equal(found[0], expected[0])
    # The gradient of a residual is added up in another order where no graph can share buffers.
    assert max(distance(*pair) for pair in zip(expected, found)) < 0.05
    with torch.no_grad():
        assert torch.equal(compiled(*built.inputs), built.layer(*built.inputs))


@pytest.mark.parametrize("name", [name for name in CAPTURED if "TinyV4" not in name])
def test_checkpoint_has_the_same_bits(name: str) -> None:
    """The layer is computed again for its backward pass, from its input alone."""
    torch.manual_seed(0)
    built = CAPTURED[name]("cpu")

    def recomputed(*inputs: Tensor) -> Tensor:
        return checkpoint(built.layer, *inputs, use_reentrant=False)

    expected, found = steps_of(built, recomputed)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def test_parts_in_bfloat16_are_those_of_the_plain_model() -> None:
    """Without experts, whose choice can differ where scores are nearly equal."""
    torch.manual_seed(0)
    model = TinyV4(Config(VOCAB, moe=False, dtype=torch.bfloat16))
    token_ids = ids(2, 33, device="cpu")
    assert distance(model(token_ids), PlainTinyV4(model)(token_ids)) < 5e-3
    exact = TinyV4(Config(VOCAB, moe=False))
    exact.load_state_dict(model.state_dict())
    assert 1e-4 < distance(exact(token_ids), model(token_ids)) < 5e-2


# ---- on a GPU -----------------------------------------------------------------------------------


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@each_layer
def test_host_does_not_wait(build: Callable[[str], Built]) -> None:
    torch.manual_seed(0)
    built = build("cuda")
    step = step_of(built.layer, built)
    step()
    with no_waiting():
        step()


@pytest.mark.gpu
@each_layer
def test_replay_is_eager_bit_for_bit(build: Callable[[str], Built]) -> None:
    """Forward and backward in a CUDA graph, replayed with other inputs and other parameters."""
    torch.manual_seed(0)
    built = build("cuda")
    step = step_of(built.layer, built)
    graph, found = captured(step)
    with torch.no_grad():
        for x in built.inputs:
            other = (
                torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 1, VOCAB)
            )
            x.copy_(other)
        for weight in built.layer.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    graph.replay()
    expected = step()
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def replayed_over_ranks(group: Any, precision: str) -> None:
    """A training step of experts on two ranks, recorded once: replays are the eager steps."""
    share_the_gpu()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=80, hidden=128, num_topk=2, engine="symm", check_ranks=False
    )
    torch.manual_seed(group.rank())
    layer = MoELayer(
        128, 128, 8, 2, precision=precision, ep=buffer, device="cuda", dtype=torch.bfloat16
    )
    built = Built(layer, (streams(2, 33, 128, device="cuda"),))
    step = step_of(layer, built)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step()
    for _ in range(2):
        with torch.no_grad():
            built.inputs[0].copy_(torch.randn_like(built.inputs[0]))
            for weight in layer.parameters():
                weight.add_(0.01 * torch.randn_like(weight))
        graph.replay()
        expected = step()
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_over_ranks_replay(precision: str) -> None:
    run_processes(2, replayed_over_ranks, precision, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, None) for name in LAYERS), ("TinyV4", "reduce-overhead")]
)
def test_compiled_is_one_graph_on_cuda(name: str, mode: str | None) -> None:
    from torch._inductor import config as inductor

    torch.manual_seed(0)
    built = LAYERS[name]("cuda")
    torch._dynamo.reset()
    compiled = torch.compile(built.layer, fullgraph=True, mode=mode)
    # Without intermediate rounding, scores that nearly tie choose other experts.
    with inductor.patch(emulate_precision_casts=True):
        for _ in range(3):  # the third one replays
            expected, found = steps_of(built, compiled)
    assert len(found) == len(expected)
    assert distance(expected[0].float(), found[0].float()) < 0.1
    every = [torch.cat([x.float().flatten() for x in xs[1:]]) for xs in (expected, found)]
    assert distance(*every) < 0.15


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("ratio", [4, 16, 0])
def test_decoding_step_is_a_cuda_graph(ratio: int, cache: str) -> None:
    """One capture for all steps: tokens, slots and the state are read when it is replayed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "heads": 4, "q_rank": 32, "out_groups": 2, "out_rank": 32, "window": 8, "cache": cache,
        "device": "cuda", "dtype": torch.bfloat16,
    }  # fmt: skip
    layer: Any = (
        CompressedSparseAttention(64, topk=4, index_heads=2, **sizes)
        if ratio == 4
        else HeavilyCompressedAttention(64, ratio=ratio, **sizes)
    )
    x, token = torch.randn(3, 60, 64, device="cuda").bfloat16(), torch.zeros(3, 64).bfloat16()
    token = token.cuda()
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device="cuda")
    state, eager = layer.state(3, 64), layer.state(3, 64)
    layer.step(token, state, slots)
    with no_waiting():
        layer.step(token, state, slots)
    graph, found = captured(lambda: layer.step(token, state, slots))
    state.reset()
    for given in (state, eager):
        layer(x[:, :20], state=given)
    for t in range(20, 60):
        token.copy_(x[:, t])
        if t == 40:
            slots.copy_(torch.tensor([1, 0, 2]))
        graph.replay()
        expected = layer.step(token, eager, slots)
        kept = slots >= 0
        assert torch.equal(found[kept], expected[kept])
    assert state.lengths.tolist() == eager.lengths.tolist() == [60, 40, 60]


@pytest.mark.gpu
def test_training_step_is_a_cuda_graph_with_the_same_bits() -> None:
    """Steps of the demo, captured, beside the same steps without a graph; nothing waits."""
    losses: list[list[float]] = []
    for graphed in (True, False):
        torch.manual_seed(0)
        model = TinyV4(Config(VOCAB, dtype=torch.bfloat16)).cuda()
        step = TrainingStep(model, optimizer_of(model, 5e-3))
        found = []
        for i in range(EAGER_STEPS + 5):
            batch = torch.randint(1, VOCAB, (4, 33), generator=torch.Generator().manual_seed(i))
            if graphed:
                found.append(step(batch, 5e-3 / (i + 1)).clone())
            else:
                step._set_rate(5e-3 / (i + 1))
                found.append(step._run(batch.cuda()))
        assert (step.graph is not None) == graphed
        losses.append(torch.stack(found).tolist())
    assert losses[0] == losses[1]
    assert losses[0][-1] != losses[0][0]


@pytest.mark.gpu
def test_loss_falls_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = TinyV4(Config(VOCAB, dtype=torch.bfloat16)).cuda()
    step = TrainingStep(model, optimizer_of(model, 5e-3))
    batch = ids(8, 33, device="cuda")
    first = loss_of(model, batch).item()
    last = [step(batch, 5e-3) for _ in range(60)][-1].item()
    assert last < first - 1
