"""`mhc_post_pre`: all that happens to the streams between two sublayers, for inference.

A kernel writes the next residual and projects it while it is on the chip, a second one reads it for
the input of the sublayer. Where the first kernel does not fit the sizes or the GPU, and for few
tokens, `mhc_post` and the projection are launched one after the other: the bits are the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.norm_fn import op as norm_fn
from tile_kernels.mhc.norm_fn.plan import padded, plan_mixes
from tile_kernels.mhc.post import op as post_op
from tile_kernels.mhc.post_pre import reference
from tile_kernels.mhc.post_pre.plan import (
    FEW_TOKENS,
    HOPPER,
    Division,
    divide,
    fits,
    num_sms,
    padded_mixes,
    plan_write,
    projects_while_writing,
)
from tile_kernels.mhc.pre import op as pre_op
from tile_kernels.mhc.pre.plan import plan_read_normed
from tile_kernels.mhc.sinkhorn.plan import is_near
from tile_kernels.quant import layout
from tile_kernels.quant.norm.plan import MAX_WIDTH
from tile_kernels.quant.storage import GROUPS
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import (
    ALIGNMENT,
    Launch,
    Out,
    Size,
    Spec,
    alignment,
    dtype_name,
)
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.utils import ceil_div

_MODULE = "tile_kernels.mhc.post_pre.kernel"
_CUT = Kernel(_MODULE, "cut_weights", plan_mixes)
_WRITE = Kernel(_MODULE, "write_and_project", plan_write)
_READ = Kernel("tile_kernels.mhc.pre.kernel", "read_from_products", plan_read_normed)


class Arguments(NamedTuple):
    """`num_per_channels` is 0 for a layer input in bfloat16."""

    x: Tensor
    residual: Tensor
    post_layer_mix: Tensor
    comb_res_mix: Tensor
    fn: Tensor
    mhc_scale: Tensor
    mhc_base: Tensor
    rms_eps: float
    mhc_pre_eps: float
    mhc_sinkhorn_eps: float
    mhc_post_mult_value: float
    sinkhorn_repeat: int
    norm_weight: Tensor | None
    norm_eps: float
    num_per_channels: int
    round_sf: bool
    amax_min: float

    def check(self) -> None:
        self.pre(self.residual).check()
        post_op.check(self)
        hidden = self.x.shape[-1]
        if hidden > MAX_WIDTH:
            raise ValueError(f"x must have at most {MAX_WIDTH} columns, got {hidden}")
        if self.norm_weight is not None:
            checks.tensor(
                "norm_weight", self.norm_weight, ("hidden",), layout.PLAIN, shape=(hidden,),
                contiguous=True,
            )  # fmt: skip
        checks.epsilon("norm_eps", self.norm_eps)

    def pre(self, residual: Any) -> pre_op.Arguments:
        """The arguments of `mhc_pre_big_fuse` on what is written."""
        return pre_op.Arguments(
            residual, self.fn, self.mhc_scale, self.mhc_base, self.rms_eps, self.mhc_pre_eps,
            self.mhc_sinkhorn_eps, self.mhc_post_mult_value, self.sinkhorn_repeat,
        )  # fmt: skip

    def outputs(self) -> tuple[Out, Out, Out, Out]:
        return *_streams_and_mixes(self), Out("layer_input", self.x.shape, torch.bfloat16)

    def launches(self, *outs: Spec) -> list[Launch]:
        return self.launches_of(_fits(self), *outs)

    def launches_of(self, at_once: bool, *outs: Spec) -> list[Launch]:
        """`at_once`: streams are written and projected by one kernel."""
        written, post, comb, layer_input, *scratch = outs
        return _launches(self, at_once, (written, post, comb), layer_input, None, None, scratch)

    def scratch(self) -> tuple[Out, ...]:
        """Products and squares in parts; and the weights, cut in two, where kernels are fused."""
        if not _fits(self):
            return norm_fn.product_scratch(self)
        mixes, size = self.fn.shape
        m = self.residual.shape[-2]
        tokens, parts, rows = (
            shapes.count_tokens(self),
            m * _division(self).parts,
            padded_mixes(mixes),
        )
        return (
            Out("mul", (parts, tokens, rows), torch.float32),
            Out("squares", (parts, tokens), torch.float32),
            Out("weights", (2 * rows, size), torch.bfloat16),
        )


def _streams_and_mixes(a: Arguments) -> tuple[Out, Out, Out]:
    *leading, m, _ = a.residual.shape
    return (
        Out("residual", a.residual.shape, torch.bfloat16),
        Out("post_mix", (*leading, m, 1), torch.float32),
        Out("comb_mix", (*leading, m, m), torch.float32),
    )


def _fits(a: Arguments) -> bool:
    return fits(*a.residual.shape[-2:]) and projects_while_writing(a.residual.device)


def _division(a: Any) -> Division:
    return divide(shapes.count_tokens(a), *a.residual.shape[-2:], num_sms(a.residual.device))


_RUN, _FOLD = Size(lambda a: _division(a).run), Size(lambda a: _division(a).fold)


def _launches(
    a: Any, at_once: bool, results: tuple[Spec, Spec, Spec], layer_input: Any, data: Any, sf: Any,
    scratch: list[Spec],
) -> list[Launch]:  # fmt: skip
    if a.residual.numel() == 0:
        return []
    m, h = a.residual.shape[-2:]
    mixes, size = a.fn.shape
    written, post, comb = results
    rows = shapes.rows(written, m, h)
    mul, squares = scratch[:2]
    if at_once:
        weights, width, fold = scratch[2], padded_mixes(mixes), _FOLD
        steps = [
            Launch(_CUT, (mixes, width, size), (shapes.aligned(a.fn), weights)),
            Launch(
                _WRITE, (m, h, width),
                (
                    shapes.aligned(shapes.rows(a.x, h)),
                    shapes.aligned(shapes.rows(a.residual, size)),
                    shapes.rows(a.post_layer_mix, m), shapes.rows(a.comb_res_mix, m * m), weights,
                    shapes.rows(written, size), mul, squares, _RUN, _FOLD,
                ),
            ),
        ]  # fmt: skip
    else:
        width, fold = padded(mixes), norm_fn.FOLD
        first = post_op.launches(a, written)
        steps = [
            *([first] if first else []),
            norm_fn.launch_products(a._replace(residual=written), mul, squares),
        ]
    kinds = ("", ALIGNMENT)
    if a.norm_weight is not None:
        kinds = dtype_name(a.norm_weight), alignment(a.norm_weight)
    outs = [
        None if out is None else shapes.rows(out, out.shape[-1]) for out in (layer_input, data, sf)
    ]
    addresses = [rows, *(out for out in outs[:2] if out is not None)]
    problem = (
        m, h, norm_fn.NUM_TOKENS, alignment(*addresses), width, is_near(a.mhc_sinkhorn_eps), *kinds,
        a.num_per_channels, a.round_sf,
    )  # fmt: skip
    wanted = shapes.rows(post, m, 1), shapes.rows(comb, m, m), outs[0]
    norm = a.norm_weight, outs[1], outs[2], float(a.norm_eps), float(a.amax_min)
    arguments = pre_op.read_arguments(a, (rows, mul, squares), wanted, fold, norm=norm)
    return [*steps, Launch(_READ, problem, arguments)]


def cost(x: Tensor, residual: Tensor, fn: Tensor, num_per_channels: int = 0, **_: Any) -> Cost:
    tokens, m = x.numel() // x.shape[-1], residual.shape[-2]
    wrote = (
        2 * x.numel() if num_per_channels == 0 else x.numel() + 4 * x.numel() // num_per_channels
    )
    return Cost(
        # What is written is read again: the mixes of a token depend on all of its streams.
        bytes=2 * x.numel()
        + 6 * residual.numel()
        + wrote
        + 4 * fn.numel()
        + 8 * tokens * m * (m + 1),
        flops=2 * residual.numel() * (2 + m + fn.shape[0]),
    )


_DYNAMIC = {"x": 1, "residual": 2, "post_layer_mix": 2, "comb_res_mix": 2}
_TRAINING = "tile_kernels.mhc.mhc_post and mhc_pre_fwd"

MHC_POST_PRE = Operator(
    "mhc.mhc_post_pre",
    Arguments,
    reference=lambda *fields: reference.mhc_post_pre(*fields[:14]),
    cost=cost,
    dynamic=_DYNAMIC,
    archs=(HOPPER,),
    instead=_TRAINING,
)

_FEW = Operator(
    "mhc._mhc_post_pre_of_few_tokens",
    Arguments,
    launches=lambda a, *outs: a.launches_of(False, *outs),
    scratch=norm_fn.product_scratch,
    reference=MHC_POST_PRE.reference,
    cost=cost,
    dynamic=_DYNAMIC,
    archs=(HOPPER,),
    instead=_TRAINING,
    serves="mhc_post_pre",
)


def _is_few(residual: Any) -> bool:
    """Before arguments are checked."""
    return isinstance(residual, Tensor) and math.prod(residual.shape[:-2]) <= FEW_TOKENS


@MHC_POST_PRE.public(reference=reference.mhc_post_pre)
def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes all between two sublayers, without gradients: `mhc_post`, then `mhc_pre_big_fuse`.

    The results have the bits of the two, and of `quant.norm_forward` where there is a norm, but for
    the order of its sum. Up to 4 streams whose columns are a multiple of 256 (of 512 if
    `m * h` is 65536) are projected while they are written: they are read once, written once
    and read once more. Up to 1024 tokens, and on other GPUs than Hopper, the kernels of the two
    operators are launched instead.

    Args:
        x: `[..., h]`, bfloat16, contiguous: the output of the sublayer before; `h` is a multiple of
            8 and at most 16384.
        residual: `[..., m, h]`, bfloat16, contiguous; `m` from 1 to 8.
        post_layer_mix: `[..., m, 1]`, float32, contiguous: the `post_mix` of that sublayer.
        comb_res_mix: `[..., m, m]`, float32, contiguous: its `comb_mix`.
        fn: `[m * (m + 2), m * h]`, float32, contiguous: the projection of the next sublayer.
        mhc_scale: `[3]`, float32, contiguous.
        mhc_base: `[m * (m + 2)]`, float32, contiguous.
        rms_eps: As for `mhc_pre_big_fuse`.
        mhc_pre_eps: As for `mhc_pre_big_fuse`.
        mhc_sinkhorn_eps: As for `mhc_pre_big_fuse`.
        mhc_post_mult_value: As for `mhc_pre_big_fuse`.
        sinkhorn_repeat: As for `mhc_pre_big_fuse`.
        norm_weight: `[h]`, bfloat16 or float32, contiguous: the weight of an RMS norm of the layer
            input, which is rounded to bfloat16 before; None for no norm.
        norm_eps: `eps` of this norm.

    Returns:
        `(residual, post_mix, comb_mix, layer_input)`: `[..., m, h]`, bfloat16; `[..., m, 1]`,
        float32; `[..., m, m]`, float32; `[..., h]`, bfloat16; all new and contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> x, one = torch.ones(1, 8).bfloat16(), torch.ones(1, 1, 1)
        >>> scale, base = torch.ones(3), torch.tensor([0.0, 0.0, 5.0])
        >>> residual, post, comb, layer_input = mhc_post_pre(
        ...     x, x[None], one, one, torch.zeros(3, 8), scale, base, 1e-6, 0.0, 1e-6, 2.0, 3
        ... )
        >>> residual[0, 0, 0].item(), post.item(), layer_input[0, 0].item()
        (2.0, 1.0, 1.0)
    """
    operator = _FEW if _is_few(residual) else MHC_POST_PRE
    return operator(
        x, residual, post_layer_mix, comb_res_mix, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps,
        mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps, 0, False,
        0.0,
    )  # fmt: skip


# ---- with a cast --------------------------------------------------------------------------------


def check_cast(a: Arguments) -> None:
    a.check()
    checks.one_of("num_per_channels", a.num_per_channels, GROUPS)
    checks.boolean("round_sf", a.round_sf)
    layout.check_amax_min(a.amax_min, "e4m3")


def outputs_cast(a: Arguments) -> tuple[Out, Out, Out, Out, Out]:
    *leading, _, h = a.residual.shape
    groups = ceil_div(h, a.num_per_channels)
    return (
        *_streams_and_mixes(a),
        Out("data", (*leading, h), torch.float8_e4m3fn),
        Out("sf", (*leading, groups), torch.float32),
    )


def launches_cast(a: Arguments, *outs: Spec) -> list[Launch]:
    return _launches_cast(a, _fits(a), *outs)


def _launches_cast(a: Arguments, at_once: bool, *outs: Spec) -> list[Launch]:
    written, post, comb, data, sf, *scratch = outs
    return _launches(a, at_once, (written, post, comb), None, data, sf, scratch)


def _cast_reference(*fields: Any) -> tuple[Tensor, ...]:
    *results, (data, sf) = reference.mhc_post_pre_and_per_token_cast(*fields)
    return *results, data, sf


_CAST = Operator(
    "mhc.mhc_post_pre_and_per_token_cast",
    Arguments,
    check=check_cast,
    outputs=outputs_cast,
    launches=launches_cast,
    reference=_cast_reference,
    cost=cost,
    dynamic=_DYNAMIC,
    archs=(HOPPER,),
    instead=_TRAINING,
)

_CAST_FEW = Operator(
    "mhc._mhc_post_pre_and_per_token_cast_of_few_tokens",
    Arguments,
    check=check_cast,
    outputs=outputs_cast,
    launches=lambda a, *outs: _launches_cast(a, False, *outs),
    scratch=norm_fn.product_scratch,
    reference=_cast_reference,
    cost=cost,
    dynamic=_DYNAMIC,
    archs=(HOPPER,),
    instead=_TRAINING,
    serves="mhc_post_pre_and_per_token_cast",
)


@_CAST.public(reference=reference.mhc_post_pre_and_per_token_cast)
def mhc_post_pre_and_per_token_cast(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    num_per_channels: int = 128,
    round_sf: bool = False,
    amax_min: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, QuantTensor]:
    """Computes `mhc_post_pre` with the layer input in e4m3, as a product in FP8 takes it.

    The bits are those of `quant.per_token_cast` of the `layer_input` of `mhc_post_pre`.

    Args:
        x: As for `mhc_post_pre`.
        residual: As for `mhc_post_pre`.
        post_layer_mix: As for `mhc_post_pre`.
        comb_res_mix: As for `mhc_post_pre`.
        fn: As for `mhc_post_pre`.
        mhc_scale: As for `mhc_post_pre`.
        mhc_base: As for `mhc_post_pre`.
        rms_eps: As for `mhc_post_pre`.
        mhc_pre_eps: As for `mhc_post_pre`.
        mhc_sinkhorn_eps: As for `mhc_post_pre`.
        mhc_post_mult_value: As for `mhc_post_pre`.
        sinkhorn_repeat: As for `mhc_post_pre`.
        norm_weight: As for `mhc_post_pre`.
        norm_eps: As for `mhc_post_pre`.
        num_per_channels: Channels per scale: 16, 32, 64 or 128.
        round_sf: Whether scales are rounded up to powers of two.
        amax_min: The least magnitude that a scale is computed from; None for the setting of
            `tile_kernels.config`.

    Returns:
        `(residual, post_mix, comb_mix, (data, sf))`: as `mhc_post_pre`, with the layer input as
        `[..., h]`, float8_e4m3fn, and its scales `[..., ceil(h / num_per_channels)]`, float32;
        all new and contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.

    Example:
        >>> x, one = torch.ones(1, 16).bfloat16(), torch.ones(1, 1, 1)
        >>> scale, base = torch.ones(3), torch.tensor([0.0, 0.0, 5.0])
        >>> *_, (data, sf) = mhc_post_pre_and_per_token_cast(
        ...     x, x[None], one, one, torch.zeros(3, 16), scale, base, 1e-6, 0.0, 1e-6, 2.0, 3,
        ...     num_per_channels=16,
        ... )
        >>> data[0, 0].item(), round(1 / sf.item(), 3)
        (448.0, 448.0)
    """
    operator = _CAST_FEW if _is_few(residual) else _CAST
    written, post, comb, data, sf = operator(
        x, residual, post_layer_mix, comb_res_mix, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps,
        mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps,
        num_per_channels, round_sf, layout.least_amax("e4m3", False, amax_min),
    )  # fmt: skip
    return written, post, comb, (data, sf)
