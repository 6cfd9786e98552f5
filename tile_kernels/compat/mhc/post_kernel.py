"""`mhc_post_fwd` and `mhc_post_bwd` at their second import path, as TileKernels has them.

Here `mhc_post_bwd` leaves the gradient at the residual's storage too; see `modeling.mhc.ops`.
"""

from tile_kernels.compat.modeling.mhc.ops.post import mhc_post_bwd, mhc_post_fwd

__all__ = ["mhc_post_bwd", "mhc_post_fwd"]
