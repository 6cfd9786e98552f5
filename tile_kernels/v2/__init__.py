"""The signatures of TileKernels 2.1 for code that was written for it.

    import tile_kernels.v2 as tile_kernels

TileKernels 2.x gave several names other arguments or another meaning than 1.0; this package keeps
those of 1.0. Here they have those of 2.1, in the same submodules. All functions run the operators
of this package. Where a function has more arguments than there, those are by keyword, or come last
and have defaults.
"""

from __future__ import annotations

import importlib
from typing import Any

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

SUBMODULES = (
    "config", "engram", "mhc", "modeling", "moe", "quant", "rand", "testing", "torch", "transform",
    "utils",
)  # fmt: skip

__all__ = [
    "SUBMODULES",
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
    "set_amax_clamp_for_quant",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "use_deterministic_algorithms",
]


def __getattr__(name: str) -> Any:
    if name in SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
