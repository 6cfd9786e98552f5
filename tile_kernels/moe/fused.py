"""The fused layout: one row per token and chosen expert, the rows of an expert side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import torch as oracles
from tile_kernels.moe.cases.fused import EXPAND_TO_FUSED, EXPAND_TO_FUSED_WITH_SF, REDUCE_FUSED
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import face, gradient, op
from tile_kernels.runtime.outputs import output
from tile_kernels.utils import align, ceil_div

_EXPAND = Kernel("tile_kernels.moe.kernels.fused", "expand")
_REDUCE = Kernel("tile_kernels.moe.kernels.fused", "reduce")

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_COPIED = (
    torch.bfloat16, torch.float16, torch.float32, *_FP8, torch.int8, torch.uint8, torch.int16,
    torch.int32,
)  # fmt: skip
_SUMMED = (torch.float32, torch.bfloat16, torch.float16, *_FP8)
_REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _COPIED}

_GROUPS = (16, 32, 64, 128)  # channels that share a scale; or all of a row's
_FORMATS = ("", "e4m3")
_SLOTS = ("num_tokens", "num_topk")


# ---- expand -------------------------------------------------------------------------------------


def _check_expand(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> None:
    checks.tensor("x", x, ("num_tokens", "hidden"), _COPIED, contiguous=True)
    shape = (x.shape[0], None)
    checks.tensor(
        "token_topk_to_pos", token_topk_to_pos, _SLOTS, torch.int32, shape=shape, contiguous=True
    )
    checks.tensor("pos_to_expert", pos_to_expert, ("num_positions",), torch.int32)


def _cost_expand(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Cost:
    num_positions = pos_to_expert.shape[0]
    rows = (x.shape[0] + num_positions) * x.shape[1] * x.element_size()
    return Cost(bytes=rows + 4 * token_topk_to_pos.numel() + 4 * num_positions)


def _expand(
    x: Tensor,
    slots: Tensor,
    out: Tensor,
    sf: Tensor | None = None,
    out_sf: Tensor | None = None,
    column_major: bool = False,
) -> None:
    """Fill `out`, and with `sf` also `out_sf`: `[positions, scales]`, or its padded transpose."""
    num_tokens, hidden = x.shape
    if hidden == 0 or not nonempty(out):
        return
    if not (nonempty(x) and nonempty(slots)):
        out.zero_()
        if out_sf is not None:
            out_sf.zero_()
        return
    num_positions = out.shape[0]
    problem = (
        _NAMES[x.dtype], x.element_size(), hidden, slots.shape[1], num_tokens, num_positions,
        alignment(x), alignment(slots),
        *(("", 0) if sf is None else (_NAMES[sf.dtype], sf.shape[1])), column_major,
    )  # fmt: skip
    _EXPAND.launch(problem, x, slots, out, sf, out_sf)


def _check_places(token_topk_to_pos: Tensor, num_positions: int) -> None:
    checks.in_range("token_topk_to_pos", token_topk_to_pos, -1, num_positions - 1)
    checks.distinct("token_topk_to_pos", token_topk_to_pos)


@op(
    check=_check_expand,
    oracle=oracles.expand_to_fused,
    cost=_cost_expand,
    cases=EXPAND_TO_FUSED,
    values=lambda x, token_topk_to_pos, pos_to_expert: _check_places(  # noqa: ARG005
        token_topk_to_pos, pos_to_expert.shape[0]
    ),
)
def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """Copy each token to its positions in the fused layout; positions without a token are zero.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x` | `[num_tokens, hidden]` | float32/16, bfloat16, float8 e4m3fn/e5m2, int8/16/32, uint8 | \
contiguous |
    | `token_topk_to_pos` | `[num_tokens, num_topk]` | int32 | contiguous |
    | `pos_to_expert` | `[num_positions]` | int32 | any |
    | returns | `[num_positions, hidden]` | as `x` | contiguous |

    `out[token_topk_to_pos[t, k]] = x[t]`, bit for bit, for every slot in `0..num_positions-1`;
    other slots (-1 is the padding) name nothing. Rows that no slot names are zero: the mapping
    alone decides that, of `pos_to_expert` only the length counts. If slots of different tokens
    name the same position, its row may mix the two.

    Differentiable for float32, float16 and bfloat16: the gradient of a token is the sum of those
    of its positions, in the order of its slots.

    Any sizes, zero included; fastest (16-byte accesses) where rows start on 16-byte boundaries.
    Raises `TypeError` on another dtype, `ValueError` on another shape or layout.

    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> slots = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    >>> expand_to_fused(x, slots, torch.tensor([0, -1, 1, 1], dtype=torch.int32)).tolist()
    [[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    """
    out = x.new_empty((pos_to_expert.shape[0], x.shape[1]))
    _expand(x, token_topk_to_pos, out)
    return out


def _save_expand(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[1])


def _backward_expand(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if grad.dtype in _FP8:
        raise TypeError(f"expand_to_fused: x of {_NAMES[grad.dtype]} has no gradient")
    (slots,) = ctx.saved_tensors
    return reduce_fused(grad.contiguous(), None, slots), None, None


gradient(expand_to_fused, _backward_expand, setup_context=_save_expand)


# ---- expand with scales -------------------------------------------------------------------------


def _check_expand_with_sf(
    x: Tensor,
    x_sf: Tensor,
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> None:
    _check_expand(x, token_topk_to_pos, pos_to_expert)
    hidden = x.shape[1] * (2 if x.dtype == torch.int8 else 1)  # two e2m1 values in a byte
    checks.integer("num_per_channels", num_per_channels, 1)
    if num_per_channels not in _GROUPS and num_per_channels != hidden:
        allowed = f"{', '.join(map(str, _GROUPS))} or {hidden} (the whole row)"
        raise ValueError(f"num_per_channels must be {allowed}, got {num_per_channels}")
    checks.tensor("x_sf", x_sf, ("num_tokens", "num_scales"), (torch.float32, torch.int32))
    num_scales = ceil_div(hidden, num_per_channels)
    if x_sf.dtype == torch.int32:  # four exponents each
        num_scales = ceil_div(num_scales, 4)
    shape = (x.shape[0], num_scales)
    checks.tensor("x_sf", x_sf, ("num_tokens", "num_scales"), shape=shape)
    checks.boolean("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf)
    if x_sf.dtype == torch.int32 and not use_tma_aligned_col_major_sf:
        raise ValueError("use_tma_aligned_col_major_sf must be True for packed scales (int32)")


def _cost_expand_with_sf(
    x: tuple[Tensor, Tensor], token_topk_to_pos: Tensor, pos_to_expert: Tensor, **_: Any
) -> Cost:
    data, sf = x
    rows = data.shape[0] + pos_to_expert.shape[0]
    expand = _cost_expand(data, token_topk_to_pos, pos_to_expert)
    return Cost(bytes=expand.bytes + 4 * rows * sf.shape[1])


def _oracle_expand_with_sf(x: Tensor, x_sf: Tensor, *args: Any, **kwargs: Any) -> Any:
    return oracles.expand_to_fused_with_sf((x, x_sf), *args, **kwargs)


@op(
    name="expand_to_fused_with_sf",
    check=_check_expand_with_sf,
    oracle=_oracle_expand_with_sf,
    cost=_cost_expand_with_sf,
    cases=EXPAND_TO_FUSED_WITH_SF,
    instead="tile_kernels.moe.expand_to_fused of values that are not quantised",
    values=lambda x, x_sf, n, token_topk_to_pos, pos_to_expert, *_: _check_places(  # noqa: ARG005
        token_topk_to_pos, pos_to_expert.shape[0]
    ),
)
def _expand_with_sf(
    x: Tensor,
    x_sf: Tensor,
    num_per_channels: int,  # noqa: ARG001 - follows from the shapes
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    num_positions, num_scales = pos_to_expert.shape[0], x_sf.shape[1]
    out = x.new_empty((num_positions, x.shape[1]))
    if use_tma_aligned_col_major_sf:
        columns = x_sf.new_empty((num_scales, align(num_positions, 4)))
        _expand(x, token_topk_to_pos, out, x_sf, columns, column_major=True)
        return out, columns.T[:num_positions]
    out_sf = x_sf.new_empty((num_positions, num_scales))
    _expand(x, token_topk_to_pos, out, x_sf, out_sf)
    return out, out_sf


@face(_expand_with_sf, oracle=oracles.expand_to_fused_with_sf)
def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """`expand_to_fused` of quantised data and of its scales.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x[0]` | `[num_tokens, hidden]` | as for `expand_to_fused` | contiguous |
    | `x[1]` | `[num_tokens, num_scales]` | float32, or int32 with four exponents each | any |
    | `num_per_channels` | | 16, 32, 64, 128 or the width of a row | |
    | `token_topk_to_pos` | `[num_tokens, num_topk]` | int32 | contiguous |
    | `pos_to_expert` | `[num_positions]` | int32 | any |
    | `use_tma_aligned_col_major_sf` | | bool; True for int32 scales | |
    | returns data | `[num_positions, hidden]` | as `x[0]` | contiguous |
    | returns scales | `[num_positions, num_scales]` | as `x[1]` | see below |

    `num_scales` is `ceil(hidden / num_per_channels)`, a quarter of it (rounded up) for int32. Data
    of int8 is packed e2m1, so that `hidden` counts twice here.

    Scales are copied as they are, from any strides; where no slot points, data and scales are zero.
    The scales are contiguous, or with `use_tma_aligned_col_major_sf` have strides `(1, n)`, `n`
    being `num_positions` rounded up to a multiple of 4; the memory between is zero.

    Raises `TypeError` or `ValueError` with the argument's name, `x_sf` for `x[1]`. Not
    differentiable.

    >>> x = torch.tensor([[1, 2]], dtype=torch.uint8), torch.tensor([[0.5]])
    >>> slots = torch.tensor([[1]], dtype=torch.int32)
    >>> data, sf = expand_to_fused_with_sf(x, 2, slots, torch.tensor([-1, 0], dtype=torch.int32))
    >>> data.tolist(), sf.tolist()
    ([[0, 0], [1, 2]], [[0.0], [0.5]])
    """
    data, sf = _pair("expand_to_fused_with_sf", x)
    return _expand_with_sf(
        data, sf, num_per_channels, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf
    )


def _pair(name: str, x: Any) -> tuple[Tensor, Tensor]:
    given = [type(part).__name__ for part in x] if isinstance(x, tuple) else type(x).__name__
    if not (isinstance(x, tuple) and len(x) == 2 and all(isinstance(t, Tensor) for t in x)):
        raise TypeError(f"{name}: x must be a tuple of two tensors, data and scales, got {given}")
    return x


# ---- reduce -------------------------------------------------------------------------------------


def _reduced_dtype(x: Tensor, fp8_format: str, out_dtype: torch.dtype | None) -> torch.dtype:
    if fp8_format:
        return torch.float8_e4m3fn
    return x.dtype if out_dtype is None else out_dtype


def _check_reduce(
    x: Tensor,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str,
    sf: Tensor | None,
    x_sf: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    checks.tensor("x", x, ("num_positions", "hidden"), _SUMMED, contiguous=True)
    checks.tensor("token_topk_to_pos", token_topk_to_pos, _SLOTS, torch.int32, contiguous=True)
    if topk_weights is not None:
        shape = tuple(token_topk_to_pos.shape)
        checks.tensor(
            "topk_weights", topk_weights, _SLOTS, torch.float32, shape=shape, contiguous=True
        )
    if x_sf is not None:
        shape = (x.shape[0],)
        checks.tensor("x_sf", x_sf, ("num_positions",), torch.float32, shape=shape, contiguous=True)
    checks.one_of("fp8_format", fp8_format, _FORMATS)
    if out_dtype is not None:
        if out_dtype not in _REDUCED:
            listed = ", ".join(_NAMES[dtype] for dtype in _REDUCED)
            raise TypeError(f"out_dtype must be one of {listed}, got {out_dtype}")
        if fp8_format and out_dtype != torch.float8_e4m3fn:
            given = _NAMES[out_dtype]
            raise ValueError(f"out_dtype must agree with fp8_format {fp8_format!r}, got {given}")
    elif x.dtype == torch.float8_e5m2 and not fp8_format:
        raise ValueError("out_dtype must be given for x of float8_e5m2")
    if sf is not None:
        checks.tensor("sf", sf, ("1",), torch.float32, shape=(1,))
        dtype = _reduced_dtype(x, fp8_format, out_dtype)
        if dtype not in _FP8:
            raise ValueError(f"sf must be None for a {_NAMES[dtype]} result, it scales float8 only")


def _cost_reduce(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> Cost:
    data, x_sf = x if isinstance(x, tuple) else (x, None)
    slots, hidden = token_topk_to_pos, data.shape[1]
    valid = slots.numel()
    if not slots.is_meta:
        valid = int(((slots >= 0) & (slots < data.shape[0])).sum())
    out_width = _reduced_dtype(data, fp8_format, out_dtype).itemsize
    rows = (valid * data.element_size() + slots.shape[0] * out_width) * hidden
    small = slots.numel() * (1 if topk_weights is None else 2)
    if x_sf is not None:
        small += x_sf.numel()
    return Cost(bytes=rows + 4 * small, flops=2 * valid * hidden)


def _oracle_reduce(
    x: Tensor,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str,
    sf: Tensor | None,
    x_sf: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    rows = x if x_sf is None else (x, x_sf)
    return oracles.reduce_fused(
        rows, topk_weights, token_topk_to_pos, fp8_format, sf, out_dtype=out_dtype
    )


@op(
    name="reduce_fused",
    check=_check_reduce,
    oracle=_oracle_reduce,
    cost=_cost_reduce,
    cases=REDUCE_FUSED,
    values=lambda x, topk_weights, token_topk_to_pos, *_, **__: _check_places(  # noqa: ARG005
        token_topk_to_pos, x.shape[0]
    ),
    outputs=("out",),
)
def _reduce(
    x: Tensor,
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str,
    sf: Tensor | None,
    x_sf: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_topk = token_topk_to_pos.shape
    hidden = x.shape[1]
    dtype = _reduced_dtype(x, fp8_format, out_dtype)
    out = output("out", out, x, (num_tokens, hidden), dtype)
    if hidden == 0 or not nonempty(out):
        return out
    if not (nonempty(x) and nonempty(token_topk_to_pos)):  # no rows: 0 * sf, which may be -0
        return out.copy_(out.new_zeros((), dtype=torch.float32) * (1.0 if sf is None else sf))
    problem = (
        _NAMES[x.dtype], _NAMES[dtype], x.element_size(), out.element_size(), hidden, num_topk,
        num_tokens, alignment(x), alignment(out), topk_weights is not None, x_sf is not None,
        sf is not None,
    )  # fmt: skip
    _REDUCE.launch(problem, x, token_topk_to_pos, out, topk_weights, x_sf, sf)
    return out


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, topk_weights, slots, _, _, x_sf, _ = inputs
    ctx.save_for_backward(x, topk_weights, slots, x_sf)


def _backward_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With `g` the gradient of a token, and `p` the position of one of its slots:

    | of | |
    |---|---|
    | `x[p]` | `g * weight * x_sf[p]` |
    | the weight | `<g, x[p]> * x_sf[p]` |
    | `x_sf[p]` | `<g, x[p]> * weight` |

    So everything follows from the gradients at the positions. That takes a position to be named
    by at most one slot.
    """
    x, weights, slots, x_sf = ctx.saved_tensors
    if grad.dtype in _FP8:
        raise TypeError("reduce_fused: a float8 result has no gradient; set out_dtype to another")
    for_x, for_weights, _, _, _, for_x_sf, _ = ctx.needs_input_grad
    if for_x and x.dtype in _FP8:
        raise TypeError(f"reduce_fused: x of {_NAMES[x.dtype]} has no gradient")
    num_positions = x.shape[0]
    named = (slots >= 0) & (slots < num_positions)
    index = torch.where(named, slots, num_positions).long()  # one past the end for the others

    def at_slots(of_positions: Tensor) -> Tensor:
        return torch.nn.functional.pad(of_positions, (0, 1))[index]

    def at_positions(of_slots: Tensor) -> Tensor:
        padded = of_slots.new_zeros((num_positions + 1,))
        return padded.scatter(0, index.flatten(), of_slots.flatten())[:num_positions]

    of_rows = expand_to_fused(grad.contiguous(), slots, slots.new_zeros((num_positions,)))
    grad_x = grad_weights = grad_x_sf = None
    if for_x:
        scale = weights
        if x_sf is not None:
            scale = at_slots(x_sf) if weights is None else weights * at_slots(x_sf)
        grad_x = of_rows if scale is None else of_rows * at_positions(scale)[:, None]
        grad_x = grad_x.to(x.dtype)
    if for_weights or for_x_sf:
        products = at_slots((of_rows.float() * x.float()).sum(1))
        if for_weights:
            grad_weights = products if x_sf is None else products * at_slots(x_sf)
        if for_x_sf:
            grad_x_sf = at_positions(products if weights is None else products * weights)
    return grad_x, grad_weights, None, None, None, grad_x_sf, None


gradient(_reduce, _backward_reduce, setup_context=_save_reduce)


@face(_reduce, oracle=oracles.reduce_fused)
def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum the rows at each token's positions in the fused layout, weighted.

    | argument | shape | dtype | layout |
    |---|---|---|---|
    | `x`, or `x[0]` | `[num_positions, hidden]` | float32/16, bfloat16, float8 | contiguous |
    | `x[1]` | `[num_positions]` | float32 | contiguous |
    | `topk_weights` | `[num_tokens, num_topk]` | float32, or None | contiguous |
    | `token_topk_to_pos` | `[num_tokens, num_topk]` | int32 | contiguous |
    | `fp8_format` | | `""`, or `"e4m3"` for a float8_e4m3fn result | |
    | `sf` | `[1]` | float32, or None; with a float8 result only | |
    | `out` | as returned; filled and returned | as returned | contiguous |
    | `out_dtype` | | float32, float16, bfloat16, float8_e4m3fn, or None: that of `x` | |
    | returns | `[num_tokens, hidden]` | `out_dtype` | contiguous |

    For the slots of a token in order, `total = fma(x[p], scale, total)` in float32, with
    `p = token_topk_to_pos[t, k]` and `scale` the weight of the slot times the scale `x[1][p]`, as
    far as given. The total starts at `+0.0`. It is multiplied by `sf` and rounded to the result's
    dtype; float8 saturates at 448. Slots outside `0..num_positions-1` (-1 is the padding) are
    skipped. NaN stays NaN.

    Differentiable with respect to `x`, `topk_weights` and `x[1]` unless the result or that `x` is
    float8; the gradient takes a position to be named by at most one slot.

    Any sizes, zero included; fastest (16-byte accesses) where rows start on 16-byte boundaries.
    Raises `TypeError` or `ValueError` with the argument's name, `x_sf` for `x[1]`.

    >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    >>> slots = torch.tensor([[1, 0], [0, -1]], dtype=torch.int32)
    >>> reduce_fused(rows, torch.tensor([[0.5, 2.0], [3.0, 9.0]]), slots).tolist()
    [[7.0, 14.0], [3.0, 6.0]]
    """
    data, x_sf = _pair("reduce_fused", x) if isinstance(x, tuple) else (x, None)
    arguments = (data, topk_weights, token_topk_to_pos, fp8_format, sf, x_sf, out_dtype)
    return _reduce(*arguments) if out is None else _reduce(*arguments, out)
