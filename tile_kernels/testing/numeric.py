"""Comparison of tensors: byte for byte, by similarity, and for a bias in rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["assert_equal", "calc_diff", "check_bias", "count_bytes"]

_MAX_LISTED = 8
_SCAN_CHUNK = 1 << 24
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_equal(
    x: torch.Tensor,
    y: torch.Tensor,
    check_dtype: bool = True,
    check_shape: bool = True,
    check_stride: bool = True,
) -> None:
    """Raise `AssertionError` unless `x` and `y` are the same tensor, byte for byte.

    Equal NaN bit patterns are equal, and `+0.0` differs from `-0.0`. Any dtype, including fp8.

    Args:
        x: a tensor, in any layout of strides.
        y: what it is compared with, on the same device.
        check_dtype: the dtypes must agree. Without it only the bytes count.
        check_shape: the shapes must agree. Without it the elements in row-major order count.
        check_stride: the strides must agree, unless `x` is empty.

    The message says what differs; for contents, how many elements and the first of them with
    their position, both values and both bit patterns.

    >>> nan = torch.tensor([float("nan")])
    >>> assert_equal(nan, nan.clone())
    >>> assert_equal(torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [-0.0, 0.0]]))
    Traceback (most recent call last):
    AssertionError: contents differ in 1 of 4 elements (torch.float32 (2, 2)); the first:
      [1, 0]: 0.0 (0x00000000) != -0.0 (0x80000000)
    """
    for name, tensor in (("x", x), ("y", y)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"assert_equal: {name} must be a tensor, got {type(tensor).__name__}: {tensor!r}"
            )
    if x.device != y.device:
        raise AssertionError(f"devices differ: {x.device} != {y.device}")
    if check_dtype and x.dtype != y.dtype:
        raise AssertionError(f"dtypes differ: {x.dtype} != {y.dtype}")
    if check_shape and x.shape != y.shape:
        raise AssertionError(f"shapes differ: {tuple(x.shape)} != {tuple(y.shape)}")
    if check_stride and x.numel() > 0 and x.stride() != y.stride():
        raise AssertionError(
            f"strides differ: {x.stride()} != {y.stride()} (shape {tuple(x.shape)})"
        )
    if count_bytes(x) != count_bytes(y):
        raise AssertionError(
            f"sizes differ: {count_bytes(x)} bytes ({x.dtype} {tuple(x.shape)}) != "
            f"{count_bytes(y)} bytes ({y.dtype} {tuple(y.shape)})"
        )
    bits_x, bits_y = _flat_bits(x), _flat_bits(y)
    by_byte = bits_x.dtype != bits_y.dtype
    if by_byte:
        bits_x, bits_y = bits_x.view(torch.uint8), bits_y.view(torch.uint8)
    if torch.equal(bits_x, bits_y):
        return
    raise AssertionError(_describe_differences(x, y, bits_x, bits_y, by_byte))


def _flat_bits(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` in row-major order as integers of the same width, 1-D contiguous.

    Reinterpreting before any copy keeps to dtypes that every device can copy and compare.
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.resolve_neg().view(_BITS[x.element_size()]).reshape(-1).contiguous()


def _describe_differences(
    x: torch.Tensor, y: torch.Tensor, bits_x: torch.Tensor, bits_y: torch.Tensor, by_byte: bool
) -> str:
    # A complex element is two numbers in `bits`.
    per_element = 1 if by_byte else max(1, bits_x.numel() // x.numel())
    total = bits_x.numel() // per_element
    count = 0
    first: list[int] = []
    for start in range(0, total, _SCAN_CHUNK):
        part = slice(start * per_element, (start + _SCAN_CHUNK) * per_element)
        differs = (bits_x[part] != bits_y[part]).view(-1, per_element).any(dim=1)
        in_chunk = int(differs.count_nonzero())
        if in_chunk and len(first) < _MAX_LISTED:
            found = differs.nonzero().view(-1)[: _MAX_LISTED - len(first)]
            first += (found + start).tolist()
        count += in_chunk

    unit = "bytes" if by_byte else "elements"
    kinds = f"{x.dtype} {tuple(x.shape)}"
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        kinds += f" and {y.dtype} {tuple(y.shape)}"
    lines = [f"contents differ in {count} of {total} {unit} ({kinds}); the first:"]
    for position in first:
        if by_byte:
            values = f"0x{int(bits_x[position]):02x} != 0x{int(bits_y[position]):02x}"
            lines.append(f"  byte {position}: {values}")
            continue
        where = str(_unravel(position, x.shape))
        if x.shape != y.shape:
            where += f" and {_unravel(position, y.shape)}"
        part = slice(position * per_element, (position + 1) * per_element)
        lines.append(f"  {where}: {_show(bits_x[part], x.dtype)} != {_show(bits_y[part], y.dtype)}")
    if count > len(first):
        lines.append(f"  and {count - len(first)} more")
    return "\n".join(lines)


def _unravel(position: int, shape: Sequence[int]) -> list[int]:
    """The index of the element at row-major `position` of a tensor of `shape`."""
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return index[::-1]


def _show(bits: torch.Tensor, dtype: torch.dtype) -> str:
    """One element as its value, and as its bit pattern where the value does not say it all."""
    bits = bits.cpu()
    pattern = "".join(f"{byte:02x}" for byte in reversed(bits.view(torch.uint8).tolist()))
    if dtype.is_complex:
        return f"{bits.view(dtype).item()} (0x{pattern})"
    if dtype == torch.bool:
        return f"{bits.item() != 0} (0x{pattern})"
    try:
        value = bits.view(dtype).item()
    except (NotImplementedError, RuntimeError):  # e.g. two packed 4-bit floats
        return f"0x{pattern}"
    return f"{value} (0x{pattern})" if dtype.is_floating_point else f"{value}"


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | int:
    """How far `x` is from `y`, in fp64: `1 - 2 * sum(x * y) / sum(x * x + y * y)`.

    About half the squared relative error; 0 for equal tensors, 2 for `y = -x`.

    Args:
        x: a tensor of any dtype.
        y: a tensor of the same shape.

    Returns:
        A 0-d float64 tensor, NaN if either tensor has a non-finite element; the integer 0 if both
        are zero or empty.

    >>> round(float(calc_diff(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))), 12)  # 1 / 49
    0.020408163265
    """
    if x.shape != y.shape:
        raise ValueError(
            f"calc_diff: x and y must have the same shape, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    x, y = x.detach().double(), y.detach().double()
    denominator = (x * x + y * y).sum()
    if denominator == 0:
        return 0
    return 1 - 2 * (x * y).sum() / denominator


def check_bias(x: torch.Tensor, ref_x: torch.Tensor) -> None:
    """Raise `AssertionError` if rounding `ref_x` to `x` went to one side too often.

    Of `n` elements the share below the reference, `r = (#(x < ref_x) + #(x == ref_x) / 2) / n`,
    must satisfy `|r - 0.5| < 10 / sqrt(n)`. Truncation fails this, rounding to nearest does not.
    Empty tensors pass, and so does anything with fewer than 400 elements. A NaN counts as above.

    Args:
        x: the rounded values, any real dtype.
        ref_x: the values before rounding, same shape.

    >>> ref_x = torch.linspace(0, 1000, 10001)
    >>> check_bias(ref_x.round(), ref_x)
    >>> check_bias(ref_x.floor(), ref_x)
    Traceback (most recent call last):
    AssertionError: rounding is biased: 95.0% of 10001 elements lie below the reference \
(9000 below, 1001 equal, 0 above); 50% +- 10.0% allowed
    """
    if x.shape != ref_x.shape:
        raise ValueError(
            f"check_bias: x and ref_x must have the same shape, got {tuple(x.shape)} and "
            f"{tuple(ref_x.shape)}"
        )
    n = x.numel()
    if n == 0:
        return
    # fp64 holds every value of the narrower float formats, of which fp8 cannot be compared.
    if x.is_floating_point() or ref_x.is_floating_point():
        x, ref_x = x.detach().double(), ref_x.detach().double()
    below, equal = int((x < ref_x).sum()), int((x == ref_x).sum())
    # |r - 0.5| < 10 / sqrt(n), times 2 n and squared: exact in integers.
    if (2 * below + equal - n) ** 2 < 400 * n:
        return
    raise AssertionError(
        f"rounding is biased: {100 * (below + equal / 2) / n:.1f}% of {n} elements lie below the "
        f"reference ({below} below, {equal} equal, {n - below - equal} above); "
        f"50% +- {1000 / n**0.5:.1f}% allowed"
    )


def count_bytes(*tensors: Any) -> int:
    """Bytes of the elements of all `tensors`, which may be nested in tuples and lists.

    None counts nothing, a view only the elements it shows.

    >>> count_bytes(torch.zeros(3, 4), None, (torch.zeros(2, dtype=torch.bfloat16), []))
    52
    """
    total = 0
    for item in tensors:
        if item is None:
            continue
        if isinstance(item, torch.Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, (tuple, list)):
            total += count_bytes(*item)
        else:
            raise TypeError(
                f"count_bytes: expected tensors, None, tuples and lists, got {type(item).__name__}"
            )
    return total
