"""Casts with scales along rows (tokens): data and scales, either alone, and e5m6."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.per_token import reference
from tile_kernels.quant.per_token.plan import is_whole, plan
from tile_kernels.quant.storage import (
    CAST,
    E4M3_ROW,
    GIVEN,
    GROUPS,
    HASHED,
    NEAREST,
    ROW,
    SCALES,
    SEEDED,
)
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, dtype_name, row_alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.utils import ceil_div

_CAST_GROUPS = Kernel("tile_kernels.quant.per_token.kernel", "cast_groups", plan)
_CAST_WHOLE_ROWS = Kernel("tile_kernels.quant.per_token.kernel", "cast_whole_rows", plan)

_SF_FORMATS = ("e4m3", "e2m1")  # of scales alone, and of data by given scales


def _check_group(num_per_channels: int, width: int, *, whole: bool = True) -> None:
    checks.integer("num_per_channels", num_per_channels, 1)
    if num_per_channels in GROUPS or (whole and num_per_channels == width):
        return
    allowed = ", ".join(map(str, GROUPS)) + (f" or the row width {width}" if whole else "")
    raise ValueError(f"num_per_channels must be {allowed}, got {num_per_channels}")


def _check_rows(width: int, fmt: str, num_per_channels: int) -> None:
    layout.check_width(fmt, width)
    _check_group(num_per_channels, width)
    if fmt == "e5m6" and num_per_channels != width:
        raise ValueError(
            f"num_per_channels must be the row width {width} for e5m6, got {num_per_channels}"
        )


def check_plain_cast(x: Tensor, fmt: str, num_per_channels: int) -> None:
    """`x` is plain, and the format can hold its rows with such groups."""
    checks.one_of("fmt", fmt, tuple(layout.FORMATS))
    layout.check_plain(x)
    _check_rows(x.shape[1], fmt, num_per_channels)


def launch_cast(
    x: Any,
    fmt: str,
    group: int,
    task: str,
    out: Spec | None,
    scales: Any,
    *,
    x_sf: Any = None,
    block: tuple[int, ...] = (0, 0),
    scale_layout: str = ROW,
    round_sf: bool = False,
    global_sf: Any = None,
    amax_min: float | None = None,
    rounding: str = NEAREST,
    seed: Any = None,
) -> Launch | None:
    """The launch for a task: `cast`, `scales` alone, data by `given` scales, or `fake`."""
    if x.numel() == 0:
        return None
    width = layout.values_in(x)
    problem = (
        layout.SOURCES[x.dtype], fmt, width, group, scale_layout, round_sf, task, block,
        dtype_name(x_sf), global_sf is not None, rounding, row_alignment(x),
        16 if out is None else row_alignment(out),
    )  # fmt: skip
    kernel = _CAST_WHOLE_ROWS if is_whole(fmt, width, group) else _CAST_GROUPS
    words = None if out is None else layout.as_words(out)
    if rounding != NEAREST:
        words = words.view(torch.uint8)  # type: ignore[union-attr]
    clamp_min = layout.FORMATS[fmt].clamp_min if amax_min is None else float(amax_min)
    factor, seed = layout.flat_scalar(global_sf), layout.flat_scalar(seed)
    arguments = (layout.as_words(x), x_sf, words, scales, factor, seed, clamp_min)
    return Launch(kernel, problem, arguments)


def check_rounding(a: Any) -> None:
    """Stochastic rounding needs groups; a seed needs stochastic rounding."""
    checks.boolean("stochastic_cast", a.stochastic_cast)
    if a.seed is not None:
        if not a.stochastic_cast:
            raise ValueError("seed needs stochastic_cast")
        layout.check_seed(a.seed)
    _check_grouped("stochastic_cast", a)


def check_e4m3_groups(a: Any) -> None:
    """Scales in e4m3 are those of groups."""
    layout.check_e4m3(a)
    _check_grouped("use_e4m3_sf", a)


def _check_grouped(flag: str, a: Any) -> None:
    """What a flag of this name, if it is set, needs."""
    if getattr(a, flag) and (a.fmt not in _SF_FORMATS or a.num_per_channels not in GROUPS):
        allowed = ", ".join(map(str, GROUPS))
        raise ValueError(
            f"{flag} needs e4m3 or e2m1 and num_per_channels {allowed}, got {a.fmt} and "
            f"{a.num_per_channels}"
        )


# ---- data and scales ----------------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    x_sf: Tensor | None
    fmt: str
    num_per_channels: int
    x_block_size: list[int] | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    use_e4m3_sf: bool
    global_sf: Tensor | None
    amax_min: float
    stochastic_cast: bool
    seed: Tensor | None

    def check(self) -> None:
        layout.check_plain_or_pair(self.x)
        if self.x_block_size is not None:
            layout.check_block("x_block_size", self.x_block_size)
        layout.check_flags(self)
        checks.one_of("fmt", self.fmt, tuple(layout.FORMATS))
        check_e4m3_groups(self)
        layout.check_amax_min(self.amax_min, self.fmt)
        check_rounding(self)
        if self.x_sf is None:
            check_plain_cast(self.x, self.fmt, self.num_per_channels)
            if self.x_block_size is not None:
                raise ValueError("x_block_size is for a quantized x, a tuple of data and scales")
            return
        dims = ("num_tokens", "hidden")
        checks.tensor("x", self.x, dims, (torch.float8_e4m3fn, torch.int8), unit_inner_stride=True)
        if self.fmt == "e5m6":
            raise ValueError("x must be a plain tensor for e5m6, got quantized data")
        if self.x_block_size is None:
            raise ValueError("x_block_size must be given for a quantized x, got None")
        layout.check_source_scales(self.x, self.x_sf, self.x_block_size, e4m3=True)
        _check_rows(layout.values_in(self.x), self.fmt, self.num_per_channels)

    def outputs(self) -> tuple[Out, Out]:
        shape = (self.x.shape[0], layout.values_in(self.x))
        return layout.cast_outs(self, self.fmt, shape, (1, self.num_per_channels))

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        return launch_cast(
            self.x, self.fmt, self.num_per_channels, CAST, out, out_sf, x_sf=self.x_sf,
            block=tuple(self.x_block_size or (0, 0)), scale_layout=layout.layout_of(self),
            round_sf=self.round_sf, global_sf=self.global_sf, amax_min=self.amax_min,
            rounding=_rounding(self), seed=self.seed,
        )  # fmt: skip


def _rounding(a: Arguments) -> str:
    return NEAREST if not a.stochastic_cast else HASHED if a.seed is None else SEEDED


def cost(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    **_: Any,
) -> Cost:
    data, _sf = layout.pair(x)
    shape = (data.shape[0], layout.values_in(data))
    block = (1, num_per_channels)
    return layout.cast_cost(x, fmt, shape, block, use_packed_ue8m0, use_e4m3_sf)


def _by_fields(x: Tensor, x_sf: Tensor | None, *fields: Any) -> QuantTensor:
    names = ("use_e4m3_sf", "global_sf", "amax_min", "stochastic_cast", "seed")
    given, more = fields[: -len(names)], dict(zip(names, fields[-len(names) :]))
    return reference.per_token_cast(x if x_sf is None else (x, x_sf), *given, **more)


PER_TOKEN_CAST = layout.cast_operator(
    reference.per_token_cast, Arguments, cost, by_fields=_by_fields
)


@PER_TOKEN_CAST.public(reference=reference.per_token_cast)
def per_token_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
    *,
    use_e4m3_sf: bool = False,
    global_sf: Tensor | float | None = None,
    amax_min: float | None = None,
    stochastic_cast: bool = False,
    seed: int | Tensor | None = None,
) -> QuantTensor:
    """Quantizes rows, with a scale for every group of channels or for a whole row.

    A value is `code * scale`, and its code is `encode(value * inv)`. With `a` the largest magnitude
    of a group, but at least `amax_min`, `scale = a / max` and `inv = max / a`. The last group of a
    row may be short. A quantized `x` is multiplied by its scales first.

    With `use_e4m3_sf` a scale is the e4m3 that is nearest to `a / (max * global_sf)`, at most 448,
    and `inv = 1 / (scale * global_sf)`: for groups of 16 and e2m1 this is NVFP4. Such a scale may
    be less than the quotient; then the largest values saturate.

    Codes are the nearest, ties to even. With `stochastic_cast` a value between two codes becomes
    the one farther from zero with a probability of its distance to the other one, in steps of
    `2**-16`: the mean over seeds is the value itself. The same seed gives the same codes on every
    device, CPU included; the bits depend on row and column.

    e5m6 makes an exception of scaled magnitudes below `2**-14`: these are truncated to a multiple
    of `2**-20`, plus a carry that the low 17 bits of the float32 decide, so that even the smallest
    can become `2**-20`. In e5m6, and with `round_sf`
    in every format, the largest finite float32 comes back as infinity.

    A NaN gets the NaN of the format (e2m1: 6) and does not count for the scale. An infinity counts
    as the largest float32 and saturates. Not differentiable: see `fake_cast`.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride. Or a quantized tensor
            `(data, scales)`, with data in float8_e4m3fn, or int8 that holds two e2m1 each, and with
            scales in any layout.
        fmt: `"e4m3"`, `"e2m1"` or `"e5m6"`, which has one scale per row.
        num_per_channels: Channels of a scale: 16, 32, 64, 128, or `hidden`.
        x_block_size: Rows and channels of a scale of a quantized `x`; None for a plain one.
        use_tma_aligned_col_major_sf: Gives scales the strides `(1, n)`, with `n` the tokens rounded
            up to a multiple of 4, instead of contiguous ones. Padding is zero.
        round_sf: Takes the next power of two as scale.
        use_packed_ue8m0: Packs the exponents of four groups into an int32, by columns or by rows;
            needs `round_sf`. The bytes of groups that do not exist are zero.
        out: Buffers `(data, scales)` that are filled and returned.
        use_e4m3_sf: Rounds scales to e4m3; for e4m3 and e2m1 in groups of 16 to 128. Columns are
            then padded to multiples of 16 tokens.
        global_sf: A float32 with one element, or a number: a factor of all scales in e4m3. Below
            `2**-117` inverses may be infinite, and zeros become NaN or the largest code.
        amax_min: The least `a`. By default that of `config.set_amax_clamp_for_quant`: 1e-4, for
            e2m1 6 * 2**-126; with scales in e4m3, and there at least, what gives the least scale,
            `2**-9`.
        stochastic_cast: Rounds stochastically; for e4m3 and e2m1 in groups of 16 to 128.
        seed: An int, or an int64 tensor with one element, which may change between replays of a
            CUDA graph. By default the random bits are a hash of four neighbouring values and their
            column, as TileKernels has it: the same data are always rounded alike.

    Returns:
        `(data, scales)`. The data are `[num_tokens, hidden]` float8_e4m3fn, `[num_tokens,
        hidden / 2]` int8 (e2m1), or `[num_tokens, 3 * hidden / 2]` uint8 (e5m6), contiguous. The
        scales are `[num_tokens, groups]` float32 or float8_e4m3fn, or `[num_tokens,
        ceil(groups / 4)]` int32 if packed.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> data, scales = per_token_cast(torch.tensor([[1.0, -2.0, 3.0, 7.0]]), "e4m3", 4)
        >>> data.float().tolist(), scales.tolist()
        ([[64.0, -128.0, 192.0, 448.0]], [[0.015625]])
    """
    data, sf = layout.pair(x)
    return PER_TOKEN_CAST(
        data, sf, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, use_e4m3_sf, layout.as_scalar(global_sf, data, torch.float32),
        layout.least_amax(fmt, use_e4m3_sf, amax_min), stochastic_cast,
        layout.as_scalar(seed, data, torch.int64), out=out,
    )  # fmt: skip


def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
    *,
    amax_min: float | None = None,
) -> QuantTensor:
    """Calls `per_token_cast(x, "e5m6", ...)`.

    Magnitudes below `2**-14` are not rounded to nearest, as described there.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        num_per_channels: The row width `hidden`.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out: As in `per_token_cast`.
        amax_min: As in `per_token_cast`.

    Returns:
        `(data, scales)` as `per_token_cast` returns them.

    Example:
        >>> per_token_cast_to_e5m6(torch.ones(1, 8), 8)[0].shape
        torch.Size([1, 12])
    """
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, "e5m6", num_per_channels, None, *flags, out, amax_min=amax_min)


# ---- scales alone -------------------------------------------------------------------------------


def _check_plain_groups(a: ScalesArguments | GivenArguments) -> None:
    checks.one_of("fmt", a.fmt, _SF_FORMATS)
    layout.check_plain(a.x)
    if a.x_block_size is not None:
        given = checks.shown(a.x_block_size)
        raise ValueError(f"x_block_size must be None, as x is plain, got {given}")
    layout.check_width(a.fmt, a.x.shape[1])
    _check_group(a.num_per_channels, a.x.shape[1], whole=False)


class ScalesArguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    x_block_size: list[int] | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    use_e4m3_sf: bool
    global_sf: Tensor | None
    amax_min: float

    def check(self) -> None:
        layout.check_flags(self)
        _check_plain_groups(self)
        layout.check_e4m3(self)
        layout.check_amax_min(self.amax_min, self.fmt)

    def outputs(self) -> Out:
        groups = ceil_div(self.x.shape[1], self.num_per_channels)
        return layout.scale_out("out", self.x.shape[0], groups, layout.layout_of(self))

    def launches(self, out: Spec) -> Launch | None:
        return launch_cast(
            self.x, self.fmt, self.num_per_channels, SCALES, None, out,
            scale_layout=layout.layout_of(self), round_sf=self.round_sf,
            global_sf=self.global_sf, amax_min=self.amax_min,
        )  # fmt: skip


def scales_cost(
    x: Tensor,
    num_per_channels: int,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    **_: Any,
) -> Cost:
    return layout.scales_cost(x, (1, num_per_channels), use_packed_ue8m0, use_e4m3_sf)


def _scales_by_fields(*fields: Any) -> Tensor:
    return reference.per_token_cast_with_sf_only(**ScalesArguments(*fields)._asdict())


PER_TOKEN_CAST_WITH_SF_ONLY = layout.cast_operator(
    reference.per_token_cast_with_sf_only, ScalesArguments, scales_cost,
    by_fields=_scales_by_fields,
)  # fmt: skip


@PER_TOKEN_CAST_WITH_SF_ONLY.public(reference=reference.per_token_cast_with_sf_only)
def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: list[int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
    *,
    use_e4m3_sf: bool = False,
    global_sf: Tensor | float | None = None,
    amax_min: float | None = None,
) -> Tensor:
    """Computes the scales of `per_token_cast` without the data.

    Only the scales are allocated. Not differentiable. Errors are those of `per_token_cast`.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"` or `"e2m1"`.
        num_per_channels: Channels of a scale: 16, 32, 64 or 128.
        x_block_size: None, as `x` is plain.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: As in `per_token_cast`.
        out: A buffer for the scales that is filled and returned.
        use_e4m3_sf, global_sf, amax_min: As in `per_token_cast`.

    Returns:
        The scales as `per_token_cast` returns them.

    Example:
        >>> per_token_cast_with_sf_only(torch.full((1, 32), 448.0), "e4m3", 16).tolist()
        [[1.0, 1.0]]
    """
    return PER_TOKEN_CAST_WITH_SF_ONLY(
        x, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, use_e4m3_sf, layout.as_scalar(global_sf, x, torch.float32),
        layout.least_amax(fmt, use_e4m3_sf, amax_min), out=out,
    )  # fmt: skip


# ---- data by given scales -----------------------------------------------------------------------


class GivenArguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    sf: Tensor
    x_block_size: list[int] | None
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool
    use_e4m3_sf: bool
    global_sf: Tensor | None

    def check(self) -> None:
        layout.check_row_major_flags(self)
        _check_plain_groups(self)
        layout.check_e4m3(self)
        shape = (self.x.shape[0], ceil_div(self.x.shape[1], self.num_per_channels))
        dims = ("num_tokens", "groups")
        dtype = torch.float8_e4m3fn if self.use_e4m3_sf else torch.float32
        checks.tensor("sf", self.sf, dims, dtype, shape=shape, contiguous=True)

    def outputs(self) -> Out:
        return layout.data_out(self.fmt, *self.x.shape)

    def launches(self, out: Spec) -> Launch | None:
        return launch_cast(
            self.x, self.fmt, self.num_per_channels, GIVEN, out, self.sf,
            scale_layout=E4M3_ROW if self.use_e4m3_sf else ROW, global_sf=self.global_sf,
        )  # fmt: skip


def _given_by_fields(*fields: Any) -> Tensor:
    return reference.per_token_cast_with_precomputed_sf(**GivenArguments(*fields)._asdict())


PER_TOKEN_CAST_WITH_PRECOMPUTED_SF = layout.cast_operator(
    reference.per_token_cast_with_precomputed_sf, GivenArguments, layout.given_cost,
    by_fields=_given_by_fields,
)  # fmt: skip


@PER_TOKEN_CAST_WITH_PRECOMPUTED_SF.public(reference=reference.per_token_cast_with_precomputed_sf)
def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: list[int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
    *,
    use_e4m3_sf: bool = False,
    global_sf: Tensor | float | None = None,
) -> Tensor:
    """Computes the data of `per_token_cast` from given scales: `encode(x * (1 / sf))`, saturating.

    Not differentiable. Errors are those of `per_token_cast`.

    Args:
        x, fmt, num_per_channels, x_block_size: As in `per_token_cast_with_sf_only`.
        sf: The scales, `[num_tokens, groups]`, float32, or float8_e4m3fn with `use_e4m3_sf`,
            contiguous.
        use_tma_aligned_col_major_sf: False, as `sf` is row-major.
        round_sf: Has no effect.
        use_packed_ue8m0: False, as `sf` is not packed.
        out: A buffer for the data that is filled and returned.
        use_e4m3_sf: Whether `sf` is float8_e4m3fn.
        global_sf: As in `per_token_cast`: the factor is `1 / (sf * global_sf)`.

    Returns:
        The data as `per_token_cast` returns them.

    Example:
        >>> sf = torch.tensor([[2.0]])
        >>> x = torch.full((1, 16), 6.0)
        >>> per_token_cast_with_precomputed_sf(x, "e4m3", 16, sf)[0, 0].item()
        3.0
    """
    return PER_TOKEN_CAST_WITH_PRECOMPUTED_SF(
        x, fmt, num_per_channels, sf, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, use_e4m3_sf, layout.as_scalar(global_sf, x, torch.float32), out=out,
    )  # fmt: skip
