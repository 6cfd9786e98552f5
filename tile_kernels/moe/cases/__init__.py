"""Argument sets of the MoE operators, for tests, benchmarks and warm-up."""

from __future__ import annotations

from collections.abc import Callable

from tile_kernels.runtime.cases import Arguments


def changed(**changes: object) -> Callable[[Arguments], Arguments]:
    """An edit of good arguments, for `Reject`."""
    return lambda arguments: {**arguments, **changes}
