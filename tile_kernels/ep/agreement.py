"""Before any data moves, the ranks tell each other what they are about to do.

A bad argument on one rank, or settings that differ, thus become the same error on every rank. A
collective that only some ranks enter would hang instead, or break the group for good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tile_kernels.ep.engines import Engine

_DESCRIPTOR_BYTES = 2048  # of which the last 8 are the count for the receiver
_MOST_TEXT = 900
_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


def agree(
    engine: Engine,
    call: str,
    settings: Mapping[str, str | int | None],
    error: Exception | None,
    counts: Sequence[int],
) -> list[int]:
    """Exchange descriptors; raise on every rank what any has to complain about.

    `settings` must be equal everywhere. `counts` are the rows that this rank will send to each
    other (0 for one that is not active); what the others will send to this one is returned.
    """
    if error is None:
        own: dict[str, Any] = {"call": call, "error": None, "settings": dict(settings)}
    else:
        text = str(error).encode("ascii", "replace")[:_MOST_TEXT].decode()
        own = {"call": call, "error": [type(error).__name__, text], "settings": {}}
    said = json.dumps(own).encode()
    head = torch.frombuffer(bytearray(said.ljust(_DESCRIPTOR_BYTES - 8)), dtype=torch.uint8)
    active = list(engine.active)
    tail = torch.tensor([counts[rank] for rank in active]).view(-1, 1).view(torch.uint8)
    rows = torch.cat([head.expand(len(active), -1), tail], dim=1)
    ones = engine.ones()
    heard = engine.exchange(rows, ones, ones, f"{call} (comparing notes)")
    if error is not None or not torch.equal(heard[:, :-8], rows[:, :-8]):
        told = {rank: json.loads(bytes(row.tolist())) for rank, row in zip(active, heard[:, :-8])}
        _raise_errors(call, told, error)
        _raise_differences(told)
    found = [0] * engine.size
    for rank, count in zip(active, heard[:, -8:].clone().view(torch.int64).flatten().tolist()):
        found[rank] = count
    return found


def _raise_errors(call: str, told: dict[int, dict[str, Any]], own: Exception | None) -> None:
    failed = [(rank, *each["error"]) for rank, each in told.items() if each["error"]]
    if not failed:
        return
    others = "" if len(failed) == 1 else f" (and {len(failed) - 1} other ranks report errors)"
    rank, kind, text = failed[0]
    caller = told[rank]["call"]
    raise _ERRORS.get(kind, ValueError)(f"{caller or call}: rank {rank}: {text}{others}") from own


def _raise_differences(told: dict[int, dict[str, Any]]) -> None:
    lowest, first = next(iter(told.items()))
    for rank, each in told.items():
        if each["call"] != first["call"]:
            raise ValueError(
                f"all ranks must make the same call, but rank {lowest} calls {first['call']} and "
                f"rank {rank} calls {each['call']}"
            )
    for rank, each in told.items():
        for name, value in first["settings"].items():
            other = each["settings"].get(name)
            if other != value:
                raise ValueError(
                    f"{first['call']}: {name} must be the same on all ranks, got {value} on rank "
                    f"{lowest} and {other} on rank {rank}"
                )
