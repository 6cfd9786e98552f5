"""What the argument sets of the mHC operators share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.runtime.cases import (
    Cases,
    Sample,
    assert_equal_results,
    close_results,
    misaligned,
)

BF16, FP32 = torch.bfloat16, torch.float32
_NAN, _INF = float("nan"), float("inf")
# Operators take any number of leading dimensions.
LEADING = (2, 2, 3, 2)
# Tokens, streams, columns: every number of streams, columns that fill accesses and that do not.
SHAPES = [(3, 1, 8), (5, 2, 24), (2, 3, 40), (3, 5, 7), (4, 6, 12), (2, 7, 1), (3, 8, 264)]
# Sums over columns are taken in float64 by the reference, where nothing overflows.
SPECIAL: dict[str, Any] = {"special": True, "largest": 1e4}

Edit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StreamCases(Cases):
    """For operators on tokens in any number of dimensions, some of which are always 1.

    The first sample is the ordinary one.
    """

    any_rank: bool = True

    def ordinary(self) -> Sample:
        """The first small sample."""
        return self.small[0]


def same(x: torch.Tensor) -> torch.Tensor:
    """No edit."""
    return x


def numbers(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    special: bool = False,
    largest: float = 3e38,
    shift: bool = False,
) -> torch.Tensor:
    """Normal numbers; special ones among them (NaN, infinities, zeros, large and tiny)."""
    x = torch.randn(shape, device=device)
    if special:
        values = torch.tensor([_NAN, _INF, -_INF, 0.0, -0.0, largest, 1e-40], device=device)
        picks = torch.randint(len(values), shape, device=device)
        x = torch.where(torch.rand(shape, device=device) < 0.1, values[picks], x)
    x = x.to(dtype)
    return misaligned(x) if shift else x


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second element of a storage."""
    return torch.stack((x, x), -1)[..., 0]


def constant(x: torch.Tensor) -> torch.Tensor:
    """One number, in the shape of `x`, with strides 0."""
    return x.new_full((), 0.75).expand(x.shape)


def streams_exact(rtol: float, atol: float) -> Callable[[Any, Any], None]:
    """A comparison for `Cases`: bfloat16 to the bit, sums in float32 to a tolerance."""
    close = close_results(rtol, atol)

    def compare(result: Any, expected: Any) -> None:
        if isinstance(expected, tuple) and isinstance(result, tuple):
            assert_equal_results(len(result), len(expected))
            for one, other in zip(result, expected):
                compare(one, other)
        elif isinstance(expected, torch.Tensor) and expected.dtype == FP32:
            close(result, expected)
        else:
            assert_equal_results(result, expected)

    return compare
