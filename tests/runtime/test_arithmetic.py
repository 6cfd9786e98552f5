"""Arithmetic that references share: `fused_multiply_add` rounds once."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import fused_multiply_add
from tile_kernels.testing.numeric import assert_equal

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
def test_reference_rounds_once(kind: str, device: str) -> None:
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


def test_reference_agrees_with_the_c_library() -> None:
    # Where the mathematics are not a file of their own, Python itself brings them.
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    for kind in KINDS:
        a, b, c = triples(kind)
        expected = torch.tensor([fmaf(*abc) for abc in zip(a.tolist(), b.tolist(), c.tolist())])
        result = fused_multiply_add(a, b, c)
        same = result.view(torch.int32) == expected.view(torch.int32)
        assert (same | (result.isnan() & expected.isnan())).all()
