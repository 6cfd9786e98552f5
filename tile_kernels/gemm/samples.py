"""Operands for the argument sets of the products, and how results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.gemm.tiling import ZERO_SHIFT
from tile_kernels.runtime.cases import Reject, close_results, edited
from tile_kernels.utils import align, ceil_div

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
MN, ROW_MAJOR, PACKED, TRANSPOSED = "mn-major", "row-major", "packed", "transposed"

# Tensor cores keep about 14 bits of a sum of e4m3 products; |a| |b|^T of 7168 channels is some 54
# times the root mean square of the product.
compare = close_results(rtol=1e-3, atol=1.5e-2, rtol_bfloat16=2**-7)


def compare_written(result: Any, expected: Any) -> None:
    """Where the reference has written; it leaves NaN in rows that nobody may read."""
    pairs = [(r, e) for r, e in zip(result, expected) if e is not None]
    compare(tuple(torch.where(e.isnan(), e, r) for r, e in pairs), tuple(e for _, e in pairs))


def mn_major(sf: Tensor) -> Tensor:
    """The same scales with strides `(1, align(rows, 4))`; NaN in padding."""
    *groups, rows, steps = sf.shape
    fill = torch.nan if sf.is_floating_point() else -1
    out = sf.new_full((*groups, steps, align(rows, 4)), fill).mT[..., :rows, :]
    return out.copy_(sf)


def _pack(exponents: Tensor) -> Tensor:
    """Exponents `[..., steps]` as words of four, the first in the low byte."""
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    bytes_ = padded.to(torch.uint8).contiguous()
    return bytes_.view(torch.int32)


def _scaled(x: Tensor, sf: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    return (x / wide).clamp(-LARGEST, LARGEST).to(E4M3), sf


def by_rows(x: Tensor, layout: str = MN) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each 128 channels of a row."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    sf = groups.abs().amax(-1).clamp(min=1e-4) / LARGEST
    if layout == PACKED:
        exponents = sf.log2().ceil().clamp(-126, 127).nan_to_num(0) + 127
        sf = (exponents - 127).exp2()
        packed = mn_major(_pack(exponents))
    data, _ = _scaled(groups, sf, sf[..., None])
    scales = packed if layout == PACKED else mn_major(sf) if layout == MN else sf
    return data.flatten(-2), scales


def by_blocks(x: Tensor, layout: str = ROW_MAJOR) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each 128 x 128 block."""
    n = x.shape[-2]
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    sf = blocks.abs().amax((-1, -3)).clamp(min=1e-4) / LARGEST
    if layout == PACKED:
        exponents = sf.log2().ceil() + 127
        sf = (exponents - 127).exp2()
    data, _ = _scaled(blocks, sf, sf[..., :, None, :, None])
    data = data.flatten(-4, -3).flatten(-2)[..., :n, :].contiguous()
    if layout == PACKED:
        return data, _pack(exponents)
    return data, sf.mT.contiguous().mT if layout == TRANSPOSED else sf


def weights(shape: tuple[int, ...], by_row: bool, layout: str, device: torch.device) -> Any:
    """Random weights `[..., n, k]` as `b`; large ones group by group, to save memory."""
    make = by_rows if by_row else by_blocks
    if len(shape) == 2 or device.type == "meta" or torch.Size(shape).numel() < 1 << 24:
        return make(torch.randn(shape, device=device), layout)
    parts = [make(torch.randn(shape[1:], device=device), layout) for _ in range(shape[0])]
    data, sf = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    return data, mn_major(sf) if layout == MN else sf


def fp4_weights(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random weights `[..., n, k]` in prepared e2m1: all codes and shifts, and groups of zeros."""
    *groups, n, k = shape
    steps = k // BLOCK
    data = torch.randint(-128, 128, (*groups, n, k // 2), dtype=torch.int8, device=device)
    shifts = torch.zeros((*groups, steps, n), dtype=torch.int32, device=device)
    for position in range(0, 16, 4):
        shift = torch.randint(0, 13, shifts.shape, dtype=torch.int32, device=device)
        shifts |= torch.where(shift == 12, ZERO_SHIFT, shift) << position
    blocks = (*groups, ceil_div(n, BLOCK), steps)
    scales = torch.randint(-9, -5, blocks, device=device).float().exp2()
    return data, shifts.to(torch.int16), scales


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A result full of NaN: what stays so was not written."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def rows_of_groups(counts: list[int], spare: int = 0) -> tuple[Tensor, Tensor]:
    """`(grouped_layout, ends)` of groups padded to 128 rows, with `spare` tiles of padding more."""
    parts, ends, start = [], [], 0
    for g, count in enumerate(counts):
        padded = ceil_div(count, BLOCK) * BLOCK
        part = torch.full((padded,), -1, dtype=torch.int32)
        part[:count] = g
        parts.append(part)
        ends.append(start + count)
        start += padded
    parts.append(torch.full((spare * BLOCK,), -1, dtype=torch.int32))
    return torch.cat(parts), torch.tensor(ends, dtype=torch.int32)


def _data(change: Any) -> Any:
    return lambda pair: (change(pair[0]), pair[1])


def _scale(change: Any) -> Any:
    return lambda pair: (pair[0], change(pair[1]))


PAIR_REJECTS = [
    Reject(name, label, edited(name, edit))
    for name in ("a", "b")
    for label, edit in (
        ("no pair", lambda pair: pair[0]),
        ("three parts", lambda pair: (*pair, pair[1])),
        ("no tensor", lambda pair: (pair[0], 1.0)),
        ("bfloat16", _data(lambda x: x.bfloat16())),
        ("channels", _data(lambda x: x[..., :-64].contiguous())),
        ("other channels", _data(lambda x: x[..., :-128].contiguous())),
        ("inner stride", _data(lambda x: x.repeat_interleave(2, -1)[..., ::2])),
        ("float64 scales", _scale(lambda x: x.double())),
        ("fewer scales", _scale(lambda x: x[..., :-1])),
        ("strides of scales", _scale(lambda x: x.repeat_interleave(2, -2)[..., ::2, :])),
    )
]
RESULT_REJECTS = [
    Reject("d", "float16", edited("d", lambda x: x.half())),
    Reject("d", "fewer columns", edited("d", lambda x: x[..., 1:])),
    Reject("d", "inner stride", edited("d", lambda x: x.repeat_interleave(2, -1)[..., ::2])),
]
