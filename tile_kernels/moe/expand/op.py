"""`expand_to_fused` and `expand_to_fused_with_sf`: tokens to their rows in the fused layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.arguments import check_slots
from tile_kernels.moe.expand import reference
from tile_kernels.moe.expand.plan import plan
from tile_kernels.moe.fused import FP8, check_positions, data_and_scales, dtype_names
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import (
    Host,
    Launch,
    Out,
    Size,
    Spec,
    alignment,
    contiguous_strides,
    dtype_name,
)
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.utils import align, ceil_div

_KERNEL = Kernel("tile_kernels.moe.expand.kernel", "expand", plan)

_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, *FP8, torch.int8, torch.uint8, torch.int16,
    torch.int32,
)  # fmt: skip
_GROUPS = (16, 32, 64, 128)  # channels that share a scale; or all of a row's


# ---- shared by both operators -------------------------------------------------------------------


def _check_rows(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> None:
    checks.tensor("x", x, ("num_tokens", "hidden"), _DTYPES, contiguous=True)
    check_slots("token_topk_to_pos", token_topk_to_pos, torch.int32, x.shape[0])
    checks.tensor("pos_to_expert", pos_to_expert, ("num_positions",), torch.int32)


def check_values(a: Any) -> None:
    check_positions(a.token_topk_to_pos, a.pos_to_expert.shape[0])


def _launches(
    x: Any,
    slots: Any,
    out: Spec,
    sf: Any = None,
    out_sf: Spec | None = None,
    column_major: bool = False,
) -> list[Launch | Host]:
    """Fills `out`, and with `sf` also `out_sf`: `[positions, scales]`, or its padded transpose."""
    if out.numel() == 0:
        return []
    if x.numel() == 0 or slots.numel() == 0:
        return [Host(Tensor.zero_, (each,)) for each in (out, out_sf) if each is not None]
    scales = ("", 0) if sf is None else (dtype_name(sf), sf.shape[1])
    problem = (
        dtype_name(x), x.element_size(), x.shape[1], slots.shape[1], Size(lambda a: a.x.shape[0]),
        Size(lambda a: a.pos_to_expert.shape[0]), alignment(x), alignment(slots), *scales,
        column_major,
    )  # fmt: skip
    return [Launch(_KERNEL, problem, (x, slots, out, sf, out_sf))]


# ---- values -------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    x: Tensor
    token_topk_to_pos: Tensor
    pos_to_expert: Tensor

    def check(self) -> None:
        _check_rows(self.x, self.token_topk_to_pos, self.pos_to_expert)

    def outputs(self) -> Out:
        return Out("out", (self.pos_to_expert.shape[0], self.x.shape[1]), self.x.dtype)

    def launches(self, out: Spec) -> list[Launch | Host]:
        return _launches(self.x, self.token_topk_to_pos, out)


def cost(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Cost:
    num_positions = pos_to_expert.shape[0]
    rows = (x.shape[0] + num_positions) * x.shape[1] * x.element_size()
    return Cost(bytes=rows + 4 * token_topk_to_pos.numel() + 4 * num_positions)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(Arguments(*inputs).token_topk_to_pos)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    from tile_kernels.moe.reduce.op import reduce_fused  # whose gradient is expand_to_fused

    if grad.dtype in FP8:
        raise TypeError(f"expand_to_fused: x of {dtype_names(grad.dtype)} has no gradient")
    (slots,) = ctx.saved_tensors
    return reduce_fused(grad.contiguous(), None, slots), None, None


EXPAND_TO_FUSED = Operator(
    "moe.expand_to_fused",
    Arguments,
    reference=reference.expand_to_fused,
    cost=cost,
    dynamic={"x": 1, "token_topk_to_pos": 1, "pos_to_expert": 0},
    backward=_backward,
    setup_context=_setup,
    check_values=check_values,
)


@EXPAND_TO_FUSED.public()
def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """Copies each token to its positions in the fused layout; positions without a token are zero.

    `out[token_topk_to_pos[t, k]] = x[t]`, bit for bit, for every slot in `0..num_positions-1`;
    other slots (-1 is the padding) name nothing. Rows that no slot names are zero: the mapping
    alone decides that, of `pos_to_expert` only the length counts. If slots of different tokens
    name the same position, its row may mix the two.

    The result is differentiable for float32, float16 and bfloat16: the gradient of a token is the
    sum of those of its positions, in the order of its slots.

    Any sizes are allowed, zero included; fastest (16-byte accesses) where rows start on 16-byte
    boundaries.

    Args:
        x: `[num_tokens, hidden]`, contiguous: float32, float16, bfloat16, float8_e4m3fn,
            float8_e5m2, int8, int16, int32 or uint8.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32, contiguous: the positions of a token.
        pos_to_expert: `[num_positions]`, int32, any stride.

    Returns:
        `[num_positions, hidden]`, dtype of `x`, contiguous.

    Raises:
        TypeError: If an argument has another dtype.
        ValueError: If an argument has another shape or layout.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> slots = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
        >>> expand_to_fused(x, slots, torch.tensor([0, -1, 1, 1], dtype=torch.int32)).tolist()
        [[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    """
    return EXPAND_TO_FUSED(x, token_topk_to_pos, pos_to_expert)


# ---- quantized values with their scales ---------------------------------------------------------


class ScaledArguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    num_per_channels: int
    token_topk_to_pos: Tensor
    pos_to_expert: Tensor
    use_tma_aligned_col_major_sf: bool

    def check(self) -> None:
        _check_rows(self.x, self.token_topk_to_pos, self.pos_to_expert)
        hidden = self.x.shape[1] * (
            2 if self.x.dtype == torch.int8 else 1
        )  # two e2m1 values in a byte
        checks.integer("num_per_channels", self.num_per_channels, 1)
        if self.num_per_channels not in _GROUPS and self.num_per_channels != hidden:
            allowed = f"{', '.join(map(str, _GROUPS))} or {hidden} (the whole row)"
            raise ValueError(f"num_per_channels must be {allowed}, got {self.num_per_channels}")
        checks.tensor("x_sf", self.x_sf, ("num_tokens", "num_scales"), (torch.float32, torch.int32))
        num_scales = ceil_div(hidden, self.num_per_channels)
        if self.x_sf.dtype == torch.int32:  # four exponents each
            num_scales = ceil_div(num_scales, 4)
        shape = (self.x.shape[0], num_scales)
        checks.tensor("x_sf", self.x_sf, ("num_tokens", "num_scales"), shape=shape)
        checks.boolean("use_tma_aligned_col_major_sf", self.use_tma_aligned_col_major_sf)
        if self.x_sf.dtype == torch.int32 and not self.use_tma_aligned_col_major_sf:
            raise ValueError("use_tma_aligned_col_major_sf must be True for packed scales (int32)")

    def outputs(self) -> tuple[Out, Out]:
        num_positions, num_scales = self.pos_to_expert.shape[0], self.x_sf.shape[1]
        out = Out("out", (num_positions, self.x.shape[1]), self.x.dtype)
        shape = (num_positions, num_scales)
        if not self.use_tma_aligned_col_major_sf:
            return out, Out("out_sf", shape, self.x_sf.dtype)
        base = (num_scales, align(num_positions, 4))
        strides = contiguous_strides(base)[::-1]
        return out, Out("out_sf", shape, self.x_sf.dtype, strides, base)

    def launches(self, out: Spec, out_sf: Spec) -> list[Launch | Host]:
        column_major = self.use_tma_aligned_col_major_sf
        return _launches(self.x, self.token_topk_to_pos, out, self.x_sf, out_sf, column_major)


def scaled_cost(
    x: tuple[Tensor, Tensor], token_topk_to_pos: Tensor, pos_to_expert: Tensor, **_: Any
) -> Cost:
    data, sf = x
    rows = data.shape[0] + pos_to_expert.shape[0]
    values = cost(data, token_topk_to_pos, pos_to_expert)
    return Cost(bytes=values.bytes + 4 * rows * sf.shape[1])


def _scaled_reference(x: Tensor, x_sf: Tensor, *rest: Any) -> Any:
    return reference.expand_to_fused_with_sf((x, x_sf), *rest)


EXPAND_TO_FUSED_WITH_SF = Operator(
    "moe.expand_to_fused_with_sf",
    ScaledArguments,
    reference=_scaled_reference,
    cost=scaled_cost,
    dynamic={"x": 1, "x_sf": 1, "token_topk_to_pos": 1, "pos_to_expert": 0},
    check_values=check_values,
    instead="tile_kernels.moe.expand_to_fused of values that are not quantized",
)


@EXPAND_TO_FUSED_WITH_SF.public(reference=reference.expand_to_fused_with_sf)
def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """Copies quantized tokens and their scales to the fused layout, as `expand_to_fused` does.

    Scales are copied as they are, from any strides; where no slot points, data and scales are zero.
    The operator is not differentiable.

    Args:
        x: `(data, scales)`. The data is `[num_tokens, hidden]`, contiguous, of a dtype that
            `expand_to_fused` takes; int8 is packed e2m1, so that `hidden` counts twice here. The
            scales are `[num_tokens, num_scales]`, float32, or int32 with four exponents each, any
            strides. `num_scales` is `ceil(hidden / num_per_channels)`, a quarter of it (rounded up)
            for int32.
        num_per_channels: Channels per scale: 16, 32, 64, 128 or the width of a row.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32, contiguous: the positions of a token.
        pos_to_expert: `[num_positions]`, int32, any stride.
        use_tma_aligned_col_major_sf: Return the scales column by column. It must be True for int32
            scales.

    Returns:
        `(data, scales)`: `[num_positions, hidden]` and `[num_positions, num_scales]`, dtypes of
        `x`. Both are contiguous, but with `use_tma_aligned_col_major_sf` the scales have strides
        `(1, n)`, `n` being `num_positions` rounded up to a multiple of 4; the memory between is
        zero.

    Raises:
        TypeError: If an argument has another type or dtype; the scales are named `x_sf`.
        ValueError: If an argument has another shape or layout.

    Example:
        >>> x = torch.tensor([[1, 2]], dtype=torch.uint8), torch.tensor([[0.5]])
        >>> slots = torch.tensor([[1]], dtype=torch.int32)
        >>> experts = torch.tensor([-1, 0], dtype=torch.int32)
        >>> data, sf = expand_to_fused_with_sf(x, 2, slots, experts)
        >>> data.tolist(), sf.tolist()
        ([[0, 0], [1, 2]], [[0.0], [0.5]])
    """
    data, x_sf = data_and_scales("expand_to_fused_with_sf", x)
    return EXPAND_TO_FUSED_WITH_SF(
        data, x_sf, num_per_channels, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf
    )
