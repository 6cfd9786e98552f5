"""The dense products."""

from typing import Any

from tile_kernels.gemm.primitives import PASS_CONFIGS, access_bits, build_product
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=access_bits, pass_configs=PASS_CONFIGS)
def gemm_nt(*static: Any) -> Any:
    return build_product(*static)
