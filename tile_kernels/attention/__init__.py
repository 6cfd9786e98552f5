"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

from tile_kernels.attention.compress import kv_compress

__all__ = ["kv_compress"]
