"""Engram: hashed n-gram addresses, and the gate that adds what they address."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
