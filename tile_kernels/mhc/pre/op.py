"""`mhc_pre_big_fuse` and `mhc_pre_fwd`: from the residual to the input of a sublayer.

Both are the projection, the split of the mixes, Sinkhorn and the weighted sum of the streams in two
launches; the second also returns what gradients need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.apply import op as apply
from tile_kernels.mhc.mix import op as mix
from tile_kernels.mhc.norm_fn import op as norm_fn
from tile_kernels.mhc.norm_fn.op import (
    FOLD,
    NUM_TOKENS,
    check_inputs,
    launch_products,
    product_scratch,
)
from tile_kernels.mhc.norm_fn.plan import padded
from tile_kernels.mhc.pre import reference
from tile_kernels.mhc.pre.plan import plan_read
from tile_kernels.mhc.pre.reference import Pre
from tile_kernels.mhc.sinkhorn import op as sinkhorn
from tile_kernels.mhc.sinkhorn.op import check_steps
from tile_kernels.mhc.sinkhorn.plan import is_near
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_READ = Kernel("tile_kernels.mhc.pre.kernel", "read_from_products", plan_read)


NO_NORM = (None, None, None, 0.0, 0.0)  # arguments of a norm and a cast, which these have not
NUM_KEPT = 5  # results for gradients: mixes, `mul`, `s`, `pre` and logits


def check_mixes(a: Any, m: int) -> None:
    """Checks what computes the mixes of `m` streams from their projection."""
    shapes.parameter("mhc_scale", a.mhc_scale, 3)
    shapes.parameter("mhc_base", a.mhc_base, m * (m + 2))
    checks.epsilon("mhc_pre_eps", a.mhc_pre_eps)
    checks.number("mhc_post_mult_value", a.mhc_post_mult_value)
    check_steps(a.sinkhorn_repeat, a.mhc_sinkhorn_eps, "sinkhorn_repeat", "mhc_sinkhorn_eps")


def read_arguments(
    a: Any,
    read: tuple[Any, Any, Any],
    results: tuple[Any, Any, Any],
    fold: Any,
    kept: Sequence[Any] = (None,) * NUM_KEPT,
    norm: tuple[Any, ...] = NO_NORM,
) -> tuple[Any, ...]:
    """The arguments of the kernel that reads the streams, for all operators that launch it.

    `read` are the streams, their products and squares, `results` `post`, `comb` and layer input;
    `fold` the leaves of a part, 0 for parts of a projection from elsewhere.
    """
    return (
        *read, a.mhc_scale, a.mhc_base, *results, *kept, float(a.rms_eps), float(a.mhc_pre_eps),
        float(a.mhc_sinkhorn_eps), float(a.mhc_post_mult_value), a.sinkhorn_repeat, fold, *norm,
    )  # fmt: skip


# ---- both ---------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    residual: Tensor
    fn: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    rms_eps: float
    mhc_pre_eps: float
    mhc_sinkhorn_eps: float
    mhc_post_mult_value: float
    sinkhorn_repeat: int

    def check(self) -> None:
        check_inputs(self.residual, self.fn, self.rms_eps, name="rms_eps")
        m = self.residual.shape[-2]
        count = m * (m + 2)
        if self.fn.shape[0] != count:
            raise ValueError(f"fn must have {count} rows for {m} streams, got {self.fn.shape[0]}")
        check_mixes(self, m)

    def outputs(self) -> tuple[Out, Out, Out, Out, Out, Out, Out, Out]:
        """With what gradients need."""
        *leading, m, _ = self.residual.shape
        return (
            *_results(self),
            Out("pre_mix", (*leading, m, 1), torch.float32),
            Out("mixes", (*leading, m * (m + 2)), torch.float32),
            Out("mul", (*leading, m * (m + 2)), torch.float32),
            Out("s", leading, torch.float32),
            Out("logits", (*leading, m, m), torch.float32),
        )

    def launches(self, *outs: Spec) -> list[Launch]:
        *results, pre, mixes, mul, s, logits, split_mul, split_squares = outs
        return _launches(self, results, (mixes, mul, s, pre, logits), split_mul, split_squares)

    def scratch(self) -> tuple[Out, ...]:
        return product_scratch(self)


def _results(a: Arguments) -> tuple[Out, Out, Out]:
    """Layer input, `post` and `comb`."""
    *leading, m, h = a.residual.shape
    return (
        Out("layer_input", (*leading, h), torch.bfloat16),
        Out("post_mix", (*leading, m, 1), torch.float32),
        Out("comb_mix", (*leading, m, m), torch.float32),
    )


def _launches(
    a: Arguments, results: Sequence[Spec], saved: Sequence[Spec], mul: Spec, squares: Spec
) -> list[Launch]:
    """`saved`: mixes, `mul`, `s`, `pre` and logits for the gradients, or nothing."""
    if a.residual.numel() == 0:
        return []
    m, h = a.residual.shape[-2:]
    count = m * (m + 2)
    residual, layer_input = shapes.rows(a.residual, m, h), shapes.rows(results[0], h)
    post, comb = shapes.rows(results[1], m, 1), shapes.rows(results[2], m, m)
    sizes = ((count,), (count,), (), (m, 1), (m, m))
    kept: list[Any] = [None] * NUM_KEPT
    if saved:
        kept = [shapes.rows(x, *last) for x, last in zip(saved, sizes)]
    problem = (
        m, h, NUM_TOKENS, alignment(residual, layer_input), padded(count),
        is_near(a.mhc_sinkhorn_eps), bool(saved),
    )  # fmt: skip
    read = residual, mul, squares
    arguments = read_arguments(a, read, (post, comb, layer_input), FOLD, kept)
    return [launch_products(a, mul, squares), Launch(_READ, problem, arguments)]


# ---- without gradients --------------------------------------------------------------------------


def outputs_big_fuse(a: Arguments) -> tuple[Out, Out, Out]:
    layer_input, post, comb = _results(a)
    return post, comb, layer_input


def launches_big_fuse(
    a: Arguments, post: Spec, comb: Spec, layer_input: Spec, mul: Spec, squares: Spec
) -> list[Launch]:
    return _launches(a, (layer_input, post, comb), (), mul, squares)


def cost_big_fuse(residual: Tensor, fn: Tensor, **_: Any) -> Cost:
    m = residual.shape[-2]
    tokens = residual.numel() // fn.shape[1]
    return Cost(
        2 * residual.numel()
        + 4 * fn.numel()
        + 2 * residual.numel() // m
        + 4 * tokens * m * (m + 1),
        2 * residual.numel() * (fn.shape[0] + 2),
    )


MHC_PRE_BIG_FUSE = Operator(
    "mhc.mhc_pre_big_fuse",
    Arguments,
    outputs=outputs_big_fuse,
    launches=launches_big_fuse,
    reference=reference.mhc_pre_big_fuse,
    cost=cost_big_fuse,
    dynamic={"residual": 2},
    instead="tile_kernels.mhc.mhc_pre_fwd",
)


@MHC_PRE_BIG_FUSE.public(reference=reference.mhc_pre_big_fuse)
def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes all that comes before a sublayer, without gradients: its mixes and its input.

    The results have the bits of `mhc_norm_fn_fwd`, `mhc_pre_split_mixes`, `sinkhorn_normalize` and
    `mhc_pre_apply_mix` one after the other, in two launches. `mhc_pre_fwd` is the same with
    gradients.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous; `m` from 1 to 8, `h` a multiple of 8.
        fn: `[m * (m + 2), m * h]`, float32, contiguous.
        mhc_scale: `[3]`, float32, contiguous.
        mhc_base: `[m * (m + 2)]`, float32, contiguous.
        rms_eps: `eps` of `mhc_norm_fn_fwd`.
        mhc_pre_eps: As for `mhc_pre_split_mixes`.
        mhc_sinkhorn_eps: `eps` of `sinkhorn_normalize`.
        mhc_post_mult_value: As for `mhc_pre_split_mixes`.
        sinkhorn_repeat: `repeat` of `sinkhorn_normalize`, at least 1.
        n_splits: At least 1; it has no effect.

    Returns:
        `(post_mix, comb_mix, layer_input)`: `[..., m, 1]`, float32; `[..., m, m]`, float32;
        `[..., h]`, bfloat16; all contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> residual, fn = torch.ones(1, 1, 8).bfloat16(), torch.zeros(3, 8)
        >>> scale, base = torch.ones(3), torch.tensor([0.0, 0.0, 5.0])
        >>> post, comb, layer_input = mhc_pre_big_fuse(
        ...     residual, fn, scale, base, 1e-6, 0.0, 1e-6, 2.0, 3
        ... )
        >>> post.item(), round(comb.item(), 4), layer_input[0, 0].item()
        (1.0, 1.0, 0.5)
    """
    try:
        checks.integer("n_splits", n_splits, 1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"mhc_pre_big_fuse: {error}") from None
    return MHC_PRE_BIG_FUSE(
        residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
        mhc_post_mult_value, sinkhorn_repeat,
    )  # fmt: skip


# ---- with gradients -----------------------------------------------------------------------------


def cost(residual: Tensor, fn: Tensor, **_: Any) -> Cost:
    m = residual.shape[-2]
    tokens = residual.numel() // fn.shape[1]
    projection_cost = cost_big_fuse(residual, fn)
    return Cost(
        projection_cost.bytes + 4 * tokens * (2 * fn.shape[0] + 1 + m * (m + 1)),
        projection_cost.flops,
    )


class BackwardArguments(NamedTuple):
    """With `d_residual` the gradient of the residual is added to it and is no result.

    `pre_mix` to `logits` are results of `mhc_pre_fwd`.
    """

    d_layer_input: Tensor
    d_post: Tensor
    d_comb: Tensor
    residual: Tensor
    fn: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    pre_mix: Tensor
    mixes: Tensor
    mul: Tensor
    s: Tensor
    logits: Tensor
    rms_eps: float
    mhc_sinkhorn_eps: float
    mhc_post_mult_value: float
    sinkhorn_repeat: int
    d_residual: Tensor | None

    def check(self) -> None:
        d_pre, d_mixes = self.pre_mix, self.mixes  # of the same shapes
        for step in self.steps(d_pre, self.logits, d_mixes, self.d_residual):
            step.check()

    def steps(self, d_pre: Any, d_logits: Any, d_mixes: Any, d_residual: Any) -> tuple[Any, ...]:
        """The arguments of the operators that compute the same one after the other."""
        return (
            apply.BackwardArguments(self.d_layer_input, self.residual, self.pre_mix, d_residual),
            sinkhorn.BackwardArguments(
                self.d_comb, self.logits, self.sinkhorn_repeat, self.mhc_sinkhorn_eps
            ),
            mix.SplitBackwardArguments(
                d_pre, self.d_post, d_logits, self.mixes, self.mhc_scale, self.mhc_base,
                self.mhc_post_mult_value,
            ),
            norm_fn.BackwardArguments(
                d_mixes, self.residual, self.fn, self.mul, self.s, self.rms_eps, d_residual
            ),
        )  # fmt: skip

    def outputs(self) -> tuple[Out, Out, Out, Out]:
        residual = Out("d_residual", self.residual.shape, torch.bfloat16)
        return residual, *outputs_in_place(self)

    def launches(self, *outs: Spec) -> list[Launch | Host]:
        """Those of the four operators; the first one writes `d_residual`, the last one adds."""
        new = outs[:1] if self.d_residual is None else ()
        total = self.d_residual if self.d_residual is not None else outs[0]
        d_fn, d_scale, d_base, d_pre, d_logits, d_mixes, sums, *products = outs[len(new) :]
        steps = self.steps(d_pre, d_logits, d_mixes, total)
        read = steps[0]._replace(grad_x=self.d_residual)
        launches = (
            read.launches(*new, d_pre),
            steps[1].launches(d_logits),
            *steps[2].launches(d_mixes, d_scale, d_base, sums),
            *steps[3].launches(d_fn, *products),
        )
        return [each for each in launches if each is not None]

    def scratch(self) -> tuple[Out, ...]:
        """The gradients of `pre`, of the logits and of the mixes, and what two operators need."""
        split, norm = self.steps(None, None, None, None)[2:]
        return (
            Out("d_pre", self.pre_mix.shape, torch.float32),
            Out("d_logits", self.logits.shape, torch.float32),
            Out("d_mixes", self.mixes.shape, torch.float32),
            *mix.scratch_backward(split),
            *norm.scratch(),
        )


def outputs_in_place(a: BackwardArguments) -> tuple[Out, Out, Out]:
    return (
        Out("d_fn", a.fn.shape, torch.float32),
        Out("d_scale", a.mhc_scale.shape, torch.float32),
        Out("d_base", a.mhc_base.shape, torch.float32),
    )


def _reference_in_place(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return reference.mhc_pre_bwd(*arguments)[1:]


# The number of tokens is not dynamic: as in `mhc_norm_fn_bwd`.
_BACKWARD = Operator(
    "mhc._mhc_pre_bwd",
    BackwardArguments,
    reference=reference.mhc_pre_bwd,
    serves="mhc_pre_fwd",
)

_BACKWARD_IN_PLACE = Operator(
    "mhc._mhc_pre_bwd_in_place",
    BackwardArguments,
    outputs=outputs_in_place,
    reference=_reference_in_place,
    mutates=("d_residual",),
    serves="mhc_pre_fwd",
)


def pre_gradients(
    saved: Sequence[Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    total: Tensor | None,
    numbers: tuple[float, float, float, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mhc_pre_fwd` from those of layer input, `post` and `comb`.

    `saved` are its four tensors and the last five of its results; `total`, a gradient of the
    residual, is added to in place. `numbers` are `rms_eps`, `mhc_sinkhorn_eps`,
    `mhc_post_mult_value` and `sinkhorn_repeat`. The bits are those of `mhc_pre_apply_mix_bwd`,
    `sinkhorn_normalize_bwd`, `mhc_pre_split_mixes_bwd` and `mhc_norm_fn_bwd`.
    """
    if total is None:
        return _BACKWARD(*grads, *saved, *numbers, None)
    return total, *_BACKWARD_IN_PLACE(*grads, *saved, *numbers, total)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pre) -> None:
    ctx.save_for_backward(*inputs[:4], *output[3:])
    ctx.numbers = inputs[4], *inputs[6:]
    ctx.mark_non_differentiable(*output[3:])


def _backward(
    ctx: Any, d_layer_input: Tensor, d_post: Tensor, d_comb: Tensor, *_: Any
) -> tuple[Any, ...]:
    grads = d_layer_input, d_post, d_comb
    return *pre_gradients(ctx.saved_tensors, grads, None, ctx.numbers), *(None,) * 5


MHC_PRE_FWD = Operator(
    "mhc.mhc_pre_fwd",
    Arguments,
    reference=reference.mhc_pre_fwd,
    cost=cost,
    dynamic={"residual": 2},
    backward=_backward,
    setup_context=_save,
)


@MHC_PRE_FWD.public()
def mhc_pre_fwd(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes all that comes before a sublayer in training: `mhc_pre_big_fuse` with gradients.

    The results have the bits of `mhc_norm_fn_fwd`, `mhc_pre_split_mixes`, `sinkhorn_normalize` and
    `mhc_pre_apply_mix` one after the other, in two launches. Differentiable in the four tensors,
    through `layer_input`, `post_mix` and `comb_mix`, by the gradients of those four operators.

    Args:
        residual: As for `mhc_pre_big_fuse`.
        fn: As for `mhc_pre_big_fuse`.
        mhc_scale: As for `mhc_pre_big_fuse`.
        mhc_base: As for `mhc_pre_big_fuse`.
        rms_eps: As for `mhc_pre_big_fuse`.
        mhc_pre_eps: As for `mhc_pre_big_fuse`.
        mhc_sinkhorn_eps: As for `mhc_pre_big_fuse`.
        mhc_post_mult_value: As for `mhc_pre_big_fuse`.
        sinkhorn_repeat: As for `mhc_pre_big_fuse`.

    Returns:
        `(layer_input, post_mix, comb_mix, pre_mix, mixes, mul, s, logits)`, contiguous, float32
        except `layer_input`, which is bfloat16 `[..., h]`. `post_mix` and `pre_mix` are
        `[..., m, 1]`, `comb_mix` is `[..., m, m]`. `mixes` and `mul`, `[..., m * (m + 2)]`, and
        `s`, `[...]`, are the results of `mhc_norm_fn_fwd`; `logits`, `[..., m, m]`, is `comb` of
        `mhc_pre_split_mixes`.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> residual, fn = torch.ones(1, 1, 8).bfloat16(), torch.zeros(3, 8)
        >>> scale, base = torch.ones(3), torch.tensor([0.0, 0.0, 5.0])
        >>> layer_input, post, comb, pre, *saved = mhc_pre_fwd(
        ...     residual, fn, scale, base, 1e-6, 0.0, 1e-6, 2.0, 3
        ... )
        >>> layer_input[0, 0].item(), pre.item(), [tuple(each.shape) for each in saved]
        (0.5, 0.5, [(1, 3), (1, 3), (1,), (1, 1, 1)])
    """
    return MHC_PRE_FWD(
        residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
        mhc_post_mult_value, sinkhorn_repeat,
    )  # fmt: skip
