"""Which backend serves a call.

| backend | tensors | runs |
|---|---|---|
| `tilelang` | CUDA | the kernel |
| `torch` | any | the PyTorch reference |
| `emulate` | CPU | the kernel's generated CUDA, executed on the CPU |

By default (`auto`) the tensors decide: CUDA tensors take `tilelang`, CPU tensors `torch`. Meta
tensors only compute shapes.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tile_kernels.runtime import checks, emulation

BACKENDS = ("tilelang", "torch", "emulate")
CHOICES = ("auto", *BACKENDS)
_BY_DEVICE = {"cuda": "tilelang", "cpu": "torch", "meta": "meta"}
_NEEDS = {"tilelang": "cuda", "emulate": "cpu"}


def _from_environment() -> str:
    choice = os.environ.get("TILE_KERNELS_BACKEND", "auto")
    checks.one_of("TILE_KERNELS_BACKEND", choice, CHOICES)
    return choice


# Read once at import; per context after that, so that threads and async tasks do not disturb
# each other.
_default = _from_environment()
_chosen: contextvars.ContextVar[str] = contextvars.ContextVar("tile_kernels_backend")
_checked_by_default = os.environ.get("TILE_KERNELS_CHECKED", "0") not in ("", "0")
_checked: contextvars.ContextVar[bool] = contextvars.ContextVar("tile_kernels_checked")


class _Overrides:
    """How many overrides are active anywhere in the process; a call need not look further at 0."""

    count: int = int(_default != "auto") + int(_checked_by_default)
    lock = threading.Lock()

    def add(self, change: int) -> None:
        with self.lock:
            self.count += change


overrides = _Overrides()


@contextlib.contextmanager
def backend(name: str, **options: Any) -> Iterator[None]:
    """Runs all operators inside the `with` block on the named backend.

    Args:
        name: `"auto"` (kernels for CUDA tensors, references for CPU tensors), `"tilelang"`,
            `"torch"` (the references) or `"emulate"` (kernels on CPU tensors).
        options: For `"emulate"`: `arch`, `mode`, `order`, `seed`, `split_shared`, `contract` and
            `keep`, as in `tile_kernels.runtime.emulation.Options`.

    Raises:
        ValueError: If the name or an option is unknown.

    Example:
        >>> import tile_kernels
        >>> with tile_kernels.backend("torch"):
        ...     tile_kernels.transpose.transpose(torch.tensor([[1, 2], [3, 4]])).tolist()
        [[1, 3], [2, 4]]
    """
    checks.one_of("backend: name", name, CHOICES)
    if options and name != "emulate":
        raise TypeError(f"backend: {name!r} takes no options, got {', '.join(options)}")
    token = _chosen.set(name)
    overrides.add(1)
    try:
        with emulation.emulating(**options):
            yield
    finally:
        overrides.add(-1)
        _chosen.reset(token)


@contextlib.contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Inspects the values of index tensors before every call, and raises if they are out of range.

    Without it, an index out of range has the result that the operator documents (it is ignored),
    because the inspection makes the host wait for the GPU. `TILE_KERNELS_CHECKED=1` enables it for
    a whole process. Calls that are captured in a CUDA graph cannot be checked.

    Args:
        enabled: Whether calls inside the `with` block are checked.

    Example:
        >>> import tile_kernels
        >>> with tile_kernels.checked():
        ...     tile_kernels.moe.group_count(torch.tensor([[0, 7]]), 4)
        Traceback (most recent call last):
        ValueError: group_count: group_idx must hold -1..3, but element [0, 1] is 7
    """
    token = _checked.set(enabled)
    overrides.add(1)
    try:
        yield
    finally:
        overrides.add(-1)
        _checked.reset(token)


def is_checked() -> bool:
    """Whether calls of this context look at values."""
    return _checked.get(_checked_by_default)


def choose(device: torch.device) -> str:
    """The backend for tensors on `device`, by the caller's choice or by the device."""
    choice = _chosen.get(_default)
    kind = device.type
    if choice == "auto" or kind == "meta":
        served = _BY_DEVICE.get(kind)
        if served is None:
            raise ValueError(f"tensors must be on a CUDA device or the CPU, got {device}")
        return served
    if _NEEDS.get(choice, kind) != kind:
        raise ValueError(f"the backend {choice!r} needs {_NEEDS[choice]} tensors, got {device}")
    return choice


def present() -> list[str]:
    """The backends that this machine can run."""
    return [*(["tilelang"] if torch.cuda.is_available() else []), "torch", "emulate"]
