"""`mhc_multilayer_recompute` at its second import path."""

from tile_kernels.mhc.recompute.op import mhc_multilayer_recompute

__all__ = ["mhc_multilayer_recompute"]
