"""Helpers of tests of quantized tensors: those of `tile_kernels.testing.quant`."""

from tile_kernels.testing.quant import (
    clear_unused_sf as clear_unused_sf,
    clear_unused_sf_col_pack as clear_unused_sf_col_pack,
    quant_level_rank as quant_level_rank,
)
