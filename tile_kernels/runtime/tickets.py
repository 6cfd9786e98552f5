"""Counters by which the last block of a launch knows that it is the last.

A counter is zero before a launch and zero again after it, so it can serve the next one. Launches
that may run at the same time need different counters:

- calls on one stream run one after the other and share a counter;
- a launch recorded in a CUDA graph keeps its counter for good, since the graph may run anywhere, at
  any time (but never beside itself).
"""

from __future__ import annotations

import itertools
import threading
from operator import itemgetter

import torch
from torch import Tensor

from tile_kernels.runtime.declaration import Spec
from tile_kernels.runtime.pytorch import current_device, current_raw_stream

_MAX_COUNTERS = 1 << 16


class _Pool:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
        self.tickets_by_stream: dict[int, int] = {}
        self.unused = itertools.count()  # `next` of a C iterator: safe among threads

    def new(self) -> int:
        ticket = next(self.unused)
        if ticket >= _MAX_COUNTERS:
            raise RuntimeError(
                f"{_MAX_COUNTERS} streams and recorded launches have a counter: record fewer "
                "calls of group_count and aux_fi in CUDA graphs"
            )
        return ticket


_pools: dict[int, _Pool] = {}
_lock = threading.Lock()


def take(device: torch.device) -> tuple[Tensor, int]:
    """A counter for one launch on `device`: the tensor that holds it, and its index in there."""
    if device.type == "cpu":  # emulated: over before the call returns
        return torch.zeros(1, dtype=torch.int32, device=device), 0
    index = device.index
    pool = _pools.get(index) or _pool(device)
    if _is_capturing(device):
        return pool.counters, pool.new()
    stream = current_raw_stream(index)
    ticket = pool.tickets_by_stream.get(stream)
    if ticket is None:
        with _lock:
            ticket = pool.tickets_by_stream.setdefault(stream, pool.new())
    return pool.counters, ticket


_tensor, _index = itemgetter(0), itemgetter(1)


def counter(x: Spec) -> tuple[Spec, Spec]:
    """A counter on the device of `x` as two launch arguments, the tensor and the index in it.

    It is taken at every call.
    """
    taken = x.apply(_take_beside)
    return taken.apply(_tensor), taken.apply(_index)


def _take_beside(x: Tensor) -> tuple[Tensor, int]:
    return take(x.device)


def _is_capturing(device: torch.device) -> bool:
    if device.index == current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _pool(device: torch.device) -> _Pool:
    with _lock:
        if device.index not in _pools:
            if _is_capturing(device):
                raise RuntimeError(
                    "call the operator once before recording it in a CUDA graph (the usual "
                    "warm-up): its first call sets up counters that are not part of the graph"
                )
            _pools[device.index] = _Pool(device)
            torch.cuda.synchronize(device)  # once: the zeros are there for every stream
        return _pools[device.index]
