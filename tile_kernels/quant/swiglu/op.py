"""SwiGLU and its gradient, alone and with casts along rows (tokens)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import formats, layout
from tile_kernels.quant.storage import GROUPS
from tile_kernels.quant.swiglu import reference
from tile_kernels.quant.swiglu.plan import (
    ALL,
    BACKWARD_GROUPS,
    FMT,
    INDEXED,
    MAX_EXPERTS,
    RANGES,
    SF_CLAMP_RANGE,
    plan,
    plan_backward,
    plan_plain,
    plan_plain_backward,
)
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec, row_alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_GROUPS = Kernel("tile_kernels.quant.swiglu.kernel", "swiglu_groups", plan)
_WHOLE_ROWS = Kernel("tile_kernels.quant.swiglu.kernel", "swiglu_whole_rows", plan)
_BACKWARD = Kernel("tile_kernels.quant.swiglu.kernel", "swiglu_backward", plan_backward)
_PLAIN = Kernel("tile_kernels.quant.swiglu.kernel", "swiglu_plain", plan_plain)
_PLAIN_BACKWARD = Kernel(
    "tile_kernels.quant.swiglu.kernel", "swiglu_plain_backward", plan_plain_backward
)


def _check_halves(x: Tensor) -> None:
    if x.shape[1] == 0 or x.shape[1] % 2:
        raise ValueError(
            f"x must have an even, positive number of channels, gate and value, got {x.shape[1]}"
        )


def _check_positions(name: str, value: Tensor, rows: int) -> None:
    checks.tensor(name, value, ("num_positions",), torch.int32, shape=(rows,), contiguous=True)


def _check_weights(name: str, value: Tensor) -> None:
    checks.tensor(name, value, ("num_tokens", "num_topk"), torch.float32, contiguous=True)


def _only_in_range(index: Tensor, weights: Tensor) -> Tensor:
    """An index for the reference, which takes no value beyond the weights: -1 instead."""
    return index.masked_fill(index >= weights.numel(), -1)


# ---- forward ------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    pos_to_token_topk: Tensor | None
    topk_weights: Tensor | None
    pos_to_expert: Tensor | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    swiglu_clamp_value: float | None
    clamped_count: Tensor | None
    sf_clamp_min: float | None

    def check(self) -> None:
        layout.check_plain(self.x)
        _check_halves(self.x)
        rows, hidden = self.x.shape[0], self.x.shape[1] // 2
        checks.one_of("fmt", self.fmt, (FMT,))
        checks.integer("num_per_channels", self.num_per_channels, 1)
        if self.num_per_channels not in GROUPS and self.num_per_channels != hidden:
            allowed = ", ".join(map(str, GROUPS))
            raise ValueError(
                f"num_per_channels must be {allowed} or half the row width {hidden}, "
                f"got {self.num_per_channels}"
            )
        layout.check_flags(self)
        if self.pos_to_token_topk is not None:
            _check_positions("pos_to_token_topk", self.pos_to_token_topk, rows)
            if self.topk_weights is None:
                raise ValueError("topk_weights must be given with pos_to_token_topk, got None")
        if self.topk_weights is not None:
            _check_weights("topk_weights", self.topk_weights)
        if self.pos_to_expert is not None:
            _check_positions("pos_to_expert", self.pos_to_expert, rows)
        layout.check_swiglu_clamp(self.swiglu_clamp_value)
        if self.sf_clamp_min is not None:
            checks.number("sf_clamp_min", self.sf_clamp_min)
            if not SF_CLAMP_RANGE[0] <= self.sf_clamp_min <= SF_CLAMP_RANGE[1]:
                raise ValueError(
                    f"sf_clamp_min must be in 2**-119..2**127, so that scales and their inverses "
                    f"are finite, got {self.sf_clamp_min}"
                )
        if self.clamped_count is not None:
            checks.tensor(
                "clamped_count",
                self.clamped_count,
                ("3",),
                torch.int64,
                shape=(3,),
                contiguous=True,
            )
            if self.swiglu_clamp_value is None:
                raise ValueError(
                    "clamped_count counts what swiglu_clamp_value changes, which is None"
                )

    def outputs(self) -> tuple[Out, Out]:
        shape = (self.x.shape[0], self.x.shape[1] // 2)
        return layout.cast_outs(self, FMT, shape, (1, self.num_per_channels))

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        weights = None
        if self.pos_to_token_topk is not None and self.topk_weights is not None:
            weights = self.topk_weights.view(-1)
        scale_layout = layout.layout_of(self)
        problem = (
            layout.SOURCES[self.x.dtype], self.x.shape[1] // 2, self.num_per_channels, scale_layout,
            self.round_sf, weights is not None, self.pos_to_expert is not None,
            self.swiglu_clamp_value is not None, self.clamped_count is not None,
            row_alignment(self.x), row_alignment(out),
        )  # fmt: skip
        sf_clamp_min = (
            formats.E4M3.clamp_min if self.sf_clamp_min is None else float(self.sf_clamp_min)
        )
        arguments = (
            self.x, self.pos_to_token_topk, weights, self.pos_to_expert, out, out_sf,
            self.clamped_count, layout.swiglu_clamp(self.swiglu_clamp_value), sf_clamp_min,
        )  # fmt: skip
        kernel = _GROUPS if self.num_per_channels in GROUPS else _WHOLE_ROWS
        return Launch(kernel, problem, arguments)

    def check_values(self) -> None:
        """Every index is that of a weight, or -1."""
        if self.pos_to_token_topk is not None and self.topk_weights is not None:
            last = self.topk_weights.numel() - 1
            checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, last)


def _reference(*args: Any) -> QuantTensor:
    a = Arguments(*args)
    if a.pos_to_token_topk is not None and a.topk_weights is not None:
        index = _only_in_range(a.pos_to_token_topk, a.topk_weights)
        a = a._replace(pos_to_token_topk=index)
    return reference.swiglu_forward_and_per_token_cast(*a)


def cost(x: Tensor, fmt: str, num_per_channels: int, use_packed_ue8m0: bool, **_: Any) -> Cost:
    """`x`, the data and the scales; the index and the weights are small."""
    shape = (x.shape[0], x.shape[1] // 2)
    return layout.cast_cost(x, fmt, shape, (1, num_per_channels), use_packed_ue8m0)


_forward_operator = functools.partial(
    layout.cast_operator,
    reference.swiglu_forward_and_per_token_cast,
    Arguments,
    cost,
    by_fields=_reference,
    instead=layout.SWIGLU_INSTEAD,
    dynamic={"x": 1, "pos_to_token_topk": 0, "topk_weights": 1, "pos_to_expert": 0},
)
SWIGLU_FORWARD_AND_PER_TOKEN_CAST = _forward_operator()
# With a `clamped_count`: the dispatcher has no optional argument that is written.
_SWIGLU_FORWARD_AND_COUNT = _forward_operator(
    name="_swiglu_forward_and_count",
    mutates=("clamped_count",),
    serves="swiglu_forward_and_per_token_cast",
)


@SWIGLU_FORWARD_AND_PER_TOKEN_CAST.public(
    reference=reference.swiglu_forward_and_per_token_cast, mutates=("clamped_count",)
)
def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """SwiGLU of rows, times the weights of their experts, and its float32 result to e4m3.

    The activation is `(l / (1 + exp(-l))) * r` in float32, with `l` the gate and `r` the value,
    times the weight if there is an index. It is cast as `per_token_cast` does it; a group's largest
    magnitude counts as at least `sf_clamp_min`.

    With a clamp value `c`, first `l = min(l, c)` and `r = min(max(r, -c), c)`; the numbers of
    `l > c`, `r > c` and `r < -c` are added to `clamped_count`.

    A padding row is not read and not counted; its data and scales are zero. An index that is
    negative, or beyond the weights, means weight 0. Weights without an index are ignored. Not
    differentiable: see `tile_kernels.modeling.quant.swiglu_cast`.

    Args:
        x: `[num_positions, 2 * hidden]`, gate then value, bfloat16 or float32, any row stride.
        fmt: `"e4m3"`.
        num_per_channels: Channels of a scale: 16, 32, 64, 128, or `hidden`.
        pos_to_token_topk: `[num_positions]`, int32: the index of the row's weight among all
            weights, or -1; or None for no weights.
        topk_weights: `[num_tokens, num_topk]`, float32, contiguous; or None.
        pos_to_expert: `[num_positions]`, int32: the row's expert, negative for padding; or None for
            no padding.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: As in `per_token_cast`.
        swiglu_clamp_value: The clamp value, at least 0, or None.
        clamped_count: `[3]`, int64, added to in place; or None.
        sf_clamp_min: `2**-119` to `2**127`, by default 1e-4.
        out: Buffers `(data, scales)` that are filled and returned.

    Returns:
        `(data, scales)`: `[num_positions, hidden]` float8_e4m3fn, and `[num_positions, groups]`
        float32, or int32 if packed, laid out as `per_token_cast` returns them.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these; in the checked mode also if
            an index is not -1 and not that of a weight.

    Example:
        >>> x = torch.tensor([[1.0, -2.0, 12.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
        >>> expert = torch.tensor([3, -1], dtype=torch.int32)
        >>> data, scales = swiglu_forward_and_per_token_cast(
        ...     x, "e4m3", 2, pos_to_expert=expert, round_sf=True
        ... )
        >>> data.float().tolist(), scales.tolist()
        ([[288.0, -22.0], [0.0, 0.0]], [[0.03125], [0.0]])
    """
    counting = clamped_count is not None
    cast = _SWIGLU_FORWARD_AND_COUNT if counting else SWIGLU_FORWARD_AND_PER_TOKEN_CAST
    return cast(
        x, fmt, num_per_channels, pos_to_token_topk, topk_weights, pos_to_expert,
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, swiglu_clamp_value, clamped_count,
        sf_clamp_min, out=out,
    )  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    grad_out: Tensor
    weight: Tensor
    pos_to_token_topk: Tensor
    token_topk_to_pos: Tensor
    num_per_channels: int
    round_sf: bool
    swiglu_clamp_value: float | None

    def check(self) -> None:
        layout.check_pair(self.x, self.x_sf)
        dims = ("num_positions", "channels")
        checks.tensor("x", self.x, dims, torch.float8_e4m3fn, contiguous=True)
        _check_halves(self.x)
        rows, hidden = self.x.shape[0], self.x.shape[1] // 2
        checks.integer("num_per_channels", self.num_per_channels, 1)
        checks.one_of("num_per_channels", self.num_per_channels, BACKWARD_GROUPS)
        if hidden % self.num_per_channels:
            raise ValueError(
                f"num_per_channels must divide half the row width, {hidden}, "
                f"got {self.num_per_channels}"
            )
        groups = 2 * hidden // self.num_per_channels
        checks.tensor(
            "x_sf", self.x_sf, ("num_positions", "groups"), torch.float32, shape=(rows, groups),
            contiguous=True,
        )  # fmt: skip
        checks.tensor(
            "grad_out", self.grad_out, ("num_positions", "hidden"), torch.bfloat16, shape=(rows,
            hidden), contiguous=True,
        )  # fmt: skip
        _check_weights("weight", self.weight)
        _check_positions("pos_to_token_topk", self.pos_to_token_topk, rows)
        checks.tensor(
            "token_topk_to_pos", self.token_topk_to_pos, ("num_tokens", "num_topk"), torch.int32,
            shape=tuple(self.weight.shape), contiguous=True,
        )  # fmt: skip
        checks.boolean("round_sf", self.round_sf)
        layout.check_swiglu_clamp(self.swiglu_clamp_value)

    def outputs(self) -> tuple[Out, Out, Out, Out, Out]:
        return (
            Out("out", self.grad_out.shape, torch.bfloat16),
            Out("x_grad_fp8", self.x.shape, torch.float8_e4m3fn),
            Out("x_grad_sf", self.x_sf.shape, torch.float32),
            Out("x_grad", self.x.shape, torch.bfloat16),
            Out("weight_grad", self.weight.shape, torch.float32),
        )

    def launches(
        self,
        out: Spec,
        x_grad_fp8: Spec,
        x_grad_sf: Spec,
        x_grad: Spec,
        weight_grad: Spec,
    ) -> Launch | Host:
        if self.x.numel() == 0:
            return Host(Tensor.zero_, (weight_grad,))
        problem = (
            self.x.shape[1] // 2, self.num_per_channels, self.round_sf, self.swiglu_clamp_value is
            not None, row_alignment(self.x), row_alignment(self.grad_out), row_alignment(out),
            row_alignment(x_grad_fp8), row_alignment(x_grad),
        )  # fmt: skip
        arguments = (
            self.x, self.x_sf, self.grad_out, self.weight.view(-1), self.pos_to_token_topk,
            self.token_topk_to_pos.view(-1), out, x_grad_fp8, x_grad_sf, x_grad,
            weight_grad.view(-1), layout.swiglu_clamp(self.swiglu_clamp_value),
            formats.E4M3.clamp_min,
        )  # fmt: skip
        return Launch(_BACKWARD, problem, arguments)

    def check_values(self) -> None:
        """The maps stay within bounds and are inverses of each other."""
        checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, self.weight.numel() - 1)
        checks.in_range("token_topk_to_pos", self.token_topk_to_pos, -1, self.x.shape[0] - 1)
        to_weight = ("pos_to_token_topk", self.pos_to_token_topk)
        to_row = ("token_topk_to_pos", self.token_topk_to_pos)
        _check_inverse(*to_weight, *to_row)
        _check_inverse(*to_row, *to_weight)


def _check_inverse(name: str, value: Tensor, inverse_name: str, inverse: Tensor) -> None:
    """What an element of `value` names, in `inverse`, names that element; -1 names nothing."""
    position = torch.arange(value.numel(), device=value.device).view(value.shape)
    named = (value >= 0).nonzero(as_tuple=True)
    bad = inverse.view(-1)[value[named].long()] != position[named]
    if bad.any():
        where = [int(index[bad][0]) for index in named]
        found = int(value[tuple(where)])
        back = int(inverse.view(-1)[found])
        raise ValueError(
            f"{name} must be the inverse of {inverse_name}, but element {where} is {found}, which "
            f"{inverse_name} maps to {back}"
        )


def _backward_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, x_sf, grad_out, weight, index, *rest = args
    index = _only_in_range(index, weight)
    out, (data, sf), x_grad, weight_grad = reference.swiglu_backward_and_per_token_cast(
        (x, x_sf), grad_out, weight, index, *rest
    )
    return out, data, sf, x_grad, weight_grad


def backward_cost(x: QuantTensor, weight: Tensor, **_: Any) -> Cost:
    """Every argument once, every result once."""
    data, sf = x
    rows = data.numel() // data.shape[-1]
    return Cost(bytes=6 * data.numel() + 8 * sf.numel() + 4 * rows + 12 * weight.numel())


SWIGLU_BACKWARD_AND_PER_TOKEN_CAST = Operator(
    "quant.swiglu_backward_and_per_token_cast",
    BackwardArguments,
    reference=_backward_reference,
    cost=backward_cost,
    dynamic={
        "x": 1,
        "x_sf": 1,
        "grad_out": 1,
        "weight": 1,
        "pos_to_token_topk": 0,
        "token_topk_to_pos": 1,
    },
    out=("out", "x_grad_fp8", "x_grad_sf", "x_grad", "weight_grad"),
)


def _as_rows(x: Tensor, dims: int) -> Tensor:
    """All leading dimensions as one, if there are `dims` dimensions."""
    return x.flatten(0, -2) if x.dim() == dims else x


@SWIGLU_BACKWARD_AND_PER_TOKEN_CAST.public(reference=reference.swiglu_backward_and_per_token_cast)
def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    out: tuple[Any, ...] | None = None,
) -> tuple[Tensor, QuantTensor, Tensor, Tensor]:
    """Weighted SwiGLU of a quantized `x` again, and its gradients; that of `x` also in e4m3.

    With `l` and `r` the halves of a dequantized row, clamped as in
    `swiglu_forward_and_per_token_cast`, `s = 1 / (1 + exp(-l))`, `g` the row of `grad_out` and `w`
    its weight:

    - `act = (l / (1 + exp(-l))) * r`, `out = act * w`;
    - with `q = (g * w) * s`, the halves of the gradient are `(q * r) * fma(l, 1 - s, 1)` and
      `q * l`, and 0 where the clamp changed `l` or `r`;
    - `weight_grad` is the sum of `g * act` over the row of that weight, in a fixed order.

    All in float32. `x_grad` is the gradient rounded to bfloat16, `x_grad_fp8` the float32 gradient
    cast as `per_token_cast` does it.

    A row whose index is -1 has weight 0: its results are zeros with the signs of the formulas. So
    has one whose index is beyond the weights. `weight_grad` is 0 for a weight without a row, and
    for one whose row does not have its index. Not differentiable.

    Args:
        x: `(data, scales)`: `[num_positions, 2 * hidden]` float8_e4m3fn, gate then value, and
            `[num_positions, 2 * hidden / num_per_channels]` float32. `x` and `grad_out` may have
            more leading dimensions; results have one. All tensors are contiguous.
        grad_out: `[num_positions, hidden]`, bfloat16.
        weight: `[num_tokens, num_topk]`, float32.
        pos_to_token_topk: `[num_positions]`, int32: the index of the row's weight among all
            weights, or -1.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32: the inverse, -1 for none.
        num_per_channels: Channels of a scale: 32 or 128, a divisor of `hidden`.
        round_sf: Takes the next power of two as scale of the result.
        swiglu_clamp_value: The clamp value, at least 0, or None.
        out: Buffers as they are returned, or five tensors in that order; filled and returned.

    Returns:
        `(out, (x_grad_fp8, x_grad_sf), x_grad, weight_grad)`: `[num_positions, hidden]` bfloat16;
        data and scales like `x`; `[num_positions, 2 * hidden]` bfloat16; `[num_tokens, num_topk]`
        float32. All are contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs; `x_sf` names the scales of `x`.
        ValueError: If a shape, a layout or a value is not one of these; in the checked mode also if
            the maps leave their bounds or are not inverses of each other.

    Example:
        >>> x = torch.zeros(1, 64), torch.ones(1, 2)
        >>> x[0][:, 0], x[0][:, 32] = 1.0, 3.0
        >>> index = torch.zeros(1, 1, dtype=torch.int32)
        >>> out, (data, sf), x_grad, weight_grad = swiglu_backward_and_per_token_cast(
        ...     (x[0].to(torch.float8_e4m3fn), x[1]), torch.ones(1, 32).bfloat16(),
        ...     torch.tensor([[2.0]]), index[0], index, 32, round_sf=True
        ... )
        >>> out[0, 0].item(), x_grad[0, ::32].tolist(), (data.float()[0, ::32] * sf).tolist()
        (4.375, [5.5625, 1.4609375], [[5.5, 1.5]])
    """
    data, sf = layout.pair(x)
    if sf is not None and data.dim() > 2 and isinstance(grad_out, Tensor):
        data, sf, grad_out = (_as_rows(part, data.dim()) for part in (data, sf, grad_out))
    if isinstance(out, (tuple, list)) and len(out) == 4 and isinstance(out[1], (tuple, list)):
        out = (out[0], *out[1], *out[2:])
    activation, codes, scales, x_grad, weight_grad = SWIGLU_BACKWARD_AND_PER_TOKEN_CAST(
        data, sf, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels,
        round_sf, swiglu_clamp_value, out=out,
    )  # fmt: skip
    return activation, (codes, scales), x_grad, weight_grad


# ---- without a cast -----------------------------------------------------------------------------


def _check_clamp_value(value: float | None) -> None:
    if value is not None and not checks.number("clamp_value", value) >= 0:
        raise ValueError(f"clamp_value must be at least 0, or None, got {value}")


def _check_rows(a: PlainArguments | PlainBackwardArguments) -> None:
    """What says which rows exist, and their weights."""
    rows = a.x.shape[0]
    checks.integer("alignment", a.alignment, 1, checks.MOST_SIZE)
    if a.psum_num_tokens_per_expert is not None:
        checks.tensor(
            "psum_num_tokens_per_expert", a.psum_num_tokens_per_expert, ("num_experts",),
            torch.int32, contiguous=True,
        )  # fmt: skip
        if not 1 <= len(a.psum_num_tokens_per_expert) <= MAX_EXPERTS:
            raise ValueError(
                f"psum_num_tokens_per_expert must have 1..{MAX_EXPERTS} experts, got "
                f"{len(a.psum_num_tokens_per_expert)}"
            )
    if a.pos_to_token_topk is not None:
        if a.psum_num_tokens_per_expert is not None:
            raise ValueError(
                "pos_to_token_topk must be None with psum_num_tokens_per_expert: both say which "
                "rows exist"
            )
        if a.topk_weights is None:
            raise ValueError("topk_weights must be given with pos_to_token_topk, got None")
        _check_positions("pos_to_token_topk", a.pos_to_token_topk, rows)
        _check_weights("topk_weights", a.topk_weights)
    elif a.topk_weights is not None:
        checks.tensor(
            "topk_weights", a.topk_weights, ("num_positions",), torch.float32, shape=(rows,),
            contiguous=True,
        )  # fmt: skip
    if a.routed_scaling_factor is not None:
        checks.finite("routed_scaling_factor", a.routed_scaling_factor)
        if a.topk_weights is None:
            raise ValueError(
                "routed_scaling_factor must be None without topk_weights, got "
                f"{a.routed_scaling_factor}"
            )
    _check_clamp_value(a.clamp_value)


def _which_rows(a: PlainArguments | PlainBackwardArguments) -> str:
    if a.pos_to_token_topk is not None:
        return INDEXED
    return ALL if a.psum_num_tokens_per_expert is None else RANGES


def _scalars(a: PlainArguments | PlainBackwardArguments) -> tuple[int, float, float]:
    factor = 1.0 if a.routed_scaling_factor is None else float(a.routed_scaling_factor)
    return a.alignment, factor, layout.swiglu_clamp(a.clamp_value)


class PlainArguments(NamedTuple):
    x: Tensor
    fmt: str
    psum_num_tokens_per_expert: Tensor | None
    topk_weights: Tensor | None
    routed_scaling_factor: float | None
    clamp_value: float | None
    alignment: int
    pos_to_token_topk: Tensor | None

    def check(self) -> None:
        layout.check_plain(self.x)
        _check_halves(self.x)
        checks.one_of("fmt", self.fmt, tuple(layout.OUT_DTYPES))
        _check_rows(self)

    def outputs(self) -> Out:
        shape = (self.x.shape[0], self.x.shape[1] // 2)
        return Out("out", shape, layout.OUT_DTYPES[self.fmt])

    def launches(self, out: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        weights = None if self.topk_weights is None else self.topk_weights.view(-1)
        problem = (
            layout.SOURCES[self.x.dtype], layout.SOURCES[out.dtype], self.x.shape[1] // 2,
            _which_rows(self), weights is not None, self.clamp_value is not None,
            row_alignment(self.x), row_alignment(out),
        )  # fmt: skip
        arguments = (
            self.x, self.pos_to_token_topk, weights, self.psum_num_tokens_per_expert, out,
            *_scalars(self),
        )  # fmt: skip
        return Launch(_PLAIN, problem, arguments)

    def check_values(self) -> None:
        """Every index is that of a weight, or -1."""
        if self.pos_to_token_topk is not None and self.topk_weights is not None:
            last = self.topk_weights.numel() - 1
            checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, last)


def plain_cost(x: Tensor, fmt: str, **_: Any) -> Cost:
    """`x` and the result; the index and the weights are small."""
    written = x.numel() // 2 * layout.OUT_DTYPES[fmt].itemsize
    return Cost(bytes=x.numel() * x.element_size() + written)


def _save_plain(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, _, psum, weights, ctx.factor, ctx.clamp, ctx.alignment, index = inputs
    ctx.save_for_backward(x, psum, weights, index)


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, psum, weights, index = ctx.saved_tensors
    inverse = None
    if index is not None:
        row = torch.arange(len(index), dtype=torch.int32, device=index.device)
        place = index.masked_fill((index < 0) | (index >= weights.numel()), weights.numel())
        inverse = index.new_full((weights.numel() + 1,), -1).scatter(0, place.long(), row)
        inverse = inverse[:-1].view(weights.shape)
    fmt = next(name for name, dtype in layout.OUT_DTYPES.items() if dtype == x.dtype)
    x_grad, weight_grad, _ = SWIGLU_BACKWARD(
        x.contiguous(), grad.to(x.dtype).contiguous(), fmt, psum, weights, ctx.factor, ctx.clamp,
        False, ctx.alignment, index, inverse,
    )  # fmt: skip
    return x_grad, None, None, None if weights is None else weight_grad, None, None, None, None


SWIGLU_FORWARD = Operator(
    "quant.swiglu_forward",
    PlainArguments,
    reference=reference.swiglu_rows_forward,
    cost=plain_cost,
    dynamic={"x": 1, "topk_weights": 0, "pos_to_token_topk": 0},
    out=("out",),
    backward=_plain_backward,
    setup_context=_save_plain,
)


@SWIGLU_FORWARD.public(reference=reference.swiglu_rows_forward)
def swiglu_forward(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    *,
    alignment: int = 128,
    pos_to_token_topk: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """SwiGLU of rows, times the weights of their experts, in float32 and rounded once.

    `((l / (1 + exp(-l))) * r) * w` with `l` the gate and `r` the value; with a clamp value `c`
    first `l = min(l, c)` and `r = min(max(r, -c), c)`. The weight `w` is that of the row times
    `routed_scaling_factor`.

    Rows that do not exist are not read and are zero in the result. All exist unless one of two
    layouts says otherwise: `psum_num_tokens_per_expert` is that of an expanded dispatch
    (`ep.ElasticBuffer`), `pos_to_token_topk` that of `moe.get_fused_mapping`.

    The result is differentiable with respect to `x` and `topk_weights`.

    Args:
        x: `[num_positions, 2 * hidden]`, gate then value, bfloat16 or float32, any row stride.
        fmt: The dtype of the result: `"bf16"` or `"fp32"`.
        psum_num_tokens_per_expert: `[num_experts]`, int32, ascending, or None: the rows of expert
            `e` start where those of `e - 1` end, rounded up to the alignment, and end at its
            element.
        topk_weights: `[num_positions]`, float32, contiguous: the weight of each row. With
            `pos_to_token_topk`: `[num_tokens, num_topk]`. Or None for no weights.
        routed_scaling_factor: Multiplies the weights, or None.
        clamp_value: The clamp value, at least 0, or None.
        alignment: That of the rows of an expert; used with `psum_num_tokens_per_expert`.
        pos_to_token_topk: `[num_positions]`, int32: the index of the row's weight among all
            weights; a row with another number does not exist. Or None.
        out: A buffer for the result, which is filled and returned.

    Returns:
        `[num_positions, hidden]`, contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these; in the checked mode also if
            an index is not -1 and not that of a weight.

    Example:
        >>> x = torch.tensor([[1.0, -2.0, 3.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
        >>> ends = torch.tensor([1], dtype=torch.int32)
        >>> swiglu_forward(x, "fp32", ends, torch.tensor([0.5, 1.0]))
        tensor([[ 1.0966, -0.0596],
                [ 0.0000,  0.0000]])
    """
    return SWIGLU_FORWARD(
        x, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value,
        alignment, pos_to_token_topk, out=out,
    )  # fmt: skip


class PlainBackwardArguments(NamedTuple):
    x: Tensor
    act_x_grad: Tensor
    fmt: str
    psum_num_tokens_per_expert: Tensor | None
    topk_weights: Tensor | None
    routed_scaling_factor: float | None
    clamp_value: float | None
    do_recompute: bool
    alignment: int
    pos_to_token_topk: Tensor | None
    token_topk_to_pos: Tensor | None

    def check(self) -> None:
        dims = ("num_positions", "channels")
        checks.tensor("x", self.x, dims, layout.PLAIN, contiguous=True)
        _check_halves(self.x)
        rows, hidden = self.x.shape[0], self.x.shape[1] // 2
        checks.tensor(
            "act_x_grad", self.act_x_grad, ("num_positions", "hidden"), self.x.dtype,
            shape=(rows, hidden), contiguous=True,
        )  # fmt: skip
        checks.one_of("fmt", self.fmt, tuple(layout.OUT_DTYPES))
        _check_rows(self)
        checks.boolean("do_recompute", self.do_recompute)
        if (self.token_topk_to_pos is None) != (self.pos_to_token_topk is None):
            raise ValueError("token_topk_to_pos must be given with pos_to_token_topk, or neither")
        if self.token_topk_to_pos is not None and self.topk_weights is not None:
            checks.tensor(
                "token_topk_to_pos", self.token_topk_to_pos, ("num_tokens", "num_topk"),
                torch.int32, shape=tuple(self.topk_weights.shape), contiguous=True,
            )  # fmt: skip

    def outputs(self) -> tuple[Out, Out, Out]:
        dtype = layout.OUT_DTYPES[self.fmt]
        rows, width = self.x.shape
        weights = (0,) if self.topk_weights is None else self.topk_weights.shape
        return (
            Out("x_grad", self.x.shape, dtype),
            Out("weight_grad", weights, torch.float32),
            Out("act", (rows if self.do_recompute else 0, width // 2), dtype),
        )

    def launches(self, x_grad: Spec, weight_grad: Spec, act: Spec) -> Launch | Host:
        if self.x.numel() == 0:
            return Host(Tensor.zero_, (weight_grad,))
        weighted = self.topk_weights is not None
        inverse = None if self.token_topk_to_pos is None else self.token_topk_to_pos.view(-1)
        problem = (
            layout.SOURCES[self.x.dtype], layout.SOURCES[x_grad.dtype], self.x.shape[1] // 2,
            _which_rows(self), weighted, self.clamp_value is not None, self.do_recompute,
            row_alignment(self.x), row_alignment(self.act_x_grad), row_alignment(act),
            row_alignment(x_grad),
        )  # fmt: skip
        arguments = (
            self.x, self.act_x_grad, self.pos_to_token_topk, inverse,
            None if self.topk_weights is None else self.topk_weights.view(-1),
            self.psum_num_tokens_per_expert, x_grad, weight_grad.view(-1) if weighted else None,
            act if self.do_recompute else None, *_scalars(self),
        )  # fmt: skip
        return Launch(_PLAIN_BACKWARD, problem, arguments)

    def check_values(self) -> None:
        """The maps stay within bounds and are inverses of each other."""
        if self.pos_to_token_topk is None or self.token_topk_to_pos is None:
            return
        weights, rows = self.token_topk_to_pos.numel(), self.x.shape[0]
        checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, weights - 1)
        checks.in_range("token_topk_to_pos", self.token_topk_to_pos, -1, rows - 1)
        to_weight = ("pos_to_token_topk", self.pos_to_token_topk)
        to_row = ("token_topk_to_pos", self.token_topk_to_pos)
        _check_inverse(*to_weight, *to_row)
        _check_inverse(*to_row, *to_weight)


def plain_backward_cost(x: Tensor, fmt: str, do_recompute: bool = False, **_: Any) -> Cost:
    """`x`, the gradient of its activation, and the results; weights and maps are small."""
    half = x.numel() // 2
    written = half * layout.OUT_DTYPES[fmt].itemsize * (3 if do_recompute else 2)
    return Cost(bytes=3 * half * x.element_size() + written)


SWIGLU_BACKWARD = Operator(
    "quant.swiglu_backward",
    PlainBackwardArguments,
    reference=reference.swiglu_rows_gradients,
    cost=plain_backward_cost,
    dynamic={
        "x": 1,
        "act_x_grad": 1,
        "topk_weights": 0,
        "pos_to_token_topk": 0,
        "token_topk_to_pos": 1,
    },
)


@SWIGLU_BACKWARD.public(reference=reference.swiglu_rows_backward)
def swiglu_backward(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    *,
    alignment: int = 128,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of `swiglu_forward` with respect to `x` and the weights.

    With `l` and `r` the clamped halves of a row, `s = 1 / (1 + exp(-l))`, `g` its row of
    `act_x_grad` and `w` its weight times the factor, the halves of the gradient are
    `(q * r) * fma(l, 1 - s, 1)` and `q * l` with `q = (g * w) * s`, and 0 where the clamp changed
    `l` or `r`. The gradient of a weight is the sum of `g * act` over its row, in a fixed order,
    times the factor. All in float32. Rows that do not exist are not read, and their results are 0.

    Args:
        x, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value,
            alignment, pos_to_token_topk: As in `swiglu_forward`; `x` is contiguous.
        act_x_grad: `[num_positions, hidden]`, dtype of `x`, contiguous.
        do_recompute: Whether the result of `swiglu_forward` is returned as well.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32: the inverse of `pos_to_token_topk`, -1
            for none; with it only. A weight belongs to a row if each map names the other; the
            gradient of one without a row is 0.

    Returns:
        `(x_grad,)`: `[num_positions, 2 * hidden]`; with weights then `weight_grad`: float32, of
        their shape; with `do_recompute` then `act`: `[num_positions, hidden]`. Contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these; in the checked mode also if
            the maps leave their bounds or are not inverses of each other.

    Example:
        >>> x, g = torch.tensor([[1.0, 3.0]]), torch.ones(1, 1)
        >>> swiglu_backward(x, g, "fp32", None, torch.tensor([2.0]), do_recompute=True)
        (tensor([[5.5660, 1.4621]]), tensor([2.1932]), tensor([[4.3864]]))
    """
    x_grad, weight_grad, act = SWIGLU_BACKWARD(
        x, act_x_grad, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
        clamp_value, do_recompute, alignment, pos_to_token_topk, token_topk_to_pos,
    )  # fmt: skip
    weights = () if topk_weights is None else (weight_grad,)
    return (x_grad, *weights, *((act,) if do_recompute else ()))
