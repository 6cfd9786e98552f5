"""The agreement check: ranks validate a call together before any data moves.

A bad argument on one rank, or settings that differ, thus become the same error on every rank. A
collective that only some ranks enter would hang instead, or break the group for good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tile_kernels.ep.engines import Engine

Settings = dict[str, "str | int | None"]
Result = TypeVar("Result")
Descriptor = dict[str, Any]

_DESCRIPTOR_BYTES = 2048  # of which the last 8 are the count for the receiver
_MAX_ERROR_CHARS = 900
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


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
) -> list[int]:
    """Exchange descriptors; raise the error of any rank on every rank.

    `settings` must be equal everywhere. `counts` are the rows that this rank will send to each
    other (0 for one that is not active; by default 0 for all). Returns the rows that each other
    rank will send to this one.
    """
    if error is None:
        own: Descriptor = {"call": call, "error": None, "settings": dict(settings)}
    else:
        text = str(error).encode("ascii", "replace")[:_MAX_ERROR_CHARS].decode()
        own = {"call": call, "error": [type(error).__name__, text], "settings": {}}
    encoded = json.dumps(own).encode()
    head = torch.frombuffer(bytearray(encoded.ljust(_DESCRIPTOR_BYTES - 8)), dtype=torch.uint8)
    active = list(engine.active)
    counts = counts or [0] * engine.size
    tail = torch.tensor([counts[rank] for rank in active]).view(-1, 1).view(torch.uint8)
    rows = torch.cat([head.expand(len(active), -1), tail], dim=1)
    ones = engine.ones()
    received = engine.exchange(rows, ones, ones, f"{call} (exchange of descriptors)")
    heads = received[:, :-8]
    if error is not None or not torch.equal(heads, rows[:, :-8]):
        descriptors = {rank: json.loads(bytes(row.tolist())) for rank, row in zip(active, heads)}
        _raise_errors(call, descriptors, error)
        _raise_differences(descriptors)
    recv_counts = [0] * engine.size
    for rank, count in zip(active, received[:, -8:].clone().view(torch.int64).flatten().tolist()):
        recv_counts[rank] = count
    return recv_counts


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
