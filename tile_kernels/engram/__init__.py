"""Engram: hashed n-gram addresses, and the gate that adds what they look up."""

from tile_kernels.engram.gate import engram_gate, engram_gate_bwd, engram_gate_fwd
from tile_kernels.engram.hashing import engram_hash, ngram_windows
from tile_kernels.engram.weights import fused_weight, grad_w_reduce

__all__ = [
    "engram_gate",
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_hash",
    "fused_weight",
    "grad_w_reduce",
    "ngram_windows",
]
