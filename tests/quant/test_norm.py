"""RMS norm: its cast to the bit, buffers, gradients, and what does not depend on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import quant
from tile_kernels.quant.norm.plan import MAX_PARTS, MAX_SHORT_PARTS, count_parts
from tile_kernels.quant.sample_flags import LAYOUTS, Flags

each_ground = pytest.mark.parametrize("ground", GROUNDS)
ALL_LAYOUTS = {**LAYOUTS, "packed_row": {"round_sf": True, "use_packed_ue8m0": True}}


def rows(*shape: int, device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device=device).bfloat16()


@pytest.mark.parametrize("flags", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
@each_ground
def test_the_cast_is_that_of_the_norm(flags: Flags, ground: tuple[str, str]) -> None:
    """Bit for bit the cast of the norm's own result, whatever rounding the sum has."""
    backend, device = ground
    x, residual, weight = rows(5, 200, device=device), rows(5, 200, device=device), None
    with tile_kernels.backend(backend):
        (data, sf), plain, rstd, total = quant.norm_forward_and_per_token_cast(
            x, weight, 1e-6, "e4m3", 16, residual, with_out_bf16=True, with_rstd=True, **flags
        )
        out, same_rstd, same_total = quant.norm_forward(x, weight, 1e-6, residual, with_rstd=True)
    assert plain is not None
    expected = tile_kernels.torch.cast(out.cpu(), "e4m3", (1, 16), **flags)
    assert torch.equal(plain, out)
    assert torch.equal(rstd, same_rstd)
    assert torch.equal(total, same_total)
    assert torch.equal(data.cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(sf.cpu(), expected[1])
    assert sf.stride() == expected[1].stride()


@pytest.mark.parametrize(
    ("how", "mega"), [("trained", False), ("compiled", False), ("compiled", True)]
)
def test_the_cast_alone(how: str, mega: bool) -> None:
    """Without a residual and without the norm in bfloat16: nothing but data and scales."""
    x = rows(5, 128)

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        buffer = torch.ones(1, 128, dtype=torch.int32)
        more: dict[str, Any] = {"mega_moe_sf": buffer, "mega_moe_block_m": 64} if mega else {}
        (data, sf), *others, total = quant.norm_forward_and_per_token_cast(
            x, None, 1e-6, "e4m3", 32, round_sf=True, **more
        )
        assert others == [None, None]
        assert total is x
        return data.view(torch.uint8), sf, buffer

    expected = cast(x)
    if how == "trained":
        found = cast(x.clone().requires_grad_())
    else:
        torch._dynamo.reset()
        found = torch.compile(cast, fullgraph=True, backend="aot_eager")(x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert bool((expected[2] == 1).all()) is not mega


@each_ground
def test_scales_of_batches(ground: tuple[str, str]) -> None:
    """Every batch has separate columns, padded to 16 bytes."""
    backend, device = ground
    x = rows(2, 5, 192, device=device)
    strides = {
        "row": ((2, 5, 6), (30, 6, 1)),
        "packed_row": ((2, 5, 2), (10, 2, 1)),
        "column": ((2, 5, 6), (48, 1, 8)),
        "packed": ((2, 5, 2), (16, 1, 8)),
    }
    with tile_kernels.backend(backend):
        for name, (shape, stride) in strides.items():
            flags: Any = ALL_LAYOUTS[name]
            (data, sf), *_ = quant.norm_forward_and_per_token_cast(
                x, None, 1e-6, "e4m3", 32, **flags
            )
            assert (tuple(sf.shape), sf.stride()) == (shape, stride)
            for i in range(2):
                (one, one_sf), *_ = quant.norm_forward_and_per_token_cast(
                    x[i], None, 1e-6, "e4m3", 32, **flags
                )
                assert torch.equal(data[i].view(torch.uint8), one.view(torch.uint8))
                assert torch.equal(sf[i], one_sf)


@each_ground
def test_results_may_replace_their_sources(ground: tuple[str, str]) -> None:
    backend, device = ground
    x, residual = rows(3, 1160, device=device), rows(3, 1160, device=device)
    with tile_kernels.backend(backend):
        expected = quant.norm_forward(x, None, 1e-6, residual)
        out, _, total = quant.norm_forward(x, None, 1e-6, residual, out=x, residual_out=residual)
    assert out is x
    assert total is residual
    assert torch.equal(out, expected[0])
    assert torch.equal(total, expected[2])


def test_the_norm_input_without_a_residual_is_x() -> None:
    x = rows(3, 96)
    assert quant.norm_forward(x, None, 1e-6)[2] is x


def test_buffers_of_other_rows_are_filled() -> None:
    x = rows(3, 96)
    buffer = torch.zeros(3, 200).bfloat16()[:, :96]
    out, *_ = quant.norm_forward(x, None, 1e-6, out=buffer)
    assert out is buffer
    assert torch.equal(buffer, quant.norm_forward(x, None, 1e-6)[0])


@pytest.mark.parametrize(
    ("tokens", "width"), [(200, 256), (200, 128), (1, 128), (1, 256), (0, 128), (0, 256)]
)
def test_the_view_of_a_mega_moe_buffer(tokens: int, width: int) -> None:
    """The scales go to the rows of the buffer, also behind those that the view shows."""
    x = rows(tokens, width)
    flags = {"round_sf": True, "mega_moe_block_m": 192}
    buffer = torch.zeros(width // 128, 512, dtype=torch.int32)
    quant.norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32, mega_moe_sf=buffer, **flags)
    memory = torch.zeros(width // 128, 512, dtype=torch.int32)
    view = memory.T[:tokens]
    quant.norm_forward_and_per_token_cast(x, None, 1e-6, "e4m3", 32, mega_moe_sf=view, **flags)
    assert torch.equal(memory, buffer)
    assert (buffer != 0).sum() == width // 128 * tokens


def test_parts_do_not_depend_on_the_device() -> None:
    assert [count_parts(n, 7168) for n in (0, 1, 131, 8192)] == [1, 1, 131, MAX_PARTS]
    assert [count_parts(n, 128) for n in (1, 263, 8192)] == [1, 263, MAX_SHORT_PARTS]


def test_the_gradient_of_the_weight_does_not_depend_on_the_sm_budget() -> None:
    x, grad, weight = rows(300, 40), rows(300, 40), rows(40)
    _, rstd, _ = quant.norm_forward(x, weight, 1e-6, with_rstd=True)
    found = []
    num_sms = tile_kernels.get_num_sms()
    with tile_kernels.backend("emulate"):
        for budget in (num_sms, 1):
            tile_kernels.set_num_sms(budget)
            try:
                found.append(quant.norm_backward(grad, x, weight, rstd)[1])
            finally:
                tile_kernels.set_num_sms(num_sms)
    assert torch.equal(found[0], found[1])


# ---- gradients ----------------------------------------------------------------------------------


def plain_norm(x: torch.Tensor, weight: torch.Tensor | None, residual: Any) -> Any:
    total = x if residual is None else x + residual
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * 0.5
    return (out if weight is None else out * weight), total


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("with_weight", [False, True], ids=["plain", "weight"])
def test_gradients(with_weight: bool, with_residual: bool, compiled: bool) -> None:
    """Those of the formula in float64."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    given = [x, torch.rand(24) if with_weight else None, residual if with_residual else None]
    grads = torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    ours = [None if t is None else t.clone().requires_grad_() for t in given]
    exact = [None if t is None else t.double().requires_grad_() for t in given]

    def norm(x: Any, weight: Any, residual: Any) -> Any:
        out, _, total = quant.norm_forward(x, weight, 1e-6, residual, 0.5)
        return out, total

    torch._dynamo.reset()
    run = torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled else norm
    out, total = run(*ours)
    expected = plain_norm(*exact)  # type: ignore[arg-type]
    torch.autograd.backward((out, total), grads)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for one, other in zip(ours, exact):
        if one is not None and other is not None:
            assert one.grad is not None
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_one_result_alone_has_a_gradient() -> None:
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    _, _, total = quant.norm_forward(x, weight, 1e-6, residual)
    total.sum().backward()
    assert x.grad is not None
    assert residual.grad is not None
    assert torch.equal(x.grad, torch.ones(3, 8))
    assert torch.equal(residual.grad, torch.ones(3, 8))


def test_the_gradient_of_the_cast_is_that_of_the_norm() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64).bfloat16()
    weight = torch.rand(64).bfloat16()
    grad = torch.randn(5, 64).bfloat16()
    found = []
    for cast in (False, True):
        one, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if cast:
            (_, sf), out, _, _ = quant.norm_forward_and_per_token_cast(
                one, w, 1e-6, "e4m3", 32, with_out_bf16=True
            )
            assert not sf.requires_grad
        else:
            out, _, _ = quant.norm_forward(one, w, 1e-6)
        assert out is not None
        out.backward(grad)
        found.append((one.grad, w.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_no_second_derivative() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    out, _, _ = quant.norm_forward(x, None, 1e-6)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@each_ground
def test_one_buffer_of_the_gradients(ground: tuple[str, str]) -> None:
    """Missing buffers are allocated; `weight_grad` is added to, a buffer is not."""
    backend, device = ground
    x, grad, weight = rows(5, 96, device=device), rows(5, 96, device=device), rows(96).to(device)
    with tile_kernels.backend(backend):
        rstd = quant.norm_forward(x, weight, 1e-6, with_rstd=True)[1]
        assert rstd is not None
        x_grad, weight_grad = quant.norm_backward(grad, x, weight, rstd)
        assert weight_grad is not None
        out, total = torch.ones_like(x), torch.ones_like(weight_grad)
        first = quant.norm_backward(grad, x, weight, rstd, out=out)
        second = quant.norm_backward(grad, x, weight, rstd, out=(None, total))
        assert first[0] is out
        assert second[1] is total
        for found, same in (first, second):
            assert torch.equal(found, x_grad)
            assert torch.equal(same, weight_grad)
        old = torch.full_like(total, 0.5)
        third = quant.norm_backward(grad, x, weight, rstd, weight_grad=old, out=(out, total))
        assert third[1] is total
        assert torch.equal(old, torch.full_like(total, 0.5))
        assert quant.norm_backward(grad, x, weight, rstd, weight_grad=old)[1] is old
        assert torch.equal(old, total)
        none = x[:0], x[:0], weight, rstd[:0]  # no rows: the sum is what was given
        assert quant.norm_backward(*none, weight_grad=old, out=(None, total.zero_()))[1] is total
        assert torch.equal(old, total)
    with pytest.raises(ValueError, match="out_weight_grad must be None without a weight"):
        quant.norm_backward(grad, x, None, rstd, out=(out, total))
    with pytest.raises(TypeError, match="out must be a tensor, or two, got 3"):
        quant.norm_backward(grad, x, weight, rstd, out=(out, total, total))
