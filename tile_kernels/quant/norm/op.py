"""RMS norm: with a residual added first, with a cast of its result, and its gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.norm import reference
from tile_kernels.quant.norm.plan import MAX_WIDTH, count_parts, plan, plan_backward, plan_sum
from tile_kernels.quant.storage import GROUPS, ROW, is_by_rows
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import last_gradients
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import (
    ALIGNMENT,
    Host,
    Launch,
    Out,
    Size,
    Spec,
    alignment,
    dtype_name,
    row_alignment,
)
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.utils import align, ceil_div

_MODULE = "tile_kernels.quant.norm.kernel"
_NORM = Kernel(_MODULE, "norm_rows", plan)
_GRADIENTS = Kernel(_MODULE, "norm_gradients", plan_backward)
_SUM = Kernel(_MODULE, "sum_parts", plan_sum)

_FORMATS = ("e4m3", "e2m1")
_DYNAMIC = {"x": 1, "residual": 1}
_SECOND = "norm_forward: there is no second derivative"


# ---- what all share -----------------------------------------------------------------------------


def _check_rows(name: str, value: object, like: Tensor | None = None) -> None:
    """`value` is `[num_tokens, hidden]` or `[batch, num_tokens, hidden]`; `like` another such."""
    batched = isinstance(value, Tensor) and value.dim() == 3
    dims = ("batch", "num_tokens", "hidden") if batched else ("num_tokens", "hidden")
    if like is None:
        checks.tensor(name, value, dims, layout.PLAIN, unit_inner_stride=True)
        width = value.shape[-1]  # type: ignore[attr-defined]
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"{name} must have 1..{MAX_WIDTH} channels, got {width}")
        return
    if isinstance(value, Tensor) and value.shape != like.shape:
        given, wanted = tuple(value.shape), tuple(like.shape)
        raise ValueError(f"{name} must have the shape of x, {wanted}, got {given}")
    checks.tensor(name, value, dims, like.dtype, unit_inner_stride=True)


def _check_norm(x: Tensor, weight: Tensor | None, out_scale: float) -> None:
    _check_rows("x", x)
    if weight is not None:
        shape = (x.shape[-1],)
        checks.tensor("weight", weight, ("hidden",), layout.PLAIN, shape=shape, contiguous=True)
    checks.finite("out_scale", out_scale)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _rows(x: Any) -> Any:
    """A spec as `[rows, hidden]`; batches that are not evenly spaced are copied."""
    if x.dim() == 2:
        return x
    hidden = x.shape[-1]
    if x.is_contiguous():
        return x.view(-1, hidden)
    size = x.element_size()
    aligned = math.gcd(x.alignment, *(stride * size for stride in x.stride()[:-1]), hidden * size)
    shape = (math.prod(x.shape[:-1]), hidden)
    like = Spec(shape, (x.stride(-2), 1), x.dtype, x.device, aligned)
    return x.apply(_flat, like=like)


def _aligned(*rows: Any) -> int:
    return min((row_alignment(x) for x in rows if x is not None), default=ALIGNMENT)


def _weight_of(weight: Any) -> tuple[str, int]:
    """The dtype and the alignment of an optional weight."""
    return ("", ALIGNMENT) if weight is None else (dtype_name(weight), alignment(weight))


def _optional(out: Any) -> Any:
    """A result that is wanted, None for one that is not: its only size is 0."""
    return None if tuple(out.shape) == (0,) else out


def _fill(
    operator: Operator, fields: tuple[Any, ...], given: dict[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """The results in the caller's buffers, by name; the others are allocated.

    Buffers that are not laid out as the results are copied to.
    """
    record = operator.arguments(*fields)
    operator.require(operator.check, record)
    buffers: list[Tensor | None] = []
    copied: list[tuple[int, Tensor]] = []
    for out in operator._results(record):
        buffer = given.get(out.name)
        if buffer is not None:
            operator.require(
                checks.buffer, out.name, buffer, out.shape, out.dtype,
                buffer.stride() if isinstance(buffer, Tensor) else None,
            )  # fmt: skip
            strides = out.strides if out.strides is not None else _contiguous(out.shape)
            if not _has_strides(buffer, strides):
                copied.append((len(buffers), buffer))
                buffer = None
        buffers.append(buffer)
    results = list(operator.fill(fields, buffers))
    for i, buffer in copied:
        results[i] = buffer.copy_(results[i])
    return tuple(results)


def _contiguous(shape: Any) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _has_strides(x: Tensor, strides: Any) -> bool:
    return all(n <= 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides))


# ---- forward ------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    weight: Tensor | None
    eps: float
    residual: Tensor | None
    out_scale: float

    def check(self) -> None:
        _check_norm(self.x, self.weight, self.out_scale)
        checks.epsilon("eps", self.eps)
        if self.residual is not None:
            _check_rows("residual", self.residual, self.x)

    def outputs(self) -> tuple[Out, Out, Out]:
        return (
            Out("out", self.x.shape, self.x.dtype),
            Out("rstd", self.x.shape[:-1], torch.float32),
            _total(self.x, self.residual),
        )

    def launches(self, out: Spec, rstd: Spec, total: Spec) -> Launch | None:
        return _launch(self, rstd, total, out, None, None)


def _total(x: Tensor, residual: Tensor | None) -> Out:
    """The sum of `x` and the residual, if there is one."""
    return Out("residual_out", (0,) if residual is None else x.shape, x.dtype)


def _launch(
    a: Any, rstd: Any, total: Any, plain: Any, data: Any, sf: Any, mega: Any = None
) -> Launch | None:
    if a.x.numel() == 0:
        return None
    casts = data is not None
    fmt, group, round_sf = (a.fmt, a.num_per_channels, a.round_sf) if casts else ("", 0, False)
    scale_layout = layout.layout_of(a) if casts else ROW
    pad = 1 if is_by_rows(scale_layout) else 4
    x, residual = _rows(a.x), None if a.residual is None else _rows(a.residual)
    plain, data, total = (
        None if out is None or _optional(out) is None else _rows(out)
        for out in (plain, data, total)
    )
    weight, weight_alignment = _weight_of(a.weight)
    problem = (
        dtype_name(x), x.shape[1], weight, residual is not None, dtype_name(plain), fmt, group,
        scale_layout, round_sf, mega is not None, a.x.dim() == 3 and pad > 1,
        _aligned(x, residual, plain, data, total), weight_alignment,
    )  # fmt: skip
    if casts and is_by_rows(scale_layout):
        sf = _rows(sf)
    clamp_min = float(a.amax_min) if casts else 0.0
    tokens = Size(lambda a: a.x.shape[-2])
    to_write = Size(lambda a: align(a.x.shape[-2], pad))
    count = Size(lambda a: math.prod(a.x.shape[:-2]) * align(a.x.shape[-2], pad))
    arguments = (
        x, residual, a.weight, plain, None if data is None else layout.as_words(data), sf,
        rstd if rstd.dim() == 1 else rstd.view(-1), total, mega, float(a.eps), float(a.out_scale),
        clamp_min, tokens, to_write, count, 0 if mega is None else a.mega_moe_block_m,
    )  # fmt: skip
    return Launch(_NORM, problem, arguments)


def _reference(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, eps, residual, out_scale = fields
    out, rstd, total = reference.norm_forward(x, weight, eps, residual, out_scale, with_rstd=True)
    if rstd is None:
        raise RuntimeError("unreachable: rstd was asked for")
    return out, rstd, x.new_empty(0) if residual is None else total


def cost(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None = None,
    with_rstd: bool = False,
    **_: Any,
) -> Cost:
    rows = x.numel() // x.shape[-1]
    fixed = 0 if weight is None else layout.bytes_of(weight)
    passes = 2 if residual is None else 4
    return Cost(passes * layout.bytes_of(x) + fixed + 4 * rows * with_rstd, 4 * x.numel())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _eps, residual, out_scale = inputs
    _, rstd, total = output
    ctx.set_materialize_grads(False)
    ctx.out_scale, ctx.has_residual = out_scale, residual is not None
    ctx.save_for_backward(x if residual is None else total, weight, rstd)
    ctx.mark_non_differentiable(rstd)


def _gradients(
    ctx: Any, out_grad: Tensor | None, total_grad: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, of the weight and of the residual."""
    x, weight, rstd = ctx.saved_tensors
    if not ctx.has_residual:
        total_grad = None
    if out_grad is None:
        weight_grad = None if weight is None else torch.zeros_like(weight)
        return total_grad, weight_grad, total_grad
    summed = weight is not None and ctx.needs_input_grad[1]
    out_grad, total_grad = (
        None if g is None else (g if g.stride(-1) == 1 else g.contiguous()).to(x.dtype)
        for g in (out_grad, total_grad)
    )
    fields = (out_grad, x, weight, rstd, total_grad, ctx.out_scale, None, summed)
    x_grad, weight_grad = NORM_BACKWARD(*fields)
    inputs = tuple(g for g in (out_grad, x, weight) if g is not None)
    grads = last_gradients(_SECOND, (x_grad, weight_grad if summed else None), inputs)
    return grads[0], grads[1], grads[0] if ctx.has_residual else None


def _backward(
    ctx: Any, out_grad: Tensor | None, _rstd_grad: Any, total_grad: Tensor | None
) -> tuple[Any, ...]:
    x_grad, weight_grad, residual_grad = _gradients(ctx, out_grad, total_grad)
    return x_grad, weight_grad, None, residual_grad, None


NORM_FORWARD = Operator(
    "quant.norm_forward",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic=_DYNAMIC,
    backward=_backward,
    setup_context=_save,
)
# With buffers. Results may replace `x` and `residual`: a row is read before it is written.
_NORM_FORWARD_INTO = Operator(
    "quant._norm_forward_into",
    Arguments,
    reference=_reference,
    dynamic=_DYNAMIC,
    out=("out", "rstd", "residual_out"),
    in_place=("x", "residual"),
    serves="norm_forward",
    instead="tile_kernels.quant.norm_forward without buffers",
)


def _check_with_rstd(with_rstd: bool, residual: Tensor | None, residual_out: Any) -> None:
    checks.boolean("with_rstd", with_rstd)
    if residual is None and residual_out is not None:
        raise ValueError("residual_out needs a residual: without one the norm's input is x")


@NORM_FORWARD.public(reference=reference.norm_forward, mutates=("out", "residual_out"))
def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Computes the RMS norm of rows, optionally after adding a residual.

    With `a = x`, or `a = x + residual` rounded to the dtype of `x`,

        rstd = 1 / sqrt(sum(a * a) / hidden + eps)
        out  = (a * rstd) * (weight * out_scale)

    in float32; `out` is rounded once. `a` is what `norm_input` returns: the residual of the next
    layer. Differentiable in `x`, `weight` and `residual`, through `out` and `norm_input`, by
    `norm_backward`; not with buffers.

    Args:
        x: `[num_tokens, hidden]` or `[batch, num_tokens, hidden]`, bfloat16 or float32, any strides
            but 1 in the last dimension; `hidden` is at most 16384. Fastest (16-byte accesses) for
            multiples of 8 channels. Batches that are not evenly spaced are copied first.
        weight: `[hidden]`, bfloat16 or float32, contiguous; None for ones.
        eps: Keeps the norm from dividing by 0; finite and not negative.
        residual: Like `x`, added to it; or None.
        out_scale: A factor of the result.
        out: A buffer for the result, which is filled and returned. It may be `x` itself.
        residual_out: A buffer for the sum of `x` and `residual`. It may be `residual` itself, or
            `x`.
        with_rstd: Whether to return `rstd`, which `norm_backward` needs.

    Returns:
        `(out, rstd, norm_input)`: like `x` and contiguous; float32 with the shape of `x` without
        its last dimension, or None; and the sum with the residual, or `x` itself without one.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0, -2.0, 0.5]]), torch.tensor([1.0, 0.5, 2.0, 1.0])
        >>> out, rstd, _ = norm_forward(x, weight, 1e-6, with_rstd=True)
        >>> round(rstd.item(), 4), [round(value, 3) for value in out[0].tolist()]
        (0.6576, [0.658, 0.658, -2.63, 0.329])
    """
    NORM_FORWARD.require(_check_with_rstd, with_rstd, residual, residual_out)
    fields = (x, weight, eps, residual, out_scale)
    if out is None and residual_out is None:
        result, rstd, total = NORM_FORWARD(*fields)
    else:
        given = {"out": out, "residual_out": residual_out}
        result, rstd, total = _fill(_NORM_FORWARD_INTO, fields, given)
    return result, rstd if with_rstd else None, x if residual is None else total


# ---- with a cast --------------------------------------------------------------------------------


class CastArguments(NamedTuple):
    x: Tensor
    weight: Tensor | None
    eps: float
    fmt: str
    num_per_channels: int
    residual: Tensor | None
    out_scale: float
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    with_out_bf16: bool
    mega_moe_sf: Tensor | None
    mega_moe_block_m: int
    amax_min: float

    def check(self) -> None:
        Arguments.check(self)  # type: ignore[arg-type]
        checks.one_of("fmt", self.fmt, _FORMATS)
        checks.integer("num_per_channels", self.num_per_channels, 1)
        checks.one_of("num_per_channels", self.num_per_channels, GROUPS)
        layout.check_width(self.fmt, self.x.shape[-1])
        layout.check_flags(self)
        layout.check_amax_min(self.amax_min, self.fmt)
        checks.boolean("with_out_bf16", self.with_out_bf16)
        checks.integer("mega_moe_block_m", self.mega_moe_block_m, 0, checks.MOST_SIZE)
        if (self.mega_moe_sf is None) != (self.mega_moe_block_m == 0):
            raise ValueError("mega_moe_sf and mega_moe_block_m must be given together")
        if self.mega_moe_sf is not None:
            self._check_mega(self.mega_moe_sf)

    def _check_mega(self, mega_moe_sf: Tensor) -> None:
        x, block_m = self.x, self.mega_moe_block_m
        if x.dim() != 2 or x.shape[1] % 128 or self.num_per_channels != 32 or not self.round_sf:
            raise ValueError(
                "mega_moe_sf needs an x of two dimensions with a multiple of 128 channels, "
                "num_per_channels 32 and round_sf"
            )
        words = x.shape[1] // 128
        dims = ("hidden / 128", "rows")
        checks.tensor(
            "mega_moe_sf", mega_moe_sf, dims, torch.int32, shape=(words, None), contiguous=True
        )
        rows = ceil_div(x.shape[0], block_m) * align(block_m, 128)
        if mega_moe_sf.shape[1] < rows:
            raise ValueError(
                f"mega_moe_sf must have at least {rows} rows, got {mega_moe_sf.shape[1]}"
            )

    def outputs(self) -> tuple[Out, Out, Out, Out, Out]:
        shape, fmt = self.x.shape, self.fmt
        width = layout.data_width(fmt, shape[-1])
        return (
            Out("out", (*shape[:-1], width), layout.FORMATS[fmt].dtype),
            _scales_out(self),
            Out("out_bf16", shape if self.with_out_bf16 else (0,), torch.bfloat16),
            Out("rstd", shape[:-1], torch.float32),
            _total(self.x, self.residual),
        )

    def launches(
        self, data: Spec, sf: Spec, out_bf16: Spec, rstd: Spec, total: Spec
    ) -> Launch | None:
        return _launch(self, rstd, total, out_bf16, data, sf, self.mega_moe_sf)


def _scales_out(a: CastArguments) -> Out:
    """The scales, of each batch by itself."""
    *batch, rows, hidden = a.x.shape
    scale_layout = layout.layout_of(a)
    one = layout.scale_out("out_sf", rows, ceil_div(hidden, a.num_per_channels), scale_layout)
    if not batch:
        return one
    columns = one.shape[1]
    if is_by_rows(scale_layout):
        return Out("out_sf", (*batch, rows, columns), one.dtype)
    padded = align(rows, 4)
    strides, base = (columns * padded, 1, padded), (batch[0] * columns, padded)
    return Out("out_sf", (*batch, rows, columns), one.dtype, strides, base)


def _cast_reference(*fields: Any) -> tuple[Tensor, ...]:
    a = CastArguments(*fields)
    (data, sf), out_bf16, rstd, total = reference.norm_forward_and_per_token_cast(
        **a._asdict(), with_rstd=True
    )
    if rstd is None:
        raise RuntimeError("unreachable: rstd was asked for")
    # Results that were not asked for have no elements; no two results may share memory.
    if out_bf16 is None:
        out_bf16 = a.x.new_empty(0, dtype=torch.bfloat16)
    return data, sf, out_bf16, rstd, a.x.new_empty(0) if a.residual is None else total


def cast_cost(
    x: Tensor,
    weight: Tensor | None,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    with_rstd: bool = False,
    mega_moe_sf: Tensor | None = None,
    **_: Any,
) -> Cost:
    rows, hidden = x.numel() // x.shape[-1], x.shape[-1]
    groups = ceil_div(hidden, num_per_channels)
    scales = 4 * rows * (ceil_div(groups, 4) if use_packed_ue8m0 else groups)
    scales += rows * groups if mega_moe_sf is not None else 0
    fixed = 0 if weight is None else layout.bytes_of(weight)
    read = (1 if residual is None else 3) * layout.bytes_of(x) + fixed
    written = rows * layout.data_width(fmt, hidden) + scales + 2 * x.numel() * with_out_bf16
    return Cost(read + written + 4 * rows * with_rstd, 8 * x.numel())


def _save_cast(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = CastArguments(*inputs)
    data, sf, _, rstd, total = output
    ctx.set_materialize_grads(False)
    ctx.out_scale, ctx.has_residual = a.out_scale, a.residual is not None
    ctx.has_bf16 = a.with_out_bf16
    ctx.save_for_backward(a.x if a.residual is None else total, a.weight, rstd)
    ctx.mark_non_differentiable(data, sf, rstd)


def _backward_cast(
    ctx: Any, _data: Any, _sf: Any, out_grad: Tensor | None, _rstd: Any, total_grad: Tensor | None
) -> tuple[Any, ...]:
    found = _gradients(ctx, out_grad if ctx.has_bf16 else None, total_grad)
    x_grad, weight_grad, residual_grad = found
    return x_grad, weight_grad, None, None, None, residual_grad, *(None,) * 8


_INSTEAD = "tile_kernels.quant.norm_forward_and_per_token_cast with with_out_bf16, without buffers"
_declare_cast: Callable[..., Operator] = functools.partial(
    Operator, arguments=CastArguments, reference=_cast_reference, dynamic=_DYNAMIC
)
NORM_FORWARD_AND_PER_TOKEN_CAST = _declare_cast(
    "quant.norm_forward_and_per_token_cast",
    cost=cast_cost,
    backward=_backward_cast,
    setup_context=_save_cast,
)
_INTO: dict[str, Any] = {
    "out": ("out", "out_sf", "out_bf16", "rstd", "residual_out"),
    "in_place": ("x", "residual"),
    "serves": "norm_forward_and_per_token_cast",
    "instead": _INSTEAD,
}
_CAST_INTO = _declare_cast("quant._norm_cast_into", **_INTO)
# With `mega_moe_sf`: the dispatcher has no optional argument that is written.
_CAST_MEGA = _declare_cast("quant._norm_cast_mega_moe", mutates=("mega_moe_sf",), **_INTO)


def _check_buffers(out: Any, out_bf16: Any, with_out_bf16: bool) -> None:
    if out is not None and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(f"out must be a tuple of data and scales, got {type(out).__name__}")
    if out_bf16 is not None and with_out_bf16 is False:
        raise ValueError("out_bf16 needs with_out_bf16")


def _as_mega_buffer(x: Any, mega_moe_sf: Any) -> Any:
    """The buffer `[hidden / 128, rows]` of a view `[num_tokens, hidden / 128]` of it."""
    if not (isinstance(mega_moe_sf, Tensor) and isinstance(x, Tensor) and x.dim() == 2):
        return mega_moe_sf
    num_tokens, words = x.shape[0], x.shape[1] // 128
    if tuple(mega_moe_sf.shape) != (num_tokens, words):
        return mega_moe_sf
    by_token, rows = mega_moe_sf.stride()
    if by_token != 1 or rows < num_tokens:  # a buffer of as many rows as there are words
        return mega_moe_sf
    return mega_moe_sf.as_strided((words, rows), (rows, 1))


@NORM_FORWARD_AND_PER_TOKEN_CAST.public(
    reference=reference.norm_forward_and_per_token_cast,
    mutates=("out", "out_bf16", "residual_out", "mega_moe_sf"),
)
def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
    out_bf16: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_moe_sf: Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
    *,
    amax_min: float | None = None,
) -> tuple[QuantTensor, Tensor | None, Tensor | None, Tensor]:
    """Computes `norm_forward` and casts its result to a format, in one pass over the data.

    The data and scales are those of `per_token_cast(norm_forward(x, ...)[0], fmt, ...)`, bit for
    bit. With `with_out_bf16` the norm itself comes in bfloat16 too, and carries the gradient: the
    rounding of the cast counts as the identity.

    Args:
        x: As in `norm_forward`.
        weight: As in `norm_forward`.
        eps: As in `norm_forward`.
        fmt: `"e4m3"` or `"e2m1"`, which needs an even number of channels.
        num_per_channels: Channels of a scale: 16, 32, 64 or 128.
        residual: As in `norm_forward`.
        out_scale: As in `norm_forward`.
        use_tma_aligned_col_major_sf: Gives scales the strides `(1, n)`, with `n` the tokens rounded
            up to a multiple of 4; of each batch by itself. Padding is zero.
        round_sf: Takes the next power of two as scale.
        use_packed_ue8m0: Packs the exponents of four groups into an int32, by columns or by rows;
            needs `round_sf`. The bytes of groups that do not exist are zero.
        with_out_bf16: Whether to return the norm in bfloat16.
        out: Buffers `(data, scales)`; one that is None is allocated.
        out_bf16: A buffer for the norm in bfloat16; it may be `x` itself if that is bfloat16.
        residual_out: As in `norm_forward`.
        mega_moe_sf: `[hidden / 128, rows]`, int32, contiguous, or the view `[num_tokens,
            hidden / 128]` of it with strides `(1, rows)`. It gets the exponents in the order that
            fused MoE kernels of sm_100 read, beside the scales; other words stay as they are. Needs
            `round_sf`, groups of 32, an `x` of two dimensions and a multiple of 128 channels.
        mega_moe_block_m: Tokens of a block of that order; with `mega_moe_sf`. Token `t`, with
            `j = t % block_m`, is in row `t // block_m * align(block_m, 128) + j // 128 * 128 +
            j % 32 * 4 + j % 128 // 32`.
        with_rstd: As in `norm_forward`.
        amax_min: As in `per_token_cast`.

    Returns:
        `((data, scales), out_bf16, rstd, norm_input)`. Data and scales have the leading dimensions
        of `x` and are laid out as by `per_token_cast`; the others are as in `norm_forward`, None
        unless asked for.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a value is not one of these.

    Example:
        >>> x = (torch.arange(32) - 15.5)[None] / 4
        >>> (data, scales), _, rstd, _ = norm_forward_and_per_token_cast(
        ...     x.bfloat16(), None, 1e-6, "e4m3", 32, round_sf=True, with_rstd=True
        ... )
        >>> round(rstd.item(), 6), scales.item() == 2**-8, data.view(torch.uint8)[0, :4].tolist()
        (0.433224, True, [253, 253, 252, 251])
    """
    operator = NORM_FORWARD_AND_PER_TOKEN_CAST
    operator.require(_check_with_rstd, with_rstd, residual, residual_out)
    operator.require(_check_buffers, out, out_bf16, with_out_bf16)
    if mega_moe_sf is not None:
        mega_moe_sf = _as_mega_buffer(x, mega_moe_sf)
    fields = (
        x, weight, eps, fmt, num_per_channels, residual, out_scale, use_tma_aligned_col_major_sf,
        round_sf, use_packed_ue8m0, with_out_bf16, mega_moe_sf, mega_moe_block_m,
        layout.least_amax(fmt, False, amax_min),
    )  # fmt: skip
    chosen = operator if mega_moe_sf is None else _CAST_MEGA
    if out is None and out_bf16 is None and residual_out is None:
        data, sf, plain, rstd, total = chosen(*fields)
    else:
        data_out, sf_out = out or (None, None)
        given = {
            "out": data_out, "out_sf": sf_out, "out_bf16": out_bf16, "residual_out": residual_out,
        }  # fmt: skip
        into = _CAST_INTO if mega_moe_sf is None else _CAST_MEGA
        data, sf, plain, rstd, total = _fill(into, fields, given)
    return (
        (data, sf), plain if with_out_bf16 else None, rstd if with_rstd else None,
        x if residual is None else total,
    )  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    """`summed`: the weight's gradient is wanted; it is added to `old_weight_grad`, if given."""

    out_grad: Tensor
    x: Tensor
    weight: Tensor | None
    rstd: Tensor
    residual_out_grad: Tensor | None
    out_scale: float
    old_weight_grad: Tensor | None
    summed: bool

    def check(self) -> None:
        _check_norm(self.x, self.weight, self.out_scale)
        _check_rows("out_grad", self.out_grad, self.x)
        checks.tensor(
            "rstd", self.rstd, ("...",) * (self.x.dim() - 1), torch.float32,
            shape=tuple(self.x.shape[:-1]), contiguous=True,
        )  # fmt: skip
        if self.residual_out_grad is not None:
            _check_rows("residual_out_grad", self.residual_out_grad, self.x)
        if self.old_weight_grad is not None:
            if self.weight is None:
                raise ValueError("weight_grad needs a weight, got None")
            shape = (self.x.shape[-1],)
            checks.tensor(
                "weight_grad", self.old_weight_grad, ("hidden",), layout.PLAIN, shape=shape,
                contiguous=True,
            )  # fmt: skip

    def outputs(self) -> tuple[Out, Out]:
        grad_like = self.weight if self.old_weight_grad is None else self.old_weight_grad
        if not self.summed or grad_like is None:
            grad = Out("out_weight_grad", (0,), torch.float32)
        else:
            grad = Out("out_weight_grad", grad_like.shape, grad_like.dtype)
        return Out("out", self.x.shape, self.x.dtype), grad

    def scratch(self) -> tuple[Out, ...]:
        if not self.summed:
            return ()
        *lead, width = self.x.shape
        return (Out("partial", (count_parts(math.prod(lead), width), width), torch.float32),)

    def launches(
        self, x_grad: Spec, weight_grad: Spec, *scratch: Spec
    ) -> tuple[Launch | Host, ...]:
        old: Any = self.old_weight_grad
        if self.x.numel() == 0:
            if not self.summed:
                return ()
            if old is None:
                return (Host(Tensor.zero_, (weight_grad,)),)
            return (Host(Tensor.copy_, (weight_grad, old)),)
        partial = scratch[0] if scratch else None
        grad, x = _rows(self.out_grad), _rows(self.x)
        residual = None if self.residual_out_grad is None else _rows(self.residual_out_grad)
        x_grad, rstd = _rows(x_grad), self.rstd
        weight, weight_alignment = _weight_of(self.weight)
        source, width = dtype_name(x), x.shape[1]
        problem = (
            source, width, weight, self.summed, residual is not None,
            _aligned(grad, x, residual, x_grad), weight_alignment,
        )  # fmt: skip
        parts = Size(lambda a: count_parts(math.prod(a.x.shape[:-1]), a.x.shape[-1]))
        arguments = (
            grad, x, self.weight, rstd if rstd.dim() == 1 else rstd.view(-1), residual, x_grad,
            partial, float(self.out_scale), parts,
        )  # fmt: skip
        gradients = Launch(_GRADIENTS, problem, arguments)
        if partial is None:
            return (gradients,)
        sum_problem = (width, dtype_name(weight_grad), old is not None)
        return gradients, Launch(_SUM, sum_problem, (partial, old, weight_grad))


def _backward_reference(*fields: Any) -> tuple[Tensor, Tensor]:
    a = BackwardArguments(*fields)
    old = None if a.old_weight_grad is None else a.old_weight_grad.clone()
    x_grad, grad = reference.norm_backward(*a[:6], old)
    return x_grad, grad if a.summed and grad is not None else x_grad.new_empty(0).float()


def backward_cost(
    x: Tensor, weight: Tensor | None, residual_out_grad: Tensor | None = None, **_: Any
) -> Cost:
    passes = 3 if residual_out_grad is None else 4
    rows = x.numel() // x.shape[-1]
    fixed = 0 if weight is None else 2 * layout.bytes_of(weight)
    return Cost(passes * layout.bytes_of(x) + fixed + 4 * rows, 8 * x.numel())


NORM_BACKWARD = Operator(
    "quant.norm_backward",
    BackwardArguments,
    reference=_backward_reference,
    cost=backward_cost,
    dynamic={"out_grad": 1, "x": 1, "rstd": 0, "residual_out_grad": 1},
    differentiable=False,
    out=("out", "out_weight_grad"),
    in_place=("old_weight_grad",),
)


def _check_backward_out(out: Any, weight: Any) -> None:
    if out is None or isinstance(out, Tensor):
        return
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        given = len(out) if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out must be a tensor, or two, got {given}")
    if weight is None and out[1] is not None:
        raise ValueError("out_weight_grad must be None without a weight")


@NORM_BACKWARD.public(reference=reference.norm_backward, mutates=("weight_grad",))
def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of `norm_forward`.

    With `h = x * rstd`, `d = out_grad * out_scale`, `e = d * weight`, in float32,

        x_grad      = (e - h * (sum(h * e) / hidden)) * rstd + residual_out_grad
        weight_grad = sum of h * d over all rows

    each rounded once. `x_grad` is the gradient of the residual too. The weight's gradient is added
    up in parts of the rows, at most 264, on every device and for any number of SMs that kernels may
    use: the same input gives the same bits.

    Args:
        out_grad: Like `x`: the gradient of `out`.
        x: `[num_tokens, hidden]` or `[batch, num_tokens, hidden]`, bfloat16 or float32: the
            `norm_input` of `norm_forward`.
        weight: As in `norm_forward`.
        rstd: float32, contiguous, with the shape of `x` without its last dimension: of
            `norm_forward`.
        residual_out_grad: Like `x`: the gradient of `norm_input`; or None.
        out_scale: As in `norm_forward`.
        weight_grad: `[hidden]`, bfloat16 or float32, contiguous: a gradient that the new one is
            added to in place, in float32 and rounded once; or None.
        out: Buffers `(x_grad, weight_grad)` that are filled and returned, or the first alone; one
            that is None is allocated. A second one takes the sum with `weight_grad`, which then
            stays as it is.

    Returns:
        `(x_grad, weight_grad)`: like `x` and contiguous; `[hidden]` with the dtype of the weight,
        or the given `weight_grad`. None without a weight.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0, -2.0, 0.5]]), torch.tensor([1.0, 0.5, 2.0, 1.0])
        >>> _, rstd, _ = norm_forward(x, weight, 1e-6, with_rstd=True)
        >>> grad = torch.tensor([[1.0, -1.0, 0.5, 2.0]])
        >>> x_grad, weight_grad = norm_backward(grad, x, weight, rstd)
        >>> [round(value, 4) for value in x_grad[0].tolist()]
        [0.7287, -0.1866, 0.5154, 1.3507]
    """
    summed = weight is not None
    fields = (out_grad, x, weight, rstd, residual_out_grad, out_scale, weight_grad, summed)
    if out is None and weight_grad is None:
        x_grad, grad = NORM_BACKWARD(*fields)
    else:
        NORM_BACKWARD.require(_check_backward_out, out, weight)
        NORM_BACKWARD.require(checks.writable, "weight_grad", weight_grad)
        first, second = out if isinstance(out, (tuple, list)) else (out, None)
        second = weight_grad if second is None else second
        x_grad, grad = NORM_BACKWARD.fill(fields, (first, second))
    return x_grad, grad if summed else None
