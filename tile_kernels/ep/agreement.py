"""The agreement check: ranks validate a call together before any data moves.

A bad argument on one rank, or settings that differ, thus become the same error on every rank. A
collective that only some ranks enter would hang instead, or break the group for good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from tile_kernels.ep.engines import Engine

Settings = dict[str, "str | int | None"]
Result = TypeVar("Result")
Descriptor = dict[str, Any]

_DESCRIPTOR_BYTES = 2048
_TAIL = 3  # numbers at its end: the count for the receiver, the free part of the window
_MAX_NUMBERS = 512  # int32 in between; also where there is no window: calls have one size
_MAX_ERROR_CHARS = 900
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class Agreed(NamedTuple):
    """What the other ranks announced: by rank, 0 for those that are not active.

    `counts` are the rows that each will send to this one, `windows` the start and the size of the
    free part of its window. `numbers` are those that each told all others; none if they are too
    many for a descriptor.
    """

    counts: list[int]
    windows: list[tuple[int, int]]
    numbers: list[list[int]]


def checked(check: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The result of a check of arguments, or its error, for `agree`."""
    try:
        return check(), None
    except (TypeError, ValueError) as error:
        return None, error


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
    """`propose`, and wait for the others."""
    return propose(engine, call, settings, error, counts)()


def propose(
    engine: Engine,
    call: str,
    settings: Mapping[str, str | int | None],
    error: Exception | None,
    counts: Sequence[int] | None = None,
    numbers: Sequence[int] = (),
) -> Callable[[], Agreed]:
    """Send descriptors; the result waits for the others, and raises an error of any rank on all.

    `settings` must be equal everywhere. `counts` are the rows that this rank will send to each
    other (0 for one that is not active; by default 0 for all). `numbers` are for all ranks, and
    equally many on each.
    """
    if error is None:
        own: Descriptor = {"call": call, "error": None, "settings": dict(settings)}
    else:
        text = str(error).encode("ascii", "replace")[:_MAX_ERROR_CHARS].decode()
        own = {"call": call, "error": [type(error).__name__, text], "settings": {}}
    encoded = json.dumps(own).encode()
    head_bytes = _DESCRIPTOR_BYTES - 8 * _TAIL
    head = torch.frombuffer(bytearray(encoded.ljust(head_bytes)), dtype=torch.uint8)
    active = list(engine.active)
    counts = counts or [0] * engine.size
    numbers = numbers if engine.window is not None and len(numbers) <= _MAX_NUMBERS else ()
    middle = torch.zeros(_MAX_NUMBERS, dtype=torch.int32)
    middle[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    window = (0, 0) if engine.window is None else engine.window.announced()
    tail = torch.tensor([[counts[rank], *window] for rank in active]).view(torch.uint8)
    for_all = torch.cat([head, middle.view(torch.uint8)]).expand(len(active), -1)
    rows = torch.cat([for_all, tail], dim=1)
    end = engine.start_descriptors(rows, f"{call} (exchange of descriptors)")

    def agreed() -> Agreed:
        received = end()
        heads = received[:, :head_bytes]
        if error is not None or not torch.equal(heads, rows[:, :head_bytes]):
            descriptors = {
                rank: json.loads(bytes(row.tolist())) for rank, row in zip(active, heads)
            }
            _raise_errors(call, descriptors, error)
            _raise_differences(descriptors)
        found = Agreed([0] * engine.size, [(0, 0)] * engine.size, [])
        tails = received[:, -8 * _TAIL :].clone().view(torch.int64).tolist()
        for rank, (count, start, size) in zip(active, tails):
            found.counts[rank], found.windows[rank] = count, (start, size)
        if numbers:
            middles = received[:, head_bytes : -8 * _TAIL].clone().view(torch.int32)
            found.numbers.extend(middles[:, : len(numbers)].tolist())
        return found

    return agreed


def _raise_errors(call: str, descriptors: dict[int, Descriptor], own: Exception | None) -> None:
    failed = [(rank, *each["error"]) for rank, each in descriptors.items() if each["error"]]
    if not failed:
        return
    others = "" if len(failed) == 1 else f" (errors on {len(failed)} ranks)"
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
