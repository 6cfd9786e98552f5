"""Utilities for quantized data."""

from tile_kernels.torch.quant import unpack_from_e2m1fn_x2

__all__ = ["unpack_from_e2m1fn_x2"]
