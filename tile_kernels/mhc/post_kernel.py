"""`mhc_post_fwd` and `mhc_post_bwd` at their second import path."""

from tile_kernels.mhc.write import mhc_post_bwd, mhc_post_fwd

__all__ = ["mhc_post_bwd", "mhc_post_fwd"]
