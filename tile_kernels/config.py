"""Settings of the process: the SM budget, and whether kernels may be compiled.

The SM budget is for kernels that size their grid by the number of multiprocessors. On a machine
without CUDA the numbers are those of the described default device (an H200), which emulation and
compiling ahead of time assume.
"""

from __future__ import annotations

import dataclasses
import threading

import torch

from tile_kernels.runtime import device as _device
from tile_kernels.runtime.compilation import (
    CompilationForbiddenError,
    compilation_count,
    forbid_compilation,
)

__all__ = [
    "CompilationForbiddenError",
    "compilation_count",
    "forbid_compilation",
    "get_device_num_sms",
    "get_max_smem_per_sm",
    "get_num_sms",
    "set_num_sms",
]

_lock = threading.Lock()
_budget: int | None = None
_device_budgets: dict[int, int] = {}
# Devices with the budget applied, by index; None is the described device.
_planned: dict[int | None, _device.Device] = {}
# Counts the changes of the budget: what was planned before one does not hold after it.
generation = 0


def _index(device: torch.device | str | int | None) -> int | None:
    """The CUDA index meant by `device` (None: the current one), or None without CUDA."""
    if device is not None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {device}")
    if not torch.cuda.is_available():
        return None
    if device is None or device.index is None:
        return torch.cuda.current_device()
    return device.index


def _physical(index: int | None) -> _device.Device:
    return _device.described() if index is None else _device.cuda_device(index)


def get_device_num_sms(device: torch.device | str | int | None = None) -> int:
    """Multiprocessors of `device` (default: the current CUDA device)."""
    return _physical(_index(device)).num_sms


def get_max_smem_per_sm(device: torch.device | str | int | None = None) -> int:
    """Shared memory in bytes of one multiprocessor of `device`."""
    return _physical(_index(device)).smem_per_sm


def set_num_sms(num_sms: int, device: torch.device | str | int | None = None) -> None:
    """Let kernels use at most `num_sms` multiprocessors.

    Without `device` the budget holds for the whole process and replaces what single devices had;
    with it for that device alone. It persists; setting the device's own count lifts it. Results
    never depend on it.
    """
    global _budget, generation  # noqa: PLW0603 - module state by contract: it is process-wide
    if isinstance(num_sms, bool) or not isinstance(num_sms, int):
        raise TypeError(f"set_num_sms: num_sms must be an int, got {type(num_sms).__name__}")
    available = get_device_num_sms(device)
    if not 0 < num_sms <= available:
        raise ValueError(f"set_num_sms: num_sms must be in 1..{available}, got {num_sms}")
    index = _index(device)
    with _lock:
        if device is None or index is None:
            _budget = num_sms
            _device_budgets.clear()
        else:
            _device_budgets[index] = num_sms
        _planned.clear()
        generation += 1


def get_num_sms(device: torch.device | str | int | None = None) -> int:
    """The SM budget of `device`: what was set, else all its multiprocessors."""
    return planned_device(_index(device)).num_sms


def with_budget(device: _device.Device, index: int | None = None) -> _device.Device:
    """`device` with the SM budget of CUDA device `index` (None: the process's) as its SM count."""
    budget = _device_budgets.get(index) if index is not None else None
    budget = min(budget or _budget or device.num_sms, device.num_sms)
    return dataclasses.replace(device, num_sms=budget)


def planned_device(index: int | None) -> _device.Device:
    """The device a kernel's plan sees: CUDA device `index` with the SM budget as its SM count."""
    with _lock:
        device = _planned.get(index)
        if device is None:
            device = _planned[index] = with_budget(_physical(index), index)
        return device
