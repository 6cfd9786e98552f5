"""Transforms of queries and keys: rotary position embedding."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
