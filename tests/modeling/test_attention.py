"""The layer that compresses keys and values: gradients, prefill and decoding, FP8 entries."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels.attention.compress.reference import halves
from tile_kernels.modeling.attention import KVCompressor

pytestmark = [
    pytest.mark.usefixtures("plain_matrix_products"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
]
each_ground = pytest.mark.parametrize("ground", GROUNDS)
each_kind = pytest.mark.parametrize("overlap", [True, False])


def layer_of(
    overlap: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> KVCompressor:
    torch.manual_seed(4)
    layer = KVCompressor(16, 8, 4, overlap=overlap, dtype=dtype)
    with torch.no_grad():
        layer.ape.normal_()
        assert layer.norm_weight is not None
        layer.norm_weight.uniform_(0.5, 1.5)
    return layer.to(device)  # the same numbers everywhere


def by_hand(layer: KVCompressor, x: Tensor) -> Tensor:
    """One sequence, window by window, in float64."""
    y = x.double() @ layer.projection.weight.double().T
    kv, z = y.split(layer.width, dim=1)
    m, d = layer.window, layer.channels
    entries = []
    for i in range(len(x) // m):
        own = slice(i * m, (i + 1) * m)
        scores, values = z[own, -d:] + layer.ape[:, -d:], kv[own, -d:]
        if layer.overlap and i > 0:
            before = slice((i - 1) * m, i * m)
            scores = torch.cat((z[before, :d] + layer.ape[:, :d], scores))
            values = torch.cat((kv[before, :d], values))
        entries.append((scores.softmax(0) * values).sum(0))
    assert layer.norm_weight is not None
    return F.rms_norm(torch.stack(entries), (d,), layer.norm_weight.double(), layer.norm_eps)


@each_ground
@each_kind
def test_entries_and_gradients_are_those_by_hand(overlap: bool, ground: tuple[str, str]) -> None:
    backend, device = ground
    layer, plain = layer_of(overlap, device), layer_of(overlap)
    x = torch.randn(2, 11, 16)
    here = x.clone().to(device).requires_grad_()
    there = x.clone().requires_grad_()
    grad = torch.randn(2, 2, 8)
    with tile_kernels.backend(backend):
        entries = layer(here)
        entries.backward(grad.to(device))
    expected = torch.stack([by_hand(plain, row) for row in there])
    expected.backward(grad.double())
    torch.testing.assert_close(entries.cpu(), expected.float(), rtol=1e-4, atol=1e-5)
    assert here.grad is not None
    torch.testing.assert_close(here.grad.cpu(), there.grad, rtol=1e-3, atol=1e-5)
    for mine, other in zip(layer.parameters(), plain.parameters()):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)


@each_kind
def test_sequences_one_after_the_other_are_those_apart(overlap: bool) -> None:
    layer = layer_of(overlap)
    x = torch.randn(20, 16)
    cu_seqlens = torch.tensor([0, 9, 9, 12, 20], dtype=torch.int32)
    entries = layer(x, cu_seqlens, num_windows=4)
    parts = [by_hand(layer, x[a:b]) for a, b in ((0, 9), (12, 20))]
    torch.testing.assert_close(entries, torch.cat(parts).float(), rtol=1e-4, atol=1e-5)
    assert layer(x).shape == (5, 8)
    assert layer(torch.randn(3, 2, 16)).shape == (3, 0, 8)


@each_ground
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_continues_prefill_to_the_bit(
    dtype: torch.dtype, overlap: bool, ground: tuple[str, str]
) -> None:
    """Small integers: the matrix product is exact, so that a token has the same rows in both."""
    backend, device = ground
    layer = layer_of(overlap, device, dtype)
    with torch.no_grad():
        layer.projection.weight.copy_(torch.randint(-1, 2, layer.projection.weight.shape))
    x = torch.randint(-2, 3, (2, 15, 16), device=device).to(dtype)
    state = layer.state(3)
    with tile_kernels.backend(backend), torch.no_grad():
        expected = layer(x)
        prompt = layer(x[:, :6], state=state, slots=torch.tensor([2, 0], device=device))
        found = [[*prompt[0]], [*prompt[1]]]
        for t in range(6, 15):
            slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
            entries, completed = layer.step(x[:, t], state, slots)
            for i in range(2):
                if completed[i]:
                    found[i].append(entries[i])
                else:
                    assert not entries[i].any()
    assert torch.equal(torch.stack([torch.stack(entries) for entries in found]), expected)
    assert state.lengths.tolist() == [15, 0, 15]


@pytest.mark.parametrize("window", [4, 16])
@each_ground
def test_fp8_entries_are_the_entries(window: int, ground: tuple[str, str]) -> None:
    backend, device = ground
    torch.manual_seed(5)
    layer = KVCompressor(32, 80, window, device=device)
    x = torch.randn(2, 33, 32, device=device)
    angle = torch.arange(33, device=device)[:, None] * torch.rand(8, device=device)
    with tile_kernels.backend(backend):
        codes, sf, rotated = layer.compress_and_cast(x, angle.cos(), angle.sin())
        entries = layer(x).detach()
    windows = 33 // window
    assert (codes.shape, sf.shape) == ((2, windows, 64), (2, windows, 1))
    torch.testing.assert_close(codes.float() * sf, entries[..., :64], rtol=0.07, atol=0.01)
    turn = torch.polar(torch.ones_like(angle), angle)[::window][:windows]
    pairs = torch.view_as_complex(entries[..., 64:].reshape(2, windows, 8, 2).contiguous())
    expected = torch.view_as_real(pairs * turn).flatten(2)
    torch.testing.assert_close(rotated.float(), expected, rtol=0.01, atol=0.01)


@each_kind
def test_layer_compiles_and_trains(overlap: bool) -> None:
    layer = layer_of(overlap)
    compiled = copy.deepcopy(layer)
    x = torch.randn(2, 13, 16)
    torch._dynamo.reset()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    result, expected = run(x), layer(x)
    torch.testing.assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(compiled.parameters(), layer.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_layer_learns_which_positions_count() -> None:
    """Entries that should be the last token of each window: the biases find out."""
    torch.manual_seed(6)
    layer = KVCompressor(4, 4, 4, overlap=False, norm_eps=None)
    with torch.no_grad():
        layer.projection.weight.copy_(torch.cat((torch.eye(4), torch.zeros(4, 4))))
    optimizer = torch.optim.Adam([layer.ape], lr=0.3)
    for _ in range(60):
        x = torch.randn(8, 16, 4)
        loss = (layer(x) - x[:, 3::4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    assert (layer.ape.argmax(0) == 3).all()


def test_arguments_are_explained() -> None:
    with pytest.raises(ValueError, match=r"KVCompressor: window must be in 1\.\.65536, got 0"):
        KVCompressor(4, 4, 0)
    layer = KVCompressor(4, 4, 2, norm_eps=None)
    with pytest.raises(ValueError, match=r"x must be \[B, S, 4\] or .* got shape \(3, 5\)"):
        layer(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="cu_seqlens and num_windows are for x of two dimensions"):
        layer(torch.zeros(1, 4, 4), torch.tensor([0, 4]).int())
    with pytest.raises(ValueError, match="compress_and_cast needs a norm"):
        layer.compress_and_cast(torch.zeros(2, 4), torch.ones(1, 1), torch.ones(1, 1))
    assert "4 -> 4, overlapping windows of 2" in repr(layer)
    wanted = "state must be of overlapping windows of 2 tokens and 4 channels, got one of"
    for other, words in (
        (KVCompressor(4, 4, 3), "overlapping windows of 3 tokens and 4 channels"),
        (KVCompressor(4, 4, 2, overlap=False), "windows of 2 tokens and 4 channels"),
        (KVCompressor(4, 8, 2), "overlapping windows of 2 tokens and 8 channels"),
    ):
        with pytest.raises(ValueError, match=f"{wanted} {words}"):
            layer(torch.zeros(1, 4, 4), state=other.state(1))
        with pytest.raises(ValueError, match=f"{wanted} {words}"):
            layer.step(torch.zeros(1, 4), other.state(1))


@each_kind
def test_decoding_continues_prefill_under_autocast(overlap: bool) -> None:
    """The projection is bfloat16 there, the state float32 as the layer is; entries agree."""
    layer = layer_of(overlap, "cpu", torch.float32)
    with torch.no_grad():
        layer.projection.weight.copy_(torch.randint(-1, 2, layer.projection.weight.shape))
    x = torch.randint(-2, 3, (1, 12, 16)).float()
    state = layer.state(1)
    assert state.kept.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = layer(x)
        found = [*layer(x[:, :5], state=state)[0]]
        for t in range(5, 12):
            entries, completed = layer.step(x[:, t], state)
            found += [*entries[completed]]
    assert expected.dtype == entries.dtype == torch.bfloat16
    assert torch.equal(torch.stack(found), expected[0])


def test_parameters_keep_their_names() -> None:
    assert [*KVCompressor(4, 4, 2).state_dict()] == ["ape", "norm_weight", "projection.weight"]
    assert halves(torch.tensor([[1, 2]]))[0].tolist() == [[2]]


def test_layer_in_bfloat16() -> None:
    layer = KVCompressor(16, 8, window=4).bfloat16()
    assert layer(torch.randn(2, 9, 16).bfloat16()).shape == (2, 2, 8)
    state = layer.state(num_sequences=2)
    layer.step(torch.randn(2, 16).bfloat16(), state)
    assert state.lengths.tolist() == [1, 1]
