"""Counters by which the last block of a launch knows that it is the last.

A counter is zero before a launch and zero again after it, so it can serve the next one. Launches
that may run at the same time need different counters:

- calls on one stream run one after the other and share a counter;
- a launch recorded in a CUDA graph keeps its counter for good, since the graph may run anywhere, at
  any time (but never beside itself).
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from tile_kernels.runtime.launch import is_recording
from tile_kernels.runtime.road import repeated

_MOST = 1 << 20
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)  # noqa: ARG005


class _Pool:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(_MOST, dtype=torch.int32, device=device)
        self.of_stream: dict[tuple[int, int], int] = {}
        self.used = 0

    def new(self, count: int) -> int:
        """The first of `count` counters that nobody has; the caller holds the lock."""
        ticket = self.used
        if ticket + count > _MOST:
            raise RuntimeError(
                f"streams and recorded launches have {ticket} of {_MOST} counters already: record "
                "fewer calls of operators that sum over blocks (group_count, aux_fi) in CUDA graphs"
            )
        self.used += count
        return ticket


_pools: dict[int, _Pool] = {}
_lock = threading.Lock()


def take(device: torch.device, count: int = 1) -> tuple[Tensor, int]:
    """Counters for one launch on `device`: the tensor that holds them, and the first one's place.

    A stream keeps those of each power of two that it has asked for.
    """
    return repeated(_take, device, count)


def _take(device: torch.device, count: int) -> tuple[Tensor, int]:
    if is_recording() or device.type == "cpu":  # emulated: over before the call returns
        return torch.zeros(count, dtype=torch.int32, device=device), 0
    index = device.index
    pool = _pools.get(index) or _pool(device)
    if _is_capturing(device):
        with _lock:
            return pool.counters, pool.new(count)
    key = _current_stream(index), count if count == 1 else 1 << (count - 1).bit_length()
    ticket = pool.of_stream.get(key)
    if ticket is None:
        with _lock:
            if key not in pool.of_stream:
                pool.of_stream[key] = pool.new(key[1])
            ticket = pool.of_stream[key]
    return pool.counters, ticket


def _is_capturing(device: torch.device) -> bool:
    if device.index == torch.cuda.current_device():
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
