"""References of Engram at their import path in TileKernels."""

from tile_kernels.engram.convolution.reference import (
    engram_convolution_bwd,
    engram_convolution_fwd,
)
from tile_kernels.engram.gate.reference import engram_gate_bwd, engram_gate_fwd, engram_gate_ref
from tile_kernels.engram.grad_w.reference import grad_w_reduce
from tile_kernels.engram.hash.reference import engram_hash, engram_hash_ref, make_offsets
from tile_kernels.engram.ngram.reference import ngram_windows
from tile_kernels.engram.weight.reference import fused_weight

__all__ = [
    "engram_convolution_bwd",
    "engram_convolution_fwd",
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_gate_ref",
    "engram_hash",
    "engram_hash_ref",
    "fused_weight",
    "grad_w_reduce",
    "make_offsets",
    "ngram_windows",
]
