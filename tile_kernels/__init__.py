"""GPU kernels for mixture-of-experts language models, each beside a PyTorch oracle.

CUDA tensors run TileLang kernels, CPU tensors run the oracles; `tile_kernels.backend` overrides
that. Importing this package needs neither a GPU nor a compiler, and does no work: each family is
loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tile_kernels import compat

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tile_kernels import (
        attention,
        config,
        engram,
        ep,
        gemm,
        mhc,
        modeling,
        moe,
        quant,
        testing,
        torch,
        transpose,
        utils,
    )
    from tile_kernels.config import get_device_num_sms, get_num_sms, set_num_sms
    from tile_kernels.emulator import EmulationError, emulate
    from tile_kernels.runtime.backends import backend, checked
    from tile_kernels.runtime.logs import set_log_level
    from tile_kernels.runtime.warmup import warmup

compat.install()

FAMILIES = ("attention", "engram", "gemm", "mhc", "moe", "quant", "transpose")
_SUBMODULES = (*FAMILIES, "config", "emulator", "ep", "modeling", "testing", "torch", "utils")
_FUNCTIONS = {
    "EmulationError": "tile_kernels.emulator",
    "backend": "tile_kernels.runtime.backends",
    "checked": "tile_kernels.runtime.backends",
    "emulate": "tile_kernels.emulator",
    "get_device_num_sms": "tile_kernels.config",
    "get_num_sms": "tile_kernels.config",
    "set_log_level": "tile_kernels.runtime.logs",
    "set_num_sms": "tile_kernels.config",
    "warmup": "tile_kernels.runtime.warmup",
}

__all__ = [
    "FAMILIES",
    "EmulationError",
    "__version__",
    "attention",
    "backend",
    "checked",
    "config",
    "emulate",
    "engram",
    "ep",
    "gemm",
    "get_device_num_sms",
    "get_num_sms",
    "mhc",
    "modeling",
    "moe",
    "quant",
    "set_log_level",
    "set_num_sms",
    "testing",
    "torch",
    "transpose",
    "utils",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tile_kernels.{name}")
    if name in _FUNCTIONS:
        value = getattr(importlib.import_module(_FUNCTIONS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tile_kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
