"""Arithmetic that references of mHC share.

The residual of a token is `m` streams of `h` columns. Mixes say how a sublayer reads them (`pre`),
how its output is written back (`post`), and how they mix (`comb`, from stream `i` to stream `j`):

    layer_input = sum_i pre[i] * residual[i]
    residual'[j] = post[j] * output + sum_i comb[i, j] * residual[i]

References whose names end in `_ref` are formulas in plain PyTorch, differentiable. The others
define the operators: they fix the order of sums, with one fused multiply-add per term, and have the
gradients written out. All compute in float32, or in float64 if that is what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import fused_multiply_add, widened


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c`, rounded once in float32."""
    if torch.float64 in (a.dtype, b.dtype, c.dtype):
        return a * b + c
    return fused_multiply_add(a, b, c)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; a bfloat16 NaN is the one that conversions on a GPU return."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return x.bfloat16().view(torch.int16).masked_fill(x.isnan(), 0x7FFF).view(dtype)


def weighted(weights: Sequence[Tensor], rows: Sequence[Tensor], total: Tensor) -> Tensor:
    """`total + sum_i weights[i] * rows[i]`, in order; weights `[...]`, rows `[..., h]`."""
    for weight, row in zip(weights, rows):
        total = fma(widened(row), widened(weight).unsqueeze(-1), total)
    return total


def dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of products over the last dimension, rounded once."""
    return (a.double() * b.double()).sum(-1).to(dtype)
