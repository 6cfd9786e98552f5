"""Transposes of matrices and of batches of matrices."""

from tile_kernels.transpose.op import batched_transpose, transpose

__all__ = ["batched_transpose", "transpose"]
