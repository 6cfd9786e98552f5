"""The products of e4m3 rows and e2m1 weights."""

from typing import Any

from tile_kernels.gemm.primitives import access_bits, build_product
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

# All barriers are written out. TileLang would add one before each store of expanded weights.
EXPLICIT_BARRIERS = {"tl.disable_thread_storage_sync": True}


@kernel(access_bits=access_bits, pass_configs={**EXPLICIT_GUARDS, **EXPLICIT_BARRIERS})
def fp8_fp4_gemm_nt(*static: Any) -> Any:
    return build_product(*static)
