"""`cast_back_e5m6` at its second import path."""

from tile_kernels.quant.back.op import cast_back_e5m6

__all__ = ["cast_back_e5m6"]
