"""Mixes from their projections: scaled, shifted, and made weights by sigmoids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.mixes import (
    MHC_HEAD_COMPUTE_MIX,
    MHC_HEAD_COMPUTE_MIX_BWD,
    MHC_PRE_SPLIT_MIXES,
    MHC_PRE_SPLIT_MIXES_BWD,
)
from tile_kernels.runtime import checks, tickets
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.torch import mhc as oracles

MOST_CHUNKS = 512  # blocks of the gradient, with their own sums over tokens

_MIXES = Kernel("tile_kernels.mhc.kernels.mixes", "compute_mixes")
_BACKWARD = Kernel("tile_kernels.mhc.kernels.mixes", "mixes_backward")

Three = tuple[Tensor, Tensor, Tensor]


def check_parameter(name: str, value: Tensor, size: int) -> None:
    """`value` holds `size` numbers that are learnt."""
    checks.tensor(name, value, ("size",), torch.float32, shape=(size,), contiguous=True)


def _check_three(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    m: int,
    like: shapes.Leading | None = None,
) -> None:
    count = m * (m + 2)
    shapes.tensor("input_mixes", input_mixes, ("mixes",), torch.float32, like=like, sizes=(count,))
    check_parameter("mhc_scale", mhc_scale, 3)
    check_parameter("mhc_base", mhc_base, count)


def _launch(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    m: int,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    post_mult: float,
    pre_eps: float,
) -> None:
    """`results`: `pre`, `post` and `comb`, or `pre` alone."""
    if not nonempty(mixes):
        return
    rows = shapes.rows(mixes, base.shape[0])
    widths = (m, m, m * m)
    to = [None if t is None else shapes.rows(t, width) for t, width in zip(results, widths)]
    given = [t for t in (rows, base, *to) if t is not None]
    problem = (m, results[1] is None, shapes.common_alignment(*given))
    _MIXES.launch(problem, rows, scale, base, *to, float(post_mult), float(pre_eps))


def _launch_backward(
    grads: tuple[Tensor, Tensor | None, Tensor | None],
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    m: int,
    post_mult: float,
) -> Three:
    d_mixes, d_scale, d_base = (t.new_empty(t.shape) for t in (mixes, scale, base))
    if not nonempty(mixes):
        return d_mixes, d_scale.zero_(), d_base.zero_()
    count = base.shape[0]
    rows, to = shapes.rows(mixes, count), shapes.rows(d_mixes, count)
    widths = (m, m, m * m)
    of = [None if t is None else shapes.rows(t, width) for t, width in zip(grads, widths)]
    partials = base.new_empty((MOST_CHUNKS, 2 * count))
    counters, ticket = tickets.take(mixes.device)
    given = [t for t in (rows, base, to, *of) if t is not None]
    problem = (m, grads[1] is None, shapes.common_alignment(*given))
    _BACKWARD.launch(
        problem, rows, scale, base, *of, to, d_scale, d_base, partials, counters, ticket,
        float(post_mult),
    )  # fmt: skip
    return d_mixes, d_scale, d_base


# ---- pre, post and comb -------------------------------------------------------------------------


def _check_split(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    checks.integer("mhc_mult", mhc_mult, 1, shapes.MOST_STREAMS)
    _check_three(input_mixes, mhc_scale, mhc_base, mhc_mult)
    checks.number("mhc_post_mult_value", mhc_post_mult_value)
    checks.epsilon("mhc_pre_eps", mhc_pre_eps)


def _check_split_backward(
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_post_mult_value: float,
) -> None:
    dims = ("mhc_mult", "mhc_mult")
    tokens = shapes.tensor("grad_comb", grad_comb, dims, torch.float32, contiguous=False)
    m = grad_comb.shape[-1]
    shapes.stream_count("grad_comb", m)
    for name, value, last in (
        ("grad_comb", grad_comb, (m, m)), ("grad_pre", grad_pre, (m, 1)),
        ("grad_post", grad_post, (m, 1)),
    ):  # fmt: skip
        shapes.tensor(name, value, dims, torch.float32, like=tokens, sizes=last, contiguous=False)
    _check_three(input_mixes, mhc_scale, mhc_base, m, tokens)
    checks.number("mhc_post_mult_value", mhc_post_mult_value)


@op(
    check=_check_split_backward,
    oracle=oracles.mhc_pre_split_mixes_bwd,
    cost=lambda input_mixes, **_: Cost(bytes=12 * input_mixes.numel()),
    cases=MHC_PRE_SPLIT_MIXES_BWD,
)
def mhc_pre_split_mixes_bwd(
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_post_mult_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `mhc_pre_split_mixes`.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `grad_pre`, `grad_post` | `[..., m, 1]` | float32 | any |
    | `grad_comb` | `[..., m, m]`, 1 to 8 streams | float32 | any |
    | `input_mixes` | `[..., m * (m + 2)]` | float32 | contiguous |
    | `mhc_scale` | `[3]` | float32 | contiguous |
    | `mhc_base` | `[m * (m + 2)]` | float32 | contiguous |
    | `mhc_post_mult_value` | | float | |
    | returns | the gradients of `input_mixes`, `mhc_scale` and `mhc_base` | float32 | contiguous |

    With `p` the sigmoid of a mix, `dz` is `g * p * (1 - p)` for `pre`, that times the multiplier
    for `post`, and `g` for `comb`. The gradients are `dz * scale`, and over the tokens the sums of
    `dz * input_mixes`, for each scale, and of `dz`, in a fixed order. Zero without tokens.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> one = torch.ones(3)
    >>> grads = [torch.ones(1, 1, 1)] * 3
    >>> mhc_pre_split_mixes_bwd(*grads, torch.zeros(1, 3), one, 0 * one, 2.0)[2].tolist()
    [0.25, 0.5, 1.0]
    """
    return _launch_backward(
        (grad_pre, grad_post, grad_comb), input_mixes, mhc_scale, mhc_base, grad_comb.shape[-1],
        mhc_post_mult_value,
    )  # fmt: skip


@op(
    check=_check_split,
    oracle=oracles.mhc_pre_split_mixes,
    cost=lambda input_mixes, **_: Cost(bytes=8 * input_mixes.numel()),
    cases=MHC_PRE_SPLIT_MIXES,
)
def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixes of a token, from their projection: weights to read and to write, and logits.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `input_mixes` | `[..., m * (m + 2)]`: pre, post, comb | float32 | \
contiguous |
    | `mhc_scale` | `[3]`: of pre, post and comb | float32 | contiguous |
    | `mhc_base` | `[m * (m + 2)]` | float32 | contiguous |
    | `mhc_mult` | | int in `1..8`: the streams `m` | |
    | `mhc_post_mult_value`, `mhc_pre_eps` | | float | |
    | returns `pre`, `post` | `[..., m, 1]` | float32 | contiguous |
    | returns `comb` | `[..., m, m]`: logits for `sinkhorn_normalize` | float32 | contiguous |

    With `z = x * scale + base`, rounded once: `pre = sigmoid(z) + mhc_pre_eps`,
    `post = sigmoid(z) * mhc_post_mult_value` and `comb = z`. Differentiable in the three tensors,
    by `mhc_pre_split_mixes_bwd`.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> pre, post, comb = mhc_pre_split_mixes(
    ...     torch.zeros(1, 8), torch.ones(3), torch.arange(8.0), 2, 2.0, 0.01
    ... )
    >>> pre[0, 0].item(), comb.tolist()
    (0.5099999904632568, [[[4.0, 5.0], [6.0, 7.0]]])
    """
    leading = input_mixes.shape[:-1]
    pre = input_mixes.new_empty((*leading, mhc_mult, 1))
    post = input_mixes.new_empty((*leading, mhc_mult, 1))
    comb = input_mixes.new_empty((*leading, mhc_mult, mhc_mult))
    _launch(
        input_mixes, mhc_scale, mhc_base, mhc_mult, (pre, post, comb), mhc_post_mult_value,
        mhc_pre_eps,
    )  # fmt: skip
    return pre, post, comb


def _save_split(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])
    ctx.post_mult = inputs[4]


def _backward_split(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    arguments: list[Any] = [*grads, *ctx.saved_tensors, ctx.post_mult]
    return *mhc_pre_split_mixes_bwd(*arguments), None, None, None


gradient(mhc_pre_split_mixes, _backward_split, setup_context=_save_split)


# ---- the head -----------------------------------------------------------------------------------


def _check_head(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> None:
    shapes.tensor("input_mix", input_mix, ("mhc_mult",), torch.float32)
    m = input_mix.shape[-1]
    shapes.stream_count("input_mix", m)
    check_parameter("mhc_scale", mhc_scale, 1)
    check_parameter("mhc_base", mhc_base, m)
    checks.epsilon("mhc_pre_eps", mhc_pre_eps)


def _check_head_backward(
    grad_mix: Tensor, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor
) -> None:
    _check_head(input_mix, mhc_scale, mhc_base, 0.0)
    shapes.tensor(
        "grad_mix", grad_mix, ("mhc_mult",), torch.float32,
        like=("input_mix", input_mix.shape[:-1]), sizes=(input_mix.shape[-1],), contiguous=False,
    )  # fmt: skip


@op(
    check=_check_head_backward,
    oracle=oracles.mhc_head_compute_mix_bwd,
    cost=lambda input_mix, **_: Cost(bytes=12 * input_mix.numel()),
    cases=MHC_HEAD_COMPUTE_MIX_BWD,
)
def mhc_head_compute_mix_bwd(
    grad_mix: Tensor, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `mhc_head_compute_mix`.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `grad_mix` | `[..., m]` | float32 | any |
    | `input_mix` | `[..., m]`, 1 to 8 streams | float32 | contiguous |
    | `mhc_scale` | `[1]` | float32 | contiguous |
    | `mhc_base` | `[m]` | float32 | contiguous |
    | returns | the gradients of `input_mix`, `mhc_scale` and `mhc_base` | float32 | contiguous |

    As for `pre` in `mhc_pre_split_mixes_bwd`.

    >>> x, one = torch.tensor([[0.0, 1.0]]), torch.ones(1)
    >>> mhc_head_compute_mix_bwd(torch.ones(1, 2), x, 2 * one, torch.tensor([0.0, -2.0]))
    (tensor([[0.5000, 0.5000]]), tensor([0.2500]), tensor([0.2500, 0.2500]))
    """
    m = input_mix.shape[-1]
    return _launch_backward((grad_mix, None, None), input_mix, mhc_scale, mhc_base, m, 1.0)


@op(
    check=_check_head,
    oracle=oracles.mhc_head_compute_mix,
    cost=lambda input_mix, **_: Cost(bytes=8 * input_mix.numel()),
    cases=MHC_HEAD_COMPUTE_MIX,
)
def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """The weights by which the head reads the streams, from their projection.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `input_mix` | `[..., m]`, 1 to 8 streams | float32 | contiguous |
    | `mhc_scale` | `[1]` | float32 | contiguous |
    | `mhc_base` | `[m]` | float32 | contiguous |
    | `mhc_pre_eps` | | float | |
    | returns | `[..., m]` | float32 | contiguous |

    `sigmoid(input_mix * scale + base) + mhc_pre_eps`, the first sum rounded once. Differentiable in
    the three tensors, by `mhc_head_compute_mix_bwd`.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> one = torch.ones(1)
    >>> mhc_head_compute_mix(torch.tensor([0.0, 1.0]), 2 * one, torch.tensor([0.0, -2.0]), 0.01)
    tensor([0.5100, 0.5100])
    """
    out = input_mix.new_empty(input_mix.shape)
    m = input_mix.shape[-1]
    _launch(input_mix, mhc_scale, mhc_base, m, (out, None, None), 1.0, mhc_pre_eps)
    return out


def _save_head(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:3])


def _backward_head(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *mhc_head_compute_mix_bwd(grad, *ctx.saved_tensors), None


gradient(mhc_head_compute_mix, _backward_head, setup_context=_save_head)
