"""SwiGLU and its gradient, alone and with casts along rows (tokens)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.quant import formats, layout
from tile_kernels.quant.storage import GROUPS
from tile_kernels.quant.swiglu import reference
from tile_kernels.quant.swiglu.plan import (
    ALL,
    BACKWARD_GROUPS,
    BY_INDEX,
    BY_ROW,
    EXPERTS,
    FMT,
    INDEXED,
    MAX_EXPERTS,
    RANGES,
    SF_CLAMP_RANGE,
    UNWEIGHTED,
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


def _check_clamp_value(value: float | None) -> None:
    if value is not None and not checks.number("clamp_value", value) >= 0:
        raise ValueError(f"clamp_value must be at least 0, or None, got {value}")


def _aligned(alignment: int | None) -> int:
    """The alignment of the rows of an expert: what was given, or the setting."""
    return config.get_token_alignment() if alignment is None else alignment


def _check_ranges(ends: Tensor | None, alignment: int) -> None:
    """Where the rows of experts end."""
    checks.integer("alignment", alignment, 1, checks.MOST_SIZE)
    if ends is None:
        return
    name = "psum_num_tokens_per_expert"
    checks.tensor(name, ends, ("num_experts",), torch.int32, contiguous=True)
    if not 1 <= len(ends) <= MAX_EXPERTS:
        raise ValueError(f"{name} must have 1..{MAX_EXPERTS} experts, got {len(ends)}")


def _check_factor(factor: float | None, weights_name: str, weights: Tensor | None) -> None:
    if factor is None:
        return
    checks.finite("routed_scaling_factor", factor)
    if weights is None:
        raise ValueError(f"routed_scaling_factor must be None without {weights_name}, got {factor}")


def _check_row_weights(name: str, value: Tensor, rows: int) -> None:
    checks.tensor(name, value, ("num_positions",), torch.float32, shape=(rows,), contiguous=True)


def _check_count(count: Tensor | None, clamp_name: str, clamp: float | None) -> None:
    """The counters of clamped elements: three, or four with the number of elements."""
    if count is None:
        return
    checks.tensor("clamped_count", count, ("3 or 4",), torch.int64, contiguous=True)
    if len(count) not in (3, 4):
        raise ValueError(f"clamped_count must have 3 or 4 elements, got {len(count)}")
    if clamp is None:
        raise ValueError(f"clamped_count counts what {clamp_name} changes, which is None")


def _check_written_count(count: Tensor, clamp: float | None, x: Tensor) -> None:
    _check_count(count, "clamp_value", clamp)
    if isinstance(x, Tensor) and x.device != count.device:
        raise ValueError(
            f"all tensors must be on one device, but x is on {x.device}, clamped_count is on "
            f"{count.device}"
        )
    if not torch.compiler.is_compiling():
        checks.writable("clamped_count", count)


def _check_rows(a: PlainArguments | PlainBackwardArguments) -> None:
    """What says which rows exist, and their weights."""
    rows = a.x.shape[0]
    _check_ranges(a.psum_num_tokens_per_expert, a.alignment)
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
        _check_row_weights("topk_weights", a.topk_weights, rows)
    _check_factor(a.routed_scaling_factor, "topk_weights", a.topk_weights)
    _check_clamp_value(a.clamp_value)


def _which_rows(a: Any) -> str:
    if a.pos_to_token_topk is not None:
        return INDEXED
    return ALL if a.psum_num_tokens_per_expert is None else RANGES


def _factor(value: float | None) -> float:
    return 1.0 if value is None else float(value)


def _scalars(a: PlainArguments | PlainBackwardArguments) -> tuple[int, float, float]:
    return a.alignment, _factor(a.routed_scaling_factor), layout.swiglu_clamp(a.clamp_value)


# ---- forward ------------------------------------------------------------------------------------


def _check_least(name: str, value: float) -> None:
    """`value` can take the place of a smaller amax."""
    checks.number(name, value)
    if not SF_CLAMP_RANGE[0] <= value <= SF_CLAMP_RANGE[1]:
        raise ValueError(
            f"{name} must be in 2**-119..2**127, so that scales and their inverses are finite, got "
            f"{value}"
        )


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
    psum_num_tokens_per_expert: Tensor | None
    routed_scaling_factor: float | None
    alignment: int
    fill_padding: bool

    @property
    def weights(self) -> str:
        """Where the weight of a row is; weights `[num_tokens, num_topk]` need an index."""
        if self.topk_weights is None:
            return UNWEIGHTED
        if self.topk_weights.dim() == 1:
            return BY_ROW
        return UNWEIGHTED if self.pos_to_token_topk is None else BY_INDEX

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
        if isinstance(self.topk_weights, Tensor) and self.topk_weights.dim() == 1:
            _check_row_weights("topk_weights", self.topk_weights, rows)
            if self.pos_to_token_topk is not None:
                raise ValueError("pos_to_token_topk must be None if every row has a weight")
        elif self.topk_weights is not None:
            _check_weights("topk_weights", self.topk_weights)
        if self.pos_to_expert is not None:
            _check_positions("pos_to_expert", self.pos_to_expert, rows)
            if self.psum_num_tokens_per_expert is not None:
                raise ValueError(
                    "pos_to_expert must be None with psum_num_tokens_per_expert: both say which "
                    "rows exist"
                )
        _check_ranges(self.psum_num_tokens_per_expert, self.alignment)
        _check_factor(self.routed_scaling_factor, "topk_weights", self.topk_weights)
        checks.boolean("fill_padding", self.fill_padding)
        layout.check_swiglu_clamp(self.swiglu_clamp_value)
        if self.sf_clamp_min is not None:
            _check_least("sf_clamp_min", self.sf_clamp_min)
        _check_count(self.clamped_count, "swiglu_clamp_value", self.swiglu_clamp_value)

    def outputs(self) -> tuple[Out, Out]:
        shape = (self.x.shape[0], self.x.shape[1] // 2)
        return layout.cast_outs(self, FMT, shape, (1, self.num_per_channels))

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        weights = None
        if self.weights != UNWEIGHTED and self.topk_weights is not None:
            weights = self.topk_weights.view(-1)
        rows = ALL if self.psum_num_tokens_per_expert is None else RANGES
        if self.pos_to_expert is not None:
            rows = EXPERTS
        counters = 0 if self.clamped_count is None else self.clamped_count.shape[0]
        scale_layout = layout.layout_of(self)
        problem = (
            layout.SOURCES[self.x.dtype], self.x.shape[1] // 2, self.num_per_channels, scale_layout,
            self.round_sf, self.weights, rows, self.swiglu_clamp_value is not None, counters,
            self.fill_padding, row_alignment(self.x), row_alignment(out),
        )  # fmt: skip
        sf_clamp_min = (
            formats.E4M3.clamp_min if self.sf_clamp_min is None else float(self.sf_clamp_min)
        )
        arguments = (
            self.x, self.pos_to_token_topk, weights, self.pos_to_expert,
            self.psum_num_tokens_per_expert, out, out_sf, self.clamped_count, self.alignment,
            _factor(self.routed_scaling_factor), layout.swiglu_clamp(self.swiglu_clamp_value),
            sf_clamp_min,
        )  # fmt: skip
        kernel = _GROUPS if self.num_per_channels in GROUPS else _WHOLE_ROWS
        return Launch(kernel, problem, arguments)

    def check_values(self) -> None:
        """Every index is that of a weight, or -1."""
        if self.pos_to_token_topk is not None and self.topk_weights is not None:
            last = self.topk_weights.numel() - 1
            checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, last)
        _check_ends(self.psum_num_tokens_per_expert, self.x.shape[0])


def _check_ends(ends: Tensor | None, rows: int) -> None:
    """Ranges of experts ascend, inside of the rows. For the checked mode only."""
    if ends is None:
        return
    checks.in_range("psum_num_tokens_per_expert", ends, 0, rows)
    if (ends.diff() < 0).any():
        raise ValueError("psum_num_tokens_per_expert must ascend")


def _reference(*args: Any) -> QuantTensor:
    a = Arguments(*args)
    if a.pos_to_token_topk is not None and a.topk_weights is not None:
        index = _only_in_range(a.pos_to_token_topk, a.topk_weights)
        a = a._replace(pos_to_token_topk=index)
    return reference.swiglu_forward_and_per_token_cast(
        *a[:12], psum_num_tokens_per_expert=a.psum_num_tokens_per_expert,
        routed_scaling_factor=a.routed_scaling_factor, alignment=a.alignment,
    )  # fmt: skip


def cost(
    x: Tensor, fmt: str, num_per_channels: int, use_packed_ue8m0: bool = False, **_: Any
) -> Cost:
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
    dynamic={"x": 1, "pos_to_token_topk": 0, "topk_weights": 0, "pos_to_expert": 0},
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
    *,
    psum_num_tokens_per_expert: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    alignment: int | None = None,
    fill_padding: bool = True,
    amax_min: float | None = None,
) -> QuantTensor:
    """Computes SwiGLU of rows, times the weights of their experts, and casts it to e4m3.

    The activation is `(l / (1 + exp(-l))) * r` in float32, with `l` the gate and `r` the value,
    times the weight if there is an index. It is cast as `per_token_cast` does it; a group's largest
    magnitude counts as at least `sf_clamp_min`.

    With a clamp value `c`, first `l = min(l, c)` and `r = min(max(r, -c), c)`; the numbers of
    `l > c`, `r > c` and `r < -c` are added to `clamped_count`, and to a fourth element that of all
    elements.

    A padding row is not read and not counted; its data and scales are zero. Two layouts have such
    rows: `pos_to_expert`, and `psum_num_tokens_per_expert` as in `swiglu_forward`. An index that is
    negative, or beyond the weights, means weight 0. Weights `[num_tokens, num_topk]` without an
    index are ignored. Not differentiable: see `tile_kernels.modeling.quant.swiglu_cast`.

    Args:
        x: `[num_positions, 2 * hidden]`, gate then value, bfloat16 or float32, any row stride.
        fmt: `"e4m3"`.
        num_per_channels: Channels of a scale: 16, 32, 64, 128, or `hidden`.
        pos_to_token_topk: `[num_positions]`, int32: the index of the row's weight among all
            weights, or -1; or None for no weights.
        topk_weights: `[num_tokens, num_topk]`, float32, contiguous; or `[num_positions]`, a weight
            for every row, without an index; or None.
        pos_to_expert: `[num_positions]`, int32: the row's expert, negative for padding; or None for
            no padding.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0: As in `per_token_cast`.
        swiglu_clamp_value: The clamp value, at least 0, or None.
        clamped_count: `[3]` or `[4]`, int64, added to in place; or None.
        sf_clamp_min: `2**-119` to `2**127`, by default that of `config.set_amax_clamp_for_quant`:
            1e-4.
        out: Buffers `(data, scales)` that are filled and returned.
        psum_num_tokens_per_expert: `[num_experts]`, int32, ascending, or None: the rows of expert
            `e` start where those of `e - 1` end, rounded up to the alignment, and end at its
            element. All other rows are padding.
        routed_scaling_factor: Multiplies the weights, or None.
        alignment: That of the rows of an expert, by default that of `config.set_token_alignment`:
            128; used with `psum_num_tokens_per_expert`.
        fill_padding: With False the data of padding rows may be left as it is, for buffers that are
            much larger than what they hold; scales are zero.
        amax_min: Another name of `sf_clamp_min`, as other casts have it; one of them at most.

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
    if amax_min is not None:
        if sf_clamp_min is not None:
            raise ValueError(
                "swiglu_forward_and_per_token_cast: amax_min must be None with sf_clamp_min, got "
                "both"
            )
        SWIGLU_FORWARD_AND_PER_TOKEN_CAST.require(_check_least, "amax_min", amax_min)
        sf_clamp_min = amax_min
    counting = clamped_count is not None
    cast = _SWIGLU_FORWARD_AND_COUNT if counting else SWIGLU_FORWARD_AND_PER_TOKEN_CAST
    return cast(
        x, fmt, num_per_channels, pos_to_token_topk, topk_weights, pos_to_expert,
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, swiglu_clamp_value, clamped_count,
        layout.least_amax(fmt, False, sf_clamp_min), psum_num_tokens_per_expert,
        routed_scaling_factor, _aligned(alignment), fill_padding, out=out,
    )  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    grad_out: Tensor
    weight: Tensor | None
    pos_to_token_topk: Tensor | None
    token_topk_to_pos: Tensor | None
    num_per_channels: int
    round_sf: bool
    swiglu_clamp_value: float | None
    use_tma_aligned_col_major_sf: bool
    use_packed_ue8m0: bool
    psum_num_tokens_per_expert: Tensor | None
    routed_scaling_factor: float | None
    alignment: int
    do_recompute: bool
    amax_min: float

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
        self._check_weight(rows)
        layout.check_flags(self)
        _check_ranges(self.psum_num_tokens_per_expert, self.alignment)
        checks.boolean("do_recompute", self.do_recompute)
        layout.check_swiglu_clamp(self.swiglu_clamp_value)
        layout.check_amax_min(self.amax_min, FMT)

    def _check_weight(self, rows: int) -> None:
        if (self.token_topk_to_pos is None) != (self.pos_to_token_topk is None):
            raise ValueError("token_topk_to_pos must be given with pos_to_token_topk, or neither")
        _check_factor(self.routed_scaling_factor, "weight", self.weight)
        if self.pos_to_token_topk is None:
            if self.weight is not None:
                _check_row_weights("weight", self.weight, rows)
            return
        if self.weight is None:
            raise ValueError("weight must be given with pos_to_token_topk, got None")
        if self.psum_num_tokens_per_expert is not None or self.routed_scaling_factor is not None:
            raise ValueError(
                "pos_to_token_topk must be None with psum_num_tokens_per_expert or "
                "routed_scaling_factor"
            )
        _check_weights("weight", self.weight)
        _check_positions("pos_to_token_topk", self.pos_to_token_topk, rows)
        checks.tensor(
            "token_topk_to_pos", self.token_topk_to_pos, ("num_tokens", "num_topk"), torch.int32,
            shape=tuple(self.weight.shape), contiguous=True,
        )  # fmt: skip

    def outputs(self) -> tuple[Out, Out, Out, Out, Out]:
        rows, hidden = self.grad_out.shape
        groups = self.x_sf.shape[1]
        scales = layout.scale_out("x_grad_sf", rows, groups, layout.layout_of(self))
        weights = (0,) if self.weight is None else self.weight.shape
        return (
            Out("out", (rows if self.do_recompute else 0, hidden), torch.bfloat16),
            Out("x_grad_fp8", self.x.shape, torch.float8_e4m3fn),
            scales,
            Out("x_grad", self.x.shape, torch.bfloat16),
            Out("weight_grad", weights, torch.float32),
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
        weighted = self.weight is not None
        problem = (
            self.x.shape[1] // 2, self.num_per_channels, layout.layout_of(self), self.round_sf,
            _which_rows(self), weighted, self.swiglu_clamp_value is not None, self.do_recompute,
            row_alignment(self.x), row_alignment(self.grad_out), row_alignment(out),
            row_alignment(x_grad_fp8), row_alignment(x_grad),
        )  # fmt: skip
        inverse = None if self.token_topk_to_pos is None else self.token_topk_to_pos.view(-1)
        scales = x_grad_sf
        if self.use_packed_ue8m0:  # written byte by byte
            scales = x_grad_sf.view(torch.uint8)
            if self.use_tma_aligned_col_major_sf:
                scales = scales.view(x_grad_sf.shape[0], -1, 4)
        arguments = (
            self.x, self.x_sf, self.grad_out, None if self.weight is None else self.weight.view(-1),
            self.pos_to_token_topk, inverse, self.psum_num_tokens_per_expert,
            out if self.do_recompute else None, x_grad_fp8, scales, x_grad,
            weight_grad.view(-1) if weighted else None, self.alignment,
            _factor(self.routed_scaling_factor), layout.swiglu_clamp(self.swiglu_clamp_value),
            float(self.amax_min),
        )  # fmt: skip
        return Launch(_BACKWARD, problem, arguments)

    def check_values(self) -> None:
        """The maps stay within bounds and are inverses of each other; ranges ascend."""
        _check_ends(self.psum_num_tokens_per_expert, self.x.shape[0])
        if self.pos_to_token_topk is None or self.token_topk_to_pos is None:
            return
        weights = self.token_topk_to_pos.numel()
        checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, weights - 1)
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
    a = BackwardArguments(*args)
    index = a.pos_to_token_topk
    if index is not None and a.weight is not None:
        index = _only_in_range(index, a.weight)
    out, (data, sf), x_grad, weight_grad = reference.swiglu_backward_and_per_token_cast(
        (a.x, a.x_sf), a.grad_out, a.weight, index, a.token_topk_to_pos, a.num_per_channels,
        a.round_sf, a.swiglu_clamp_value,
        use_tma_aligned_col_major_sf=a.use_tma_aligned_col_major_sf,
        use_packed_ue8m0=a.use_packed_ue8m0,
        psum_num_tokens_per_expert=a.psum_num_tokens_per_expert,
        routed_scaling_factor=a.routed_scaling_factor, alignment=a.alignment,
        do_recompute=a.do_recompute, amax_min=a.amax_min,
    )  # fmt: skip
    return out, data, sf, x_grad, weight_grad


def backward_cost(
    x: QuantTensor, weight: Tensor | None = None, do_recompute: bool = True, **_: Any
) -> Cost:
    """Every argument once, every result once."""
    data, sf = x
    rows = data.numel() // data.shape[-1]
    weights = 0 if weight is None else weight.numel()
    values = (6 if do_recompute else 5) * data.numel()
    return Cost(bytes=values + 8 * sf.numel() + 4 * rows + 12 * weights)


SWIGLU_BACKWARD_AND_PER_TOKEN_CAST = Operator(
    "quant.swiglu_backward_and_per_token_cast",
    BackwardArguments,
    reference=_backward_reference,
    cost=backward_cost,
    dynamic={
        "x": 1,
        "x_sf": 1,
        "grad_out": 1,
        "weight": 0,
        "pos_to_token_topk": 0,
        "token_topk_to_pos": 0,
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
    weight: Tensor | None,
    pos_to_token_topk: Tensor | None,
    token_topk_to_pos: Tensor | None,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    out: tuple[Any, ...] | None = None,
    *,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    psum_num_tokens_per_expert: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    alignment: int | None = None,
    do_recompute: bool = True,
    amax_min: float | None = None,
) -> tuple[Tensor, QuantTensor, Tensor, Tensor]:
    """Recomputes the SwiGLU of a quantized `x`, with its gradients; that of `x` also in e4m3.

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

    Without an index every row has its own weight, or 1, times `routed_scaling_factor`, which also
    multiplies `weight_grad`. Rows outside of the ranges of `psum_num_tokens_per_expert` are not
    read; all their results are 0, scales included.

    Args:
        x: `(data, scales)`: `[num_positions, 2 * hidden]` float8_e4m3fn, gate then value, and
            `[num_positions, 2 * hidden / num_per_channels]` float32. `x` and `grad_out` may have
            more leading dimensions; results have one. All tensors are contiguous.
        grad_out: `[num_positions, hidden]`, bfloat16.
        weight: `[num_tokens, num_topk]`, float32; without an index `[num_positions]`, or None.
        pos_to_token_topk: `[num_positions]`, int32: the index of the row's weight among all
            weights, or -1; or None.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32: the inverse, -1 for none; or None.
        num_per_channels: Channels of a scale: 32 or 128, a divisor of `hidden`.
        round_sf: Takes the next power of two as scale of the result.
        swiglu_clamp_value: The clamp value, at least 0, or None.
        out: Buffers as they are returned, or five tensors in that order; filled and returned.
        use_tma_aligned_col_major_sf, use_packed_ue8m0: As in `per_token_cast`, of the result.
        psum_num_tokens_per_expert, alignment: As in `swiglu_forward`; without an index only.
        routed_scaling_factor: Multiplies the weights of rows, or None.
        do_recompute: With False, `out` has no rows.
        amax_min: As in `per_token_cast`.

    Returns:
        `(out, (x_grad_fp8, x_grad_sf), x_grad, weight_grad)`: `[num_positions, hidden]` bfloat16;
        data and scales like `x`; `[num_positions, 2 * hidden]` bfloat16; float32 like `weight`,
        without elements if there are no weights. All but scales in other layouts are contiguous.

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
        round_sf, swiglu_clamp_value, use_tma_aligned_col_major_sf, use_packed_ue8m0,
        psum_num_tokens_per_expert, routed_scaling_factor, _aligned(alignment), do_recompute,
        layout.least_amax(FMT, False, amax_min), out=out,
    )  # fmt: skip
    return activation, (codes, scales), x_grad, weight_grad


# ---- without a cast -----------------------------------------------------------------------------


class PlainArguments(NamedTuple):
    x: Tensor
    fmt: str
    psum_num_tokens_per_expert: Tensor | None
    topk_weights: Tensor | None
    routed_scaling_factor: float | None
    clamp_value: float | None
    alignment: int
    pos_to_token_topk: Tensor | None
    fill_padding: bool

    def check(self) -> None:
        layout.check_plain(self.x)
        _check_halves(self.x)
        checks.one_of("fmt", self.fmt, tuple(layout.OUT_DTYPES))
        _check_rows(self)
        checks.boolean("fill_padding", self.fill_padding)

    def outputs(self) -> Out:
        shape = (self.x.shape[0], self.x.shape[1] // 2)
        return Out("out", shape, layout.OUT_DTYPES[self.fmt])

    def launches(self, out: Spec) -> Launch | None:
        return None if self.x.numel() == 0 else _plain_launch(self, out, None)

    def check_values(self) -> None:
        """Every index is that of a weight, or -1."""
        if self.pos_to_token_topk is not None and self.topk_weights is not None:
            last = self.topk_weights.numel() - 1
            checks.in_range("pos_to_token_topk", self.pos_to_token_topk, -1, last)
        _check_ends(self.psum_num_tokens_per_expert, self.x.shape[0])


def _plain_launch(a: PlainArguments, out: Spec, counts: Spec | None) -> Launch:
    weights = None if a.topk_weights is None else a.topk_weights.view(-1)
    problem = (
        layout.SOURCES[a.x.dtype], layout.SOURCES[out.dtype], a.x.shape[1] // 2, _which_rows(a),
        weights is not None, a.clamp_value is not None, 0 if counts is None else COUNTERS,
        a.fill_padding, row_alignment(a.x), row_alignment(out),
    )  # fmt: skip
    arguments = (
        a.x,
        a.pos_to_token_topk,
        weights,
        a.psum_num_tokens_per_expert,
        out,
        counts,
        *_scalars(a),
    )
    return Launch(_PLAIN, problem, arguments)


COUNTERS = 4  # gates and values that the clamp changes, on each side, and all elements


def outputs_with_counts(a: PlainArguments) -> tuple[Out, Out]:
    return a.outputs(), Out("counts", (COUNTERS,), torch.int64)


def launches_with_counts(a: PlainArguments, out: Spec, counts: Spec) -> list[Launch | Host]:
    zero = Host(Tensor.zero_, (counts,))
    return [zero] if a.x.numel() == 0 else [zero, _plain_launch(a, out, counts)]


def plain_cost(x: Tensor, fmt: str, **_: Any) -> Cost:
    """`x` and the result; the index and the weights are small."""
    written = x.numel() // 2 * layout.OUT_DTYPES[fmt].itemsize
    return Cost(bytes=x.numel() * x.element_size() + written)


def _save_plain(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, _, psum, weights, ctx.factor, ctx.clamp, ctx.alignment, index, _ = inputs
    ctx.save_for_backward(x, psum, weights, index)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def _plain_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
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
    grads = x_grad, None, None, None if weights is None else weight_grad
    return *grads, None, None, None, None, None


def _plain_reference(*args: Any) -> Tensor:
    a = PlainArguments(*args)
    return reference.swiglu_rows_forward(
        *a[:6], alignment=a.alignment, pos_to_token_topk=a.pos_to_token_topk
    )


def _reference_with_counts(*args: Any) -> tuple[Tensor, Tensor]:
    a = PlainArguments(*args)
    counts = torch.zeros(COUNTERS, dtype=torch.int64, device=a.x.device)
    out = reference.swiglu_rows_forward(
        *a[:6], counts, alignment=a.alignment, pos_to_token_topk=a.pos_to_token_topk
    )
    return out, counts


_DYNAMIC = {"x": 1, "topk_weights": 0, "pos_to_token_topk": 0}

SWIGLU_FORWARD = Operator(
    "quant.swiglu_forward",
    PlainArguments,
    reference=_plain_reference,
    cost=plain_cost,
    dynamic=_DYNAMIC,
    out=("out",),
    backward=_plain_backward,
    setup_context=_save_plain,
)

# The counts are a result, so that a call with a gradient can count.
_SWIGLU_FORWARD_WITH_COUNTS = Operator(
    "quant._swiglu_forward_with_counts",
    PlainArguments,
    outputs=outputs_with_counts,
    launches=launches_with_counts,
    reference=_reference_with_counts,
    dynamic=_DYNAMIC,
    out=("out", "counts"),
    backward=_plain_backward,
    setup_context=_save_plain,
    serves="swiglu_forward",
)


@SWIGLU_FORWARD.public(reference=reference.swiglu_rows_forward, mutates=("clamped_count",))
def swiglu_forward(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    *,
    alignment: int | None = None,
    pos_to_token_topk: Tensor | None = None,
    fill_padding: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Computes SwiGLU of rows, times the weights of their experts, rounded once.

    `((l / (1 + exp(-l))) * r) * w` with `l` the gate and `r` the value; with a clamp value `c`
    first `l = min(l, c)` and `r = min(max(r, -c), c)`. `w` is the weight of the row times
    `routed_scaling_factor`. The numbers of `l > c`, `r > c`, `r < -c` and of all elements, in rows
    that are used, are added to `clamped_count`.

    Padding rows are not read and are zero in the result. Two layouts have such rows: that of an
    expanded dispatch (`ep.ElasticBuffer`), described by `psum_num_tokens_per_expert`, and that of
    `moe.get_fused_mapping`, described by `pos_to_token_topk`. With neither, all rows are used.

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
        clamped_count: `[4]`, or `[3]` without the last, int64, added to in place; or None.
        alignment: That of the rows of an expert, by default that of `config.set_token_alignment`:
            128; used with `psum_num_tokens_per_expert`.
        pos_to_token_topk: `[num_positions]`, int32: the index of the row's weight among all
            weights; a row with another number does not exist. Or None.
        fill_padding: With False, rows that do not exist may be left as they are, for buffers that
            are much larger than what they hold.
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
    arguments: list[Any] = [
        x, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value,
        _aligned(alignment), pos_to_token_topk, fill_padding,
    ]  # fmt: skip
    if clamped_count is None:
        return SWIGLU_FORWARD(*arguments, out=out)
    SWIGLU_FORWARD.require(_check_written_count, clamped_count, clamp_value, x)
    if out is None:
        out, counts = _SWIGLU_FORWARD_WITH_COUNTS(*arguments)
    else:
        out, counts = _SWIGLU_FORWARD_WITH_COUNTS.fill(tuple(arguments), (out, None))
    clamped_count.add_(counts[: len(clamped_count)])
    return out


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
            Out("out", self.x.shape, dtype),
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
        """The maps stay within bounds and are inverses of each other; ranges ascend."""
        _check_ends(self.psum_num_tokens_per_expert, self.x.shape[0])
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
    out=("out", "weight_grad", "act"),
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
    alignment: int | None = None,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    out: Tensor | tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Computes the gradients of `swiglu_forward` with respect to `x` and the weights.

    With `l` and `r` the clamped halves of a row, `s = 1 / (1 + exp(-l))`, `g` its row of
    `act_x_grad` and `w` its weight times the factor, the halves of the gradient are
    `(q * r) * fma(l, 1 - s, 1)` and `q * l` with `q = (g * w) * s`, and 0 where the clamp changed
    `l` or `r`. The gradient of a weight is the sum of `g * act` over its row, in a fixed order,
    times the factor. All in float32. Rows that do not exist are not read, and their results are 0.

    Args:
        x: As in `swiglu_forward`; contiguous.
        act_x_grad: `[num_positions, hidden]`, dtype of `x`, contiguous.
        fmt: As in `swiglu_forward`.
        psum_num_tokens_per_expert: As in `swiglu_forward`.
        topk_weights: As in `swiglu_forward`.
        routed_scaling_factor: As in `swiglu_forward`.
        clamp_value: As in `swiglu_forward`.
        do_recompute: Whether the result of `swiglu_forward` is returned as well.
        alignment: As in `swiglu_forward`.
        pos_to_token_topk: As in `swiglu_forward`.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32: the inverse of `pos_to_token_topk`, -1
            for none; given together with it. A weight belongs to a row if each map names the other;
            the gradient of a weight without a row is 0.
        out: Buffers for the results, which are filled and returned; not with gradients. One alone
            need not be in a tuple.

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
    arguments = (
        x, act_x_grad, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
        clamp_value, do_recompute, _aligned(alignment), pos_to_token_topk, token_topk_to_pos,
    )  # fmt: skip
    returned = (True, topk_weights is not None, do_recompute)
    if out is None:
        results = SWIGLU_BACKWARD(*arguments)
    else:
        results = SWIGLU_BACKWARD.fill(arguments, out, returned)
    return tuple(result for result, wanted in zip(results, returned) if wanted)
