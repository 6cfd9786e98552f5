"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

from tile_kernels.attention.compress import kv_compress, kv_compress_packed
from tile_kernels.attention.decode import KVCompressorState, kv_compress_step
from tile_kernels.attention.gradients import kv_compress_bwd, kv_compress_packed_bwd
from tile_kernels.attention.indexer import indexer_logits, indexer_select
from tile_kernels.attention.indexer_gradient import indexer_logits_bwd
from tile_kernels.attention.indexer_ranges import indexer_ranges
from tile_kernels.attention.indexer_topk import indexer_topk
from tile_kernels.attention.tail import kv_compress_norm_rope_cast

__all__ = [
    "KVCompressorState",
    "indexer_logits",
    "indexer_logits_bwd",
    "indexer_ranges",
    "indexer_select",
    "indexer_topk",
    "kv_compress",
    "kv_compress_bwd",
    "kv_compress_norm_rope_cast",
    "kv_compress_packed",
    "kv_compress_packed_bwd",
    "kv_compress_step",
]
