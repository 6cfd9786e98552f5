"""RMS norm for training and inference: functions with gradients, and a module."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from tile_kernels import quant
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks

__all__ = ["RMSNorm", "rms_norm", "rms_norm_cast"]


def _rows(name: str, owner: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError(f"{owner}: {name} must have at least one dimension, got none")
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = ..., residual: None = ...
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm, after adding a residual; differentiable in all three tensors.

    Args:
        x: `[..., hidden]`, bfloat16 or float32; `hidden` is at most 16384.
        weight: `[hidden]`, bfloat16 or float32; None for ones.
        eps: Keeps the norm from dividing by 0.
        residual: Like `x`; or None.

    Returns:
        The norm, like `x`. With a residual `(norm, x + residual)`: the second is the residual of
        the next layer. Only that sum and a float32 per row are kept for the backward pass.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.

    Example:
        >>> x, residual = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
        >>> out, residual = rms_norm(x, torch.ones(8), 1e-6, residual)
        >>> out.sum().backward()
        >>> out.shape, x.grad.shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 8]))
    """
    rows = _rows("x", "rms_norm", x)
    added = None if residual is None else _rows("residual", "rms_norm", residual)
    out, _, total = quant.norm_forward(rows, weight, eps, added)
    if residual is None:
        return out.view(x.shape)
    return out.view(x.shape), total.view(x.shape)


def rms_norm_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    fmt: str = "e4m3",
    num_per_channels: int = 128,
    **flags: Any,
) -> tuple[Tensor, QuantTensor] | tuple[Tensor, QuantTensor, Tensor]:
    """`rms_norm` whose result comes in bfloat16 and quantized, from one kernel.

    The bfloat16 result carries the gradient: the rounding of the cast counts as the identity. Use
    the quantized one for the matrix product behind it.

    Args:
        x: As in `rms_norm`.
        weight: As in `rms_norm`.
        eps: As in `rms_norm`.
        residual: As in `rms_norm`.
        fmt: `"e4m3"` or `"e2m1"`.
        num_per_channels: Channels of a scale: 16, 32, 64 or 128.
        **flags: `round_sf`, `use_tma_aligned_col_major_sf`, `use_packed_ue8m0` of
            `quant.norm_forward_and_per_token_cast`.

    Returns:
        `(norm, (data, scales))`, with a residual `(norm, (data, scales), x + residual)`. Data and
        scales have two dimensions: one row for each row of `x`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or a value is not one of these.

    Example:
        >>> x = torch.randn(4, 256).bfloat16().requires_grad_()
        >>> out, (data, scales) = rms_norm_cast(x, None)
        >>> out.float().sum().backward()
        >>> data.dtype, tuple(scales.shape), tuple(x.grad.shape)
        (torch.float8_e4m3fn, (4, 2), (4, 256))
    """
    rows = _rows("x", "rms_norm_cast", x)
    added = None if residual is None else _rows("residual", "rms_norm_cast", residual)
    pair, out, _, total = quant.norm_forward_and_per_token_cast(
        rows, weight, eps, fmt, num_per_channels, added, with_out_bf16=True, **flags
    )
    result = out.view(x.shape)  # type: ignore[union-attr]
    return (result, pair) if residual is None else (result, pair, total.view(x.shape))


class RMSNorm(torch.nn.Module):
    """A module of `rms_norm`: `norm(x)`, or `norm(x, residual)`, which returns a pair.

    Args:
        hidden: Channels of a row, at most 16384.
        eps: Keeps the norm from dividing by 0.
        device: Where the weight is.
        dtype: Of the weight: bfloat16 or float32.

    Example:
        >>> norm = RMSNorm(8)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with checks.named("RMSNorm"):
            checks.integer("hidden", hidden, 1, 16384)
            checks.epsilon("eps", eps)
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype, (torch.float32, torch.bfloat16))
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Applies the norm.

        Args:
            x: `[..., hidden]`.
            residual: A tensor of the shape of `x` that is added first, or None.

        Returns:
            The norm of `x`, or with a residual the norm of `x + residual` and that sum.
        """
        return rms_norm(x, self.weight, self.eps, residual)

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        torch.nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Shown by `print`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
