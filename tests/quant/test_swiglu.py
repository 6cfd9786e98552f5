"""The references of SwiGLU against worked vectors, exact arithmetic and numerical derivatives."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tests.quant.helpers import INF, LAYOUTS, NAN, bits, float32, hex_rows
from tests.requirements import GROUNDS
from tile_kernels import quant
from tile_kernels import torch as references
from tile_kernels.quant import scales
from tile_kernels.quant.swiglu.reference import activate, split_halves, swiglu_gradients
from tile_kernels.runtime import arithmetic
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.torch import (
    cast,
    cast_back,
    swiglu_backward,
    swiglu_forward,
)

CLAMPS = [None, 10.0, 0.5]


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: float) -> torch.Tensor:
    return arithmetic.fused_multiply_add(a, b, torch.tensor(c, device=a.device))


def close_to(found: torch.Tensor, *expected: float) -> None:
    """To the digits that the vectors give; the last bit of `exp` is the device's own."""
    torch.testing.assert_close(found, float32(*expected), rtol=3e-7, atol=1e-9)
    assert torch.signbit(found).tolist() == torch.signbit(float32(*expected)).tolist()


# ---- without a cast ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all", "ranges", "indexed"])
def test_gradients_of_the_plain_forward(kind: str) -> None:
    """Against autograd of the formula; rows that do not exist have none."""
    torch.manual_seed(0)
    x = torch.randn(9, 12, requires_grad=True)
    exists, weights = torch.ones(9, dtype=torch.bool), torch.randn(9, requires_grad=True)
    of_row, layout = weights, {}
    if kind == "ranges":
        layout = {"psum_num_tokens_per_expert": torch.tensor([3, 5]).int(), "alignment": 4}
        exists = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0, 0]).bool()
    elif kind == "indexed":
        weights = torch.randn(6, 2, requires_grad=True)
        index = torch.tensor([5, -1, 0, 11, 3, 12, 2, -1, 7])
        layout, exists = {"pos_to_token_topk": index.int()}, (index >= 0) & (index < 12)
        of_row = weights.flatten()[index.clamp(0, 11)]
    y = quant.swiglu_forward(x, "fp32", topk_weights=weights, routed_scaling_factor=2.5, **layout)
    gate, value = x.chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * value * of_row[:, None] * 2.5 * exists[:, None]
    torch.testing.assert_close(y, wanted)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weights), grad)
    for one, other in zip(found, torch.autograd.grad(wanted, (x, weights), grad)):
        torch.testing.assert_close(one, other)


# ---- forward -----------------------------------------------------------------------------------

X = torch.tensor([[1, -2, 12, 3], [0, 5, -0.25, -20]])


def test_forward_vectors() -> None:
    out = swiglu_forward(X)
    assert out.dtype == torch.float32
    close_to(out[0], 8.7727031708, -0.7152175307)
    close_to(out[1], -0.0, -99.3307113647)
    assert_equal(swiglu_forward(X.bfloat16()), out)

    count = torch.tensor([100, 0, 0])
    out = swiglu_forward(X, None, None, 10.0, count)
    close_to(out[0], 7.3105859756, -0.7152175307)
    close_to(out[1], -0.0, -49.6653556824)
    assert count.tolist() == [100, 1, 1]  # added to what was there


def test_weighted_forward_vectors() -> None:
    weights, index = torch.tensor([[0.5, 2.0]]), torch.tensor([1, -1], dtype=torch.int32)
    out = swiglu_forward(X, index, weights)
    close_to(out[0], 17.5454063416, -1.4304350615)
    close_to(out[1], -0.0, -0.0)
    data, sf = references.swiglu_forward_and_per_token_cast(
        X, "e4m3", 2, index, weights, round_sf=True
    )
    assert hex_rows(data) == "79 DB / 80 80"
    assert sf.tolist() == [[2**-4], [2**-22]]


def test_per_channel_vector() -> None:
    x = torch.tensor([[1.0, 3], [2, 1]]).bfloat16()
    assert swiglu_forward(x).bfloat16().flatten().tolist() == [2.1875, 1.7578125]
    data, sf = references.swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 2)
    assert hex_rows(data) == "7E 7B"
    assert bits(sf) == [0x3BA00000]
    data, _ = references.swiglu_forward_and_per_channel_cast_and_transpose(
        x, "e4m3", 2, False, True
    )
    assert hex_rows(data) == "7E / 7B"
    assert bits(cast(swiglu_forward(x), "e4m3", (2, 1))[1]) == [0x3BA06A47]


@pytest.mark.parametrize("clamp", CLAMPS)
def test_forward_is_swiglu(clamp: float | None) -> None:
    x = torch.randn(16, 64, dtype=torch.float64) * 4
    left, right = x.chunk(2, dim=1)
    if clamp is not None:
        left, right = left.clamp(max=clamp), right.clamp(-clamp, clamp)
    expected = torch.nn.functional.silu(left) * right
    torch.testing.assert_close(swiglu_forward(x, swiglu_clamp_value=clamp), expected)
    found = swiglu_forward(x.float(), swiglu_clamp_value=clamp)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


def test_forward_of_extremes() -> None:
    """No NaN but from NaN, from infinities that cancel, and it survives the clamp."""
    left = float32(-1000, 1000, NAN, 1.0, INF, -INF)
    right = float32(2, 2, 1.0, NAN, 1.0, 1.0)
    for clamp, at_infinity in ((None, INF), (5.0, None)):
        out = swiglu_forward(torch.cat((left, right))[None], swiglu_clamp_value=clamp)[0]
        assert out.isnan().tolist() == [False, False, True, True, False, True]
        assert out[0] == 0
        if at_infinity is not None:
            assert out[4] == at_infinity


def test_counting_is_strict() -> None:
    x = float32(5, 5.000001, 6, -6, 5, -5, 6, -7)[None]
    count = torch.zeros(3, dtype=torch.int64)
    swiglu_forward(x, swiglu_clamp_value=5.0, clamped_count=count)
    assert count.tolist() == [2, 1, 1]
    swiglu_forward(x, clamped_count=count)
    assert count.tolist() == [2, 1, 1]
    swiglu_forward(x, swiglu_clamp_value=5.0, clamped_count=count)
    assert count.tolist() == [4, 2, 2]


def test_no_rows() -> None:
    count = torch.zeros(3, dtype=torch.int64)
    x, index = torch.zeros(0, 256), torch.zeros(0, dtype=torch.int32)
    assert swiglu_forward(x, index, torch.zeros(0, 2), 1.0, count).shape == (0, 128)
    data, sf = references.swiglu_forward_and_per_token_cast(x, "e4m3", 128, pos_to_expert=index)
    assert (tuple(data.shape), tuple(sf.shape)) == ((0, 128), (0, 1))
    data, sf = references.swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 128)
    assert (tuple(data.shape), tuple(sf.shape)) == ((128, 0), (0, 128))
    assert count.tolist() == [0, 0, 0]


def test_only_padding() -> None:
    """Rows without any token: the weights may then be empty."""
    index = torch.full((3,), -1)
    out = swiglu_forward(torch.ones(3, 4), index, torch.zeros(0, 2))
    assert out.tolist() == [[0.0, 0.0]] * 3


def test_weights_in_any_strides() -> None:
    weights = torch.rand(3, 4)
    index = torch.randperm(12)
    x = torch.randn(12, 6)
    expected = swiglu_forward(x) * weights.flatten()[index, None]
    assert_equal(swiglu_forward(x, index, weights), expected)
    assert_equal(swiglu_forward(x, index, weights.T.contiguous().T), expected)
    assert_equal(swiglu_forward(x, None, weights), swiglu_forward(x))


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("flags", LAYOUTS)
def test_skipped_rows_are_zero_and_not_counted(
    flags: tuple[bool, bool], clamp: float | None
) -> None:
    x = (torch.randn(9, 320) * 10).bfloat16()
    expert = torch.tensor([0, -1, 3, 3, -1, -5, 7, 0, -1], dtype=torch.int32)
    index = torch.randperm(9, dtype=torch.int32)
    weights = torch.randn(3, 3)
    real = expert >= 0
    x[~real] = NAN
    options = {"use_tma_aligned_col_major_sf": flags[0], "use_packed_ue8m0": flags[1]}
    counts = torch.zeros(2, 3, dtype=torch.int64)
    data, sf = references.swiglu_forward_and_per_token_cast(
        x,
        "e4m3",
        64,
        index,
        weights,
        expert,
        round_sf=True,
        swiglu_clamp_value=clamp,
        clamped_count=counts[0],
        **options,
    )
    act = swiglu_forward(x[real], index[real], weights, clamp, counts[1])
    expected = cast(act, "e4m3", (1, 64), round_sf=True)
    assert_equal(data.view(torch.uint8)[real], expected[0].view(torch.uint8))
    assert not data.view(torch.uint8)[~real].any()
    plain = torch.zeros(9, 3)
    plain[real] = expected[1]
    assert_equal(sf, scales.lay_out_sf(plain, *flags))
    assert_equal(counts[0], counts[1])


def test_another_least_magnitude() -> None:
    x = torch.full((1, 256), 1e-4)
    plain = references.swiglu_forward_and_per_token_cast(x, "e4m3", 128)
    finer = references.swiglu_forward_and_per_token_cast(x, "e4m3", 128, sf_clamp_min=1e-12)
    act = float(swiglu_forward(x)[0, 0])
    assert bits(plain[1]) == [0x346FACAD]
    assert_equal(finer[1], (float32(act).double() / 448).float()[None])
    assert float(finer[0][0, 0].float()) == 448


# ---- a multiplication and an addition with one rounding ----------------------------------------


def rounded_once(a: float, b: float, c: float) -> Fraction:
    """The float32 nearest to `a * b + c`, ties to even, in exact arithmetic."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return exact
    exponent = -149
    while abs(exact) / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    unit = Fraction(2) ** exponent
    return round(exact / unit) * unit  # Python rounds fractions to nearest, ties to even


factors = st.floats(-(2.0**40), 2.0**40, width=32)


@settings(deadline=None, max_examples=300)
@given(factors, st.floats(-2, 2, width=32))
def test_fused_multiply_add(a: float, b: float) -> None:
    found = fused_multiply_add(float32(a), float32(b), 1.0)
    assert Fraction(float(found)) == rounded_once(a, b, 1.0)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, (1 << 24) - 1), st.integers(1, (1 << 24) - 1), st.integers(-70, 2))
def test_fused_multiply_add_of_all_significands(a: int, b: int, exponent: int) -> None:
    """Every bit set at random, and sums that lie next to the middle of two float32."""
    factor = a * 2.0**-23 * 2.0**exponent
    for sign in (1.0, -1.0):
        found = fused_multiply_add(float32(sign * factor), float32(b * 2.0**-23), 1.0)
        assert Fraction(float(found)) == rounded_once(sign * factor, b * 2.0**-23, 1.0)


def test_fused_multiply_add_where_rounding_twice_is_wrong() -> None:
    """`1 + 2**-24 + 2**-70`: in float64 the last term is lost, and the tie goes down."""
    a, b = 2.0**-12 + 2.0**-35, 2.0**-12 - 2.0**-35
    above, below = float32(2.0**-24 * (1 + 2.0**-23)), float32(1.0)
    assert fused_multiply_add(above, below, 1.0) == 1 + 2.0**-23
    assert rounded_once(a, b, 1.0) == 1  # 2**-24 - 2**-70: below the middle
    assert fused_multiply_add(float32(a), float32(b), 1.0) == 1.0
    # 1 + 2**-23 + 2**-24 is a tie between an odd and an even mantissa; a little less rounds down.
    one = 1 + 2.0**-23
    assert fused_multiply_add(float32(a), float32(b), one) == one
    assert (float32(a).double() * float32(b).double() + one).float() != one


def test_fused_multiply_add_of_extremes() -> None:
    a, b = float32(INF, -INF, NAN, INF, 3e38, 0.0), float32(1, 1, 1, 0, 2, 5)
    found = fused_multiply_add(a, b, 1.0)
    assert found[:2].tolist() == [INF, -INF]
    assert found.isnan().tolist() == [False, False, True, True, False, False]
    assert found[4:].tolist() == [INF, 1.0]


# ---- backward ----------------------------------------------------------------------------------


def example() -> tuple[torch.Tensor, ...]:
    """32 channels, of which the first four are not zero."""
    left, right, grad = torch.zeros(3, 32), torch.zeros(3, 32), torch.zeros(3, 32)
    left[:2, :4] = torch.tensor([[1, -2, 12, 0], [2, 0.5, 0, 0]])
    right[:2, :4] = torch.tensor([[3, 1, -0.5, 20], [1, 1, 0, 0]])
    grad[:, :4] = float32(1, 2, -1, 0.5)
    data = torch.cat((left, right), dim=1).to(torch.float8_e4m3fn)
    weight = torch.tensor([[0.5, 2], [1, 3]])
    index = torch.tensor([1, 2, -1], dtype=torch.int32)
    inverse = torch.tensor([[-1, 0], [1, -1]], dtype=torch.int32)
    return data, torch.ones(3, 2), grad.bfloat16(), weight, index, inverse


def test_backward_vectors() -> None:
    data, sf, grad, weight, index, inverse = example()
    out, x_grad, weight_grad = swiglu_backward((data, sf), grad, weight, index, inverse, 32)
    assert out.bfloat16()[0, :4].tolist() == [4.375, -0.4765625, -12, 0]
    assert out.bfloat16()[1, :4].tolist() == [1.7578125, 0.310546875, 0, 0]
    assert not out[2].any()
    close_to(x_grad[0, :4], 5.5660233, -0.3631370, 1.0000682, 10)
    close_to(x_grad[0, 32:36], 1.4621172, -0.9536234, -23.9998512, 0)
    zeros = float32(0, 0, -0.0, 0)
    assert_equal(x_grad[2, :4], zeros)
    assert_equal(x_grad[2, 32:36], zeros)
    close_to(weight_grad.flatten(), 0, 7.7163267, 2.3840535, 0)
    assert out.dtype == x_grad.dtype == weight_grad.dtype == torch.float32


def test_quantised_backward_vectors() -> None:
    data, sf, grad, weight, index, inverse = example()
    arguments = (data, sf), grad, weight, index, inverse, 32
    found = references.swiglu_backward_and_per_token_cast(*arguments, round_sf=True)
    out, (grad_data, grad_sf), x_grad, weight_grad = found
    assert grad_data.float()[0, :4].tolist() == [176, -12, 32, 320]
    assert grad_data.float()[0, 32:36].tolist() == [24, -15, -384, 0]
    assert grad_sf.tolist()[0] == [2**-5, 2**-4]
    assert grad_sf.tolist()[2] == [2**-22, 2**-22]
    assert hex_rows(grad_data[2:, :4]) == hex_rows(grad_data[2:, 32:36]) == "00 00 80 00"
    plain = swiglu_backward(*arguments)
    assert_equal(out, plain[0].bfloat16())
    assert_equal(x_grad, plain[1].bfloat16())
    assert_equal(weight_grad, plain[2])
    expected = cast(plain[1], "e4m3", (1, 32), round_sf=True)
    assert_equal(grad_data, expected[0])
    assert_equal(grad_sf, expected[1])


def test_clamped_backward_vectors() -> None:
    data, sf, grad, weight, index, inverse = example()
    out, x_grad, weight_grad = swiglu_backward(
        (data, sf), grad, weight, index, inverse, 32, swiglu_clamp_value=10.0
    )
    assert out.bfloat16()[0, 2] == -10
    close_to(x_grad[0, :4], 5.5660233, -0.3631370, 0, 5)
    close_to(weight_grad[0, 1:], 6.7161369)


@pytest.mark.parametrize("clamp", CLAMPS)
def test_gradients_are_derivatives(clamp: float | None) -> None:
    """The formulas in float64 against finite differences of the forward pass."""

    class Swiglu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return swiglu_forward(x, torch.arange(x.shape[0]), weight, clamp)

        @staticmethod
        def backward(ctx, grad_out):
            x, weight = ctx.saved_tensors
            halves = split_halves(x)
            act, left, right = swiglu_gradients(*halves, grad_out, weight.view(-1, 1), clamp)
            grad_weight = (grad_out * act).sum(1).view(weight.shape)
            return torch.cat((left, right), 1), grad_weight

    x = torch.randn(6, 16, dtype=torch.float64) * 3
    weight = torch.randn(3, 2, dtype=torch.float64)
    arguments = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(Swiglu.apply, arguments)


@pytest.mark.parametrize("clamp", CLAMPS)
def test_backward_is_autograd_s(clamp: float | None) -> None:
    """Through the quantised input, with padding rows, unmapped weights and 3-D data."""
    num_rows, hidden, n = 10, 64, 32
    x = cast(torch.randn(num_rows, 2 * hidden) * 3, "e4m3", (1, n))
    grad_out = torch.randn(num_rows, hidden).bfloat16()
    weight = torch.rand(6, 3)
    index = torch.randperm(18, dtype=torch.int32)[:num_rows]
    index[3] = index[7] = -1
    inverse = torch.full((18,), -1, dtype=torch.int32)
    mapped = index >= 0
    inverse[index[mapped].long()] = torch.arange(num_rows, dtype=torch.int32)[mapped]
    arguments = grad_out, weight, index, inverse.view(6, 3), n, clamp

    values = cast_back(x, "fp32", (1, n)).double().requires_grad_()
    weights = weight.double().requires_grad_()
    expected = swiglu_forward(values, index, weights, clamp)
    expected.backward(grad_out.double())
    out, x_grad, weight_grad = swiglu_backward(x, *arguments)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), expected.detach(), **close)
    torch.testing.assert_close(x_grad.double(), values.grad, **close)
    torch.testing.assert_close(weight_grad.double(), weights.grad, **close)
    assert not weight_grad[inverse.view(6, 3) < 0].any()
    assert not x_grad[~mapped].any()

    deep = x[0].view(2, 5, -1), x[1].view(2, 5, -1)
    again = swiglu_backward(deep, grad_out.view(2, 5, -1), *arguments[1:])
    for found, kept in zip(again, (out, x_grad, weight_grad)):
        assert_equal(found, kept)


def test_backward_in_the_stated_association() -> None:
    """The same formulas, written out once more; `exp` is the only thing shared."""
    left, right, grad = torch.randn(3, 500).unbind(0)
    weight = torch.rand(500, 1)
    d = 1 + torch.exp(-left)
    s = (1 / d.double()).float()
    fused = torch.tensor([
        float(rounded_once(a, b, 1.0)) for a, b in zip(left.tolist(), (1 - s).tolist())
    ])  # fmt: skip
    q = (grad * weight[:, 0]) * s
    act, grad_left, grad_right = swiglu_gradients(
        left[:, None], right[:, None], grad[:, None], weight, None
    )
    assert_equal(act[:, 0], (left / d) * right)
    assert_equal(grad_left[:, 0], (q * right) * fused)
    assert_equal(grad_right[:, 0], q * left)
    assert_equal(activate(left, right)[1], d)


def test_backward_without_rows() -> None:
    x = torch.zeros(0, 128).to(torch.float8_e4m3fn), torch.zeros(0, 4)
    index = torch.zeros(0, dtype=torch.int32)
    out, (data, sf), x_grad, weight_grad = references.swiglu_backward_and_per_token_cast(
        x, torch.zeros(0, 64).bfloat16(), torch.ones(2, 3), index, torch.full((2, 3), -1), 32
    )
    shapes = [tuple(tensor.shape) for tensor in (out, data, sf, x_grad)]
    assert shapes == [(0, 64), (0, 128), (0, 4), (0, 128)]
    assert weight_grad.tolist() == [[0.0] * 3] * 2


def test_backward_with_packed_scales() -> None:
    data, sf, grad, weight, index, inverse = example()
    sf = sf * 0.5
    expected = swiglu_backward((data, sf), grad, weight, index, inverse, 32)
    packed = data, scales.lay_out_sf(sf, True, True)
    for found, kept in zip(swiglu_backward(packed, grad, weight, index, inverse, 32), expected):
        assert_equal(found, kept)


def test_wrong_arguments_are_named() -> None:
    data, sf, grad, weight, index, inverse = example()
    with pytest.raises(ValueError, match="even number of channels"):
        swiglu_forward(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="topk_weights"):
        swiglu_forward(torch.zeros(3, 4), index)
    with pytest.raises(ValueError, match=r"shape of weight, \(2, 2\), got \(2, 1\)"):
        swiglu_backward((data, sf), grad, weight, index, inverse[:, :1], 32)
    with pytest.raises(ValueError, match="must be 'e4m3', got 'e2m1'"):
        references.swiglu_forward_and_per_token_cast(torch.zeros(3, 4), "e2m1", 2)


@pytest.mark.gpu
def test_fused_multiply_add_on_cuda() -> None:
    """As the CPU computes it, and as the GPU's own instruction, which `addcmul` compiles to."""
    a = torch.randn(1 << 20) * 2.0 ** torch.randint(-30, 30, (1 << 20,))
    b = torch.rand(1 << 20)
    found = fused_multiply_add(a.cuda(), b.cuda(), 1.0)
    assert_equal(found.cpu(), fused_multiply_add(a, b, 1.0))
    assert_equal(found, torch.addcmul(torch.ones_like(found), a.cuda(), b.cuda()))


@pytest.mark.gpu
def test_backward_on_cuda_agrees() -> None:
    x = cast(torch.randn(64, 512), "e4m3", (1, 128))
    grad = torch.randn(64, 256).bfloat16()
    weight, index = torch.rand(32, 2), torch.arange(64, dtype=torch.int32)
    arguments = grad, weight, index, index.view(32, 2)
    expected = swiglu_backward(x, *arguments, 128, 0.5)
    moved = [tensor.cuda() for tensor in (*x, *arguments)]
    found = swiglu_backward((moved[0], moved[1]), *moved[2:], 128, 0.5)
    for tensor, kept in zip(found, expected):
        torch.testing.assert_close(tensor.cpu(), kept, rtol=1e-5, atol=1e-6)


# ---- ranges of experts --------------------------------------------------------------------------


def _ranges(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which 0, 1 and 4 exist."""
    torch.manual_seed(4)
    ends = torch.tensor([2, 4, 5], dtype=torch.int32, device=device)
    return torch.randn(7, 64, device=device), ends


@pytest.mark.parametrize("ground", GROUNDS)
def test_rows_that_do_not_exist_are_left_alone(ground: tuple[str, str]) -> None:
    """Without `fill_padding` only rows of experts have to be written; the others are not read."""
    backend, device = ground
    x, ends = _ranges(device)
    exists = torch.tensor([0, 1, 4], device=device)
    wanted = quant.swiglu_forward(x, "fp32", ends, alignment=4)
    codes = quant.swiglu_forward_and_per_token_cast(
        x, "e4m3", 32, psum_num_tokens_per_expert=ends, alignment=4
    )
    missing = torch.tensor([2, 3, 5, 6], device=device)
    x[missing] = torch.nan
    out = torch.full_like(wanted, 7.0)
    data, sf = (torch.full_like(each.view(torch.uint8), 7).view(each.dtype) for each in codes)
    with tile_kernels.backend(backend):
        quant.swiglu_forward(x, "fp32", ends, alignment=4, fill_padding=False, out=out)
        quant.swiglu_forward_and_per_token_cast(
            x, "e4m3", 32, psum_num_tokens_per_expert=ends, alignment=4, fill_padding=False,
            out=(data, sf),
        )  # fmt: skip
    torch.testing.assert_close(out[exists], wanted[exists], rtol=1e-6, atol=1e-7)
    assert torch.equal(data.view(torch.uint8)[exists], codes[0].view(torch.uint8)[exists])
    assert not sf[missing].any()
    if backend != "torch":
        assert (out[missing] == 7).all()


def test_counting_does_not_hide_the_gradient() -> None:
    x, ends = _ranges("cpu")
    counted, plain = (x.clone().requires_grad_() for _ in range(2))
    count = torch.zeros(4, dtype=torch.int64)
    grad = torch.randn(7, 32)
    quant.swiglu_forward(counted, "fp32", ends, None, None, 0.5, count, alignment=4).backward(grad)
    quant.swiglu_forward(plain, "fp32", ends, None, None, 0.5, alignment=4).backward(grad)
    assert counted.grad is not None
    assert plain.grad is not None
    assert torch.equal(counted.grad, plain.grad)
    left, right = x[[0, 1, 4]].split(32, dim=1)
    wanted = [left > 0.5, right > 0.5, right < -0.5, left == left]
    assert count.tolist() == [int(each.sum()) for each in wanted]


def test_a_psum_layout_from_the_fused_mapping() -> None:
    """The two layouts of rows give the same gradients of the quantized form."""
    x, ends = _ranges("cpu")
    data, sf = quant.per_token_cast(x, "e4m3", 32)
    grad, weight = torch.randn(7, 32).bfloat16(), torch.rand(7)
    index = torch.tensor([0, 1, -1, -1, 4, -1, -1], dtype=torch.int32)
    by_index = quant.swiglu_backward_and_per_token_cast(
        (data, sf), grad, weight[:, None], index, index[:, None], 32
    )
    by_range = quant.swiglu_backward_and_per_token_cast(
        (data, sf), grad, weight, None, None, 32, psum_num_tokens_per_expert=ends, alignment=4
    )
    assert torch.equal(by_range[0], by_index[0])
    assert torch.equal(by_range[2], by_index[2])
    assert torch.equal(by_range[3], by_index[3][:, 0])
    assert torch.equal(by_range[1][0].float(), by_index[1][0].float())
    assert not by_range[1][1][[2, 3, 5, 6]].any()


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("experts", [1, 2, 31, 33, 64, 1100])
def test_ranges_of_many_experts(experts: int, ground: tuple[str, str]) -> None:
    """Every row is found, whatever the number of experts; some have no rows."""
    backend, device = ground
    generator = torch.Generator().manual_seed(experts)
    counts = torch.randint(0, 3, (experts,), generator=generator)
    ends = (2 * torch.arange(experts) + counts).to(torch.int32)
    rows = min(2 * experts + 3, 70)
    ends += rows - 5 - 2 * experts if experts == 1100 else 0  # the last experts have the rows
    ends.clamp_(min=0)
    x = torch.ones(rows, 16, device=device)
    with tile_kernels.backend(backend):
        out = quant.swiglu_forward(x, "fp32", ends.to(device), alignment=2)
    exists, start = torch.zeros(rows, dtype=torch.bool), 0
    for end in ends.tolist():
        exists[start:end] = True
        start = -(-end // 2) * 2
    assert torch.equal(out.cpu().any(1), exists)


@pytest.mark.parametrize("ground", GROUNDS)
def test_least_amax(ground: tuple[str, str]) -> None:
    """Both casts take the least amax as an argument, and from the setting."""
    backend, device = ground
    torch.manual_seed(5)
    x = torch.randn(3, 64, device=device).bfloat16()
    data, sf = quant.per_token_cast(x, "e4m3", 32)
    grad = torch.randn(3, 32, device=device).bfloat16()
    backward = ((data, sf), grad, None, None, None, 32)
    with tile_kernels.backend(backend):
        forward = quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, amax_min=448.0)
        _, gradient, _, _ = quant.swiglu_backward_and_per_token_cast(*backward, amax_min=448.0)
        with tile_kernels.config.quant_amax_min(448.0, "e4m3"):
            same = quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32)
            _, same_gradient, _, _ = quant.swiglu_backward_and_per_token_cast(*backward)
        usual = quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32)
    for one, other in ((forward, same), (gradient, same_gradient)):
        assert torch.equal(one[1], torch.ones_like(one[1]))  # no value is that large
        assert torch.equal(one[0].float(), other[0].float())
        assert torch.equal(one[1], other[1])
    assert (usual[1] < 1).all()
    with pytest.raises(ValueError, match="amax_min must be None with sf_clamp_min"):
        quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, sf_clamp_min=1.0, amax_min=1.0)
    with pytest.raises(ValueError, match="amax_min must be in"):
        quant.swiglu_backward_and_per_token_cast(*backward, amax_min=0.0)
