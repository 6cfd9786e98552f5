"""Casts, norms and SwiGLU with the arguments of TileKernels 2.1.

Names whose arguments did not change are those of `tile_kernels.quant`. What the others add to the
arguments of TileKernels, such as `amax_min` and `seed`, is by keyword here too (`options`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tile_kernels import quant
from tile_kernels.quant.back.op import (
    cast_back as cast_back,
    per_token_cast_back as per_token_cast_back,
)
from tile_kernels.quant.common import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
from tile_kernels.quant.fake.op import per_token_cast_and_cast_back as per_token_cast_and_cast_back
from tile_kernels.quant.lossless.op import per_block_cast_lossless as per_block_cast_lossless
from tile_kernels.quant.norm.op import (
    norm_backward as norm_backward,
    norm_forward as norm_forward,
    norm_forward_and_per_token_cast as norm_forward_and_per_token_cast,
)
from tile_kernels.quant.per_block.op import (
    per_block_cast as per_block_cast,
    per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf,
)
from tile_kernels.quant.plain.op import cast as cast
from tile_kernels.quant.swiglu.op import (
    swiglu_backward as swiglu_backward,
    swiglu_forward as swiglu_forward,
)
from tile_kernels.quant.types import QuantTensor
from tile_kernels.quant.weight_scales import (
    batched_transpose_weight_sf as batched_transpose_weight_sf,
)


def per_token_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: QuantTensor | None = None,
    **options: Any,
) -> QuantTensor:
    """`tile_kernels.quant.per_token_cast`; two of its arguments by keyword are positional here."""
    return quant.per_token_cast(
        x, fmt, num_per_channels, x_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, out, use_e4m3_sf=use_e4m3_sf, stochastic_cast=stochastic_cast, **options,
    )  # fmt: skip


def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`tile_kernels.quant.per_token_cast_with_sf_only` without `x_block_size`."""
    return quant.per_token_cast_with_sf_only(
        x, fmt, num_per_channels, None, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0,
        out_sf, use_e4m3_sf=use_e4m3_sf, **options,
    )  # fmt: skip


def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`tile_kernels.quant.per_token_cast_with_precomputed_sf` without `x_block_size`."""
    return quant.per_token_cast_with_precomputed_sf(
        x, fmt, num_per_channels, sf, None, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, out, use_e4m3_sf=use_e4m3_sf, **options,
    )  # fmt: skip


def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_size: list[int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`tile_kernels.quant.per_block_cast_with_sf_only`, whose buffer has the name `out`."""
    return quant.per_block_cast_with_sf_only(
        x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, out_sf,
        **options,
    )  # fmt: skip


def per_channel_cast(
    x: Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    **options: Any,
) -> QuantTensor:
    """`tile_kernels.quant.per_channel_cast` with two arguments of it that are by keyword there."""
    return quant.per_channel_cast(
        x, fmt, num_per_tokens, round_sf, num_per_channels=num_per_channels,
        use_packed_ue8m0=use_packed_ue8m0, **options,
    )  # fmt: skip


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    **options: Any,
) -> QuantTensor:
    """`tile_kernels.quant.swiglu_forward_and_per_token_cast` with a weight for every row."""
    return quant.swiglu_forward_and_per_token_cast(
        x, fmt, num_per_channels, None, topk_weights, None, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, clamp_value, clamped_count,
        psum_num_tokens_per_expert=psum_num_tokens_per_expert,
        routed_scaling_factor=routed_scaling_factor, **options,
    )  # fmt: skip


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    act_x_grad: Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    **options: Any,
) -> tuple[Tensor | QuantTensor, ...]:
    """`tile_kernels.quant.swiglu_backward_and_per_token_cast`, with results in another order.

    Returns:
        `(x_grad, (data, scales))`, with weights then their gradient, with `do_recompute` then the
        weighted activation.

    Raises:
        ValueError: If `fmt` is not `"e4m3"`, or as the operator does.
    """
    if fmt != "e4m3":
        raise ValueError(f"swiglu_backward_and_per_token_cast: fmt must be 'e4m3', got {fmt!r}")
    act, codes, x_grad, weight_grad = quant.swiglu_backward_and_per_token_cast(
        x, act_x_grad, topk_weights, None, None, num_per_channels, round_sf, clamp_value,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        use_packed_ue8m0=use_packed_ue8m0, psum_num_tokens_per_expert=psum_num_tokens_per_expert,
        routed_scaling_factor=routed_scaling_factor, do_recompute=do_recompute, **options,
    )  # fmt: skip
    weights = () if topk_weights is None else (weight_grad,)
    return (x_grad, codes, *weights, *((act,) if do_recompute else ()))
