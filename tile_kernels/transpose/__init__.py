"""Transposes of matrices and of batches of matrices."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
