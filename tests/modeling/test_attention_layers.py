"""Attention layers over compressed entries: formulas, gradients, sequences, decoding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tile_kernels
from tests.modeling.attention_formulas import Layer, by_formula, frequencies_of
from tile_kernels.modeling.attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    Rope,
)

pytestmark = [
    pytest.mark.usefixtures("plain_matrix_products", "one_thread"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
]
HIDDEN = 32
SIZES: dict[str, Any] = {
    "heads": 4, "q_rank": 24, "out_groups": 2, "out_rank": 16, "window": 8,
}  # fmt: skip
SPARSE = {**SIZES, "topk": 3, "index_heads": 2, "index_dim": 64}


def stirred(layer: Any, device: str) -> Any:
    """The layer with parameters that all matter, the same on every device."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else parameter + 0.05 * noise)
        layer.attn_sink.copy_(torch.randn(layer.heads, generator=draw))
    return layer.to(device)


def csa(device: str = "cpu", **changes: Any) -> CompressedSparseAttention:
    torch.manual_seed(3)
    return stirred(CompressedSparseAttention(HIDDEN, **{**SPARSE, **changes}), device)


def hca(device: str = "cpu", **changes: Any) -> HeavilyCompressedAttention:
    torch.manual_seed(3)
    layer = HeavilyCompressedAttention(HIDDEN, **{**SIZES, "ratio": 16, **changes})
    return stirred(layer, device)


LAYERS: dict[str, Callable[..., Layer]] = {
    "csa": csa,
    "csa bf16": functools.partial(csa, index_format="bf16"),
    "hca": hca,
    "window": functools.partial(hca, ratio=0),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=list(LAYERS))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def tokens(*shape: int, device: str = "cpu", seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, HIDDEN, generator=draw).to(device)


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


# ---- values -------------------------------------------------------------------------------------


# Queries, rows, weights of the softmax and results are bfloat16: about 2^-9 each of a norm.
@each_device
@each_layer
def test_results_are_those_of_the_formula(make: Any, device: str) -> None:
    layer, x = make(device), tokens(37, device=device)
    expected, _ = by_formula(make(), x.cpu())
    assert distance(layer(x), expected) < 6e-3
    assert distance(layer(x[None])[0], expected) < 6e-3


@each_device
@each_layer
def test_gradients_are_those_of_the_formula(make: Any, device: str) -> None:
    layer, plain = make(device), make()
    x = tokens(29, device=device).requires_grad_()
    direction = tokens(29, seed=2)
    (layer(x) * direction.to(device)).sum().backward()
    given = x.detach().cpu().double().requires_grad_()
    (by_formula(plain, given)[0] * direction).sum().backward()
    assert distance(x.grad, given.grad) < 0.02
    for (name, one), other in zip(layer.named_parameters(), plain.parameters()):
        if name.startswith("indexer."):
            assert one.grad is None
        else:
            assert distance(one.grad, other.grad) < 0.02, name


def test_all_entries_are_attention_with_a_mask() -> None:
    """`topk` above their number: what the indexer scores does not matter."""
    layer, x = csa(topk=64), tokens(45)
    complete = (torch.arange(11) + 1) * 4 <= torch.arange(45)[:, None] + 1
    assert distance(layer(x), by_formula(layer, x, complete)[0]) < 6e-3
    assert distance(csa(topk=2)(x), by_formula(layer, x, complete)[0]) > 0.02


@each_layer
def test_sequences_one_after_the_other_are_those_apart(make: Any) -> None:
    layer, x = make(), tokens(60)
    bounds = (0, 21, 21, 24, 57)  # one is empty, one shorter than an entry
    y = layer(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for begin, end in itertools.pairwise(bounds):
        torch.testing.assert_close(y[begin:end], layer(x[begin:end]), rtol=1e-3, atol=1e-3)
    rows = layer(x.view(3, 20, HIDDEN))
    torch.testing.assert_close(rows[1], layer(x[20:40]), rtol=1e-3, atol=1e-3)


@each_layer
def test_no_token_sees_a_later_one(make: Any) -> None:
    layer, x = make(), tokens(41)
    y = layer(x)
    for t in (1, 15, 16, 19, 30):
        other = x.clone()
        other[t:] = tokens(41 - t, seed=9)
        assert torch.equal(layer(other)[:t], y[:t])
        assert not torch.allclose(layer(other)[t:], y[t:])


def test_few_tokens() -> None:
    for make in LAYERS.values():
        layer = make()
        assert layer(tokens(1, 0)).shape == (1, 0, HIDDEN)
        assert layer(tokens(0)).shape == (0, HIDDEN)
        for length in (1, 3, 4):
            x = tokens(length)
            assert distance(layer(x), by_formula(layer, x)[0]) < 6e-3


@each_layer
def test_no_sequences(make: Any) -> None:
    """An empty batch has an empty result, and changes nothing in a state."""
    layer = make()
    x = tokens(0, 5).requires_grad_()
    y = layer(x)
    assert y.shape == (0, 5, HIDDEN)
    y.sum().backward()
    assert x.grad is not None
    state = layer.state(2, 16)
    layer(tokens(2, 4), state=state)
    assert layer(tokens(0, 4), state=state).shape == (0, 4, HIDDEN)
    assert state.lengths.tolist() == [4, 4]
    empty = layer.state(0, 16)
    assert layer.step(tokens(0), empty).shape == (0, HIDDEN)
    assert layer(tokens(0, 0), state=empty).shape == (0, 0, HIDDEN)
    padding = torch.tensor([-1], dtype=torch.int32)
    with pytest.raises(ValueError, match="state must have room for at least 1 sequence, got 0"):
        layer.step(tokens(1), empty, padding)
    with pytest.raises(ValueError, match="state must have room for at least 1 sequence, got 0"):
        layer(tokens(1, 0), state=empty, slots=padding)


def test_old_tokens_reach_a_query_through_entries_alone() -> None:
    """Behind the window: not at all without compression, and with it they do."""
    x, other = tokens(40), tokens(40)
    other[:4] = tokens(4, seed=8)
    for make, expected in ((functools.partial(hca, ratio=0), False), (hca, True)):
        layer = make()
        assert torch.equal(layer(x)[12:], layer(other)[12:]) != expected


# ---- positions ----------------------------------------------------------------------------------


def test_frequencies() -> None:
    """V4's: fast pairs as they are, slow ones a sixteenth, a ramp between pairs 15 and 25."""
    found = Rope().frequencies(64)
    plain = Rope(factor=1.0).frequencies(64)
    torch.testing.assert_close(found[:16], plain[:16], rtol=0, atol=0)
    torch.testing.assert_close(found[25:], plain[25:] / 16)
    assert ((found[16:25] < plain[16:25]) & (found[16:25] > plain[16:25] / 16)).all()
    torch.testing.assert_close(found, frequencies_of(csa()), rtol=1e-6, atol=0)
    torch.testing.assert_close(plain, 160000.0 ** (-torch.arange(32) / 32), rtol=1e-6, atol=0)
    assert hca(ratio=0).rope == Rope.plain(10000.0)
    with pytest.raises(ValueError, match=r"rope.base must be above 1.0, got 1"):
        Rope(base=1)
    with pytest.raises(ValueError, match=r"rope.factor must be at least 1.0, got 0.5"):
        Rope(factor=0.5)


def test_frequencies_are_not_rounded_with_the_parameters() -> None:
    layer = csa().bfloat16()
    angles = layer.angles(torch.tensor([1000]))
    torch.testing.assert_close(angles, csa().angles(torch.tensor([1000])), rtol=0, atol=0)
    assert layer(tokens(9).bfloat16()).dtype == torch.bfloat16


def test_a_layer_from_the_meta_device() -> None:
    """Frequencies and the Hadamard matrix are no parameters: `reset_parameters` fills them in."""
    with torch.device("meta"):
        layer = CompressedSparseAttention(HIDDEN, **SPARSE)
    layer.to_empty(device="cpu")
    for part in layer.modules():
        if isinstance(part, (CompressedSparseAttention, type(layer.indexer))):
            part.reset_parameters()
    layer.load_state_dict(csa().state_dict())
    x = tokens(20)
    assert torch.equal(layer(x), csa()(x))


# ---- the indexer --------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("fmt", ["e2m1", "bf16"])
def test_loss_of_the_indexer_is_that_of_the_formula(fmt: str, device: str) -> None:
    layer, plain = csa(device, index_format=fmt), csa(index_format=fmt)
    x = tokens(33, device=device).requires_grad_()
    y, loss = layer(x, indexer_loss=True)
    expected_y, expected = by_formula(plain, x.detach().cpu())
    assert distance(y, expected_y) < 6e-3
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    loss.backward()
    expected.backward()
    assert x.grad is None
    for (name, one), other in zip(layer.named_parameters(), plain.parameters()):
        if name.startswith("indexer."):
            assert distance(one.grad, other.grad) < 0.03, name
        else:
            assert one.grad is None, name


def test_indexer_learns_to_choose() -> None:
    """With the loss alone, from random parameters: the divergence falls by more than half."""
    layer = csa(topk=8, index_format="bf16")
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        _, loss = layer(tokens(2, 32), indexer_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("fmt", ["e4m3", "bf16"])
def test_formats_of_the_indexer_agree_mostly(fmt: str) -> None:
    x = tokens(33)
    assert distance(csa(index_format=fmt)(x), csa()(x)) < 0.2


# ---- decoding -----------------------------------------------------------------------------------

V4_WINDOWS = {"window": 128, "heads": 2, "out_groups": 1}
DECODERS: dict[str, Callable[..., Layer]] = {
    "csa": functools.partial(csa, **V4_WINDOWS, topk=16),
    "hca": functools.partial(hca, **V4_WINDOWS, ratio=128),
    "window": functools.partial(hca, **V4_WINDOWS, ratio=0),
}
each_decoder = pytest.mark.parametrize("make", DECODERS.values(), ids=list(DECODERS))
each_cache = pytest.mark.parametrize("cache", ["bf16", "fp8"])


def nearly_equal(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of weights and results to bfloat16, row by row."""
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-2


@each_device
@each_decoder
def test_decoding_is_the_forward_pass_token_by_token(make: Any, device: str) -> None:
    """Past the end of the window, and past the first entry of 128 tokens."""
    layer, x = make(device, cache="fp8"), tokens(1, 140, device=device)
    state = layer.state(1, 140)
    found = torch.cat([layer.step(x[:, t], state) for t in range(140)])
    with torch.no_grad():
        nearly_equal(found, layer(x)[0])
    assert state.lengths.tolist() == [140]


@each_device
@each_cache
@each_decoder
def test_decoding_continues_prompts(make: Any, cache: str, device: str) -> None:
    """Of all lengths at once, one after the other in the rows, in slots in another order."""
    lengths = (1, 3, 4, 5, 127, 128, 129, 300)
    layer = make(device, cache=cache)
    texts = [tokens(length + 6, device=device, seed=length) for length in lengths]
    bounds = torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)
    slots = torch.tensor([5, 0, 7, 2, 8, 1, 3, 6], dtype=torch.int32, device=device)
    state = layer.state(9, 320)
    with torch.no_grad():
        expected = [layer(text) for text in texts]
        prompts = torch.cat([text[:n] for text, n in zip(texts, lengths)])
        y = layer(prompts, cu_seqlens=bounds, state=state, slots=slots)
    nearly_equal(y, torch.cat([rows[:n] for rows, n in zip(expected, lengths)]))
    for i in range(6):
        x = torch.stack([text[n + i] for text, n in zip(texts, lengths)])
        rows = torch.stack([rows[n + i] for rows, n in zip(expected, lengths)])
        nearly_equal(layer.step(x, state, slots), rows)
    assert [state.lengths[i].item() for i in slots] == [n + 6 for n in lengths]
    assert state.lengths[4] == 0


@pytest.mark.parametrize("fmt", ["e4m3", "bf16"])
def test_decoding_with_other_formats_of_the_indexer(fmt: str) -> None:
    layer, x = csa(index_format=fmt), tokens(2, 26)
    state = layer.state(2, 32)
    layer(x[:, :13], state=state)
    found = torch.stack([layer.step(x[:, t], state) for t in range(13, 26)], 1)
    nearly_equal(found, layer(x)[:, 13:].detach())


@each_cache
def test_padding_changes_nothing_in_a_state(cache: str) -> None:
    layer, x = csa(cache=cache), tokens(3, 20)
    state = layer.state(3, 32)
    layer(x, state=state)
    before = [tensor.clone() for tensor in state._tensors()]
    layer.step(tokens(2), state, torch.tensor([-1, 3], dtype=torch.int32))
    after = list(state._tensors())
    for kept, now in zip(before, after):
        # The last row of keys takes what is not kept.
        count = len(now) - any(now is key for key in state.keys)
        assert torch.equal(kept[:count].view(torch.uint8), now[:count].view(torch.uint8))


def test_sequences_start_anew() -> None:
    layer, x = csa(), tokens(2, 20)
    state = layer.state(2, 32)
    layer(x, state=state)
    state.reset(torch.tensor([1]))
    assert state.lengths.tolist() == [20, 0]
    found = torch.stack([layer.step(x[:, t], state)[1] for t in range(9)])
    nearly_equal(found, layer(x[1, :9]).detach())
    layer(x[:1, :7], state=state)  # a new prompt in place of the first
    assert state.lengths.tolist() == [7, 9]
    nearly_equal(layer.step(x[:, 7], state)[:1], layer(x[0, :8]).detach()[-1:])
    state.reset()
    assert state.lengths.tolist() == [0, 0]


def test_a_state_is_as_large_as_it_says() -> None:
    """On the meta device too, so that a cache can be sized without a GPU."""
    sizes = {"heads": 2, "out_groups": 1, "q_rank": 8, "out_rank": 8}
    with torch.device("meta"):
        fp8 = CompressedSparseAttention(HIDDEN, **sizes, cache="fp8").state(2, 1024)
        bf16 = CompressedSparseAttention(HIDDEN, **sizes).state(2, 1024)
    pages = 2 * 4 * 37440  # 256 entries: four pages of 64 * 584 bytes, padded to 576
    rings = 2 * 130 * 576
    keys = (2 * 256 + 1) * (64 + 4)
    open_windows = 2 * 8 * 4 * (512 + 128) * 4
    lengths = 3 * 2 * 4
    assert fp8.num_bytes == pages + rings + keys + open_windows + lengths
    assert bf16.num_bytes == fp8.num_bytes - pages - rings + 2 * (256 + 128) * 1024
    assert (fp8.num_sequences, fp8.max_entries) == (2, 256)


def test_states_of_other_layers_are_refused() -> None:
    layer = csa()
    for other in (hca(), csa(cache="fp8"), csa(window=4), csa(ratio=8), hca(ratio=0)):
        with pytest.raises(ValueError, match=r"state must be one of .window, cache, ratio"):
            layer.step(tokens(1), other.state(1, 32))
    state = layer.state(2, 256)
    with pytest.raises(ValueError, match="x must have a token for each of 2 sequences"):
        layer.step(tokens(3), state)
    with pytest.raises(ValueError, match="x must have at most 256 tokens for this state, got 257"):
        layer(tokens(1, 257), state=state)
    with pytest.raises(ValueError, match="x must have at most 2 sequences"):
        layer(tokens(3, 5), state=state)
    with pytest.raises(ValueError, match="indexer_loss must be False with a state"):
        layer(tokens(1, 5), state=state, indexer_loss=True)
    with pytest.raises(TypeError, match="state must be an AttentionState, got int"):
        layer.step(tokens(1), 3)
    state.lengths.fill_(256)
    with (
        tile_kernels.checked(),
        pytest.raises(ValueError, match=r"state.lengths must hold 0..255"),
    ):
        layer.step(tokens(2), state)


# ---- as a module --------------------------------------------------------------------------------


def test_parameters_have_the_names_of_checkpoints() -> None:
    compressor = {f"compressor.{name}" for name in ("ape", "norm.weight", "wgate.weight")}
    compressor |= {"compressor.wkv.weight"}
    common = {"attn_sink", "q_norm.weight", "kv_norm.weight"}
    common |= {f"{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
    index = {"indexer.wq_b.weight", "indexer.weights_proj.weight"}
    index |= {f"indexer.{name}" for name in compressor}
    assert csa().state_dict().keys() == common | compressor | index
    assert hca().state_dict().keys() == common | compressor
    assert hca(ratio=0).state_dict().keys() == common
    shapes = {name: tuple(x.shape) for name, x in csa().state_dict().items()}
    assert shapes["wo_a.weight"] == (2 * 16, 2 * 512)
    assert shapes["compressor.ape"] == (4, 1024)
    other = CompressedSparseAttention(HIDDEN, **SPARSE)
    other.load_state_dict(csa().state_dict())
    assert torch.equal(other(tokens(20)), csa()(tokens(20)))


@pytest.mark.parametrize("make", [csa, hca])
def test_layer_compiles_as_one_graph(make: Any) -> None:
    layer, compiled = make(), make()
    x = tokens(2, 21)
    torch._dynamo.reset()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    result, expected = run(x), layer(x)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(compiled.parameters(), layer.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("make", [csa, hca])
def test_new_lengths_do_not_compile_again(make: Any) -> None:
    """Of prompts in training, and of sequences that are decoded."""
    layer, counter = make(), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    compiled = []
    for length in (37, 50, 61):  # several entries of 16 tokens each
        x = tokens(2, length).requires_grad_()
        y = run(x)
        torch.testing.assert_close(y, layer(x))
        y.sum().backward()
        compiled.append(counter.frame_count)
    assert compiled == compiled[:1] * 3
    state, other = layer.state(2, 64), layer.state(2, 64)
    step = torch.compile(lambda x: layer.step(x, state), fullgraph=True, backend=counter)
    compiled = []
    for t in range(6):
        x = tokens(2, seed=t)
        torch.testing.assert_close(step(x), layer.step(x, other))
        compiled.append(counter.frame_count)
    assert compiled == compiled[:1] * 6


@pytest.mark.parametrize("make", [csa, hca])
def test_prompts_into_a_state_compile_as_one_graph(make: Any) -> None:
    layer, x, slots = make(cache="fp8"), tokens(2, 21), torch.tensor([2, 0])
    state, other = layer.state(3, 64), layer.state(3, 64)
    torch._dynamo.reset()
    run = torch.compile(
        lambda x: layer(x, state=state, slots=slots), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(run(x), layer(x, state=other, slots=slots))
    last = tokens(2, seed=3)
    found, expected = (layer.step(last, each, slots.int()) for each in (state, other))
    assert torch.equal(found, expected)
    assert state.lengths.tolist() == [22, 0, 22]


def test_loss_compiles_as_one_graph() -> None:
    layer, compiled, x = csa(), csa(), tokens(2, 21)
    torch._dynamo.reset()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    (y, loss), (expected_y, expected) = run(x, indexer_loss=True), layer(x, indexer_loss=True)
    torch.testing.assert_close((y, loss), (expected_y, expected))
    (y.sum() + loss).backward()
    (expected_y.sum() + expected).backward()
    for one, other in zip(compiled.parameters(), layer.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_products_under_autocast() -> None:
    layer, x = csa(), tokens(21)
    with torch.autocast("cpu", torch.bfloat16):
        y, loss = layer(x, indexer_loss=True)
    assert y.dtype == torch.bfloat16
    assert distance(y, layer(x)) < 0.1  # some tokens choose other entries
    (y.float().sum() + loss).backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in layer.parameters())


def test_arguments_are_explained() -> None:
    with pytest.raises(ValueError, match="CompressedSparseAttention: head_dim must be 512, got 64"):
        csa(head_dim=64)
    with pytest.raises(ValueError, match="out_groups must divide 4 heads, got 3"):
        hca(out_groups=3)
    with pytest.raises(ValueError, match="index_format must be one of e2m1, e4m3, bf16"):
        csa(index_format="fp8")
    with pytest.raises(ValueError, match="cache must be one of bf16, fp8, got 'int8'"):
        hca(cache="int8")
    layer = csa()
    with pytest.raises(
        ValueError, match=r"x must be \[B, L, 32\] or \[T, 32\], got shape \(3, 5\)"
    ):
        layer(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="cu_seqlens are for x of two dimensions"):
        layer(tokens(2, 4), cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(TypeError, match="x must be float32 like the weights"):
        layer(tokens(4).bfloat16())
    for name, given in (
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32, device="meta")}),
        ("slots", {"state": layer.state(1, 8), "slots": torch.zeros(1, device="meta").int()}),
        ("state.lengths", {"state": csa().to("meta").state(1, 8)}),
    ):
        with pytest.raises(ValueError, match=f"CompressedSparseAttention: {name} must be on cpu"):
            layer(tokens(4), **given)
    with pytest.raises(ValueError, match="slots must be on cpu"):
        layer.step(tokens(1), layer.state(1, 8), torch.zeros(1, device="meta").int())
    with pytest.raises(TypeError, match="indexer_loss must be a bool, got str"):
        layer(tokens(4), indexer_loss="no")
    with pytest.raises(ValueError, match="slots need a state"):
        layer(tokens(4), slots=torch.zeros(1).int())
    assert "heads=4, window=8, ratio=4, cache='bf16', topk=3" in repr(layer)
