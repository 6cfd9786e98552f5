"""`reduce_fused`: the weighted sum of each token's rows in the fused layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.expand.op import expand_to_fused
from tile_kernels.moe.fused import FP8, SLOT_DIMS, check_positions, data_and_scales, dtype_names
from tile_kernels.moe.reduce import reference
from tile_kernels.moe.reduce.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.moe.reduce.kernel", "reduce", plan)

_X_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8)
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_FORMATS = ("", "e4m3")


class Arguments(NamedTuple):
    x: Tensor
    topk_weights: Tensor | None
    token_topk_to_pos: Tensor
    fp8_format: str
    sf: Tensor | None
    x_sf: Tensor | None
    out_dtype: torch.dtype | None

    def check(self) -> None:
        checks.tensor("x", self.x, ("num_positions", "hidden"), _X_DTYPES, contiguous=True)
        slots = self.token_topk_to_pos
        checks.tensor("token_topk_to_pos", slots, SLOT_DIMS, torch.int32, contiguous=True)
        if self.topk_weights is not None:
            shape = tuple(slots.shape)
            checks.tensor(
                "topk_weights",
                self.topk_weights,
                SLOT_DIMS,
                torch.float32,
                shape=shape,
                contiguous=True,
            )
        if self.x_sf is not None:
            checks.tensor(
                "x_sf", self.x_sf, ("num_positions",), torch.float32, shape=(self.x.shape[0],),
                contiguous=True,
            )  # fmt: skip
        checks.one_of("fp8_format", self.fp8_format, _FORMATS)
        if self.out_dtype is not None:
            if self.out_dtype not in _OUT_DTYPES:
                listed = dtype_names(*_OUT_DTYPES)
                raise TypeError(f"out_dtype must be one of {listed}, got {self.out_dtype}")
            if self.fp8_format and self.out_dtype != torch.float8_e4m3fn:
                given = dtype_names(self.out_dtype)
                raise ValueError(
                    f"out_dtype must agree with fp8_format {self.fp8_format!r}, got {given}"
                )
        elif self.x.dtype == torch.float8_e5m2 and not self.fp8_format:
            raise ValueError("out_dtype must be given for x of float8_e5m2")
        if self.sf is not None:
            checks.tensor("sf", self.sf, ("1",), torch.float32, shape=(1,))
            dtype = _result_dtype(self.x, self.fp8_format, self.out_dtype)
            if dtype not in FP8:
                name = dtype_names(dtype)
                raise ValueError(f"sf must be None for a {name} result, it scales float8 only")

    def outputs(self) -> Out:
        dtype = _result_dtype(self.x, self.fp8_format, self.out_dtype)
        return Out("out", (self.token_topk_to_pos.shape[0], self.x.shape[1]), dtype)

    def launches(self, out: Spec) -> Launch | Host | None:
        x, slots = self.x, self.token_topk_to_pos
        if out.numel() == 0:
            return None
        if x.numel() == 0 or slots.numel() == 0:  # no rows to sum
            if self.sf is None:
                return Host(Tensor.zero_, (out,))
            return Host(_fill_with_scaled_zero, (out, self.sf))
        problem = (
            dtype_name(x), dtype_name(out), x.element_size(), out.element_size(), x.shape[1],
            slots.shape[1], Size(lambda a: a.token_topk_to_pos.shape[0]), alignment(x),
            alignment(out), self.topk_weights is not None, self.x_sf is not None, self.sf is not
            None,
        )  # fmt: skip
        return Launch(_KERNEL, problem, (x, slots, out, self.topk_weights, self.x_sf, self.sf))

    def check_values(self) -> None:
        check_positions(self.token_topk_to_pos, self.x.shape[0])


def _result_dtype(x: Tensor, fp8_format: str, out_dtype: torch.dtype | None) -> torch.dtype:
    if fp8_format:
        return torch.float8_e4m3fn
    return x.dtype if out_dtype is None else out_dtype


def _fill_with_scaled_zero(out: Tensor, sf: Tensor) -> None:
    """Zero times `sf`, which may be -0."""
    out.copy_(sf.new_zeros(()) * sf)


def cost(
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
    out_width = _result_dtype(data, fp8_format, out_dtype).itemsize
    rows = (valid * data.element_size() + slots.shape[0] * out_width) * hidden
    small = slots.numel() * (1 if topk_weights is None else 2)
    if x_sf is not None:
        small += x_sf.numel()
    return Cost(bytes=rows + 4 * small, flops=2 * valid * hidden)


def _reference(*args: Any) -> Tensor:
    a = Arguments(*args)
    rows = a.x if a.x_sf is None else (a.x, a.x_sf)
    return reference.reduce_fused(
        rows, a.topk_weights, a.token_topk_to_pos, a.fp8_format, a.sf, out_dtype=a.out_dtype
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    a = Arguments(*inputs)
    ctx.save_for_backward(a.x, a.topk_weights, a.token_topk_to_pos, a.x_sf)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
    if grad.dtype in FP8:
        raise TypeError("reduce_fused: a float8 result has no gradient; set out_dtype to another")
    needed = Arguments(*ctx.needs_input_grad)
    if needed.x and x.dtype in FP8:
        raise TypeError(f"reduce_fused: x of {dtype_names(x.dtype)} has no gradient")
    num_positions = x.shape[0]
    named = (slots >= 0) & (slots < num_positions)
    index = torch.where(named, slots, num_positions).long()  # one past the end for the others

    def at_slots(values: Tensor) -> Tensor:
        """`[num_positions]` to `[num_tokens, num_topk]`."""
        return torch.nn.functional.pad(values, (0, 1))[index]

    def at_positions(values: Tensor) -> Tensor:
        """`[num_tokens, num_topk]` to `[num_positions]`."""
        padded = values.new_zeros((num_positions + 1,))
        return padded.scatter(0, index.flatten(), values.flatten())[:num_positions]

    grad_rows = expand_to_fused(grad.contiguous(), slots, slots.new_zeros((num_positions,)))
    grad_x = grad_weights = grad_x_sf = None
    if needed.x:
        scale = weights
        if x_sf is not None:
            scale = at_slots(x_sf) if weights is None else weights * at_slots(x_sf)
        grad_x = grad_rows if scale is None else grad_rows * at_positions(scale)[:, None]
        grad_x = grad_x.to(x.dtype)
    if needed.topk_weights or needed.x_sf:
        products = at_slots((grad_rows.float() * x.float()).sum(1))
        if needed.topk_weights:
            grad_weights = products if x_sf is None else products * at_slots(x_sf)
        if needed.x_sf:
            grad_x_sf = at_positions(products if weights is None else products * weights)
    return grad_x, grad_weights, None, None, None, grad_x_sf, None


REDUCE_FUSED = Operator(
    "moe.reduce_fused",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic={"x": 1, "topk_weights": 1, "token_topk_to_pos": 1, "x_sf": 0},
    out=("out",),
    backward=_backward,
    setup_context=_setup,
)


@REDUCE_FUSED.public(reference=reference.reduce_fused)
def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sums the rows at each token's positions in the fused layout, weighted.

    For the slots of a token in order, `total = fma(x[p], scale, total)` in float32, with
    `p = token_topk_to_pos[t, k]` and `scale` the weight of the slot times the scale `x[1][p]`, as
    far as given. The total starts at `+0.0`. It is multiplied by `sf` and rounded to the result's
    dtype; float8 saturates at 448. Slots outside `0..num_positions-1` (-1 is the padding) are
    skipped. NaN stays NaN.

    The result is differentiable with respect to `x`, `topk_weights` and `x[1]` unless the result or
    that `x` is float8; the gradient takes a position to be named by at most one slot.

    Any sizes are allowed, zero included; fastest (16-byte accesses) where rows start on 16-byte
    boundaries.

    Args:
        x: `[num_positions, hidden]`, contiguous: float32, float16, bfloat16, float8_e4m3fn or
            float8_e5m2. Or a pair of that and a scale for each row: `[num_positions]`, float32,
            contiguous.
        topk_weights: `[num_tokens, num_topk]`, float32, contiguous, or None.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32, contiguous: the positions of a token.
        fp8_format: `""`, or `"e4m3"` for a float8_e4m3fn result.
        sf: `[1]`, float32, or None; with a float8 result only.
        out: A contiguous buffer for the result, which is filled and returned, or None.
        out_dtype: float32, float16, bfloat16 or float8_e4m3fn; None for the dtype of `x`.

    Returns:
        `[num_tokens, hidden]`, `out_dtype`, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype; the scales of rows are named `x_sf`.
        ValueError: If an argument has another shape or layout, or if arguments contradict.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> slots = torch.tensor([[1, 0], [0, -1]], dtype=torch.int32)
        >>> reduce_fused(rows, torch.tensor([[0.5, 2.0], [3.0, 9.0]]), slots).tolist()
        [[7.0, 14.0], [3.0, 6.0]]
    """
    data, x_sf = data_and_scales("reduce_fused", x) if isinstance(x, tuple) else (x, None)
    return REDUCE_FUSED(
        data, topk_weights, token_topk_to_pos, fp8_format, sf, x_sf, out_dtype, out=out
    )
