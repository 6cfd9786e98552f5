"""Run TileLang kernels on a CPU: the generated CUDA itself, every access checked.

    >>> from tile_kernels.emulator import emulate      # doctest: +SKIP
    >>> emulate(factory, (static, args), {"x": x, "y": y})     # doctest: +SKIP

See docs/debugging-kernels.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import EmulationError

if TYPE_CHECKING:
    from .call import emulate
    from .launch import Emulated, Options
    from .report import KernelRun, Report, Traffic

__all__ = ["Emulated", "EmulationError", "KernelRun", "Options", "Report", "Traffic", "emulate"]
# Loaded at first use: they import PyTorch, which the parent process of a script does not need.
_LATER = {"Emulated": "launch", "Options": "launch", "emulate": "call"}
_LATER |= dict.fromkeys(("KernelRun", "Report", "Traffic"), "report")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value
