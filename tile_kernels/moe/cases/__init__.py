"""Argument sets of the MoE operators, for tests, benchmarks and warm-up."""

from __future__ import annotations

from collections.abc import Callable

from tile_kernels.runtime.cases import Arguments


def with_value(name: str, value: int) -> Callable[[Arguments], Arguments]:
    """An edit that puts `value` into the last element of a tensor."""

    def edit(arguments: Arguments) -> Arguments:
        tensor = arguments[name].clone()
        tensor.view(-1)[-1] = value
        return {**arguments, name: tensor}

    return edit


def changed(**changes: object) -> Callable[[Arguments], Arguments]:
    """An edit of good arguments, for `Reject`."""
    return lambda arguments: {**arguments, **changes}
