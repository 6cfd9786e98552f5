"""References of the products with e2m1 weights: weights expanded to e4m3, then those of e4m3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm.gemm_nt.reference import fp8_gemm_nt
from tile_kernels.gemm.m_grouped.reference import m_grouped_fp8_gemm_nt_contiguous
from tile_kernels.gemm.masked.reference import m_grouped_fp8_gemm_nt_masked
from tile_kernels.gemm.product_reference import Operand
from tile_kernels.gemm.tiling import GROUP, LEAST_SHIFT, NAN_SHIFT, ZERO_SHIFT
from tile_kernels.quant import formats


def expanded_fp4_weights(data: Tensor, shifts: Tensor, scales: Tensor) -> Operand:
    """Expands weights to e4m3, without rounding.

    Args:
        data: As in `Fp4Weights`.
        shifts: As in `Fp4Weights`.
        scales: As in `Fp4Weights`.

    Returns:
        `[..., N, K]`, e4m3, and scales of blocks of 128 x 128.
    """
    positions = torch.arange(0, 16, 4, device=data.device)
    codes = (shifts.int().mT[..., None] >> positions & 15).flatten(-2)  # [..., N, K / 32]
    factors = (codes + LEAST_SHIFT).float().exp2()
    factors = factors.masked_fill(codes == ZERO_SHIFT, 0.0).masked_fill(
        codes == NAN_SHIFT, torch.nan
    )
    values = formats.decode_e2m1(data) * factors.repeat_interleave(GROUP, -1)
    return values.to(torch.float8_e4m3fn), scales


def _weights(b: Any) -> Operand:
    return expanded_fp4_weights(*b) if len(b) == 3 else b


def fp8_fp4_gemm_nt(a: Operand, b: Any, d: Tensor, c: Tensor | None = None, **_: Any) -> Tensor:
    """See `tile_kernels.gemm.fp8_fp4_gemm_nt`."""
    return fp8_gemm_nt(a, _weights(b), d, c)


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Operand,
    b: Any,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Any = None,  # noqa: ARG001
    use_psum_layout: bool = False,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.m_grouped_fp8_fp4_gemm_nt_contiguous`."""
    weights = _weights(b)
    return m_grouped_fp8_gemm_nt_contiguous(a, weights, d, grouped_layout, None, use_psum_layout)


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Operand,
    b: Any,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    **ignored: Any,  # noqa: ARG001
) -> Tensor:
    """See `tile_kernels.gemm.m_grouped_fp8_fp4_gemm_nt_masked`."""
    return m_grouped_fp8_gemm_nt_masked(a, _weights(b), d, masked_m, expected_m)
