"""Taking values out of a sequence by their positions, without a Python loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What gives the values at these positions.

    >>> getter([2, 0])("abc"), getter([1])(["a", "b"]), getter([])("abc")
    (('c', 'a'), ['b'], ())
    """
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        return itemgetter(slice(positions[0], positions[0] + 1))
    return _nothing


def _nothing(values: Sequence[Any]) -> tuple[()]:  # noqa: ARG001
    return ()
