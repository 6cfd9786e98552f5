"""Helpers of tests with the names of TileKernels 2.1: comparison, and quantized tensors."""

from tile_kernels.v2.testing import numeric as numeric, quant as quant
from tile_kernels.v2.testing.quant import (
    clear_unused_sf as clear_unused_sf,
    clear_unused_sf_col_pack as clear_unused_sf_col_pack,
)
