"""The causal convolution behind the gate, each channel by itself, and its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.convolution import reference
from tile_kernels.engram.convolution.plan import (
    MAX_TAPS,
    VECTOR,
    num_parts,
    num_sums,
    plan,
    plan_bwd,
    plan_norms,
    plan_rows,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
MAX_STREAMS = 8
MAX_DILATION = 65535  # of a grid in its second dimension

_MODULE = "tile_kernels.engram.convolution.kernel"
_NORMS = Kernel(_MODULE, "row_norms", plan_norms)
_CONVOLVE = Kernel(_MODULE, "convolve", plan)
_GRADIENTS = Kernel(_MODULE, "convolve_gradients", plan_bwd)
_ROWS = Kernel(_MODULE, "row_gradients", plan_rows)

_DYNAMIC = {"grad_out": 2, "y": 2, "rstd": 1, "starts": 0, "residual": 2}
_DIMS = ("num_tokens", "hc", "hidden")


def _check(y: Tensor, norm_weight: Tensor, taps: Tensor, starts: Tensor, dilation: int) -> None:
    checks.tensor("y", y, _DIMS, torch.bfloat16, contiguous=True)
    num_tokens, streams, hidden = y.shape
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"y must have 1..{MAX_STREAMS} streams, got {streams}")
    if hidden < VECTOR or hidden % VECTOR:
        raise ValueError(f"y must have a multiple of {VECTOR} columns, got {hidden}")
    checks.tensor(
        "norm_weight", norm_weight, _DIMS[1:], WEIGHT_DTYPES, shape=(streams, hidden),
        contiguous=True,
    )  # fmt: skip
    checks.tensor(
        "taps", taps, ("kernel_size", *_DIMS[1:]), norm_weight.dtype, shape=(None, streams, hidden),
        contiguous=True,
    )  # fmt: skip
    if not 1 <= taps.shape[0] <= MAX_TAPS:
        raise ValueError(f"taps must be 1..{MAX_TAPS} of each channel, got {taps.shape[0]}")
    checks.tensor("starts", starts, _DIMS[:1], torch.int32, shape=(num_tokens,), contiguous=True)
    checks.integer("dilation", dilation, 1, MAX_DILATION)


def _accessible(x: Any) -> Any:
    """`x`, or a copy where it does not start at a multiple of 16 bytes."""
    return x if x is None or alignment(x) == 16 else x.clone()


# ---- engram_convolution_fwd ---------------------------------------------------------------------


class Arguments(NamedTuple):
    y: Tensor
    norm_weight: Tensor
    taps: Tensor
    starts: Tensor
    dilation: int
    eps: float
    residual: Tensor | None = None

    def check(self) -> None:
        _check(*self[:5])
        checks.epsilon("eps", self.eps)
        if self.residual is not None:
            checks.tensor(
                "residual", self.residual, _DIMS, torch.bfloat16, shape=tuple(self.y.shape),
                contiguous=True,
            )  # fmt: skip

    def outputs(self) -> tuple[Out, Out]:
        shape = self.y.shape
        return Out("out", shape, torch.bfloat16), Out("rstd", shape[:2], torch.float32)

    def launches(self, out: Spec, rstd: Spec) -> tuple[Launch, ...]:
        if out.numel() == 0:
            return ()
        _, streams, hidden = out.shape
        y, weight, taps = map(_accessible, self[:3])
        problem = (
            streams, hidden, self.taps.shape[0], int(self.dilation), dtype_name(self.taps),
            self.residual is not None,
        )  # fmt: skip
        given = (y, rstd, weight, taps, self.starts, _accessible(self.residual), out)
        return (
            Launch(_NORMS, (hidden,), (y.view(-1, hidden), rstd.view(-1), float(self.eps))),
            Launch(_CONVOLVE, problem, given),
        )


def cost(y: Tensor, taps: Tensor, residual: Tensor | None = None, **_: Any) -> Cost:
    rows = 2 if residual is None else 3
    size = taps.element_size() * (1 + 1 / taps.shape[0])
    return Cost(2 * rows * y.numel() + int(size * taps.numel()) + 4 * y.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.dilation, ctx.summed = inputs[4], inputs[6] is not None
    ctx.save_for_backward(inputs[0], output[1], *inputs[1:4])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Any, ...]:
    y, rstd, norm_weight, taps, starts = ctx.saved_tensors
    grad_y, partial = engram_convolution_bwd(
        grad_out.contiguous(), y, rstd, norm_weight, taps, starts, ctx.dilation, ctx.summed
    )
    total = partial.sum(0).to(taps.dtype)
    return grad_y, total[-1], total[:-1], None, None, None, grad_out if ctx.summed else None


ENGRAM_CONVOLUTION_FWD = Operator(
    "engram.engram_convolution_fwd",
    Arguments,
    reference=reference.engram_convolution_fwd,
    cost=cost,
    dynamic=_DYNAMIC,
    backward=_backward,
    setup_context=_save,
)


@ENGRAM_CONVOLUTION_FWD.public()
def engram_convolution_fwd(
    y: Tensor,
    norm_weight: Tensor,
    taps: Tensor,
    starts: Tensor,
    dilation: int,
    eps: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes a causal convolution of the norm of each row, channel by channel, with a SiLU.

    In float32, for each token `t` and stream,

        normed = y * norm_weight * rstd            rstd = 1 / sqrt(mean(y * y) + eps)
        total  = sum_j taps[j] * normed[t - j * dilation]
        out    = silu(total)

    where the sum leaves out tokens before `starts[t]`. With `residual` the result is
    `residual + (y + out)`, each sum rounded to bfloat16. It is differentiable with respect to `y`,
    the weights and `residual`. Tensors that do not start at a multiple of 16 bytes are copied
    first.

    Args:
        y: `[num_tokens, hc, hidden]`, bfloat16, contiguous; `hc` is in `1..8`, `hidden` a multiple
            of 8.
        norm_weight: `[hc, hidden]`, bfloat16 or float32, contiguous.
        taps: `[kernel_size, hc, hidden]`, dtype of `norm_weight`, contiguous; `kernel_size` is in
            `1..8`.
        starts: `[num_tokens]`, int32: the first token of the text that a token belongs to.
        dilation: Tokens between two taps, 1 or more.
        eps: Keeps the norm from dividing by 0; finite and not negative.
        residual: `[num_tokens, hc, hidden]`, bfloat16, contiguous, or None.

    Returns:
        `(out, rstd)`: `[num_tokens, hc, hidden]`, bfloat16, and `[num_tokens, hc]`, float32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> y, taps = torch.ones(3, 1, 8).bfloat16(), torch.ones(2, 1, 8)
        >>> starts = torch.tensor([0, 0, 2], dtype=torch.int32)
        >>> out, rstd = engram_convolution_fwd(y, taps[0], taps, starts, 1, 0.0)
        >>> out[:, 0, 0].tolist(), rstd[0, 0].item()
        ([0.73046875, 1.7578125, 0.73046875], 1.0)
    """
    return ENGRAM_CONVOLUTION_FWD(y, norm_weight, taps, starts, dilation, eps, residual)


# ---- engram_convolution_bwd ---------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    grad_out: Tensor
    y: Tensor
    rstd: Tensor
    norm_weight: Tensor
    taps: Tensor
    starts: Tensor
    dilation: int
    add_grad: bool = False

    def check(self) -> None:
        _check(self.y, *self[3:7])
        shape = tuple(self.y.shape)
        checks.tensor(
            "grad_out", self.grad_out, _DIMS, torch.bfloat16, shape=shape, contiguous=True
        )
        checks.tensor("rstd", self.rstd, _DIMS[:2], torch.float32, shape=shape[:2], contiguous=True)
        checks.boolean("add_grad", self.add_grad)

    def outputs(self) -> tuple[Out, Out]:
        num_tokens, streams, hidden = self.y.shape
        parts = num_parts(num_tokens, self.dilation)
        shape = (parts, self.taps.shape[0] + 1, streams, hidden)
        return (
            Out("grad_y", self.y.shape, torch.bfloat16),
            Out("grad_partial", shape, torch.float32),
        )

    def scratch(self) -> tuple[Out, Out]:
        num_tokens, streams, hidden = self.y.shape
        return (
            Out("normed_grad", self.y.shape, torch.float32),
            Out("sums", (num_tokens, streams, num_sums(hidden)), torch.float32),
        )

    def launches(
        self, grad_y: Spec, partial: Spec, normed_grad: Spec, sums: Spec
    ) -> tuple[Launch, ...]:
        if grad_y.numel() == 0:
            return ()
        _, streams, hidden = grad_y.shape
        grad, y, weight, taps = map(_accessible, (self.grad_out, self.y, *self[3:5]))
        dtype = dtype_name(self.taps)
        return (
            Launch(
                _GRADIENTS,
                (streams, hidden, self.taps.shape[0], int(self.dilation), dtype),
                (grad, y, self.rstd, weight, taps, self.starts, normed_grad, sums, partial),
            ),
            Launch(
                _ROWS,
                (streams, hidden, dtype, self.add_grad),
                (grad if self.add_grad else None, y, self.rstd, normed_grad, sums, grad_y),
            ),
        )


def cost_bwd(y: Tensor, taps: Tensor, **_: Any) -> Cost:
    return Cost(6 * y.numel() + 3 * taps.element_size() * taps.numel() + 8 * y.shape[0])


ENGRAM_CONVOLUTION_BWD = Operator(
    "engram.engram_convolution_bwd",
    BackwardArguments,
    reference=reference.engram_convolution_bwd,
    cost=cost_bwd,
    dynamic=_DYNAMIC,
)


@ENGRAM_CONVOLUTION_BWD.public()
def engram_convolution_bwd(
    grad_out: Tensor,
    y: Tensor,
    rstd: Tensor,
    norm_weight: Tensor,
    taps: Tensor,
    starts: Tensor,
    dilation: int,
    add_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `engram_convolution_fwd`; those of the weights as partial sums.

    Args:
        grad_out: `[num_tokens, hc, hidden]`, bfloat16, contiguous.
        y: As in `engram_convolution_fwd`.
        rstd: `[num_tokens, hc]`, float32, of `engram_convolution_fwd`.
        norm_weight: As in `engram_convolution_fwd`.
        taps: As in `engram_convolution_fwd`.
        starts: As in `engram_convolution_fwd`.
        dilation: As in `engram_convolution_fwd`.
        add_grad: Whether `grad_out` is added to the gradient of `y`: with a residual, `y` itself is
            part of the result.

    Returns:
        `(grad_y, grad_partial)`: `[num_tokens, hc, hidden]`, bfloat16, and
        `[parts, kernel_size + 1, hc, hidden]`, float32; summed over parts, the gradients of the
        taps and, last, of `norm_weight`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> y, taps = torch.ones(3, 1, 8).bfloat16(), torch.ones(2, 1, 8)
        >>> starts, rstd = torch.zeros(3, dtype=torch.int32), torch.ones(3, 1)
        >>> grad, partial = engram_convolution_bwd(y, y, rstd, taps[0], taps, starts, 1)
        >>> grad.shape, partial.shape
        (torch.Size([3, 1, 8]), torch.Size([1, 3, 1, 8]))
    """
    return ENGRAM_CONVOLUTION_BWD(grad_out, y, rstd, norm_weight, taps, starts, dilation, add_grad)
