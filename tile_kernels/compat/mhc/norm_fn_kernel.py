"""`round_to_tf32` at its import path."""

from tile_kernels.mhc.norm_fn.reference import round_to_tf32

__all__ = ["round_to_tf32"]
