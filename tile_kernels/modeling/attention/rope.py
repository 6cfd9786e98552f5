"""Rotary positions: angles by position, and the rotation of the last channels of a row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tile_kernels import transform
from tile_kernels.runtime import checks

# Angles of some positions: cosines, then sines, float32 `[num_positions, channels]`.
Angles = Tensor


@dataclasses.dataclass(frozen=True)
class Rope:
    """How fast each pair of channels rotates: a base, and YaRN's change of the frequencies.

    Pair `i` of `r` channels rotates by `base ** (-2 i / r)` for each token. YaRN divides slow
    frequencies by `factor` and keeps fast ones: those that make at least `fast` turns within
    `original_length` tokens; between `fast` and `slow` turns it interpolates. There is no factor on
    amplitudes. A `factor` of 1 is plain RoPE.

    The defaults are those of V4's layers with compression; `Rope.plain()` is that of the others.

    Args:
        base: The base of the frequencies, above 1.
        factor: How many times longer the context is than `original_length`, at least 1.
        original_length: Tokens of the context before it was extended.
        fast: Turns above which a frequency is kept.
        slow: Turns below which it is divided by `factor`.

    Example:
        >>> Rope.plain().frequencies(4).tolist()
        [1.0, 0.009999999776482582]
    """

    base: float = 160000.0
    factor: float = 16.0
    original_length: int = 65536
    fast: float = 32.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("base", 1.0), ("fast", 0.0), ("slow", 0.0)):
            value = checks.finite(f"rope.{name}", getattr(self, name))
            if value <= least:
                raise ValueError(f"rope.{name} must be above {least}, got {value}")
        if checks.finite("rope.factor", self.factor) < 1.0:
            raise ValueError(f"rope.factor must be at least 1.0, got {self.factor}")
        checks.integer("rope.original_length", self.original_length, 1)

    @classmethod
    def plain(cls, base: float = 10000.0) -> Rope:
        """Returns RoPE without YaRN.

        Args:
            base: The base of the frequencies.
        """
        return cls(base=base, factor=1.0)

    def frequencies(self, channels: int, device: torch.device | str | None = None) -> Tensor:
        """Returns the radians per token of each pair of channels.

        Args:
            channels: The number of rotated channels.
            device: The device of the result.

        Returns:
            `[channels / 2]`, float32.
        """
        pairs = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
        frequencies = 1.0 / self.base**pairs
        if self.factor == 1.0:
            return frequencies
        low = max(math.floor(self._pair_with(self.fast, channels)), 0)
        high = min(math.ceil(self._pair_with(self.slow, channels)), channels - 1)
        index = torch.arange(channels // 2, dtype=torch.float32, device=device)
        # Two bounds that are equal would divide by zero; a narrow ramp is a step.
        divided = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies / self.factor * divided + frequencies * (1 - divided)

    def _pair_with(self, turns: float, channels: int) -> float:
        """The pair, between integers, that makes so many turns within the original length."""
        length = self.original_length / (2 * math.pi * turns)
        return channels * math.log(length) / (2 * math.log(self.base))


def angles_at(positions: Tensor, frequencies: Tensor) -> Angles:
    """The angles of positions `[n]` for `frequencies [r / 2]`."""
    angles = positions.float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotate_tail(x: Tensor, angles: Angles, *, inverse: bool = False) -> Tensor:
    """`x` with its last channels rotated, adjacent pairs in float32, rounded to the dtype of `x`.

    Without gradients `x` itself is written and returned, which leaves its other channels alone.

    Args:
        x: `[n, channels]` or `[n, heads, channels]`, bfloat16 or float32.
        angles: Those of the `n` rows; their width is the number of rotated channels.
        inverse: Rotates by the negative angle.
    """
    if torch.is_grad_enabled():
        return _RotatedTail.apply(x, angles, inverse)
    return _rotate(x, angles, inverse)


def _rotate(x: Tensor, angles: Angles, inverse: bool) -> Tensor:
    """Rotates the last channels of `x` in place."""
    heads = x if x.dim() == 3 else x[:, None]
    tail = heads[..., x.shape[-1] - angles.shape[-1] :]
    transform.apply_rotary(tail, angles, interleaved=True, conjugate=inverse)
    return x


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class _RotatedTail(torch.autograd.Function):
    """A copy whose last channels are rotated; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Angles, inverse: bool) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.inverse = inverse
        return _rotate(_copy(x), angles, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (angles,) = ctx.saved_tensors
        return _rotate(_copy(grad), angles, not ctx.inverse), None, None
