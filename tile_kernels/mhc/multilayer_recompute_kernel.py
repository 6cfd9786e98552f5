"""`mhc_multilayer_recompute` at its second import path."""

from tile_kernels.mhc.fused import mhc_multilayer_recompute

__all__ = ["mhc_multilayer_recompute"]
