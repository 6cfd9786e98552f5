"""Settings of the process: the SM budget, casts, bundles of kernels, whether they may be compiled.

The SM budget is for kernels that size their grid by the number of multiprocessors. On a machine
without CUDA the numbers are those of the described default device (an H200), which emulation and
compiling ahead of time assume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

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
    "get_amax_clamp_for_quant",
    "get_deterministic_algorithms",
    "get_device",
    "get_device_num_sms",
    "get_max_smem_per_sm",
    "get_max_ub_per_vector_core",
    "get_num_ai_cores",
    "get_num_cube_cores",
    "get_num_sms",
    "get_num_vec_cores",
    "get_pdl",
    "get_token_alignment",
    "is_ascend",
    "quant_amax_min",
    "reset_runtime_config",
    "set_amax_clamp_for_quant",
    "set_bundles",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "use_deterministic_algorithms",
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
    """Returns the number of multiprocessors of a device.

    Args:
        device: A CUDA device; by default the current one.
    """
    return _physical(_index(device)).num_sms


def get_max_smem_per_sm(device: torch.device | str | int | None = None) -> int:
    """Returns the shared memory of a multiprocessor in bytes.

    Args:
        device: A CUDA device; by default the current one.
    """
    return _physical(_index(device)).smem_per_sm


def set_num_sms(num_sms: int, device: torch.device | str | int | None = None) -> None:
    """Limits kernels to `num_sms` multiprocessors; results do not depend on the limit.

    The setting persists. To remove it, set the number of multiprocessors of the device.

    Args:
        num_sms: The largest number of multiprocessors that a kernel may occupy.
        device: The device to which the limit applies. By default it applies to all devices of the
            process and replaces the limits of single devices.
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
    """Returns the SM budget of a device: the number that was set, or all its multiprocessors.

    Args:
        device: A CUDA device; by default the current one.
    """
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


# ---- casts --------------------------------------------------------------------------------------

# The least amax of a group by format and kind of scale: e4m3 scales (True) or others (False).
_DEFAULT_AMAX_MIN = {
    ("e4m3", False): 1e-4,
    ("e2m1", False): 6.0 * 2.0**-126,
    ("e5m6", False): 1e-4,
    ("e4m3", True): 448.0 * 2.0**-9,
    ("e2m1", True): 6.0 * 2.0**-9,
}
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
_amax_min = dict(_DEFAULT_AMAX_MIN)


def amax_min(fmt: str, use_e4m3_sf: bool) -> float:
    """The setting for a cast to `fmt` that is given no `amax_min`; formats without one: 1e-4."""
    return _amax_min.get((fmt, use_e4m3_sf), 1e-4)


def _checked_amax_min(
    owner: str, fmt: object, use_e4m3_sf: object, value: object, name: str = "value"
) -> float:
    if fmt not in _LARGEST:
        raise ValueError(f"{owner}: fmt must be e4m3 or e2m1, got {fmt!r}")
    if not isinstance(use_e4m3_sf, bool):
        kind = type(use_e4m3_sf).__name__
        raise TypeError(f"{owner}: use_e4m3_sf must be a bool, got {kind}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name} must be a number, got {type(value).__name__}")
    smallest = _LARGEST[str(fmt)] * 2.0**-126
    if not smallest <= value < math.inf:
        raise ValueError(
            f"{owner}: {name} must be finite and at least {smallest}, so that scales are normal "
            f"numbers, got {value}"
        )
    return float(value)


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
    """Sets the least amax of casts to `fmt`, for the process; `quant_amax_min` sets it for a block.

    Args:
        fmt: `"e4m3"` or `"e2m1"`.
        use_e4m3_sf: Of casts with scales in e4m3, or of the others.
        clamp_min_value: Finite, and so large that the scale of a group of zeros is a normal
            float32. Scales in e4m3 are at least `2**-9` in any case.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If the format is another one, or the value is out of range.
    """
    global _amax_min  # noqa: PLW0603 - module state by contract: it is process-wide
    owner, name = "set_amax_clamp_for_quant", "clamp_min_value"
    value = _checked_amax_min(owner, fmt, use_e4m3_sf, clamp_min_value, name)
    with _lock:
        _amax_min = {**_amax_min, (fmt, use_e4m3_sf): value}


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """Returns the least amax of casts to `fmt`.

    Args:
        fmt: A format with a setting, such as `"e4m3"` or `"e2m1"`.
        use_e4m3_sf: Whether the scales are e4m3 (NVFP4).

    Example:
        >>> get_amax_clamp_for_quant("e4m3", False), get_amax_clamp_for_quant("e2m1", True)
        (0.0001, 0.01171875)
    """
    _checked_amax_min("get_amax_clamp_for_quant", fmt, use_e4m3_sf, 1.0)
    return _amax_min[fmt, use_e4m3_sf]


@contextlib.contextmanager
def quant_amax_min(
    value: float, fmt: str | None = None, use_e4m3_sf: bool | None = None
) -> Iterator[None]:
    """Sets the least amax of casts inside of a `with` block, and restores it afterwards.

    The setting is that of the process: other threads see it too. A graph that `torch.compile` has
    traced is traced again if it has changed. Pass `amax_min=` to a cast to concern that one alone.

    Args:
        value: As in `set_amax_clamp_for_quant`.
        fmt: `"e4m3"` or `"e2m1"`; by default both.
        use_e4m3_sf: Of casts with scales in e4m3, or of the others; by default both.

    Example:
        >>> with quant_amax_min(1e-10, "e4m3"):
        ...     get_amax_clamp_for_quant("e4m3", False)
        1e-10
    """
    global _amax_min  # noqa: PLW0603 - as above
    formats = tuple(_LARGEST) if fmt is None else (fmt,)
    kinds = (False, True) if use_e4m3_sf is None else (use_e4m3_sf,)
    keys = [(each, kind) for each in formats for kind in kinds]
    for key in keys:
        _checked_amax_min("quant_amax_min", *key, value)
    with _lock:
        before = {key: _amax_min[key] for key in keys}
        _amax_min = {**_amax_min, **dict.fromkeys(keys, float(value))}
    try:
        yield
    finally:
        with _lock:
            _amax_min = {**_amax_min, **before}


# ---- other settings of TileKernels --------------------------------------------------------------

_DEFAULT_TOKEN_ALIGNMENT = 128
_token_alignment = _DEFAULT_TOKEN_ALIGNMENT
_pdl = False
_deterministic = False


def set_token_alignment(token_alignment: int) -> None:
    """Sets the alignment of the ranges of experts in buffers sorted by expert; by default 128.

    Args:
        token_alignment: Ranges start at multiples of this number of rows.
    """
    global _token_alignment  # noqa: PLW0603 - module state by contract: it is process-wide
    if isinstance(token_alignment, bool) or not isinstance(token_alignment, int):
        kind = type(token_alignment).__name__
        raise TypeError(f"set_token_alignment: token_alignment must be an int, got {kind}")
    if token_alignment < 1:
        raise ValueError(
            f"set_token_alignment: token_alignment must be at least 1, got {token_alignment}"
        )
    _token_alignment = token_alignment


def get_token_alignment() -> int:
    """The alignment of the ranges of experts."""
    return _token_alignment


def _checked_bool(owner: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be a bool, got {type(value).__name__}")
    return value


def set_pdl(use_pdl: bool) -> None:
    """Stores whether programmatic dependent launch is wanted; no kernel of this package uses it.

    Args:
        use_pdl: The setting.
    """
    global _pdl  # noqa: PLW0603 - module state by contract: it is process-wide
    _pdl = _checked_bool("set_pdl", "use_pdl", use_pdl)


def get_pdl() -> bool:
    """What `set_pdl` has stored."""
    return _pdl


def use_deterministic_algorithms(enabled: bool) -> None:
    """Stores the setting; every operator of this package is deterministic in any case.

    Args:
        enabled: The setting.
    """
    global _deterministic  # noqa: PLW0603 - module state by contract: it is process-wide
    _deterministic = _checked_bool("use_deterministic_algorithms", "enabled", enabled)


def get_deterministic_algorithms() -> bool:
    """What `use_deterministic_algorithms` has stored."""
    return _deterministic


def reset_runtime_config() -> None:
    """All settings, the SM budget included, back to their defaults."""
    global _amax_min, _budget, generation  # noqa: PLW0603 - as above
    with _lock:
        _amax_min = dict(_DEFAULT_AMAX_MIN)
        _budget = None
        _device_budgets.clear()
        _planned.clear()
        generation += 1
    set_token_alignment(_DEFAULT_TOKEN_ALIGNMENT)
    set_pdl(False)
    use_deterministic_algorithms(False)


# ---- names that TileKernels has for other hardware ----------------------------------------------


def is_ascend() -> bool:
    """Whether this is a Huawei Ascend: never, this package has CUDA kernels."""
    return False


def get_device() -> str:
    """The type of device that kernels run on: `"cuda"`."""
    return "cuda"


def get_num_vec_cores() -> int:
    """Twice the SM budget, as TileKernels counts vector cores."""
    return 2 * get_num_sms()


def get_num_cube_cores() -> int:
    """The SM budget."""
    return get_num_sms()


get_num_ai_cores = get_num_cube_cores


def get_max_ub_per_vector_core(use_simt: bool = True) -> int:  # noqa: ARG001
    """Returns the shared memory of a multiprocessor in bytes.

    Args:
        use_simt: Has no effect on CUDA.
    """
    return get_max_smem_per_sm()


def set_bundles(paths: Iterable[str | Path] | None) -> None:
    """Reads compiled kernels from these bundles before anything is compiled.

    Kernels that the process has already stay in use. See docs/precompiled.md.

    Args:
        paths: Files that `tile-kernels pack` wrote, or folders with such files; an empty list for
            none; None for what the environment variable `TILE_KERNELS_BUNDLES` names, or else for
            an installed wheel of kernels.

    Raises:
        TypeError: If `paths` is a single path.
        BundleError: If one does not exist, or belongs to another version of this package.
    """
    from tile_kernels.runtime import bundles

    bundles.set_bundles(paths)
