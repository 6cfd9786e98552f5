"""Tensors that a kernel reaches through addresses stored in another tensor.

A parameter `T.Tensor(shape, T.ptr)` holds addresses. What they point to is no argument, so its
bounds are those of the live PyTorch tensor whose storage contains the address.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Mapping

import torch

from .errors import EmulationError


def _storages() -> list[tuple[int, int, torch.UntypedStorage]]:
    """Start, end and storage of every CPU tensor that Python knows, by address."""
    found: dict[int, torch.UntypedStorage] = {}
    for value in gc.get_objects():
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            if value.device.type != "cpu" or value.layout != torch.strided:
                continue
            storage = value.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage
    return sorted((start, start + s.nbytes(), s) for start, s in found.items())


def targets(tables: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The memory that addresses in tables point to, as byte tensors named `table[index]`.

    Null addresses are left out: the kernel may not use them.
    """
    if not tables:
        return {}
    storages = _storages()
    starts = [start for start, _, _ in storages]
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, table in tables.items():
        for i, address in enumerate(table.flatten().tolist()):
            if address == 0:
                continue
            at = bisect.bisect_right(starts, address) - 1
            if at < 0 or address >= storages[at][1]:
                raise EmulationError(
                    f"{name}[{i}] is the address {address:#x}, which lies in no tensor that is "
                    "alive",
                    kind="out of bounds",
                    buffer=name,
                    element=i,
                )
            found.setdefault(starts[at], (f"{name}[{i}]", storages[at][2]))
    return {
        name: torch.empty(0, dtype=torch.uint8).set_(storage) for name, storage in found.values()
    }


def overlapping(
    arguments: Mapping[str, torch.Tensor], reached: Mapping[str, torch.Tensor]
) -> set[str]:
    """Names of `reached`, and of the arguments that share memory with them."""
    known = {t.untyped_storage().data_ptr() for t in reached.values()}
    shared = {n for n, t in arguments.items() if t.untyped_storage().data_ptr() in known}
    return {*reached, *shared}
