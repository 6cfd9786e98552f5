"""The steps around a sublayer as functions: enter, read, write, leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels import mhc
from tile_kernels.mhc.pre.op import pre_gradients
from tile_kernels.modeling.mhc.main_grad import in_float32
from tile_kernels.modeling.mhc.norm_weight import merged
from tile_kernels.modeling.mhc.once import differentiable_once
from tile_kernels.modeling.mhc.post import Computed, MHCPost


class CarriedResidual(NamedTuple):
    """A residual that `mhc_post` takes from `mhc_pre`, so that both share one gradient.

    Attributes:
        residual: The residual again, as a result of `mhc_pre`. A gradient that flows to it passes
            through `mhc_pre`, which adds its own part.
        computed: Whether that gradient is the tensor that `mhc_post` allocated for this purpose, to
            which can be added in place, or a tensor to which others may refer.
    """

    residual: Tensor
    computed: Computed


Mixes = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, CarriedResidual | None]


class Settings(NamedTuple):
    """The numbers of `mhc_pre`."""

    norm_eps: float = 1e-6
    post_mult_value: float = 1.0
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    sinkhorn_repeat: int = 10


class Read(NamedTuple):
    """What comes before a sublayer: its input and mixes; `pre` is None if not asked for."""

    layer_input: Tensor
    pre: Tensor | None
    post: Tensor
    comb: Tensor
    carried: CarriedResidual | None


def _steps(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, settings: Settings
) -> tuple[Tensor, ...]:
    """Layer input, `post`, `comb` and `pre`, and what else the gradients need."""
    return mhc.mhc_pre_fwd(
        residual, fn, scale, base, settings.norm_eps, settings.pre_eps, settings.sinkhorn_eps,
        settings.post_mult_value, settings.sinkhorn_repeat,
    )  # fmt: skip


class _Pre(torch.autograd.Function):
    """All steps before a sublayer: one gradient of the residual, to which each step adds."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        settings: Settings,
        computed: Computed | None,
    ) -> tuple[Tensor, ...]:
        """Layer input, `post`, `comb`, `pre`, and the residual again if it is to be carried."""
        layer_input, post, comb, pre, *kept = _steps(residual, fn, scale, base, settings)
        ctx.save_for_backward(residual, fn, scale, base, pre, *kept)
        ctx.settings, ctx.computed = settings, computed
        ctx.mark_non_differentiable(pre)
        ctx.set_materialize_grads(False)
        results = layer_input, post, comb, pre
        return results if computed is None else (*results, residual)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """In reverse; what came back to the carried residual is what the others add to."""
        saved, settings = ctx.saved_tensors, ctx.settings
        residual, pre, logits = saved[0], saved[4], saved[8]
        grad_input = _or_zeros(grads[0], residual, residual.shape[:-2] + residual.shape[-1:])
        grad_post = _or_zeros(grads[1], pre, pre.shape)
        grad_comb = _or_zeros(grads[2], logits, logits.shape)
        total = grads[4] if ctx.computed is not None else None
        if total is not None and total is not ctx.computed.gradient:  # others may hold it: not ours
            total = total.clone(memory_format=torch.contiguous_format)
        numbers = (
            settings.norm_eps, settings.sinkhorn_eps, settings.post_mult_value,
            settings.sinkhorn_repeat,
        )  # fmt: skip
        input_grads = pre_gradients(saved, (grad_input, grad_post, grad_comb), total, numbers)
        if ctx.computed is not None:
            ctx.computed.gradient = None
        return *input_grads, None, None


def _or_zeros(grad: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_zeros(shape) if grad is None else grad


def read(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    settings: Settings,
    carry: bool,
    with_pre: bool = False,
) -> Read:
    """`mhc_pre`, with the mixes by which the layer input was read."""
    trained = torch.is_grad_enabled() and (
        residual.requires_grad
        or fn.requires_grad
        or scale.requires_grad
        or base.requires_grad
        or (norm_weight is not None and norm_weight.requires_grad)
    )
    fn = merged(("fn", "norm_weight"), fn, norm_weight)
    scale, base = in_float32("scale", scale), in_float32("base", base)
    if not (trained or with_pre):
        post, comb, layer_input = mhc.mhc_pre_big_fuse(
            residual, fn, scale, base, settings.norm_eps, settings.pre_eps, settings.sinkhorn_eps,
            settings.post_mult_value, settings.sinkhorn_repeat,
        )  # fmt: skip
        return Read(layer_input, None, post, comb, None)
    if not trained or torch.compiler.is_compiling():  # no graph can follow who holds a gradient
        layer_input, post, comb, pre, *_ = _steps(residual, fn, scale, base, settings)
        return Read(layer_input, pre, post, comb, None)
    computed = Computed() if carry and residual.requires_grad else None
    layer_input, post, comb, pre, *same = _Pre.apply(residual, fn, scale, base, settings, computed)
    carried = None if computed is None else CarriedResidual(same[0], computed)
    return Read(layer_input, pre, post, comb, carried)


def _check_streams(name: str, residual: Tensor, mhc_mult: int) -> None:
    if residual.dim() < 2 or residual.shape[-2] != mhc_mult:
        raise ValueError(
            f"{name}: residual must be [..., {mhc_mult}, h] for mhc_mult of {mhc_mult}, got "
            f"{list(residual.shape)}"
        )


# ---- public ------------------------------------------------------------------------------------


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """Returns the first residual, in which every stream is a copy of the embedding.

    Args:
        x: `[..., h]`, bfloat16, contiguous.
        mhc_mult: The number of streams `m`.

    Returns:
        `[..., m, h]`, bfloat16.

    Example:
        >>> expand_from_embedding(torch.ones(2, 3, 16).bfloat16()).shape
        torch.Size([2, 3, 4, 16])
    """
    return mhc.expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,  # noqa: ARG001
    fuse_grad_acc: bool = False,
) -> tuple[Tensor, Mixes]:
    """Computes the input of a sublayer, and the mixes with which `mhc_post` writes its output back.

    The mixes are a projection of the RMS norm of all streams, scaled and shifted. `pre` and `post`
    are sigmoids of them, and `comb` is made nearly doubly stochastic. `layer_input` is the sum of
    the streams, weighted by `pre`. Without gradients one fused operator computes everything, with
    the same bits. Parameters may have `main_grad`: a float32 buffer to which the gradient is added
    instead of `.grad`.

    With `fuse_grad_acc` there are three mixes. The third is for `mhc_post`, to share its gradient
    of the residual, which saves a gradient and an addition. Results are correct whoever else reads
    the residual. It is None where there is nothing to share.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous; `h` is a multiple of 8.
        fn: `[m * (m + 2), m * h]`, float32.
        scale: `[3]`, float32: the factors of pre, post and comb.
        base: `[m * (m + 2)]`, float32.
        norm_weight: `[m * h]`, float32, or None.
        norm_eps: The epsilon of the norm before the projection.
        mhc_mult: The number of streams `m`, in `1..8`.
        post_mult_value: The factor of the sigmoid of `post`.
        pre_eps: A number that is added to `pre`.
        sinkhorn_eps: The epsilon of the Sinkhorn iteration.
        sinkhorn_repeat: The number of its iterations.
        n_splits: Has no effect: the sizes and the device decide.
        fuse_grad_acc: Whether `mhc_post` shares its gradient of the residual.

    Returns:
        `layer_input` `[..., h]`, bfloat16; and the mixes: `post_mix` `[..., m, 1]` and `comb_mix`
        `[..., m, m]`, float32, with `fuse_grad_acc` then a `CarriedResidual` or None.

    Example:
        >>> residual = torch.randn(5, 2, 16).bfloat16().requires_grad_()
        >>> fn, scale, base = torch.randn(8, 32), torch.ones(3), torch.zeros(8)
        >>> layer_input, mixes = mhc_pre(residual, fn, scale, base, mhc_mult=2)
        >>> out = mhc_post(layer_input.tanh(), residual, *mixes)
        >>> out.sum().backward()
        >>> layer_input.shape, out.shape, residual.grad.shape
        (torch.Size([5, 16]), torch.Size([5, 2, 16]), torch.Size([5, 2, 16]))
    """
    _check_streams("mhc_pre", residual, mhc_mult)
    settings = Settings(norm_eps, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat)
    got = read(residual, fn, scale, base, norm_weight, settings, fuse_grad_acc)
    if fuse_grad_acc:
        return got.layer_input, (got.post, got.comb, got.carried)
    return got.layer_input, (got.post, got.comb)


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    carried: CarriedResidual | None = None,
) -> Tensor:
    """Computes the next residual: it mixes the streams, and adds the output of a sublayer to each.

    The result is `out[j] = post[j] * x + sum_i comb[i, j] * residual[i]`.

    Args:
        x: `[..., h]`, bfloat16, contiguous: the output of the sublayer.
        residual: `[..., m, h]`, bfloat16: the residual that `mhc_pre` was given.
        post_layer_mix: `[..., m, 1]`, float32: the first of the mixes of `mhc_pre`.
        comb_res_mix: `[..., m, m]`, float32: the second of them.
        carried: The third of them with `fuse_grad_acc`, or None.

    Returns:
        `[..., m, h]`, bfloat16.

    Example:
        >>> x, residual = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> post, comb = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> mhc_post(x.bfloat16(), residual.bfloat16(), post, comb).tolist()
        [[12.25, 23.5], [6.75, 12.5]]
    """
    if carried is None:
        return mhc.mhc_post(x, residual, post_layer_mix, comb_res_mix)
    same, computed = carried
    if same.data_ptr() != residual.data_ptr() or same.shape != residual.shape:
        raise ValueError("mhc_post: carried must come from the mhc_pre call of the same residual")
    result: Tensor = MHCPost.apply(x, same, post_layer_mix, comb_res_mix, None, computed)
    return result


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,  # noqa: ARG001
) -> Tensor:
    """Combines the streams into one, weighted by mixes that are computed from the streams.

    Parameters may have `main_grad`, as those of `mhc_pre`.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous.
        fn: `[m, m * h]`, float32; of more rows the first `m` are used.
        scale: `[1]` or `[]`, float32.
        base: `[m]`, float32.
        norm_weight: `[m * h]`, float32, or None.
        norm_eps: The epsilon of the norm before the projection.
        mhc_mult: The number of streams `m`.
        pre_eps: A number that is added to the mixes.
        n_splits: Has no effect: the sizes and the device decide.

    Returns:
        `[..., h]`, bfloat16.

    Example:
        >>> residual = torch.ones(5, 2, 16).bfloat16()
        >>> out = mhc_head(residual, torch.zeros(2, 32), torch.ones(1), torch.zeros(2), mhc_mult=2)
        >>> out.shape, out[0, 0].item()
        (torch.Size([5, 16]), 1.0)
    """
    _check_streams("mhc_head", residual, mhc_mult)
    fn = merged(("fn", "norm_weight"), fn, norm_weight)[:mhc_mult]
    mixes = mhc.mhc_norm_fn_fwd(residual, fn, norm_eps)[0]
    scale = in_float32("scale", scale).reshape(1)
    mix = mhc.mhc_head_compute_mix(mixes, scale, in_float32("base", base), pre_eps)
    return mhc.mhc_pre_apply_mix(residual, mix.unsqueeze(-1))
