"""The fused layout: the oracles' arithmetic, properties, gradients, the reference grid."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels.runtime.arithmetic import fused_multiply_add
from tile_kernels.testing.bench import make_param_id
from tile_kernels.testing.generator import generate_moe_params, generate_topk_idx
from tile_kernels.testing.numeric import assert_equal

BACKENDS = ["torch", "emulate"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


# ---- one rounding -------------------------------------------------------------------------------


def rounded(exact: Fraction) -> float:
    """The float32 nearest to a number other than zero, ties to even."""
    exponent = math.frexp(float(abs(exact)))[1] - 1  # 2**exponent <= |exact|, or one too much
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = round(exact / step) * step  # Python rounds ties to even
    return math.copysign(math.inf if abs(nearest) >= 2**128 else float(abs(nearest)), exact)


def exactly(a: float, b: float, c: float) -> float:
    """`a * b + c` of float32 numbers by rational arithmetic."""
    plain = a * b + c  # Python's float64 is right about infinities, NaN and the sign of zero
    if not math.isfinite(plain):
        return plain
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return rounded(exact) if exact else plain


def bits(count: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (count,)).int().view(torch.float32)


def near(exact: Tensor, steps: int) -> Tensor:
    """float32 numbers a few steps around `exact`."""
    away = torch.randint(-steps, steps + 1, exact.shape).int()
    return (exact.float().view(torch.int32) + away).view(torch.float32)


def triples(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    count = 4000
    a, b = 1 + torch.rand(count), 1 + torch.rand(count)
    if kind == "any bits":
        return bits(count), bits(count), bits(count)
    if kind == "cancellation":
        return a, b, near(-(a.double() * b.double()), 3)
    if kind == "ties":  # the product is half a step of c, give or take 2**-46 of that
        near_one = 1 + torch.randint(-3, 4, (count,)) * 2.0**-23
        inverse = (1 / near_one.double()).float()
        c = torch.randint(2**23, 2**24, (count,)).float()
        return 0.5 * near_one, near(inverse.double(), 1), c * torch.randn(count).sign()
    if kind == "subnormal":
        scale = 2.0 ** torch.randint(-90, -60, (count,))
        return (
            a * scale,
            b * 2.0 ** torch.randint(-90, -60, (count,)),
            torch.randint(-(2**23), 2**23, (count,)) * 2.0**-149,
        )
    if kind == "overflow":
        most = torch.finfo(torch.float32).max
        return a * 2.0**100, b * torch.full_like(b, 2.0**27), near(torch.full((count,), -most), 9)
    values = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3e38, -3e38]
    special = torch.tensor([*values, math.inf, -math.inf, math.nan])
    a, b, c = torch.cartesian_prod(special, special, special).unbind(1)
    return a, b, c


KINDS = ["any bits", "cancellation", "ties", "subnormal", "overflow", "special"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_oracle_rounds_once(kind: str, device: str) -> None:
    a, b, c = triples(kind)
    result = fused_multiply_add(a.to(device), b.to(device), c.to(device)).cpu()
    expected = torch.tensor([exactly(*abc) for abc in zip(a.tolist(), b.tolist(), c.tolist())])
    assert torch.equal(result.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert_equal(result[numbers], expected[numbers])


def test_the_traps_are_traps() -> None:
    """Rounding twice, to float64 and to float32, must fail somewhere, or the test shows nothing."""
    a, b, c = triples("ties")
    twice = (a.double() * b.double() + c.double()).float()
    assert (fused_multiply_add(a, b, c) != twice).any()
    a, b, c = triples("cancellation")
    assert (fused_multiply_add(a, b, c) != a * b + c).float().mean() > 0.5


def test_oracle_agrees_with_the_c_library() -> None:
    # Where the mathematics are not a file of their own, Python itself brings them.
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    for kind in KINDS:
        a, b, c = triples(kind)
        expected = torch.tensor([fmaf(*abc) for abc in zip(a.tolist(), b.tolist(), c.tolist())])
        result = fused_multiply_add(a, b, c)
        same = result.view(torch.int32) == expected.view(torch.int32)
        assert (same | (result.isnan() & expected.isnan())).all()


# ---- properties ---------------------------------------------------------------------------------


def routed(num_tokens: int = 21, num_topk: int = 4, num_experts: int = 6) -> tuple[Tensor, Tensor]:
    """Slots and experts of a mapping; half of the slots are masked."""
    torch.manual_seed(1)
    chosen = torch.rand(num_tokens, 2 * num_experts).argsort(1)[:, :num_topk]
    chosen = chosen.masked_fill(chosen >= num_experts, -1)
    mapping = tile_kernels.torch.get_fused_mapping(chosen, num_experts, 0, 4)
    return mapping[3], mapping[0]


@each_backend
def test_reduce_undoes_expand(backend: str) -> None:
    """Small integers, so that every sum is exact: each token comes back once per valid slot."""
    slots, experts = routed()
    x = torch.randint(-9, 9, (21, 40)).float()
    with tile_kernels.backend(backend):
        expanded = tile_kernels.moe.expand_to_fused(x, slots, experts)
        reduced = tile_kernels.moe.reduce_fused(expanded, None, slots)
    assert_equal(reduced, x * (slots >= 0).sum(1, keepdim=True) + 0.0)
    assert not expanded[experts < 0].any()


@each_backend
def test_order_of_slots_is_the_order_of_the_sum(backend: str) -> None:
    """`1e8 - 1e8 + 1` is 1, `1 + 1e8 - 1e8` is 0."""
    x = torch.tensor([[1e8], [-1e8], [1.0]])
    slots = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32)
    with tile_kernels.backend(backend):
        assert tile_kernels.moe.reduce_fused(x, None, slots).tolist() == [[1.0], [0.0]]


@each_backend
def test_the_room_behind_column_major_scales_is_zero(backend: str) -> None:
    slots = torch.tensor([[0, 5], [3, -1]], dtype=torch.int32)
    experts = torch.zeros(6, dtype=torch.int32)
    for num_tokens in (2, 0):
        x = torch.ones(num_tokens, 64, dtype=torch.uint8), torch.ones(num_tokens, 4)
        with tile_kernels.backend(backend), tile_kernels.testing.poison.poisoned_empty(0xA5):
            _, sf = tile_kernels.moe.expand_to_fused_with_sf(
                x, 16, slots[:num_tokens], experts, use_tma_aligned_col_major_sf=True
            )
        assert sf.stride() == (1, 8)
        room = sf.as_strided((4, 2), (8, 1), 6)
        assert not room.any()
        assert sf.sum() == 4 * (slots[:num_tokens] >= 0).sum()


@each_backend
def test_negative_zero_and_saturation(backend: str) -> None:
    """Without slots the sum is `0 * sf`; e4m3 ends at 448, and NaN stays."""
    x = torch.tensor([[1e9, -1e9, math.nan, -0.0]])
    slots = torch.tensor([[-1], [0]], dtype=torch.int32)
    with tile_kernels.backend(backend):
        result = tile_kernels.moe.reduce_fused(x, None, slots, "e4m3", torch.tensor([-1.0]))
        assert result.view(torch.uint8).tolist() == [[0x80] * 4, [0xFE, 0x7E, 0x7F, 0x80]]
        # -0.0 is added to +0.0: the sum is +0.0, unlike a plain product
        assert tile_kernels.moe.reduce_fused(x, None, slots)[1].signbit().tolist()[3] is False


def test_sizes_known_at_run_time_only() -> None:
    """Tokens and positions that are chosen by masks, without a graph break."""
    slots, experts = routed()
    x = torch.randn(21, 64)

    def there_and_back(kept: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        tokens = kept.nonzero()[:, 0]
        rows, mine, positions = x[tokens], slots[tokens], experts[length]
        sf = rows[:, :4].contiguous()
        arguments = (16, mine, positions)
        columns = tile_kernels.moe.expand_to_fused_with_sf((rows, sf), *arguments, True)
        data, scales = tile_kernels.moe.expand_to_fused_with_sf((rows, sf), *arguments)
        return *columns, scales, tile_kernels.moe.reduce_fused(data, None, mine)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
        for num_tokens, num_positions in ((21, len(experts)), (7, 11), (0, 5)):
            masks = torch.arange(21) < num_tokens, torch.arange(len(experts)) < num_positions
            for result, expected in zip(compiled(*masks), there_and_back(*masks)):
                assert_equal(result, expected)


# ---- gradients ----------------------------------------------------------------------------------


def reduced_plainly(
    x: Tensor, weights: Tensor | None, slots: Tensor, x_sf: Tensor | None
) -> Tensor:
    """What `reduce_fused` means, for PyTorch's own autograd."""
    total = x.new_zeros(slots.shape[0], x.shape[1])
    for k in range(slots.shape[1]):
        (tokens,) = (slots[:, k] >= 0).nonzero(as_tuple=True)
        rows = slots[tokens, k].long()
        row = x[rows] if x_sf is None else x[rows] * x_sf[rows, None]
        row = row if weights is None else row * weights[tokens, k, None]
        total = total.index_add(0, tokens, row)
    return total


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("weighted", "scaled"), [*itertools.product([False, True], repeat=2)])
def test_gradient_of_reduce(weighted: bool, scaled: bool, compiled: bool) -> None:
    slots, experts = routed()
    num_positions = experts.shape[0]
    x, x_sf = torch.randn(num_positions, 10), torch.randn(num_positions)
    weights, upstream = torch.rand(slots.shape), torch.randn(slots.shape[0], 10)

    def reduce(x: Tensor, weights: Tensor | None, slots: Tensor, x_sf: Tensor | None) -> Tensor:
        pair = x if x_sf is None else (x, x_sf)
        return tile_kernels.moe.reduce_fused(pair, weights, slots)

    if compiled:
        torch._dynamo.reset()
        reduce = torch.compile(reduce, fullgraph=True, backend="aot_eager")
    grads = []
    for function, dtype in ((reduce, torch.float32), (reduced_plainly, torch.float64)):
        leaves = [x, *([weights] if weighted else []), *([x_sf] if scaled else [])]
        leaves = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
        arguments = [leaves[0], leaves[1] if weighted else None, slots]
        result = function(*arguments, leaves[-1] if scaled else None)
        result.backward(upstream.to(dtype))
        grads.append([leaf.grad for leaf in leaves])
    for mine, plain in zip(*grads):
        torch.testing.assert_close(mine, plain.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_expand(dtype: torch.dtype, compiled: bool) -> None:
    slots, experts = routed()
    upstream = torch.randn(experts.shape[0], 9).to(dtype)
    x = torch.randn(21, 9).to(dtype).requires_grad_()
    function = tile_kernels.moe.expand_to_fused
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    function(x, slots, experts).backward(upstream)
    assert x.grad is not None
    assert_equal(x.grad, tile_kernels.torch.reduce_fused(upstream, None, slots))
    plain = reduced_plainly(upstream.double(), None, slots, None)
    torch.testing.assert_close(x.grad.double(), plain, rtol=2e-2, atol=2e-2)


def test_gradient_of_a_lower_precision_result() -> None:
    """float32 rows, bfloat16 sum: the gradient comes in bfloat16 and leaves in float32."""
    slots, experts = routed()
    x = torch.randn(experts.shape[0], 8, requires_grad=True)
    weights = torch.rand(slots.shape, requires_grad=True)
    out = tile_kernels.moe.reduce_fused(x, weights, slots, out_dtype=torch.bfloat16)
    out.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    named = slots[slots >= 0].long()
    assert_equal(x.grad[named, 0], weights.detach()[slots >= 0])
    assert not weights.grad[slots < 0].any()


def test_gradients_that_do_not_exist() -> None:
    slots, experts = routed()
    x = torch.randn(experts.shape[0], 8, requires_grad=True)
    reduce = tile_kernels.moe.reduce_fused
    with pytest.raises(TypeError, match="reduce_fused: a float8 result has no gradient"):
        reduce(x, None, slots, "e4m3").backward(torch.ones(21, 8).to(torch.float8_e4m3fn))
    codes = x.detach().to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(TypeError, match="reduce_fused: x of float8_e4m3fn has no gradient"):
        reduce(codes, None, slots, out_dtype=torch.float32).sum().backward()
    weights = torch.rand(slots.shape, requires_grad=True)
    reduce(codes.detach(), weights, slots, out_dtype=torch.float32).sum().backward()
    expected = codes.detach().float().sum(1)[slots.long().clamp(0)] * (slots >= 0)
    torch.testing.assert_close(weights.grad, expected)
    tokens = torch.randn(21, 8).to(torch.float8_e5m2).requires_grad_()
    expanded = tile_kernels.moe.expand_to_fused(tokens, slots, experts)
    with pytest.raises(TypeError, match="expand_to_fused: x of float8_e5m2 has no gradient"):
        expanded.backward(torch.zeros_like(expanded))
    with pytest.raises(ValueError, match="reduce_fused: out cannot be given with gradients"):
        reduce(x, None, slots, out=torch.empty(21, 8))


# ---- the reference grid -------------------------------------------------------------------------

HIDDEN_SIZES = (576, 2048, 2560, 3072, 4096, 6144, 7168)
PARAMS = [
    {**params, "hidden": hidden}
    for params, hidden in zip(generate_moe_params(), itertools.cycle(HIDDEN_SIZES))
]
each_grid_point = pytest.mark.parametrize("params", PARAMS, ids=make_param_id)


def mapped(params: dict[str, int], alignment: int) -> tuple[Tensor, Tensor]:
    topk_idx = generate_topk_idx(params, device="cuda")
    mapping = tile_kernels.moe.get_fused_mapping(topk_idx, params["num_experts"], 0, alignment)
    return mapping[3], mapping[1]


@pytest.mark.gpu
@each_grid_point
def test_expand_on_the_grid(params: dict[str, int]) -> None:
    hidden = params["hidden"]
    slots, tokens = mapped(params, 16)
    x = torch.randn(slots.shape[0], hidden, device="cuda", dtype=torch.bfloat16)
    expected = tile_kernels.torch.expand_to_fused(x, slots, tokens)
    assert_equal(tile_kernels.moe.expand_to_fused(x, slots, tokens), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("packed", [False, True])
@each_grid_point
def test_expand_with_sf_on_the_grid(params: dict[str, int], packed: bool, group: int) -> None:
    hidden = params["hidden"]
    slots, tokens = mapped(params, 16)
    num_scales = -(-hidden // group)
    sf = torch.rand(slots.shape[0], -(-num_scales // 4) if packed else num_scales, device="cuda")
    sf = sf.view(torch.int32) if packed else sf
    x = torch.randn(slots.shape[0], hidden, device="cuda").to(torch.float8_e4m3fn), sf
    arguments = (x, group, slots, tokens, packed)
    expected = tile_kernels.torch.expand_to_fused_with_sf(*arguments)
    for mine, other in zip(tile_kernels.moe.expand_to_fused_with_sf(*arguments), expected):
        assert_equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_format", ["", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_grid_point
def test_reduce_on_the_grid(params: dict[str, int], dtype: torch.dtype, fp8_format: str) -> None:
    hidden = params["hidden"]
    slots, _ = mapped(params, 1)
    x: Any = torch.randn(slots.numel(), hidden, device="cuda").to(dtype)
    sf = torch.randn(1, device="cuda") if fp8_format else None
    weights = torch.rand(slots.shape, device="cuda")
    x_sf = torch.randn(slots.numel(), device="cuda")
    for arguments in ((x, weights), ((x, x_sf), weights), (x, None), ((x, x_sf), None)):
        more = (slots, fp8_format, sf)
        expected = tile_kernels.torch.reduce_fused(*arguments, *more)
        assert_equal(tile_kernels.moe.reduce_fused(*arguments, *more), expected)
