"""Everything before a sublayer at once, for inference."""

from tile_kernels.mhc import mhc_pre_big_fuse

__all__ = ["mhc_pre_big_fuse"]
