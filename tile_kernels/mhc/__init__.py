"""Manifold-constrained hyper-connections (mHC): a residual of several streams, mixed per token."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
