"""`mhc_pre_split_mixes` and `mhc_head_compute_mix`, with gradients: mixes from their projections.

Both scale and shift a projection and apply sigmoids, in the same two kernels: the first has the
mixes `pre`, `post` and `comb` of a sublayer, the second `pre` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.gradients import bytes_per_element, differentiated_by
from tile_kernels.mhc.mix import reference
from tile_kernels.mhc.mix.plan import MAX_CHUNKS, plan
from tile_kernels.runtime import checks, tickets
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MIXES = Kernel("tile_kernels.mhc.mix.kernel", "compute_mixes", plan)
_BACKWARD = Kernel("tile_kernels.mhc.mix.kernel", "mixes_backward", plan)


# ---- both ---------------------------------------------------------------------------------------


def _per_kind(m: int, pre: Any, post: Any, comb: Any) -> list[Spec | None]:
    """Tensors of `pre`, `post` and `comb` as kernels take them; None where there is none."""
    kind = (m,) if comb is None else (m, 1)
    pairs = zip((pre, post, comb), (kind, kind, (m, m)))
    return [None if value is None else shapes.rows(value, *last) for value, last in pairs]


def _problem(m: int, *tensors: Spec | None) -> tuple[int, bool, int]:
    """`tensors` are all that is read or written by vectors, those of the three kinds last."""
    head = tensors[-1] is None
    return m, head, alignment(*(each for each in tensors if each is not None))


def _launches(
    m: int,
    mixes: Any,
    scale: Any,
    base: Any,
    results: Sequence[Spec | None],
    post_mult: float,
    pre_eps: float,
) -> Launch | None:
    if mixes.numel() == 0:
        return None
    rows, kinds = shapes.rows(mixes, base.shape[0]), _per_kind(m, *results)
    numbers = float(post_mult), float(pre_eps)
    return Launch(_MIXES, _problem(m, rows, base, *kinds), (rows, scale, base, *kinds, *numbers))


def _outputs_backward(mixes: Tensor, scale: Tensor, base: Tensor) -> tuple[Out, Out, Out]:
    return (
        Out("out", mixes.shape, torch.float32),
        Out("d_scale", scale.shape, torch.float32),
        Out("d_base", base.shape, torch.float32),
    )


def scratch_backward(a: Any) -> tuple[Out, ...]:
    return (Out("partials", (MAX_CHUNKS, 2 * a.mhc_base.shape[0]), torch.float32),)


def _launches_backward(
    m: int,
    mixes: Any,
    scale: Any,
    base: Any,
    grads: Sequence[Any],
    results: Sequence[Spec],
    post_mult: float,
) -> list[Launch | Host]:
    """`results` are the three gradients and the partial sums."""
    d_mixes, d_scale, d_base, partials = results
    if mixes.numel() == 0:
        return [Host(Tensor.zero_, (d_scale,)), Host(Tensor.zero_, (d_base,))]
    count = base.shape[0]
    rows, d_rows = shapes.rows(mixes, count), shapes.rows(d_mixes, count)
    kinds = _per_kind(m, *grads)
    arguments = (
        rows, scale, base, *kinds, d_rows, d_scale, d_base, partials, *tickets.counter(rows),
        float(post_mult),
    )  # fmt: skip
    return [Launch(_BACKWARD, _problem(m, rows, base, d_rows, *kinds), arguments)]


# ---- pre, post and comb -------------------------------------------------------------------------


class SplitArguments(NamedTuple):
    input_mixes: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    mhc_mult: int
    mhc_post_mult_value: float
    mhc_pre_eps: float

    def check(self) -> None:
        checks.integer("mhc_mult", self.mhc_mult, 1, shapes.MAX_STREAMS)
        _check_mixes(self, self.mhc_mult)
        checks.number("mhc_post_mult_value", self.mhc_post_mult_value)
        checks.epsilon("mhc_pre_eps", self.mhc_pre_eps)

    def outputs(self) -> tuple[Out, Out, Out]:
        leading, m = self.input_mixes.shape[:-1], self.mhc_mult
        return (
            Out("out", (*leading, m, 1), torch.float32),
            Out("post", (*leading, m, 1), torch.float32),
            Out("comb", (*leading, m, m), torch.float32),
        )

    def launches(self, *results: Spec) -> Launch | None:
        return _launches(
            self.mhc_mult, self.input_mixes, self.mhc_scale, self.mhc_base, results,
            self.mhc_post_mult_value, self.mhc_pre_eps,
        )  # fmt: skip


def _check_mixes(a: Any, m: int, like: shapes.Leading | None = None) -> None:
    count = m * (m + 2)
    shapes.tensor(
        "input_mixes", a.input_mixes, ("mixes",), torch.float32, like=like, sizes=(count,)
    )
    shapes.parameter("mhc_scale", a.mhc_scale, 3)
    shapes.parameter("mhc_base", a.mhc_base, count)


def _split_gradients(grads: Any, given: Any, numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, post_mult, _ = numbers
    arguments: list[Any] = [*grads, *given, post_mult]
    return mhc_pre_split_mixes_bwd(*arguments)


MHC_PRE_SPLIT_MIXES = Operator(
    "mhc.mhc_pre_split_mixes",
    SplitArguments,
    reference=reference.mhc_pre_split_mixes,
    cost=bytes_per_element("input_mixes", 8),
    dynamic={"input_mixes": 1},
    out=("out", "post", "comb"),
    **differentiated_by(_split_gradients),
)


@MHC_PRE_SPLIT_MIXES.public()
def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the mixes of each token from their projection: two sets of weights, and logits.

    With `z = x * scale + base`, rounded once: `pre = sigmoid(z) + mhc_pre_eps`,
    `post = sigmoid(z) * mhc_post_mult_value` and `comb = z`. Differentiable in the three tensors,
    by `mhc_pre_split_mixes_bwd`.

    Args:
        input_mixes: `[..., m * (m + 2)]`, float32, contiguous: `m` numbers of `pre`, `m` of `post`,
            `m * m` of `comb`.
        mhc_scale: `[3]`, float32, contiguous: the scales of `pre`, `post` and `comb`.
        mhc_base: `[m * (m + 2)]`, float32, contiguous.
        mhc_mult: The number of streams `m`, 1 to 8.
        mhc_post_mult_value: The factor of `post`.
        mhc_pre_eps: Added to `pre`.
        out: Buffers for the results, contiguous. They are filled and returned; not with
            gradients.

    Returns:
        `(pre, post, comb)`, float32, contiguous: the weights by which a sublayer reads and writes
        the streams, `[..., m, 1]` both, and the logits for `sinkhorn_normalize`, `[..., m, m]`.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> pre, post, comb = mhc_pre_split_mixes(
        ...     torch.zeros(1, 8), torch.ones(3), torch.arange(8.0), 2, 2.0, 0.01
        ... )
        >>> pre[0, 0].item(), comb.tolist()
        (0.5099999904632568, [[[4.0, 5.0], [6.0, 7.0]]])
    """
    return MHC_PRE_SPLIT_MIXES(
        input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps, out=out
    )


class SplitBackwardArguments(NamedTuple):
    grad_pre: Tensor
    grad_post: Tensor
    grad_comb: Tensor
    input_mixes: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    mhc_post_mult_value: float

    def check(self) -> None:
        dims = ("mhc_mult", "mhc_mult")
        tokens = shapes.tensor("grad_comb", self.grad_comb, dims, torch.float32, contiguous=False)
        m = self.grad_comb.shape[-1]
        shapes.stream_count("grad_comb", m)
        for name, value, last in (
            ("grad_comb", self.grad_comb, (m, m)), ("grad_pre", self.grad_pre, (m, 1)),
            ("grad_post", self.grad_post, (m, 1)),
        ):  # fmt: skip
            shapes.tensor(
                name, value, dims, torch.float32, like=tokens, sizes=last, contiguous=False
            )
        _check_mixes(self, m, tokens)
        checks.number("mhc_post_mult_value", self.mhc_post_mult_value)

    def outputs(self) -> tuple[Out, Out, Out]:
        return _outputs_backward(self.input_mixes, self.mhc_scale, self.mhc_base)

    def launches(self, *results: Spec) -> list[Launch | Host]:
        grads = self.grad_pre, self.grad_post, self.grad_comb
        return _launches_backward(
            self.grad_comb.shape[-1], self.input_mixes, self.mhc_scale, self.mhc_base, grads,
            results, self.mhc_post_mult_value,
        )  # fmt: skip


MHC_PRE_SPLIT_MIXES_BWD = Operator(
    "mhc.mhc_pre_split_mixes_bwd",
    SplitBackwardArguments,
    scratch=scratch_backward,
    reference=reference.mhc_pre_split_mixes_bwd,
    cost=bytes_per_element("input_mixes", 12),
    dynamic={"grad_pre": 2, "grad_post": 2, "grad_comb": 2, "input_mixes": 1},
    out=("out", "d_scale", "d_base"),
)


@MHC_PRE_SPLIT_MIXES_BWD.public()
def mhc_pre_split_mixes_bwd(
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_post_mult_value: float,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `mhc_pre_split_mixes`.

    With `p` the sigmoid of a mix, `dz` is `g * p * (1 - p)` for `pre`, that times the multiplier
    for `post`, and `g` for `comb`. The gradient of the mixes is `dz * scale`; those of the scales
    and of the base are the sums over the tokens of `dz * input_mixes` and of `dz`, in a fixed
    order, and zero without tokens.

    Args:
        grad_pre: `[..., m, 1]`, float32, any strides.
        grad_post: `[..., m, 1]`, float32, any strides.
        grad_comb: `[..., m, m]`, float32, 1 to 8 streams, any strides.
        input_mixes: `[..., m * (m + 2)]`, float32, contiguous.
        mhc_scale: `[3]`, float32, contiguous.
        mhc_base: `[m * (m + 2)]`, float32, contiguous.
        mhc_post_mult_value: The factor of `post`.
        out: Buffers for the results, contiguous. They are filled and returned.

    Returns:
        The gradients of `input_mixes`, `mhc_scale` and `mhc_base`: float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> one = torch.ones(3)
        >>> grads = [torch.ones(1, 1, 1)] * 3
        >>> mhc_pre_split_mixes_bwd(*grads, torch.zeros(1, 3), one, 0 * one, 2.0)[2].tolist()
        [0.25, 0.5, 1.0]
    """
    return MHC_PRE_SPLIT_MIXES_BWD(
        grad_pre, grad_post, grad_comb, input_mixes, mhc_scale, mhc_base, mhc_post_mult_value,
        out=out,
    )  # fmt: skip


# ---- the head -----------------------------------------------------------------------------------


class HeadArguments(NamedTuple):
    input_mix: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    mhc_pre_eps: float

    def check(self) -> None:
        _check_head_mix(self)
        checks.epsilon("mhc_pre_eps", self.mhc_pre_eps)

    def outputs(self) -> Out:
        return Out("out", self.input_mix.shape, torch.float32)

    def launches(self, out: Spec) -> Launch | None:
        m, results = self.input_mix.shape[-1], (out, None, None)
        return _launches(
            m, self.input_mix, self.mhc_scale, self.mhc_base, results, 1.0, self.mhc_pre_eps
        )


def _check_head_mix(a: Any) -> None:
    shapes.tensor("input_mix", a.input_mix, ("mhc_mult",), torch.float32)
    m = a.input_mix.shape[-1]
    shapes.stream_count("input_mix", m)
    shapes.parameter("mhc_scale", a.mhc_scale, 1)
    shapes.parameter("mhc_base", a.mhc_base, m)


def _head_gradients(grads: Any, given: Any, _: Any) -> tuple[Tensor, Tensor, Tensor]:
    return mhc_head_compute_mix_bwd(*grads, *given)


MHC_HEAD_COMPUTE_MIX = Operator(
    "mhc.mhc_head_compute_mix",
    HeadArguments,
    reference=reference.mhc_head_compute_mix,
    cost=bytes_per_element("input_mix", 8),
    dynamic={"input_mix": 1},
    out=("out",),
    **differentiated_by(_head_gradients),
)


@MHC_HEAD_COMPUTE_MIX.public()
def mhc_head_compute_mix(
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_pre_eps: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the weights by which the head reads the streams, from their projection.

    The result is `sigmoid(input_mix * scale + base) + mhc_pre_eps`, the first sum rounded once.
    Differentiable in the three tensors, by `mhc_head_compute_mix_bwd`.

    Args:
        input_mix: `[..., m]`, float32, contiguous, 1 to 8 streams.
        mhc_scale: `[1]`, float32, contiguous.
        mhc_base: `[m]`, float32, contiguous.
        mhc_pre_eps: Added to the sigmoid.
        out: Buffer for the result, contiguous. It is filled and returned; not with gradients.

    Returns:
        `[..., m]`, float32, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> x, base = torch.tensor([0.0, 1.0]), torch.tensor([0.0, -2.0])
        >>> mhc_head_compute_mix(x, torch.tensor([2.0]), base, 0.01)
        tensor([0.5100, 0.5100])
    """
    return MHC_HEAD_COMPUTE_MIX(input_mix, mhc_scale, mhc_base, mhc_pre_eps, out=out)


class HeadBackwardArguments(NamedTuple):
    grad_mix: Tensor
    input_mix: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor

    def check(self) -> None:
        _check_head_mix(self)
        shapes.tensor(
            "grad_mix", self.grad_mix, ("mhc_mult",), torch.float32,
            like=("input_mix", self.input_mix.shape[:-1]), sizes=(self.input_mix.shape[-1],),
            contiguous=False,
        )  # fmt: skip

    def outputs(self) -> tuple[Out, Out, Out]:
        return _outputs_backward(self.input_mix, self.mhc_scale, self.mhc_base)

    def launches(self, *results: Spec) -> list[Launch | Host]:
        m, grads = self.input_mix.shape[-1], (self.grad_mix, None, None)
        return _launches_backward(
            m, self.input_mix, self.mhc_scale, self.mhc_base, grads, results, 1.0
        )


MHC_HEAD_COMPUTE_MIX_BWD = Operator(
    "mhc.mhc_head_compute_mix_bwd",
    HeadBackwardArguments,
    scratch=scratch_backward,
    reference=reference.mhc_head_compute_mix_bwd,
    cost=bytes_per_element("input_mix", 12),
    dynamic={"grad_mix": 1, "input_mix": 1},
    out=("out", "d_scale", "d_base"),
)


@MHC_HEAD_COMPUTE_MIX_BWD.public()
def mhc_head_compute_mix_bwd(
    grad_mix: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `mhc_head_compute_mix`, as those of `pre` in a sublayer.

    The formulas are those of `mhc_pre_split_mixes_bwd` for `pre`.

    Args:
        grad_mix: `[..., m]`, float32, any strides.
        input_mix: `[..., m]`, float32, contiguous, 1 to 8 streams.
        mhc_scale: `[1]`, float32, contiguous.
        mhc_base: `[m]`, float32, contiguous.
        out: Buffers for the results, contiguous. They are filled and returned.

    Returns:
        The gradients of `input_mix`, `mhc_scale` and `mhc_base`: float32, contiguous.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or layout differs.

    Example:
        >>> x, base = torch.tensor([[0.0, 1.0]]), torch.tensor([0.0, -2.0])
        >>> mhc_head_compute_mix_bwd(torch.ones(1, 2), x, torch.tensor([2.0]), base)
        (tensor([[0.5000, 0.5000]]), tensor([0.2500]), tensor([0.2500, 0.2500]))
    """
    return MHC_HEAD_COMPUTE_MIX_BWD(grad_mix, input_mix, mhc_scale, mhc_base, out=out)
