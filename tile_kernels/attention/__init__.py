"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

from tile_kernels.attention.compress.op import (
    kv_compress,
    kv_compress_bwd,
    kv_compress_packed,
    kv_compress_packed_bwd,
)
from tile_kernels.attention.logits.op import indexer_logits, indexer_logits_bwd
from tile_kernels.attention.norm_rope.op import kv_compress_norm_rope_cast
from tile_kernels.attention.ranges import indexer_ranges
from tile_kernels.attention.select.op import indexer_select
from tile_kernels.attention.step.op import kv_compress_step
from tile_kernels.attention.step.state import KVCompressorState
from tile_kernels.attention.topk.op import indexer_topk

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
