"""Rotary position embedding: inverse, gradients, positions, and what is left untouched."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import transform
from tile_kernels.transform.rotary.cases import cache

each_ground = pytest.mark.parametrize("ground", GROUNDS)
CPU = torch.device("cpu")


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_it_is_a_complex_product(interleaved: bool) -> None:
    torch.manual_seed(0)
    x, table = torch.randn(6, 3, 16, dtype=torch.float32), cache(6, 16, CPU, torch.float32)
    pairs = x.unflatten(-1, (8, 2)) if interleaved else x.unflatten(-1, (2, 8)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.complex(
        table[:, None, :8].double(), table[:, None, 8:].double()
    )
    parts = torch.view_as_real(turned)
    expected = (parts if interleaved else parts.transpose(-1, -2)).flatten(-2)
    result = transform.rotary_embedding(x, table, interleaved=interleaved)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


@each_ground
def test_the_key_is_rotated_like_the_query(ground: tuple[str, str]) -> None:
    backend, device = ground
    x = torch.randn(2, 5, 4, 64, device=device).bfloat16()
    query, key = x[:, :, :3].contiguous(), x[:, :, 3:].contiguous()
    table = cache(9, 64, torch.device(device), torch.float32)
    with tile_kernels.backend(backend):
        expected = transform.rotary_embedding(x, table, seqlen_offset=4)
        transform.apply_rotary(query, table, key, seqlen_offset=4)
    assert torch.equal(torch.cat((query, key), 2), expected)


@each_ground
def test_slices_of_heads(ground: tuple[str, str]) -> None:
    """Only the given channels change; positions of one row serve all batches."""
    backend, device = ground
    x = torch.randn(2, 4, 3, 96, device=device).bfloat16()
    before = x.clone()
    table = cache(8, 32, torch.device(device), torch.bfloat16)
    positions = torch.tensor([3, 0, 7, 1], device=device).expand(2, 4)
    with tile_kernels.backend(backend):
        transform.apply_rotary(x[..., -32:], table, positions=positions, interleaved=True)
    assert torch.equal(x[..., :64], before[..., :64])
    expected = tile_kernels.torch.rotary_embedding(
        before[..., -32:].cpu(), table.cpu(), None, positions.cpu(), True
    )
    assert torch.equal(x[..., -32:].cpu(), expected)


def test_positions_that_the_cache_lacks() -> None:
    """They raise on a CPU and in the checked mode; a kernel leaves their tokens as they are."""
    x = torch.randn(4, 2, 16)
    table = cache(3, 16, CPU, torch.float32)
    positions = torch.tensor([0, -1, 3, 2])
    with pytest.raises(ValueError, match=r"positions must be in 0\.\.2 .*\[1\] is -1"):
        transform.rotary_embedding(x, table, positions=positions)
    known = torch.tensor([0, 3])
    expected = x.clone()
    expected[known] = transform.rotary_embedding(x[known], table, positions=positions[known])
    with tile_kernels.backend("emulate"):
        assert torch.equal(transform.rotary_embedding(x, table, positions=positions), expected)
        in_place = x.clone()
        transform.apply_rotary(in_place, table, positions=positions)
        assert torch.equal(in_place, expected)
        with tile_kernels.checked(), pytest.raises(ValueError, match=r"positions.*element \[1\]"):
            transform.apply_rotary(in_place, table, positions=positions)
        with tile_kernels.checked(), pytest.raises(ValueError, match="seqlen_offset"):
            transform.apply_rotary(in_place, table)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_gradients(interleaved: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    table = cache(9, 8, CPU, torch.float32)
    query, key = (torch.randn(5, n, 8, requires_grad=True) for n in (3, 1))
    grads = torch.randn(5, 3, 8), torch.randn(5, 1, 8)

    def rotated(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = transform.rotary_embedding(
            query, table, key, interleaved=interleaved, seqlen_offset=2
        )
        assert isinstance(found, tuple)
        return found

    torch._dynamo.reset()
    run = torch.compile(rotated, fullgraph=True, backend="aot_eager") if compiled else rotated
    torch.autograd.backward(run(query, key), grads)
    for x, grad in zip((query, key), grads):
        assert x.grad is not None
        # The Jacobian is orthogonal: the opposite rotation of the gradient.
        back = transform.rotary_embedding(x.grad, table, interleaved=interleaved, seqlen_offset=2)
        assert isinstance(back, torch.Tensor)
        torch.testing.assert_close(back, grad, rtol=1e-5, atol=1e-6)
        exact = x.detach().double().requires_grad_()
        angles = table[2:7].double().unflatten(-1, (2, 4))[:, None]
        a, b = exact.unflatten(-1, (4, 2)).unbind(-1) if interleaved else exact.chunk(2, -1)
        turned = (
            a * angles[:, :, 0] - b * angles[:, :, 1],
            a * angles[:, :, 1] + b * angles[:, :, 0],
        )
        result = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        result.backward(grad.double())
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)


def test_in_place_under_compile() -> None:
    x, table = torch.randn(4, 2, 16), cache(4, 16, CPU, torch.float32)
    expected = transform.rotary_embedding(x, table)
    torch._dynamo.reset()
    torch.compile(transform.apply_rotary, fullgraph=True, backend="aot_eager")(x, table)
    assert torch.equal(x, expected)


@each_ground
def test_expanded_tensors_are_not_written(ground: tuple[str, str]) -> None:
    """Several tokens of one memory would be rotated one after another."""
    backend, device = ground
    query, cache = torch.ones(1, 2, 8, device=device), torch.ones(9, 8, device=device)
    with (
        tile_kernels.backend(backend),
        pytest.raises(ValueError, match="query must not have elements that share memory"),
    ):
        transform.apply_rotary(query.expand(3, 2, 8), cache)
    assert torch.equal(query, torch.ones_like(query))


def test_in_place_has_no_gradient() -> None:
    x = torch.randn(4, 2, 16, requires_grad=True) * 1
    table = cache(4, 16, CPU, torch.float32)
    with pytest.raises(RuntimeError, match="rotary_embedding"):
        transform.apply_rotary(x, table)
    with torch.no_grad():
        transform.apply_rotary(x, table)


def test_buffers_have_no_gradient() -> None:
    x, table = torch.randn(4, 2, 16), cache(4, 16, CPU, torch.float32)
    with pytest.raises(ValueError, match="out cannot be given with gradients"):
        transform.rotary_embedding(x.requires_grad_(), table, out=torch.empty(4, 2, 16))
    with pytest.raises(TypeError, match="out must be 2 tensors, got 1"):
        transform.rotary_embedding(x.detach(), table, x.detach(), out=torch.empty(4, 2, 16))
