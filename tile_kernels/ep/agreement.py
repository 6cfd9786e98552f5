"""The agreement check: ranks validate a call together before any data moves.

A bad argument on one rank, or settings that differ, thus become the same error on every rank. A
collective that only some ranks enter would hang instead, or break the group for good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from tile_kernels.ep.engines import Engine

Settings = dict[str, "str | int | None"]
Result = TypeVar("Result")
Descriptor = dict[str, Any]

_DESCRIPTOR_BYTES = 2048
_TAIL = 3  # numbers at its end: the count for the receiver, the free part of the window
_MAX_ERROR_CHARS = 900
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class Agreed(NamedTuple):
    """What the other ranks announced: by rank, 0 for those that are not active.

    `counts` are the rows that each will send to this one, `windows` the start and the size of the
    free part of its window.
    """

    counts: list[int]
    windows: list[tuple[int, int]]


def checked(check: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of a check of arguments, or its error, for `agree`."""
    try:
        return check(), None
    except (TypeError, ValueError) as error:
        return None, error


@contextmanager
def named(call: str) -> Iterator[None]:
    """Put the name of the call in front of an error message."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{call}: {error}") from error


def unreachable() -> RuntimeError:
    """For code after `agree`, which raises on every rank if this one has an error."""
    return RuntimeError("unreachable: a bad request is an error of every rank")


def agree(
    engine: Engine,
    call: str,
    settings: Mapping[str, str | int | None],
    error: Exception | None,
    counts: Sequence[int] | None = None,
) -> Agreed:
    """Exchange descriptors; raise the error of any rank on every rank.

    `settings` must be equal everywhere. `counts` are the rows that this rank will send to each
    other (0 for one that is not active; by default 0 for all).
    """
    if error is None:
        own: Descriptor = {"call": call, "error": None, "settings": dict(settings)}
    else:
        text = str(error).encode("ascii", "replace")[:_MAX_ERROR_CHARS].decode()
        own = {"call": call, "error": [type(error).__name__, text], "settings": {}}
    encoded = json.dumps(own).encode()
    head = torch.frombuffer(
        bytearray(encoded.ljust(_DESCRIPTOR_BYTES - 8 * _TAIL)), dtype=torch.uint8
    )
    active = list(engine.active)
    counts = counts or [0] * engine.size
    start, room = (0, 0) if engine.window is None else engine.window.announced()
    tail = torch.tensor([[counts[rank], start, room] for rank in active]).view(torch.uint8)
    rows = torch.cat([head.expand(len(active), -1), tail], dim=1)
    ones = engine.ones()
    received = engine.exchange(rows, ones, ones, f"{call} (exchange of descriptors)")
    heads = received[:, : -8 * _TAIL]
    if error is not None or not torch.equal(heads, rows[:, : -8 * _TAIL]):
        descriptors = {rank: json.loads(bytes(row.tolist())) for rank, row in zip(active, heads)}
        _raise_errors(call, descriptors, error)
        _raise_differences(descriptors)
    agreed = Agreed([0] * engine.size, [(0, 0)] * engine.size)
    numbers = received[:, -8 * _TAIL :].clone().view(torch.int64).tolist()
    for rank, (count, start, room) in zip(active, numbers):
        agreed.counts[rank], agreed.windows[rank] = count, (start, room)
    return agreed


def _raise_errors(call: str, descriptors: dict[int, Descriptor], own: Exception | None) -> None:
    failed = [(rank, *each["error"]) for rank, each in descriptors.items() if each["error"]]
    if not failed:
        return
    others = "" if len(failed) == 1 else f" (and {len(failed) - 1} other ranks report errors)"
    rank, kind, text = failed[0]
    caller = descriptors[rank]["call"]
    raise _ERRORS.get(kind, ValueError)(f"{caller or call}: rank {rank}: {text}{others}") from own


def _raise_differences(descriptors: dict[int, Descriptor]) -> None:
    lowest, first = next(iter(descriptors.items()))
    for rank, each in descriptors.items():
        if each["call"] != first["call"]:
            raise ValueError(
                f"all ranks must make the same call, but rank {lowest} calls {first['call']} and "
                f"rank {rank} calls {each['call']}"
            )
    for rank, each in descriptors.items():
        for name, value in first["settings"].items():
            other = each["settings"].get(name)
            if other != value:
                raise ValueError(
                    f"{first['call']}: {name} must be the same on all ranks, got {value} on rank "
                    f"{lowest} and {other} on rank {rank}"
                )
