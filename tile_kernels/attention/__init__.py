"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
