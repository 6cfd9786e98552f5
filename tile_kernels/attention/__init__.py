"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

from tile_kernels.attention.compress import kv_compress, kv_compress_packed
from tile_kernels.attention.decode import KVCompressorState, kv_compress_step
from tile_kernels.attention.gradients import kv_compress_bwd, kv_compress_packed_bwd
from tile_kernels.attention.tail import kv_compress_norm_rope_cast

__all__ = [
    "KVCompressorState",
    "kv_compress",
    "kv_compress_bwd",
    "kv_compress_norm_rope_cast",
    "kv_compress_packed",
    "kv_compress_packed_bwd",
    "kv_compress_step",
]
