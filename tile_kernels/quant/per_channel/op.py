"""Casts with scales along channels: a scale for every 32 or 128 tokens of a channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.per_channel import reference
from tile_kernels.quant.per_channel.plan import (
    CLAMPED_SWIGLU,
    GROUPS,
    NONE,
    SCALE_COLUMNS,
    SWIGLU,
    plan,
)
from tile_kernels.quant.scales import num_blocks, pack_along_tokens
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.transpose.reference import transpose

_CAST_COLUMNS = Kernel("tile_kernels.quant.per_channel.kernel", "cast_columns", plan)


def _check_flags(fmt: str, num_per_tokens: int, round_sf: bool) -> None:
    checks.one_of("fmt", fmt, ("e4m3",))
    checks.integer("num_per_tokens", num_per_tokens, 1)
    checks.one_of("num_per_tokens", num_per_tokens, GROUPS)
    checks.boolean("round_sf", round_sf)


def _outputs(
    shape: Sequence[int], num_per_tokens: int, *, transposed: bool = False
) -> tuple[Out, Out]:
    data = tuple(reversed(shape)) if transposed else tuple(shape)
    scales = num_blocks(shape, (num_per_tokens, 1))
    return Out("out", data, torch.float8_e4m3fn), Out("out_sf", scales, torch.float32)


class Source(NamedTuple):
    """What a launch reads: `rows` of them, gathered if there is a `pos_to_token`."""

    x: Any
    x_sf: Any = None
    pos_to_token: Any = None
    rows: Size = Size(lambda a: a.x.shape[0])


def _launch(
    a: Any, source: Source, out: Spec, out_sf: Spec, transposed: bool = False, swiglu: bool = False
) -> Launch | None:
    if out.numel() == 0:
        return None
    x, x_sf, pos_to_token, rows = source
    activation, clamp = NONE, math.inf
    if swiglu:
        activation = SWIGLU if a.swiglu_clamp_value is None else CLAMPED_SWIGLU
        clamp = layout.swiglu_clamp(a.swiglu_clamp_value)
    problem = (
        layout.SOURCES[x.dtype], activation, transposed, a.num_per_tokens, a.round_sf,
        pos_to_token is not None, getattr(a, "num_per_channels", None) or SCALE_COLUMNS,
        x_sf is not None and x_sf.dtype == torch.int32, rows, out_sf.shape[1], x.stride(0),
        alignment(x), alignment(out),
    )  # fmt: skip
    arguments = (x, x_sf, pos_to_token, out, out_sf, float(a.amax_min), clamp)
    return Launch(_CAST_COLUMNS, problem, arguments)


# ---- as it is, or transposed ---------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_tokens: int
    round_sf: bool
    amax_min: float

    def check(self) -> None:
        layout.check_plain(self.x)
        layout.check_width("e4m3", self.x.shape[1])
        _check_flags(self.fmt, self.num_per_tokens, self.round_sf)
        layout.check_amax_min(self.amax_min, self.fmt)

    def outputs(self) -> tuple[Out, Out]:
        return _outputs(self.x.shape, self.num_per_tokens)

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        return _launch(self, Source(self.x), out, out_sf)


def cost(x: Tensor | QuantTensor, fmt: str, num_per_tokens: int, **_: Any) -> Cost:
    data = x[0] if isinstance(x, tuple) else x
    return layout.cast_cost(x, fmt, data.shape, (num_per_tokens, 1), packed=False)


def _by_fields(*fields: Any) -> QuantTensor:
    return reference.per_channel_cast(**Arguments(*fields)._asdict())


PER_CHANNEL_CAST = layout.cast_operator(
    reference.per_channel_cast, Arguments, cost, by_fields=_by_fields
)


def _check_packed(use_packed_ue8m0: bool, round_sf: bool) -> None:
    checks.boolean("use_packed_ue8m0", use_packed_ue8m0)
    if use_packed_ue8m0 and not checks.boolean("round_sf", round_sf):
        raise ValueError(
            "use_packed_ue8m0 needs round_sf=True, because packed scales are exponents, got "
            "round_sf=False"
        )


def _packed(pair: QuantTensor, out: Any) -> QuantTensor:
    """The cast with its scales packed along tokens, in the caller's buffers if there are any."""
    data, words = pair[0], pack_along_tokens(pair[1])
    if out is None:
        return data, words
    buffers = PER_CHANNEL_CAST._buffers(out)
    for name, buffer, result in zip(("out", "out_sf"), buffers, (data, words)):
        PER_CHANNEL_CAST.require(checks.buffer, name, buffer, result.shape, result.dtype)
        buffer.copy_(result)
    return buffers


@PER_CHANNEL_CAST.public(reference=reference.per_channel_cast)
def per_channel_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    out: QuantTensor | None = None,
    *,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    amax_min: float | None = None,
) -> QuantTensor:
    """Quantizes with a scale for every 32 or 128 tokens of a channel.

    A value is `code * scale`, and its code is `encode(value * inv)`. With `a` the largest magnitude
    among the tokens of a scale, but at least `amax_min`, `scale = a / 448` and `inv = 448 / a`. The
    last tokens may be fewer. A quantized `x` is multiplied by its scales first. A NaN becomes a NaN
    and does not count for the scale; an infinity counts as the largest float32 and saturates. Not
    differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride. Or `(data, scales)`, as in
            `per_channel_cast_fused`.
        fmt: `"e4m3"`.
        num_per_tokens: Tokens of a scale: 32 or 128.
        round_sf: Takes the next power of two as scale.
        out: Buffers `(data, scales)` that are filled and returned.
        num_per_channels: Channels of a scale of a quantized `x`: 32 or 128.
        use_packed_ue8m0: Packs the exponents of four neighbouring scales of a channel into an
            int32, by PyTorch operations behind the cast; needs `round_sf`.
        amax_min: As in `per_token_cast`.

    Returns:
        `(data, scales)`: `[num_tokens, hidden]` float8_e4m3fn, and
        `[ceil(num_tokens / num_per_tokens), hidden]` float32, or a fourth of these rows in int32 if
        packed; both contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> data, scales = per_channel_cast(torch.tensor([[1.0, -2.0], [7.0, 0.5]]), "e4m3", 32)
        >>> data.float().tolist(), (scales * 448).tolist()
        ([[64.0, -448.0], [448.0, 112.0]], [[7.0, 2.0]])
    """
    PER_CHANNEL_CAST.require(_check_packed, use_packed_ue8m0, round_sf)
    least = layout.least_amax(fmt, False, amax_min)
    given = None if use_packed_ue8m0 else out
    if isinstance(x, tuple):
        pair = PER_CHANNEL_CAST_OF_PAIRS(
            *layout.pair(x), fmt, num_per_tokens, round_sf, num_per_channels, None, least,
            out=given,
        )  # fmt: skip
    else:
        if num_per_channels is not None:
            PER_CHANNEL_CAST.require(check_num_per_channels, num_per_channels)
        pair = PER_CHANNEL_CAST(x, fmt, num_per_tokens, round_sf, least, out=given)
    return _packed(pair, out) if use_packed_ue8m0 else pair


class TransposedArguments(Arguments):
    def outputs(self) -> tuple[Out, Out]:
        return _outputs(self.x.shape, self.num_per_tokens, transposed=True)

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        return _launch(self, Source(self.x), out, out_sf, transposed=True)


PER_CHANNEL_CAST_AND_TRANSPOSE = layout.cast_operator(
    reference.per_channel_cast_and_transpose, TransposedArguments, cost
)


@PER_CHANNEL_CAST_AND_TRANSPOSE.public()
def per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    out: QuantTensor | None = None,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Computes `per_channel_cast` with the data, but not the scales, transposed.

    Fastest where `num_tokens` is a multiple of 16 and `hidden` of 8. Not differentiable. Errors are
    those of `per_channel_cast`.

    Args:
        x, fmt, num_per_tokens, round_sf, out, amax_min: As in `per_channel_cast`; `x` is plain.

    Returns:
        `(data, scales)`: `[hidden, num_tokens]` float8_e4m3fn, and
        `[ceil(num_tokens / num_per_tokens), hidden]` float32, both contiguous.

    Example:
        >>> x = torch.tensor([[1.0, -2.0], [7.0, 0.5]])
        >>> data, scales = per_channel_cast_and_transpose(x, "e4m3", 32)
        >>> data.float().tolist(), (scales * 448).tolist()
        ([[64.0, 448.0], [-448.0, 112.0]], [[7.0, 2.0]])
    """
    least = layout.least_amax(fmt, False, amax_min)
    return PER_CHANNEL_CAST_AND_TRANSPOSE(x, fmt, num_per_tokens, round_sf, least, out=out)


# ---- gathered, of a plain or a quantized source --------------------------------------------------


class FusedArguments(NamedTuple):
    x: Tensor
    x_sf: Tensor | None
    fmt: str
    num_per_tokens: int
    round_sf: bool
    num_per_channels: int | None
    pos_to_token: Tensor | None
    amax_min: float

    def check(self) -> None:
        layout.check_plain_or_pair(self.x)
        if self.num_per_channels is not None:
            check_num_per_channels(self.num_per_channels)
        if self.x_sf is None:
            layout.check_plain(self.x)
        else:
            dims = ("num_tokens", "hidden")
            checks.tensor("x", self.x, dims, torch.float8_e4m3fn, unit_inner_stride=True)
            if self.num_per_channels is None:
                allowed = " or ".join(map(str, GROUPS))
                raise ValueError(f"num_per_channels must be {allowed} for a quantized x, got None")
            layout.check_source_scales(self.x, self.x_sf, (1, self.num_per_channels))
        layout.check_width("e4m3", self.x.shape[1])
        _check_flags(self.fmt, self.num_per_tokens, self.round_sf)
        layout.check_amax_min(self.amax_min, self.fmt)
        if self.pos_to_token is not None:
            checks.tensor(
                "pos_to_token", self.pos_to_token, ("num_positions",), torch.int32, contiguous=True
            )

    def outputs(self) -> tuple[Out, Out]:
        return _outputs((_num_positions(self), self.x.shape[1]), self.num_per_tokens)

    def launches(self, out: Spec, out_sf: Spec, transposed: bool = False) -> Launch | None:
        x, x_sf = self.x, self.x_sf
        if x.numel() == 0:  # all positions are padding
            x, x_sf = _row_of_zeros(x), None if x_sf is None else _row_of_zeros(x_sf)
        source = Source(x, x_sf, self.pos_to_token, Size(_num_positions))
        return _launch(self, source, out, out_sf, transposed)

    def check_values(self) -> None:
        """Negative positions are padding, the others name a row of `x`."""
        checks.in_range("pos_to_token", self.pos_to_token, -(2**31), self.x.shape[0] - 1)


def check_num_per_channels(value: int) -> None:
    """The channels of a scale of a quantized `x`."""
    checks.integer("num_per_channels", value, 1)
    checks.one_of("num_per_channels", value, GROUPS)


def _num_positions(a: FusedArguments) -> int:
    return a.x.shape[0] if a.pos_to_token is None else a.pos_to_token.shape[0]


def _row_of_zeros(x: Any) -> Any:
    """A tensor of one row instead of `x`, which has none."""
    shape = (1, x.shape[1])
    like = Spec(shape, (x.shape[1], 1), x.dtype, x.device)
    return x.apply(Tensor.new_zeros, shape, like=like)


def _fused_reference(
    x: Tensor,
    x_sf: Tensor | None,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool,
    num_per_channels: int | None,
    pos_to_token: Tensor | None,
    amax_min: float,
) -> QuantTensor:
    source = x if x_sf is None else (x, x_sf)
    if pos_to_token is not None:
        pos_to_token = pos_to_token.masked_fill(pos_to_token >= x.shape[0], -1)
    return reference.per_channel_cast_fused(
        source, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token, amax_min
    )


def fused_cost(
    x: Tensor | QuantTensor, fmt: str, num_per_tokens: int, pos_to_token: Tensor | None, **_: Any
) -> Cost:
    rows, width = layout.pair(x)[0].shape
    index_bytes = 0
    if pos_to_token is not None:
        rows, index_bytes = pos_to_token.shape[0], layout.bytes_of(pos_to_token)
    cast = layout.cast_cost(x, fmt, (rows, width), (num_per_tokens, 1), packed=False)
    return Cost(bytes=cast.bytes + index_bytes)


def _fused_operator(
    function: Callable[..., Any],
    arguments: Any = FusedArguments,
    by_fields: Callable[..., Any] = _fused_reference,
    **more: Any,
) -> Operator:
    rows = {"x": 1, "x_sf": 1, "pos_to_token": 0}
    return layout.cast_operator(
        function, arguments, fused_cost, by_fields=by_fields, dynamic=rows, **more
    )


PER_CHANNEL_CAST_FUSED = _fused_operator(reference.per_channel_cast_fused)

# `per_channel_cast` of a quantized `x`.
PER_CHANNEL_CAST_OF_PAIRS = _fused_operator(
    reference.per_channel_cast_fused, name="_per_channel_cast_of_pairs", serves="per_channel_cast"
)


@PER_CHANNEL_CAST_FUSED.public(reference=reference.per_channel_cast_fused)
def per_channel_cast_fused(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
    out: QuantTensor | None = None,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Quantizes gathered tokens, plain or quantized ones, as `per_channel_cast` does.

    Row `i` of the result is that of `x[pos_to_token[i]]`. A position that is negative or not below
    `num_tokens` makes a row of zeros. Without `pos_to_token` the rows stay as they are. A quantized
    `x` is multiplied by its scales first, `(code * scale) * inv`. See `per_channel_cast` for
    scales, codes, NaN and infinity. Not differentiable.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride. Or `(data, scales)`:
            `[num_tokens, hidden]` float8_e4m3fn, any row stride, and
            `[num_tokens, ceil(hidden / num_per_channels)]` float32, or a fourth of these columns in
            int32 that hold four exponents each, any strides.
        num_per_channels: 32 or 128 for a quantized `x`; ignored for a plain one.
        pos_to_token: `[num_positions]`, int32, contiguous; or None.
        fmt, num_per_tokens, round_sf, out, amax_min: As in `per_channel_cast`.

    Returns:
        `(data, scales)`: `[num_positions, hidden]` float8_e4m3fn, and
        `[ceil(num_positions / num_per_tokens), hidden]` float32, both contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs; `x_sf` names the scales of `x`.
        ValueError: If a shape, a layout or a value is not one of these; in the checked mode also if
            a position is not below `num_tokens`.

    Example:
        >>> x, index = torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 0], dtype=torch.int32)
        >>> data, scales = per_channel_cast_fused(x, "e4m3", 32, pos_to_token=index)
        >>> data.float().tolist(), (scales * 448).tolist()
        ([[448.0], [0.0], [224.0]], [[2.0]])
    """
    data, sf = layout.pair(x)
    return PER_CHANNEL_CAST_FUSED(
        data, sf, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token,
        layout.least_amax(fmt, False, amax_min), out=out,
    )  # fmt: skip


class TransposedFusedArguments(FusedArguments):
    def outputs(self) -> tuple[Out, Out]:
        shape = (_num_positions(self), self.x.shape[1])
        return _outputs(shape, self.num_per_tokens, transposed=True)

    def launches(self, out: Spec, out_sf: Spec, transposed: bool = True) -> Launch | None:
        return super().launches(out, out_sf, transposed)


def _transposed_fused_reference(*fields: Any) -> QuantTensor:
    data, sf = _fused_reference(*fields)
    return transpose(data), sf


PER_CHANNEL_CAST_FUSED_AND_TRANSPOSE = _fused_operator(
    reference.per_channel_cast_fused_and_transpose,
    TransposedFusedArguments,
    _transposed_fused_reference,
)


@PER_CHANNEL_CAST_FUSED_AND_TRANSPOSE.public(
    reference=reference.per_channel_cast_fused_and_transpose
)
def per_channel_cast_fused_and_transpose(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
    out: QuantTensor | None = None,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Computes `per_channel_cast_fused` with the data, but not the scales, transposed.

    An operand of a weight gradient from tokens in one pass. Fastest where the number of positions
    is a multiple of 16 and `hidden` of 8, or of 16 for a quantized `x`. Not differentiable. Errors
    are those of `per_channel_cast_fused`.

    Args:
        x, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token, out, amax_min: As in
            `per_channel_cast_fused`.

    Returns:
        `(data, scales)`: `[hidden, num_positions]` float8_e4m3fn, and
        `[ceil(num_positions / num_per_tokens), hidden]` float32, both contiguous.

    Example:
        >>> x, index = torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 0], dtype=torch.int32)
        >>> data, _ = per_channel_cast_fused_and_transpose(x, "e4m3", 32, pos_to_token=index)
        >>> data.float().tolist()
        [[448.0, 0.0, 224.0]]
    """
    data, sf = layout.pair(x)
    return PER_CHANNEL_CAST_FUSED_AND_TRANSPOSE(
        data, sf, fmt, num_per_tokens, round_sf, num_per_channels, pos_to_token,
        layout.least_amax(fmt, False, amax_min), out=out,
    )  # fmt: skip


# ---- of SwiGLU -----------------------------------------------------------------------------------


class SwigluArguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_tokens: int
    round_sf: bool
    without_transpose: bool
    swiglu_clamp_value: float | None
    amax_min: float

    def check(self) -> None:
        layout.check_plain(self.x)
        layout.check_width("e4m3", self.x.shape[1])
        if self.x.shape[1] % 2:
            raise ValueError(
                f"x must have an even number of channels, gate and value, got {self.x.shape[1]}"
            )
        _check_flags(self.fmt, self.num_per_tokens, self.round_sf)
        checks.boolean("without_transpose", self.without_transpose)
        layout.check_swiglu_clamp(self.swiglu_clamp_value)
        layout.check_amax_min(self.amax_min, self.fmt)

    def outputs(self) -> tuple[Out, Out]:
        shape = (self.x.shape[0], self.x.shape[1] // 2)
        return _outputs(shape, self.num_per_tokens, transposed=not self.without_transpose)

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        transposed = not self.without_transpose
        return _launch(self, Source(self.x), out, out_sf, transposed, swiglu=True)


def swiglu_cost(x: Tensor, fmt: str, num_per_tokens: int, **_: Any) -> Cost:
    shape = (x.shape[0], x.shape[1] // 2)
    return layout.cast_cost(x, fmt, shape, (num_per_tokens, 1), packed=False)


SWIGLU_FORWARD_AND_PER_CHANNEL_CAST_AND_TRANSPOSE = layout.cast_operator(
    reference.swiglu_forward_and_per_channel_cast_and_transpose,
    SwigluArguments,
    swiglu_cost,
    instead=layout.SWIGLU_INSTEAD,
)


@SWIGLU_FORWARD_AND_PER_CHANNEL_CAST_AND_TRANSPOSE.public()
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    out: QuantTensor | None = None,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Computes SwiGLU, rounded to bfloat16, then `per_channel_cast_and_transpose`.

    The activation is `(l / (1 + exp(-l))) * r` in float32, with `l` the gate and `r` the value.
    With a clamp value `c`, first `l = min(l, c)` and `r = min(max(r, -c), c)`. Not differentiable.

    Args:
        x: `[num_tokens, 2 * hidden]`, gate then value, bfloat16 or float32, any row stride.
        without_transpose: True for data as `per_channel_cast` returns them.
        swiglu_clamp_value: The clamp value, at least 0, or None.
        fmt, num_per_tokens, round_sf, out, amax_min: As in `per_channel_cast`.

    Returns:
        `(data, scales)`: `[hidden, num_tokens]` float8_e4m3fn, or `[num_tokens, hidden]` without
        transpose, and `[ceil(num_tokens / num_per_tokens), hidden]` float32, both contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> x = torch.tensor([[1.0, 3.0], [2.0, 1.0]])
        >>> data, scales = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 32)
        >>> data.float().tolist(), (scales * 448).tolist()
        ([[448.0, 352.0]], [[2.1875]])
    """
    return SWIGLU_FORWARD_AND_PER_CHANNEL_CAST_AND_TRANSPOSE(
        x, fmt, num_per_tokens, round_sf, without_transpose, swiglu_clamp_value,
        layout.least_amax(fmt, False, amax_min), out=out,
    )  # fmt: skip
