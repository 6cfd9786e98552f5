"""`mhc_norm_fn_fwd` and `mhc_norm_fn_bwd`: the projection of a token's streams to its mixes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.gradients import check_like
from tile_kernels.mhc.norm_fn import reference
from tile_kernels.mhc.norm_fn.plan import (
    MAX_MIXES,
    VECTOR,
    Division,
    count_shares,
    divide,
    gradient_columns,
    padded,
    plan_mixes,
    plan_product_gradients,
    plan_products,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MODULE = "tile_kernels.mhc.norm_fn.kernel"
_PRODUCTS = Kernel(_MODULE, "products", plan_products)
_MIXES = Kernel(_MODULE, "mixes_of_products", plan_mixes)
_MIX_GRADIENTS = Kernel(_MODULE, "mix_gradients", plan_mixes)
_GRADIENTS = Kernel(_MODULE, "product_gradients", plan_product_gradients)


# ---- the products, which `mhc_pre_fwd` needs too -------------------------------------------------


def check_inputs(residual: Tensor, fn: Tensor, eps: float, name: str = "eps") -> shapes.Leading:
    """Checks streams, weights and `eps`, called `name`; returns what other arguments share."""
    tokens, streams, hidden = shapes.streams("residual", residual)
    if hidden % VECTOR:
        raise ValueError(f"residual must have a multiple of {VECTOR} columns, got {hidden}")
    checks.tensor(
        "fn", fn, ("J", "m * h"), torch.float32, shape=(None, streams * hidden), contiguous=True
    )
    if not 1 <= fn.shape[0] <= MAX_MIXES:
        raise ValueError(f"fn must have 1..{MAX_MIXES} rows, got {fn.shape[0]}")
    checks.epsilon(name, eps)
    return tokens


def _division(a: Any) -> Division:
    return divide(shapes.count_tokens(a), a.fn.shape[1], a.residual.device)


NUM_TOKENS = Size(shapes.count_tokens)
RUN, FOLD = Size(lambda a: _division(a).run), Size(lambda a: _division(a).fold)


def product_scratch(a: Any) -> tuple[Out, ...]:
    """`mul` and `s` of each part of the columns, for kernels that add them up."""
    tokens, parts = shapes.count_tokens(a), _division(a).parts
    return (
        Out("mul", (parts, tokens, padded(a.fn.shape[0])), torch.float32),
        Out("squares", (parts, tokens), torch.float32),
    )


def launch_products(a: Any, mul: Spec, squares: Spec) -> Launch:
    """The launch that fills the scratch of `product_scratch`."""
    mixes, size = a.fn.shape
    problem = (mixes, padded(mixes), size, NUM_TOKENS)
    rows = shapes.aligned(shapes.rows(a.residual, size))
    return Launch(_PRODUCTS, problem, (rows, shapes.aligned(a.fn), mul, squares, RUN, FOLD))


# ---- forward ------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    residual: Tensor
    fn: Tensor
    eps: float

    def check(self) -> None:
        check_inputs(self.residual, self.fn, self.eps)

    def outputs(self) -> tuple[Out, Out, Out]:
        leading = self.residual.shape[:-2]
        return (
            Out("mixes", (*leading, self.fn.shape[0]), torch.float32),
            Out("mul", (*leading, self.fn.shape[0]), torch.float32),
            Out("s", leading, torch.float32),
        )

    def launches(
        self, mixes: Spec, mul: Spec, s: Spec, split_mul: Spec, split_squares: Spec
    ) -> list[Launch]:
        if self.residual.numel() == 0:
            return []
        count, size = self.fn.shape
        arguments = (
            split_mul, split_squares, shapes.rows(mixes, count), shapes.rows(mul, count),
            shapes.rows(s), FOLD, float(self.eps),
        )  # fmt: skip
        return [
            launch_products(self, split_mul, split_squares),
            Launch(_MIXES, (count, padded(count), size), arguments),
        ]

    def scratch(self) -> tuple[Out, ...]:
        return product_scratch(self)


def cost(residual: Tensor, fn: Tensor, eps: float) -> Cost:  # noqa: ARG001
    rows, mixes = residual.numel() // fn.shape[1], fn.shape[0]
    return Cost(
        2 * residual.numel() + 4 * fn.numel() + 8 * rows * mixes + 4 * rows,
        2 * residual.numel() * (mixes + 1),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.eps = inputs[2]
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_mixes: Tensor, *_: Any) -> tuple[Any, ...]:
    residual, fn, mul, s = ctx.saved_tensors
    return *mhc_norm_fn_bwd(grad_mixes, residual, fn, mul, s, ctx.eps), None


MHC_NORM_FN_FWD = Operator(
    "mhc.mhc_norm_fn_fwd",
    Arguments,
    reference=reference.mhc_norm_fn_fwd,
    cost=cost,
    dynamic={"residual": 2},
    backward=_backward,
    setup_context=_save,
)


@MHC_NORM_FN_FWD.public()
def mhc_norm_fn_fwd(residual: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the mixes of each token: projects its streams and divides by their root mean square.

    With `X` the streams of a token as one row of `K = m * h` numbers and `f` the weights rounded to
    TF32 (to nearest, ties away from zero),

        mul = X . f^T        s = sum of X^2        mixes = mul / sqrt(s / K + eps)

    summed in float32 in an order that depends on `m * h` and the device alone: a token has the same
    bits in any batch. The gradient needs `mul` and `s`. A token with NaN or an infinity has mixes
    that are NaN. Differentiable with respect to `residual` and `fn`, through `mixes`.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous; `m` from 1 to 8, `h` a multiple of 8.
        fn: `[J, m * h]`, float32, contiguous; `J` from 1 to 128.
        eps: Added to the mean square, at least 0.

    Returns:
        `(mixes, mul, s)`: `[..., J]`, `[..., J]` and `[...]`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or `eps` is out of range.

    Example:
        >>> residual = torch.ones(1, 2, 8).bfloat16()
        >>> mixes, mul, s = mhc_norm_fn_fwd(residual, torch.full((3, 16), 0.25), 0.0)
        >>> mixes.tolist(), s.tolist()
        ([[4.0, 4.0, 4.0]], [16.0])
    """
    return MHC_NORM_FN_FWD(residual, fn, eps)


# ---- backward -----------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    """With `grad_residual` the gradient of the streams is added to it and is no result."""

    grad_mixes: Tensor
    residual: Tensor
    fn: Tensor
    mul: Tensor
    s: Tensor
    eps: float
    grad_residual: Tensor | None

    def check(self) -> None:
        tokens = check_inputs(self.residual, self.fn, self.eps)
        fp32, mixes = torch.float32, (self.fn.shape[0],)
        shapes.tensor(
            "grad_mixes", self.grad_mixes, ("J",), fp32, like=tokens, sizes=mixes, contiguous=False
        )
        shapes.tensor("mul", self.mul, ("J",), fp32, like=tokens, sizes=mixes)
        shapes.tensor("s", self.s, (), fp32, like=tokens, sizes=())
        if self.grad_residual is not None:
            residual = ("residual", self.residual)
            check_like("grad_residual", self.grad_residual, residual, contiguous=True)

    def outputs(self) -> tuple[Out, Out]:
        return Out("grad_residual", self.residual.shape, torch.bfloat16), outputs_in_place(self)

    def launches(self, *outs: Spec) -> list[Launch | Host]:
        if self.grad_residual is None:
            return _launches_backward(self, False, *outs)
        return _launches_backward(self, True, self.grad_residual, *outs)

    def scratch(self) -> tuple[Out, ...]:
        """The gradient of the products in two parts, that of the squares, and partial sums."""
        tokens, shares = shapes.count_tokens(self), _shares(self)[0]
        return (
            Out("parts", (2, tokens, padded(self.fn.shape[0])), torch.bfloat16),
            Out("square_grads", (tokens,), torch.float32),
            *([Out("partials", (shares, *self.fn.shape), torch.float32)] if shares > 1 else []),
        )


def outputs_in_place(a: BackwardArguments) -> Out:
    return Out("grad_fn", a.fn.shape, torch.float32)


def _shares(a: Any) -> tuple[int, int]:
    """Blocks that share the rows, each with partial sums for `grad_fn`, and tiles of each."""
    columns = gradient_columns(padded(a.fn.shape[0]))
    return count_shares(shapes.count_tokens(a), a.fn.shape[1], columns, a.residual.device)


def _sum_shares(partials: Tensor, out: Tensor) -> None:
    torch.sum(partials, 0, out=out)


def _launches_backward(
    a: Any, accumulate: bool, grad_residual: Any, grad_fn: Spec, parts: Spec, square_grads: Spec,
    *partials: Spec,
) -> list[Launch | Host]:  # fmt: skip
    if a.residual.numel() == 0:
        return [Host(Tensor.zero_, (grad_fn,))]
    mixes, size = a.fn.shape
    width, (_, tiles) = padded(mixes), _shares(a)
    rows, fn = shapes.aligned(shapes.rows(a.residual, size)), shapes.aligned(a.fn)
    grads = shapes.rows(a.grad_mixes, mixes), shapes.rows(a.mul, mixes), shapes.rows(a.s)
    grad_rows = shapes.rows(grad_residual, size)
    grad_buffer = shapes.aligned(grad_rows)
    sums = partials[0] if partials else grad_fn.view(1, mixes, size)
    steps: list[Launch | Host] = [
        Launch(
            _MIX_GRADIENTS, (mixes, width, size), (*grads, parts, square_grads, float(a.eps))
        ),
        Launch(
            _GRADIENTS, (mixes, width, size, accumulate),
            (rows, fn, parts, square_grads, grad_buffer, sums, tiles),
        ),
    ]  # fmt: skip
    if grad_buffer is not grad_rows:
        steps.append(Host(Tensor.copy_, (grad_rows, grad_buffer)))
    if partials:
        steps.append(Host(_sum_shares, (sums, grad_fn)))
    return steps


def cost_backward(
    residual: Tensor, fn: Tensor, mul: Tensor, grad_residual: Tensor | None = None, **_: Any
) -> Cost:
    return Cost(
        (4 if grad_residual is None else 6) * residual.numel() + 8 * fn.numel() + 8 * mul.numel(),
        4 * residual.numel() * fn.shape[0],
    )


def _reference_in_place(*arguments: Any) -> Tensor:
    return reference.mhc_norm_fn_bwd(*arguments)[1]


# The number of tokens is not dynamic: whether `grad_fn` is summed from shares depends on it.
MHC_NORM_FN_BWD = Operator(
    "mhc.mhc_norm_fn_bwd",
    BackwardArguments,
    reference=reference.mhc_norm_fn_bwd,
    cost=cost_backward,
)

_IN_PLACE = Operator(
    "mhc._mhc_norm_fn_bwd_in_place",
    BackwardArguments,
    outputs=outputs_in_place,
    reference=_reference_in_place,
    mutates=("grad_residual",),
    serves="mhc_norm_fn_bwd",
)


@MHC_NORM_FN_BWD.public(reference=reference.mhc_norm_fn_bwd, mutates=("grad_residual",))
def mhc_norm_fn_bwd(
    grad_mixes: Tensor,
    residual: Tensor,
    fn: Tensor,
    mul: Tensor,
    s: Tensor,
    eps: float,
    grad_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `mhc_norm_fn_fwd`; that of the streams may be added to another one.

    With `r = 1 / sqrt(s / K + eps)` and `gm = grad_mixes * r`, rounded to TF32,

        grad_residual = gm . f - X * (sum of grad_mixes * mul) * r / (s + eps * K)
        grad_fn       = gm^T . X

    in float32; a given `grad_residual` is read, added to and rounded once more. Deterministic.

    Args:
        grad_mixes: `[..., J]`, float32, any strides.
        residual: As for `mhc_norm_fn_fwd`.
        fn: As for `mhc_norm_fn_fwd`.
        mul: `[..., J]`, float32, contiguous: a result of `mhc_norm_fn_fwd`.
        s: `[...]`, float32, contiguous: a result of `mhc_norm_fn_fwd`.
        eps: As for `mhc_norm_fn_fwd`.
        grad_residual: `[..., m, h]`, bfloat16, contiguous, to be added to in place; or None. It
            must not share memory with another argument.

    Returns:
        `(grad_residual, grad_fn)`: `[..., m, h]`, bfloat16, new or the one given, and
        `[J, m * h]`, float32; both contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or `eps` is out of range.

    Example:
        >>> residual, fn = torch.ones(1, 2, 8).bfloat16(), torch.full((1, 16), 0.25)
        >>> mixes, mul, s = mhc_norm_fn_fwd(residual, fn, 0.0)
        >>> grad_residual, grad_fn = mhc_norm_fn_bwd(torch.ones(1, 1), residual, fn, mul, s, 0.0)
        >>> grad_residual.abs().max().item(), grad_fn[0, 0].item()
        (0.0, 1.0)
    """
    if grad_residual is None:
        return MHC_NORM_FN_BWD(grad_mixes, residual, fn, mul, s, eps, None)
    return grad_residual, _IN_PLACE(grad_mixes, residual, fn, mul, s, eps, grad_residual)
