"""Residuals and layer inputs of many layers, from what is kept of them."""

from tile_kernels.mhc import mhc_multilayer_recompute

__all__ = ["mhc_multilayer_recompute"]
