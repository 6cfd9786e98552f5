"""What references of several families share: arithmetic that PyTorch has no operator for."""

from __future__ import annotations

import torch

# Elements at a time on a CPU, so that what is in between stays in its caches. One thread of an
# EPYC, 4096 x 2048: 2^18 35 ms, 2^14 48 ms, all at once 150 ms; `a * b + c` takes 38 ms.
_CHUNK = 1 << 18
_HALF_STEP = 1 << 28  # of float32: the lower 29 bits of a float64 halfway between two float32
_LEAST_NORMAL = 2.0**-126


def row_chunks(num_rows: int, width: int, multiple: int = 1) -> list[slice]:
    """Rows of `width` numbers in pieces for a CPU's caches, each a multiple of rows but the last.

    >>> row_chunks(5, 1 << 17, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, _CHUNK // max(width * multiple, 1)) * multiple
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or as it is if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` of float32 tensors with a single rounding, on any device; they are broadcast.

    The product of two float32 is exact in float64: 24 + 24 significant bits are at most 53, and
    the exponents (-298..255) are far inside the range. The sum with `c`, rounded to float64 and
    then to float32, can only be wrong if it is inexact, and rounded onto the middle between two
    float32. On a CPU, where looking costs little, only such sums are computed by `_rounded_to_odd`.

    >>> a, b = torch.tensor(2.0**-24 + 2.0**-47), torch.tensor(1 - 2.0**-23)
    >>> c = torch.tensor(1 + 2.0**-23)  # a * b is 2**-70 short of half a step of c
    >>> bool(fused_multiply_add(a, b, c) == c), bool((a.double() * b + c).float() == c)
    (True, False)
    """
    a, b, c = torch.broadcast_tensors(a, b, c)
    if not a.is_cpu:
        product = a.double() * b  # in float64, without a copy of b
        return _rounded_to_odd(product, c, product + c)
    if a.numel() <= _CHUNK:
        return _rounded_twice(a, b, c)
    out = torch.empty(a.shape, dtype=torch.float32)
    dim = max(range(a.dim()), key=lambda d: a.shape[d])
    size = max(1, _CHUNK * a.shape[dim] // a.numel())
    for parts in zip(*(x.split(size, dim) for x in (out, a, b, c))):
        parts[0].copy_(_rounded_twice(*parts[1:]))
    return out


def _rounded_twice(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` rounded to float64 and to float32, but where that could differ from one step."""
    product = a.double() * b
    total = product + c
    out = total.float()
    doubtful = total.view(torch.int64) & 2 * _HALF_STEP - 1 == _HALF_STEP
    size = out.abs()
    if out.numel() and not size.amin() > _LEAST_NORMAL:  # there float32 has other steps
        doubtful |= (size <= _LEAST_NORMAL) & (total != 0)
    where = doubtful if doubtful.dim() == 0 else doubtful.nonzero(as_tuple=True)
    out[where] = _rounded_to_odd(product[where], c[where], total[where])
    return out


def _rounded_to_odd(product: torch.Tensor, c: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """`product + c` rounded once to float32, where `total` is that rounded to float64.

    The sum in float64 is rounded *to odd*: if it is not exact, to that neighbour whose last bit is
    set. Every float32, and every midpoint between two of them, has at most 25 significant bits, so
    as a float64 its last bit is clear. Hence an inexact sum stays strictly on its side of all of
    these, and rounding it to float32 gives what rounding the exact sum gives: in the normal range,
    below it, and at the overflow.

    `sum + error` is the exact sum (Knuth's TwoSum; nothing overflows or underflows in float64).
    The sum is the neighbour nearest to it; if its last bit is clear, the other neighbour, one step
    in the direction of the error, is the odd one. Zeros, infinities and NaN have no error to heed.
    """
    of_c = total - product
    error = (product - (total - of_c)) + (c - of_c)
    del of_c  # so that tensors of billions of elements fit a GPU
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)  # larger bits: larger magnitude
    inexact = (error != 0) & total.isfinite()
    odd = torch.where(inexact & (bits & 1 == 0), bits + step, bits)
    return odd.view(torch.float64).float()
