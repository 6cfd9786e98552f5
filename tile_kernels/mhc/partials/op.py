"""What follows a projection whose sums come in parts, as a matrix product elsewhere leaves them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.norm_fn.op import NUM_TOKENS
from tile_kernels.mhc.partials import reference
from tile_kernels.mhc.partials.plan import plan
from tile_kernels.mhc.pre.op import check_mixes, read_arguments
from tile_kernels.mhc.pre.plan import plan_read_splits
from tile_kernels.mhc.sinkhorn.plan import is_near
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MODULE = "tile_kernels.mhc.partials.kernel"
_REDUCE = Kernel(_MODULE, "reduce_partials", plan)
_REDUCE_BACKWARD = Kernel(_MODULE, "reduce_partials_backward", plan)
_READ = Kernel("tile_kernels.mhc.pre.kernel", "read_from_products", plan_read_splits)


# ---- sums of parts ------------------------------------------------------------------------------


class Arguments(NamedTuple):
    mul: Tensor
    sqrsum: Tensor
    rms_group_size: int
    eps: float

    def check(self) -> None:
        dims = ("num_splits", "num_tokens", "groups", "mixes")
        checks.tensor("mul", self.mul, dims, torch.float32, contiguous=True)
        if 0 in (self.mul.shape[0], *self.mul.shape[2:]):
            raise ValueError(
                "mul must have at least one split, group and mix, got shape "
                f"{tuple(self.mul.shape)}"
            )
        checks.tensor(
            "sqrsum", self.sqrsum, dims[:3], torch.float32, shape=tuple(self.mul.shape[:3]),
            contiguous=True,
        )  # fmt: skip
        checks.countable("mul", self.mul)
        checks.integer("rms_group_size", self.rms_group_size, 1)
        checks.epsilon("eps", self.eps)

    def outputs(self) -> tuple[Out, Out, Out]:
        _, num_tokens, groups, mixes = self.mul.shape
        return (
            Out("out", (num_tokens, mixes), torch.float32),
            Out("out_mul", (num_tokens, groups, mixes), torch.float32),
            Out("out_sqrsum", (num_tokens, groups), torch.float32),
        )

    def launches(self, out: Spec, out_mul: Spec, out_sqrsum: Spec) -> Launch | None:
        if self.mul.numel() == 0:
            return None
        problem = (*self.mul.shape[2:], self.rms_group_size)
        arguments = (self.mul, self.sqrsum, out, out_mul, out_sqrsum, float(self.eps))
        return Launch(_REDUCE, problem, arguments)


def cost(mul: Tensor, sqrsum: Tensor, **_: Any) -> Cost:
    splits, num_tokens, _groups, mixes = mul.shape
    parts = mul.numel() + sqrsum.numel()
    return Cost(bytes=4 * (parts + parts // splits + num_tokens * mixes), flops=2 * mul.numel())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers, ctx.splits = inputs[2:], inputs[0].shape[0]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    grads = mhc_reduce_partials_bwd(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return *(x.expand(ctx.splits, *x.shape) for x in grads), None, None


MHC_REDUCE_PARTIALS = Operator(
    "mhc.mhc_reduce_partials",
    Arguments,
    reference=reference.mhc_reduce_partials,
    cost=cost,
    dynamic={"mul": 2, "sqrsum": 1},
    out=("out", "out_mul", "out_sqrsum"),
    backward=_backward,
    setup_context=_save,
)


@MHC_REDUCE_PARTIALS.public()
def mhc_reduce_partials(
    mul: Tensor,
    sqrsum: Tensor,
    rms_group_size: int,
    eps: float,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds up a projection that was computed in parts, and divides by root mean squares.

    The parts are added in order. With the sums `p` of a group of channels and `s` of their squares,
    the mixes are the sum of `p / sqrt(s / rms_group_size + eps)` over the groups. They are
    differentiable with respect to `mul` and `sqrsum`.

    Args:
        mul: `[num_splits, num_tokens, groups, mixes]`, float32, contiguous: partial products.
        sqrsum: `[num_splits, num_tokens, groups]`, float32, contiguous: partial sums of squares.
        rms_group_size: Channels of a group.
        eps: Added to the mean squares; finite and not negative.
        out: Buffers for the results, which are filled and returned.

    Returns:
        `(mixes, out_mul, out_sqrsum)`: `[num_tokens, mixes]`, `[num_tokens, groups, mixes]` and
        `[num_tokens, groups]`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> mul = torch.tensor([[[[1.0, 2.0]]], [[[3.0, -1.0]]]])
        >>> squares = torch.tensor([[[4.0]], [[12.0]]])
        >>> mhc_reduce_partials(mul, squares, 8, 1e-6)[0]
        tensor([[2.8284, 0.7071]])
    """
    return MHC_REDUCE_PARTIALS(mul, sqrsum, rms_group_size, eps, out=out)


class BackwardArguments(NamedTuple):
    out_grad: Tensor
    out_mul: Tensor
    sqrsum: Tensor
    rms_group_size: int
    eps: float

    def check(self) -> None:
        dims = ("num_tokens", "groups", "mixes")
        checks.tensor("out_mul", self.out_mul, dims, torch.float32, contiguous=True)
        num_tokens, groups, mixes = self.out_mul.shape
        checks.tensor(
            "out_grad", self.out_grad, ("num_tokens", "mixes"), torch.float32,
            shape=(num_tokens, mixes), contiguous=True,
        )  # fmt: skip
        checks.tensor(
            "sqrsum", self.sqrsum, dims[:2], torch.float32, shape=(num_tokens, groups),
            contiguous=True,
        )  # fmt: skip
        checks.integer("rms_group_size", self.rms_group_size, 1)
        checks.epsilon("eps", self.eps)

    def outputs(self) -> tuple[Out, Out]:
        return (
            Out("out", self.out_mul.shape, torch.float32),
            Out("sqrsum_grad", self.sqrsum.shape, torch.float32),
        )

    def launches(self, out: Spec, sqrsum_grad: Spec) -> Launch | None:
        if self.sqrsum.numel() == 0:
            return None
        problem = (*self.out_mul.shape[1:], self.rms_group_size)
        arguments = (self.out_grad, self.out_mul, self.sqrsum, out, sqrsum_grad, float(self.eps))
        return Launch(_REDUCE_BACKWARD, problem, arguments)


def backward_cost(out_grad: Tensor, out_mul: Tensor, sqrsum: Tensor, **_: Any) -> Cost:
    return Cost(bytes=4 * (out_grad.numel() + 2 * out_mul.numel() + 2 * sqrsum.numel()))


MHC_REDUCE_PARTIALS_BWD = Operator(
    "mhc.mhc_reduce_partials_bwd",
    BackwardArguments,
    reference=reference.mhc_reduce_partials_bwd,
    cost=backward_cost,
    dynamic={"out_grad": 1, "out_mul": 2, "sqrsum": 1},
    out=("out", "sqrsum_grad"),
)


@MHC_REDUCE_PARTIALS_BWD.public()
def mhc_reduce_partials_bwd(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    rms_group_size: int,
    eps: float,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `mhc_reduce_partials` with respect to its sums; all parts have the same.

    With `r = 1 / sqrt(s / rms_group_size + eps)` they are `g * r` for the products and
    `-(sum(g * p) * r) / (s + eps * rms_group_size) / 2` for the squares.

    Args:
        out_grad: `[num_tokens, mixes]`, float32, contiguous.
        out_mul, sqrsum: Results of `mhc_reduce_partials`.
        rms_group_size, eps: As in `mhc_reduce_partials`.
        out: Buffers for the results, which are filled and returned.

    Returns:
        `(out_mul_grad, sqrsum_grad)`: `[num_tokens, groups, mixes]` and `[num_tokens, groups]`,
        float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> out_mul, squares = torch.tensor([[[4.0, 1.0]]]), torch.tensor([[16.0]])
        >>> mhc_reduce_partials_bwd(torch.tensor([[1.0, 0.5]]), out_mul, squares, 8, 1e-6)
        (tensor([[[0.7071, 0.3536]]]), tensor([[-0.0994]]))
    """
    return MHC_REDUCE_PARTIALS_BWD(out_grad, out_mul, sqrsum, rms_group_size, eps, out=out)


# ---- all that follows ---------------------------------------------------------------------------


class PreArguments(NamedTuple):
    gemm_out_mul: Tensor
    gemm_out_sqrsum: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    residual: Tensor
    rms_eps: float
    mhc_pre_eps: float
    mhc_sinkhorn_eps: float
    mhc_post_mult_value: float
    sinkhorn_repeat: int

    def check(self) -> None:
        dims = ("num_tokens", "mhc_mult", "hidden")
        checks.tensor("residual", self.residual, dims, torch.bfloat16, contiguous=True)
        num_tokens, m, hidden = self.residual.shape
        shapes.stream_count("residual", m)
        if hidden < 1 or hidden % 8:
            raise ValueError(f"residual must have a multiple of 8 columns, got {hidden}")
        count = m * (m + 2)
        checks.tensor(
            "gemm_out_mul", self.gemm_out_mul, ("num_splits", "num_tokens", "mixes"),
            torch.float32, shape=(None, num_tokens, count), contiguous=True,
        )  # fmt: skip
        splits = self.gemm_out_mul.shape[0]
        if splits < 1:
            raise ValueError("gemm_out_mul must have at least one split, got 0")
        checks.tensor(
            "gemm_out_sqrsum", self.gemm_out_sqrsum, ("num_splits", "num_tokens"), torch.float32,
            shape=(splits, num_tokens), contiguous=True,
        )  # fmt: skip
        checks.epsilon("rms_eps", self.rms_eps)
        check_mixes(self, m)

    def outputs(self) -> tuple[Out, Out, Out]:
        num_tokens, m, hidden = self.residual.shape
        return (
            Out("out", (num_tokens, m, 1), torch.float32),
            Out("comb_mix", (num_tokens, m, m), torch.float32),
            Out("layer_input", (num_tokens, hidden), torch.bfloat16),
        )

    def launches(self, post: Spec, comb: Spec, layer_input: Spec) -> Launch | None:
        if self.residual.numel() == 0:
            return None
        _, m, hidden = self.residual.shape
        problem = (
            m, hidden, NUM_TOKENS, alignment(self.residual, layer_input),
            is_near(self.mhc_sinkhorn_eps),
        )  # fmt: skip
        read = self.residual, self.gemm_out_mul, self.gemm_out_sqrsum
        arguments = read_arguments(self, read, (post, comb, layer_input), fold=0)
        return Launch(_READ, problem, arguments)


def pre_cost(gemm_out_mul: Tensor, gemm_out_sqrsum: Tensor, residual: Tensor, **_: Any) -> Cost:
    num_tokens, m, hidden = residual.shape
    read = 2 * residual.numel() + 4 * (gemm_out_mul.numel() + gemm_out_sqrsum.numel())
    return Cost(read + num_tokens * (2 * hidden + 4 * m * (m + 1)), 2 * residual.numel())


MHC_PRE_FROM_PARTIALS = Operator(
    "mhc.mhc_pre_from_partials",
    PreArguments,
    reference=reference.mhc_pre_from_partials,
    cost=pre_cost,
    dynamic={"gemm_out_mul": 1, "gemm_out_sqrsum": 0, "residual": 2},
    out=("out", "comb_mix", "layer_input"),
    instead="tile_kernels.mhc.mhc_reduce_partials and the steps that follow it",
)


@MHC_PRE_FROM_PARTIALS.public()
def mhc_pre_from_partials(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc_pre_big_fuse` behind a projection that was computed elsewhere, in one launch.

    The projection gives partial sums of `residual . fn^T` and of the squares of the residual, such
    as those of a matrix product that is split along its columns. The results have the bits of
    `mhc_reduce_partials`, `mhc_pre_split_mixes`, `sinkhorn_normalize` and `mhc_pre_apply_mix` one
    after the other. Not differentiable: those are.

    Args:
        gemm_out_mul: `[num_splits, num_tokens, m * (m + 2)]`, float32, contiguous.
        gemm_out_sqrsum: `[num_splits, num_tokens]`, float32, contiguous.
        mhc_scale, mhc_base: As for `mhc_pre_big_fuse`.
        residual: `[num_tokens, m, h]`, bfloat16, contiguous; `m` from 1 to 8, `h` a multiple of 8.
        rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat: As for
            `mhc_pre_big_fuse`.
        out: Buffers for the results, which are filled and returned.

    Returns:
        `(post_mix, comb_mix, layer_input)`: `[num_tokens, m, 1]`, float32; `[num_tokens, m, m]`,
        float32; `[num_tokens, h]`, bfloat16; all contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> residual, scale = torch.ones(1, 1, 8).bfloat16(), torch.ones(3)
        >>> mul, squares = torch.zeros(2, 1, 3), torch.full((2, 1), 4.0)
        >>> post, comb, layer_input = mhc_pre_from_partials(
        ...     mul, squares, scale, torch.zeros(3), residual, 1e-6, 0.0, 1e-6, 2.0, 3
        ... )
        >>> post.item(), layer_input[0, 0].item()
        (1.0, 0.5)
    """
    return MHC_PRE_FROM_PARTIALS(
        gemm_out_mul, gemm_out_sqrsum, mhc_scale, mhc_base, residual, rms_eps, mhc_pre_eps,
        mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, out=out,
    )  # fmt: skip
