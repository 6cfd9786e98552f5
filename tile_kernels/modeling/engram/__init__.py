"""Engram in training: the gate as an autograd function, the tables, and the whole layer."""

from tile_kernels.modeling.engram.convolution import CausalConvolution
from tile_kernels.modeling.engram.gate import EngramGateFn, engram_gate
from tile_kernels.modeling.engram.hashing import (
    EngramHasher,
    compression_map,
    odd_multipliers,
    prime_table_sizes,
)
from tile_kernels.modeling.engram.module import EngramModule
from tile_kernels.modeling.engram.optimizer import SinkhornMomentum
from tile_kernels.modeling.engram.tables import EngramTable

__all__ = [
    "CausalConvolution",
    "EngramGateFn",
    "EngramHasher",
    "EngramModule",
    "EngramTable",
    "SinkhornMomentum",
    "compression_map",
    "engram_gate",
    "odd_multipliers",
    "prime_table_sizes",
]
