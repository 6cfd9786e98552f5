"""Integer helpers shared by host code, kernels' plans and tests."""

from __future__ import annotations

__all__ = ["align", "ceil_div", "is_power_of_two"]


def ceil_div(x: int, y: int) -> int:
    """The quotient `x / y` rounded up, for positive `y`.

    >>> ceil_div(7, 4), ceil_div(8, 4), ceil_div(0, 4)
    (2, 2, 0)
    """
    return (x + y - 1) // y


def align(x: int, y: int) -> int:
    """`x` rounded up to a multiple of `y`, for positive `y`.

    >>> align(7, 4), align(8, 4), align(0, 4)
    (8, 8, 0)
    """
    return ceil_div(x, y) * y


def is_power_of_two(x: int) -> bool:
    """Whether `x` is positive and has exactly one bit set.

    >>> [x for x in range(-2, 10) if is_power_of_two(x)]
    [1, 2, 4, 8]
    """
    return x > 0 and x & (x - 1) == 0
