"""Layers of attention over long contexts."""

from tile_kernels.attention import KVCompressorState
from tile_kernels.modeling.attention.compressor import KVCompressor
from tile_kernels.modeling.attention.heavy import HeavilyCompressedAttention
from tile_kernels.modeling.attention.indexer import LightningIndexer
from tile_kernels.modeling.attention.rope import Rope
from tile_kernels.modeling.attention.sparse import CompressedSparseAttention
from tile_kernels.modeling.attention.state import AttentionState

__all__ = [
    "AttentionState",
    "CompressedSparseAttention",
    "HeavilyCompressedAttention",
    "KVCompressor",
    "KVCompressorState",
    "LightningIndexer",
    "Rope",
]
