"""The products of groups of rows."""

from typing import Any

from tile_kernels.gemm.primitives import access_bits, build_product
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def m_grouped_gemm_nt(*static: Any) -> Any:
    return build_product(*static)
