"""SwiGLU and its gradient, with casts along rows (tokens)."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.swiglu import SWIGLU_BACKWARD_AND_CAST, SWIGLU_FORWARD_AND_CAST
from tile_kernels.quant.layout import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, nonempty, row_alignment
from tile_kernels.runtime.op import face, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import formats
from tile_kernels.torch import quant as oracles
from tile_kernels.utils import ceil_div

GROUPS = (16, 32, 64, 128)
BACKWARD_GROUPS = (32, 128)
# The least bound of magnitudes for which 448 / bound is a float32, and the largest.
LEAST_BOUND, LARGEST_BOUND = 2.0**-119, 2.0**127

_GROUPS = Kernel("tile_kernels.quant.kernels.swiglu", "swiglu_groups")
_WHOLE_ROWS = Kernel("tile_kernels.quant.kernels.swiglu", "swiglu_whole_rows")
_BACKWARD = Kernel("tile_kernels.quant.kernels.swiglu", "swiglu_backward")


def _only_in_range(index: Tensor, weights: Tensor) -> Tensor:
    """An index for the oracle, which takes no value beyond the weights: -1 in its place."""
    return index.masked_fill(index >= weights.numel(), -1)


def _check_halves(x: Tensor) -> None:
    if x.shape[1] == 0 or x.shape[1] % 2:
        raise ValueError(
            f"x must have an even, positive number of channels, gate and value, got {x.shape[1]}"
        )


# ---- forward ------------------------------------------------------------------------------------


def _check_forward(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    swiglu_clamp_value: float | None,
    sf_clamp_min: float | None,
    clamped_count: Tensor | None = None,
) -> None:
    layout.check_plain(x)
    _check_halves(x)
    rows, hidden = x.shape[0], x.shape[1] // 2
    checks.one_of("fmt", fmt, ("e4m3",))
    checks.integer("num_per_channels", num_per_channels, 1)
    if num_per_channels not in GROUPS and num_per_channels != hidden:
        allowed = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"num_per_channels must be {allowed} or half the row width {hidden}, "
            f"got {num_per_channels}"
        )
    layout.check_flags(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if pos_to_token_topk is not None:
        _check_rows("pos_to_token_topk", pos_to_token_topk, rows)
        if topk_weights is None:
            raise ValueError("topk_weights must be given with pos_to_token_topk, got None")
    if topk_weights is not None:
        _check_weights("topk_weights", topk_weights)
    if pos_to_expert is not None:
        _check_rows("pos_to_expert", pos_to_expert, rows)
    layout.check_swiglu_clamp(swiglu_clamp_value)
    if sf_clamp_min is not None:
        checks.number("sf_clamp_min", sf_clamp_min)
        if not LEAST_BOUND <= sf_clamp_min <= LARGEST_BOUND:
            raise ValueError(
                f"sf_clamp_min must be in 2**-119..2**127, so that scales and their inverses are "
                f"finite, got {sf_clamp_min}"
            )
    if clamped_count is not None:
        checks.tensor(
            "clamped_count", clamped_count, ("3",), torch.int64, shape=(3,), contiguous=True
        )
        if swiglu_clamp_value is None:
            raise ValueError("clamped_count counts what swiglu_clamp_value changes, which is None")


def _check_rows(name: str, value: Tensor, rows: int) -> None:
    checks.tensor(name, value, ("num_positions",), torch.int32, shape=(rows,), contiguous=True)


def _check_weights(name: str, value: Tensor) -> None:
    checks.tensor(name, value, ("num_tokens", "num_topk"), torch.float32, contiguous=True)


def _check_index_values(
    x: Tensor,  # noqa: ARG001
    fmt: str,  # noqa: ARG001
    num_per_channels: int,  # noqa: ARG001
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    if pos_to_token_topk is not None and topk_weights is not None:
        checks.in_range(
            "pos_to_token_topk", pos_to_token_topk, -1, topk_weights.numel() - 1
        )  # fmt: skip


def _launch_forward(
    x: Tensor,
    fmt: str,  # noqa: ARG001
    num_per_channels: int,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    swiglu_clamp_value: float | None,
    sf_clamp_min: float | None,
    clamped_count: Tensor | None = None,
    out: Tensor | None = None,
    out_sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, hidden = x.shape[0], x.shape[1] // 2
    how = layout.layout_of(use_tma_aligned_col_major_sf, use_packed_ue8m0)
    out = output("out", out, x, (rows, hidden), torch.float8_e4m3fn)
    groups = ceil_div(hidden, num_per_channels)
    out_sf, scales = layout.scale_buffer("out_sf", out_sf, x, rows, groups, how)
    if not nonempty(x):
        return out, out_sf
    weights = None
    if pos_to_token_topk is not None and topk_weights is not None:
        weights = topk_weights.view(-1)
    problem = (
        layout.SOURCES[x.dtype], hidden, num_per_channels, how, round_sf, weights is not None,
        pos_to_expert is not None, swiglu_clamp_value is not None, clamped_count is not None,
        row_alignment(x), row_alignment(out),
    )  # fmt: skip
    kernel = _GROUPS if num_per_channels in GROUPS else _WHOLE_ROWS
    kernel.launch(
        problem, x, pos_to_token_topk, weights, pos_to_expert, out, scales, clamped_count,
        math.inf if swiglu_clamp_value is None else float(swiglu_clamp_value),
        formats.E4M3.clamp_min if sf_clamp_min is None else float(sf_clamp_min),
    )  # fmt: skip
    return out, out_sf


def _oracle_forward(*args: Any, **kwargs: Any) -> QuantTensor:
    named = _SIGNATURE.bind(*args, **kwargs).arguments
    index, weights = named["pos_to_token_topk"], named["topk_weights"]
    if index is not None and weights is not None:
        named["pos_to_token_topk"] = _only_in_range(index, weights)
    return oracles.swiglu_forward_and_per_token_cast(**named)


def _cost_forward(x: Tensor, num_per_channels: int, use_packed_ue8m0: bool, **_: Any) -> Cost:
    """`x`, the data and the scales; the index and the weights are small."""
    rows, hidden = x.shape[0], x.shape[1] // 2
    groups = ceil_div(hidden, num_per_channels)
    scales = 4 * rows * (ceil_div(groups, 4) if use_packed_ue8m0 else groups)
    return Cost(bytes=x.numel() * x.element_size() + rows * hidden + scales)


# Two operators behind the public function, as PyTorch wants them: what is written must be given.

_SIGNATURE = inspect.signature(_launch_forward, eval_str=True)
*_INPUTS, _COUNT, _OUT, _OUT_SF = _SIGNATURE.parameters.values()
_GIVEN_COUNT = _COUNT.replace(annotation=Tensor, default=inspect.Parameter.empty)

_forward = op(
    check=_check_forward,
    oracle=_oracle_forward,
    cost=_cost_forward,
    cases=SWIGLU_FORWARD_AND_CAST,
    instead=layout.SWIGLU_INSTEAD,
    outputs=("out", "out_sf"),
    values=_check_index_values,
    name="swiglu_forward_and_per_token_cast",
    signature=_SIGNATURE.replace(parameters=[*_INPUTS, _OUT, _OUT_SF]),
)(_launch_forward)

_forward_and_count = op(
    check=_check_forward,
    oracle=_oracle_forward,
    mutates=("clamped_count",),
    outputs=("out", "out_sf"),
    values=_check_index_values,
    name="_forward_and_count",
    instead=layout.SWIGLU_INSTEAD,
    serves="swiglu_forward_and_per_token_cast",
    signature=_SIGNATURE.replace(parameters=[*_INPUTS, _GIVEN_COUNT, _OUT, _OUT_SF]),
)(_launch_forward)


@face(_forward, oracle=oracles.swiglu_forward_and_per_token_cast, mutates=("clamped_count",))
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

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_positions, 2 * hidden]`: gate, value; any row stride | bfloat16, float32 |
    | `fmt` | | `e4m3` |
    | `num_per_channels` | | 16, 32, 64, 128, or `hidden`: channels of a scale |
    | `pos_to_token_topk` | `[num_positions]`: place of the row's weight | int32 |
    | `topk_weights` | `[num_tokens, num_topk]`, contiguous | float32 |
    | `pos_to_expert` | `[num_positions]`: negative for padding | int32 |
    | `swiglu_clamp_value` | | at least 0, or None |
    | `clamped_count` | `[3]`, added to in place | int64 |
    | `sf_clamp_min` | | `2**-119` to `2**127`, by default 1e-4 |
    | `out` | as returned; filled and returned | |
    | returns data | `[num_positions, hidden]` | float8_e4m3fn |
    | returns scales | `[num_positions, groups]`, as `per_token_cast` has them | float32, int32 |

    With a clamp value `c` first `l = min(l, c)` for the gate and `r = min(max(r, -c), c)` for the
    value; `clamped_count` gets the numbers of `l > c`, `r > c` and `r < -c`. The activation is
    `(l / (1 + exp(-l))) * r`, times the weight if there is an index, in float32. It is cast as
    `per_token_cast` does it; a group's largest magnitude counts as at least `sf_clamp_min`.

    A padding row is not read and not counted; its data and scales are zero. An index that is
    negative, or beyond the weights, means weight 0. Weights without an index are ignored.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> x = torch.tensor([[1.0, -2.0, 12.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    >>> expert = torch.tensor([3, -1], dtype=torch.int32)
    >>> data, scales = swiglu_forward_and_per_token_cast(
    ...     x, "e4m3", 2, pos_to_expert=expert, round_sf=True
    ... )
    >>> data.float().tolist(), scales.tolist()
    ([[288.0, -22.0], [0.0, 0.0]], [[0.03125], [0.0]])
    """
    arguments: list[Any] = [
        x, fmt, num_per_channels, pos_to_token_topk, topk_weights, pos_to_expert,
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, swiglu_clamp_value, sf_clamp_min,
    ]  # fmt: skip
    if clamped_count is not None:
        arguments.append(clamped_count)
    cast = _forward if clamped_count is None else _forward_and_count
    return cast(*arguments, *layout.buffers(out))


# ---- backward -----------------------------------------------------------------------------------


def _check_backward(
    x: Tensor,
    x_sf: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
) -> None:
    dims = ("num_positions", "channels")
    checks.tensor("x", x, dims, torch.float8_e4m3fn, contiguous=True)
    _check_halves(x)
    rows, hidden = x.shape[0], x.shape[1] // 2
    checks.integer("num_per_channels", num_per_channels, 1)
    checks.one_of("num_per_channels", num_per_channels, BACKWARD_GROUPS)
    if hidden % num_per_channels:
        raise ValueError(
            f"num_per_channels must divide half the row width, {hidden}, got {num_per_channels}"
        )
    groups = 2 * hidden // num_per_channels
    checks.tensor(
        "x_sf", x_sf, ("num_positions", "groups"), torch.float32, shape=(rows, groups),
        contiguous=True,
    )  # fmt: skip
    checks.tensor(
        "grad_out", grad_out, ("num_positions", "hidden"), torch.bfloat16, shape=(rows, hidden),
        contiguous=True,
    )  # fmt: skip
    _check_weights("weight", weight)
    _check_rows("pos_to_token_topk", pos_to_token_topk, rows)
    checks.tensor(
        "token_topk_to_pos", token_topk_to_pos, ("num_tokens", "num_topk"), torch.int32,
        shape=tuple(weight.shape), contiguous=True,
    )  # fmt: skip
    checks.boolean("round_sf", round_sf)
    layout.check_swiglu_clamp(swiglu_clamp_value)


def _check_map_values(
    x: Tensor,
    x_sf: Tensor,  # noqa: ARG001
    grad_out: Tensor,  # noqa: ARG001
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    checks.in_range("pos_to_token_topk", pos_to_token_topk, -1, weight.numel() - 1)
    checks.in_range("token_topk_to_pos", token_topk_to_pos, -1, x.shape[0] - 1)
    maps = ("pos_to_token_topk", pos_to_token_topk), ("token_topk_to_pos", token_topk_to_pos)
    _check_inverse(*maps[0], *maps[1])
    _check_inverse(*maps[1], *maps[0])


def _check_inverse(name: str, value: Tensor, inverse_name: str, inverse: Tensor) -> None:
    """What an element of `value` names, in `inverse`, names that element; -1 names nothing."""
    place = torch.arange(value.numel(), device=value.device).view(value.shape)
    named = (value >= 0).nonzero(as_tuple=True)
    bad = inverse.view(-1)[value[named].long()] != place[named]
    if bad.any():
        where = [int(index[bad][0]) for index in named]
        found = int(value[tuple(where)])
        back = int(inverse.view(-1)[found])
        raise ValueError(
            f"{name} must be the inverse of {inverse_name}, but element {where} is {found}, which "
            f"{inverse_name} maps to {back}"
        )


Backward = tuple[Tensor, QuantTensor, Tensor, Tensor]
Flat = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _oracle_backward(
    x: Tensor,
    x_sf: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    *rest: Any,
    **named: Any,
) -> Flat:
    index = _only_in_range(pos_to_token_topk, weight)
    out, (data, sf), x_grad, weight_grad = oracles.swiglu_backward_and_per_token_cast(
        (x, x_sf), grad_out, weight, index, *rest, **named
    )
    return out, data, sf, x_grad, weight_grad


def _cost_backward(x: QuantTensor, weight: Tensor, **_: Any) -> Cost:
    """Every argument once, every result once."""
    data, sf = x
    rows = data.numel() // data.shape[-1]
    return Cost(bytes=6 * data.numel() + 8 * sf.numel() + 4 * rows + 12 * weight.numel())


@op(
    check=_check_backward,
    oracle=_oracle_backward,
    cost=_cost_backward,
    cases=SWIGLU_BACKWARD_AND_CAST,
    outputs=("out", "x_grad_fp8", "x_grad_sf", "x_grad", "weight_grad"),
    values=_check_map_values,
    name="swiglu_backward_and_per_token_cast",
)
def _backward(
    x: Tensor,
    x_sf: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
    out: Tensor | None = None,
    x_grad_fp8: Tensor | None = None,
    x_grad_sf: Tensor | None = None,
    x_grad: Tensor | None = None,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = output("out", out, grad_out, grad_out.shape)
    x_grad_fp8 = output("x_grad_fp8", x_grad_fp8, x, x.shape)
    x_grad_sf = output("x_grad_sf", x_grad_sf, x_sf, x_sf.shape)
    x_grad = output("x_grad", x_grad, x, x.shape, torch.bfloat16)
    weight_grad = output("weight_grad", weight_grad, weight, weight.shape)
    if nonempty(x):
        problem = (
            x.shape[1] // 2, num_per_channels, round_sf, swiglu_clamp_value is not None,
            row_alignment(x), row_alignment(grad_out), row_alignment(out),
            row_alignment(x_grad_fp8), row_alignment(x_grad),
        )  # fmt: skip
        _BACKWARD.launch(
            problem, x, x_sf, grad_out, weight.view(-1), pos_to_token_topk,
            token_topk_to_pos.view(-1), out, x_grad_fp8, x_grad_sf, x_grad, weight_grad.view(-1),
            math.inf if swiglu_clamp_value is None else float(swiglu_clamp_value),
            formats.E4M3.clamp_min,
        )  # fmt: skip
    else:
        weight_grad.zero_()
    return out, x_grad_fp8, x_grad_sf, x_grad, weight_grad


@face(_backward, oracle=oracles.swiglu_backward_and_per_token_cast)
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
) -> Backward:
    """Weighted SwiGLU of a quantised `x` again, and its gradients; that of `x` also in e4m3.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `([num_positions, 2 * hidden], x_sf)`: gate, value | float8_e4m3fn, float32 |
    | `x_sf`, in `x` | `[num_positions, 2 * hidden / num_per_channels]` | float32 |
    | `grad_out` | `[num_positions, hidden]` | bfloat16 |
    | `weight` | `[num_tokens, num_topk]` | float32 |
    | `pos_to_token_topk` | `[num_positions]`: place of the row's weight, or -1 | int32 |
    | `token_topk_to_pos` | `[num_tokens, num_topk]`: the inverse, -1 for none | int32 |
    | `num_per_channels` | | 32 or 128, a divisor of `hidden`: channels of a scale |
    | `round_sf` | | scales of the result that are powers of two |
    | `swiglu_clamp_value` | | at least 0, or None |
    | `out` | as returned, or its five tensors; filled and returned | |
    | returns `out` | `[num_positions, hidden]` | bfloat16 |
    | returns `(x_grad_fp8, x_grad_sf)` | as `x` | float8_e4m3fn, float32 |
    | returns `x_grad` | `[num_positions, 2 * hidden]` | bfloat16 |
    | returns `weight_grad` | `[num_tokens, num_topk]` | float32 |

    All tensors are contiguous. `x` and `grad_out` may have more leading dimensions; results have
    one. With `l` and `r` the halves of a dequantised row, clamped as in
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
    for one whose row does not have its index.

    Raises `TypeError` or `ValueError` with the argument's name. Not differentiable.

    >>> x = torch.zeros(1, 64), torch.ones(1, 2)
    >>> x[0][:, 0], x[0][:, 32] = 1.0, 3.0
    >>> place = torch.zeros(1, 1, dtype=torch.int32)
    >>> out, (data, sf), x_grad, weight_grad = swiglu_backward_and_per_token_cast(
    ...     (x[0].to(torch.float8_e4m3fn), x[1]), torch.ones(1, 32).bfloat16(),
    ...     torch.tensor([[2.0]]), place[0], place, 32, round_sf=True
    ... )
    >>> out[0, 0].item(), x_grad[0, ::32].tolist(), (data.float()[0, ::32] * sf).tolist()
    (4.375, [5.5625, 1.4609375], [[5.5, 1.5]])
    """
    data, sf = layout.pair(x)
    if sf is None:
        raise TypeError(
            "swiglu_backward_and_per_token_cast: x must be a tuple of data and scales, got "
            f"{type(data).__name__}"
        )
    if data.dim() > 2 and isinstance(grad_out, Tensor) and grad_out.dim() == data.dim():
        data, sf, grad_out = data.flatten(0, -2), sf.flatten(0, -2), grad_out.flatten(0, -2)
    buffers: tuple[Tensor, ...] = ()
    if out is not None:
        buffers = out if len(out) == 5 else (out[0], *out[1], *out[2:])
    activation, codes, scales, x_grad, weight_grad = _backward(
        data, sf, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels,
        round_sf, swiglu_clamp_value, *buffers,
    )  # fmt: skip
    return activation, (codes, scales), x_grad, weight_grad
