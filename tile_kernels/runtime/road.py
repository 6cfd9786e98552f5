"""Where the launches of a thread go, and who sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Road(threading.local):
    """Per thread. `recorded`: launches are only listed there, if it is a list; `watch` sees those
    that are made, if there is one (`runtime/replay.py`)."""

    recorded: list[Any] | None = None
    watch: Any = None


road = _Road()


def repeated(function: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """`function(*args)`, which depends on more than the look of its arguments: the device's state,
    their addresses. A replay of the call around it calls it again."""
    return function(*args) if road.watch is None else road.watch.called(function, args)
