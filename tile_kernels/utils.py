"""Helpers shared by host code, kernels' plans and tests: integers, and names of dtypes."""

from __future__ import annotations

import torch

__all__ = [
    "align",
    "ceil_div",
    "dtype_to_str",
    "is_power_of_two",
    "next_power_of_two",
    "str_to_dtype",
]

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e2m1": torch.int8,
}


def ceil_div(x: int, y: int) -> int:
    """Returns the quotient `x / y` rounded up.

    Args:
        x: The dividend.
        y: The divisor, positive.

    Example:
        >>> ceil_div(7, 4), ceil_div(8, 4), ceil_div(0, 4)
        (2, 2, 0)
    """
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    """Returns `x` rounded up to a multiple of `y`.

    Args:
        x: The number to round.
        y: The divisor, positive.

    Example:
        >>> align(7, 4), align(8, 4), align(0, 4)
        (8, 8, 0)
    """
    return ceil_div(x, y) * y


def is_power_of_two(x: int) -> bool:
    """Returns whether `x` is positive and has exactly one bit set.

    Args:
        x: The number to test.

    Example:
        >>> [x for x in range(-2, 10) if is_power_of_two(x)]
        [1, 2, 4, 8]
    """
    return x > 0 and x & (x - 1) == 0


def next_power_of_two(x: int) -> int:
    """Returns the least power of two that is not below `x`.

    Args:
        x: A positive number.

    Example:
        >>> [next_power_of_two(x) for x in (1, 2, 3, 8, 9)]
        [1, 2, 4, 8, 16]
    """
    if x < 1:
        raise ValueError(f"next_power_of_two: x must be positive, got {x}")
    return 1 << (x - 1).bit_length()


def dtype_to_str(dtype: torch.dtype) -> str:
    """Returns the format that a dtype stores.

    Args:
        dtype: `torch.float32`, `bfloat16`, `float8_e4m3fn` or `int8`.

    Returns:
        `"fp32"`, `"bf16"`, `"e4m3"`, or `"e2m1"` for int8.

    Example:
        >>> dtype_to_str(torch.float8_e4m3fn)
        'e4m3'
    """
    for name, known in _DTYPES.items():
        if known is dtype:
            return name
    raise ValueError(f"dtype_to_str: dtype must be one of {[*_DTYPES.values()]}, got {dtype}")


def str_to_dtype(fmt: str) -> torch.dtype:
    """Returns the dtype that stores a format.

    Args:
        fmt: `"fp32"`, `"bf16"`, `"e4m3"`, or `"e2m1"`, which is stored in int8.

    Example:
        >>> str_to_dtype("e2m1")
        torch.int8
    """
    if fmt not in _DTYPES:
        raise ValueError(f"str_to_dtype: fmt must be one of {[*_DTYPES]}, got {fmt!r}")
    return _DTYPES[fmt]
