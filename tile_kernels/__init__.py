"""GPU kernels for mixture-of-experts language models, each next to its PyTorch reference.

CUDA tensors run TileLang kernels, CPU tensors run the references; `tile_kernels.backend` overrides
that. Importing this package needs neither a GPU nor a compiler, and does no work: each family is
loaded when it is first named.
"""

from __future__ import annotations

import importlib
import importlib.metadata
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
        rand,
        testing,
        torch,
        transform,
        transpose,
        utils,
        v2,
    )
    from tile_kernels.config import (
        get_amax_clamp_for_quant,
        get_deterministic_algorithms,
        get_device_num_sms,
        get_max_smem_per_sm,
        get_max_ub_per_vector_core,
        get_num_ai_cores,
        get_num_cube_cores,
        get_num_sms,
        get_num_vec_cores,
        get_pdl,
        get_token_alignment,
        set_amax_clamp_for_quant,
        set_num_sms,
        set_pdl,
        set_token_alignment,
        use_deterministic_algorithms,
    )
    from tile_kernels.emulator import EmulationError, emulate
    from tile_kernels.runtime.backends import backend, checked
    from tile_kernels.runtime.logs import set_log_level
    from tile_kernels.runtime.warmup import warmup


def _refuse_the_other_distribution() -> None:
    """Raises if DeepSeek's `tile-kernels` is installed, whose files have the same names."""
    try:
        other = importlib.metadata.version("tile-kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    if other.startswith("0."):  # a checkout of this package from before it had its name
        return
    raise ImportError(
        f"tile-kernels {other} (DeepSeek's) and moe-tile-kernels {__version__} (this package) are "
        "both installed, and overwrite each other's files in the folder tile_kernels. Uninstall "
        "both (pip uninstall tile-kernels moe-tile-kernels), then install the one you want."
    )


_refuse_the_other_distribution()
compat.install()

FAMILIES = ("attention", "engram", "gemm", "mhc", "moe", "quant", "transform", "transpose")
_SUBMODULES = (
    *FAMILIES, "config", "emulator", "ep", "modeling", "rand", "testing", "torch", "utils", "v2",
)  # fmt: skip
_FUNCTIONS = {
    "EmulationError": "tile_kernels.emulator",
    "backend": "tile_kernels.runtime.backends",
    "checked": "tile_kernels.runtime.backends",
    "emulate": "tile_kernels.emulator",
    "get_amax_clamp_for_quant": "tile_kernels.config",
    "get_deterministic_algorithms": "tile_kernels.config",
    "get_device_num_sms": "tile_kernels.config",
    "get_max_smem_per_sm": "tile_kernels.config",
    "get_max_ub_per_vector_core": "tile_kernels.config",
    "get_num_ai_cores": "tile_kernels.config",
    "get_num_cube_cores": "tile_kernels.config",
    "get_num_sms": "tile_kernels.config",
    "get_num_vec_cores": "tile_kernels.config",
    "get_pdl": "tile_kernels.config",
    "get_token_alignment": "tile_kernels.config",
    "set_amax_clamp_for_quant": "tile_kernels.config",
    "set_log_level": "tile_kernels.runtime.logs",
    "set_num_sms": "tile_kernels.config",
    "set_pdl": "tile_kernels.config",
    "set_token_alignment": "tile_kernels.config",
    "use_deterministic_algorithms": "tile_kernels.config",
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
    "get_amax_clamp_for_quant",
    "get_deterministic_algorithms",
    "get_device_num_sms",
    "get_max_smem_per_sm",
    "get_max_ub_per_vector_core",
    "get_num_ai_cores",
    "get_num_cube_cores",
    "get_num_sms",
    "get_num_vec_cores",
    "get_pdl",
    "get_token_alignment",
    "mhc",
    "modeling",
    "moe",
    "quant",
    "rand",
    "set_amax_clamp_for_quant",
    "set_log_level",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "testing",
    "torch",
    "transform",
    "transpose",
    "use_deterministic_algorithms",
    "utils",
    "v2",
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
