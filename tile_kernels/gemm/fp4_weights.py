"""`prepare_fp4_weights`: packed e2m1 weights as the products read them.

Hopper's tensor cores have no e2m1. Its values times a power of two from `2**-5` to `2**6` are
normal numbers of e4m3, so a 128 x 128 block whose groups of 32 channels have exponents `e` becomes
e4m3 without rounding, with one scale:

    scale of the block = 2**(max(e) - 127 - 6)       shift = e - max(e) + 6, from -5 to 6

The products add the shift to the exponents of the codes while they expand them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.gemm.operands import check_pair
from tile_kernels.gemm.tiling import BLOCK, GROUP, LEAST_SHIFT, NAN_SHIFT, ZERO_SHIFT
from tile_kernels.quant import formats, scales
from tile_kernels.runtime import checks

_UP = 6  # 6 * 2**6 is not above e4m3's largest number
_PER_STEP = BLOCK // GROUP
_MAGNITUDES = 0x77777777  # of eight codes
_MAX_EXPONENT = 255  # stands for NaN


class Fp4Weights(NamedTuple):
    """Weights in packed e2m1 as `fp8_fp4_gemm_nt` and its grouped forms read them.

    Attributes:
        data: `[..., N, K / 2]`, int8: two codes in a byte, the first in its low half.
        shifts: `[..., K / 128, N]`, int16: four shifts of 32 channels each, the first in the low
            bits. 0 to 11 stand for factors `2**-5` to `2**6`, 14 makes zeros and 15 NaN.
        scales: `[..., ceil(N / 128), K / 128]`, float32, powers of two.
    """

    data: Tensor
    shifts: Tensor
    scales: Tensor


def prepare_fp4_weights(weights: tuple[Tensor, Tensor]) -> Fp4Weights:
    """Brings e2m1 weights with 1 x 32 scales into the form of `fp8_fp4_gemm_nt`.

    Values are kept exactly: the scale of a 128 x 128 block, times a power of two for each 32
    channels of a row, which is stored in 4 bits. Groups of 32 codes that are all zero do not count.
    Call it once, when weights are loaded: it waits for the GPU to look for groups that cannot be
    represented.

    Args:
        weights: `(data, scales)`, as `quant.per_token_cast(w, "e2m1", 32, round_sf=True)` returns
            them, or with a leading dimension of groups: `[..., N, K / 2]`, int8, contiguous, and
            `[..., N, K / 32]`, float32 powers of two, or `[..., N, K / 128]`, int32, four ue8m0
            exponents in a word. `N` is a multiple of 8, `K` of 128. An exponent of 0 stands for a
            scale of zero, 255 for NaN.

    Returns:
        `Fp4Weights(data, shifts, scales)`, with the same `data`: 4.127 bits for each weight.

    Raises:
        TypeError: If `weights` is no pair of tensors, or a dtype differs.
        ValueError: If a shape or a layout differs, if a scale is no power of two, or if a group's
            scale is less than `2**-11` of the largest one in its 128 x 128 block. Such weights can
            be multiplied in bfloat16.

    Example:
        >>> data = torch.full((8, 64), 0x22, dtype=torch.int8)  # ones
        >>> prepared = prepare_fp4_weights((data, torch.ones(8, 4)))
        >>> prepared.scales.item(), hex(prepared.shifts[0, 0].item() & 0xFFFF)
        (0.015625, '0xbbbb')
    """
    with checks.named("prepare_fp4_weights"):
        _check(weights)
        data, sf = weights
        if data.dim() == 2:
            return Fp4Weights(data, *_prepared(data, sf))
        *_, n, width = data.shape
        steps = 2 * width // BLOCK
        shifts = data.new_empty((len(data), steps, n), dtype=torch.int16)
        blocks = data.new_empty((len(data), -(-n // BLOCK), steps), dtype=torch.float32)
        for g in range(len(data)):  # one after another, to save memory
            shifts[g], blocks[g] = _prepared(data[g], sf[g])
    return Fp4Weights(data, shifts, blocks)


def _check(weights: Any) -> None:
    check_pair("weights", weights)
    data, sf = weights
    dims = ("groups", "N", "K / 2")[-2 if data.dim() == 2 else -3 :]
    checks.tensor("weights", data, dims, torch.int8, contiguous=True)
    *groups, n, width = data.shape
    if n % 8 or width % (BLOCK // 2):
        raise ValueError(
            f"weights must have a multiple of 8 rows and of {BLOCK} channels, got {n} and "
            f"{2 * width}"
        )
    per_scale = BLOCK if sf.dtype == torch.int32 else GROUP
    dims = (*dims[:-1], f"K / {per_scale}")
    checks.tensor(
        "the scales of weights", sf, dims, (torch.float32, torch.int32),
        shape=(*groups, n, 2 * width // per_scale),
    )  # fmt: skip
    if sf.device != data.device:
        raise ValueError(f"the scales of weights must be on {data.device}, got {sf.device}")


def _prepared(data: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
    """Shifts and scales of one matrix."""
    if sf.dtype == torch.float32:
        bits = sf.contiguous().view(torch.int32)
        if ((bits & 0x7FFFFF).ne(0) | (bits < 0)).any():
            raise ValueError("the scales of weights must be powers of two, or zero")
    exponents = scales.read_exponents(sf.contiguous()).int()
    words = data.view(torch.int32).unflatten(-1, (-1, GROUP // 8))
    counted = (words & _MAGNITUDES).ne(0).any(-1) & (exponents > 0) & (exponents < _MAX_EXPONENT)
    largest = scales.block_max(exponents.where(counted, 0), (BLOCK, _PER_STEP))
    block_exponent = (largest - _UP).clamp(min=1)
    shift = exponents - scales.expand_blocks(block_exponent, (BLOCK, _PER_STEP), exponents.shape)
    bad = counted & (shift < LEAST_SHIFT)
    if bad.any():
        row, group = bad.nonzero()[0].tolist()
        raise ValueError(
            f"the scales of weights must vary by at most 2**{_UP - LEAST_SHIFT} within a block of "
            f"{BLOCK} x {BLOCK}, but element [{row}, {group}] is "
            f"2**{int(shift[row, group]) - _UP} of the largest"
        )
    codes = torch.where(counted, shift - LEAST_SHIFT, ZERO_SHIFT)
    codes = codes.masked_fill(exponents == _MAX_EXPONENT, NAN_SHIFT).unflatten(-1, (-1, _PER_STEP))
    positions = torch.arange(0, 4 * _PER_STEP, 4, device=data.device, dtype=torch.int32)
    packed = (codes << positions).sum(-1, dtype=torch.int32).to(torch.int16)
    return packed.T.contiguous(), formats.decode_ue8m0(block_exponent)
