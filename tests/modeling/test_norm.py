"""RMS norm as a function with gradients and as a module, against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.modeling.norm import RMSNorm, rms_norm, rms_norm_cast


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_as_pytorchs(compiled: bool) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(2, 3, 24, requires_grad=True) for _ in range(2))
    norm = RMSNorm(24, 1e-5)
    torch.nn.init.uniform_(norm.weight)
    torch._dynamo.reset()
    run = torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled else norm
    out, total = run(x, residual)
    expected = torch.nn.functional.rms_norm(x + residual, (24,), norm.weight, 1e-5)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(total, x + residual)
    grad = torch.randn(2, 3, 24)
    wanted = torch.autograd.grad((expected, x + residual), (x, norm.weight), (grad, grad))
    found = torch.autograd.grad((out, total), (x, norm.weight), (grad, grad))
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_one_row_and_strided_rows() -> None:
    x = torch.randn(4, 16)
    expected = rms_norm(x, None)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(rms_norm(x[0], None), expected[0])  # type: ignore[arg-type]
    assert torch.equal(rms_norm(x.T.contiguous().T, None), expected)  # type: ignore[arg-type]


def test_the_cast_form() -> None:
    x = torch.randn(2, 3, 256).bfloat16().requires_grad_()
    out, (data, sf), total = rms_norm_cast(x, None, residual=x.detach(), round_sf=True)  # type: ignore[misc]
    assert out.shape == x.shape
    assert data.shape == (6, 256)
    assert sf.shape == (6, 2)
    assert torch.equal(total, x + x)
    values = data.float() * sf.repeat_interleave(128, 1)
    torch.testing.assert_close(values, out.float().view(6, 256), rtol=0.07, atol=0.01)
    out.sum().backward()
    assert x.grad is not None
    assert not data.requires_grad


def test_errors_name_the_function() -> None:
    with pytest.raises(TypeError, match=r"^rms_norm: x must be a torch\.Tensor"):
        rms_norm([1.0], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^RMSNorm: hidden must be in 1\.\.16384"):
        RMSNorm(20000)
