"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

from tile_kernels.attention.indexer import indexer_logits, indexer_select
from tile_kernels.attention.indexer_gradient import indexer_logits_bwd
from tile_kernels.attention.indexer_ranges import indexer_ranges
from tile_kernels.attention.indexer_topk import indexer_topk

__all__ = [
    "indexer_logits",
    "indexer_logits_bwd",
    "indexer_ranges",
    "indexer_select",
    "indexer_topk",
]
