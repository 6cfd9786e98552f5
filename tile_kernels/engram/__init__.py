"""Engram: hashed n-gram addresses, and the gate that adds what they address."""

from tile_kernels.engram.gate.op import engram_gate, engram_gate_bwd, engram_gate_fwd
from tile_kernels.engram.grad_w.op import grad_w_reduce
from tile_kernels.engram.hash.op import engram_hash
from tile_kernels.engram.ngram.op import ngram_windows
from tile_kernels.engram.weight.op import fused_weight

__all__ = [
    "engram_gate",
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_hash",
    "fused_weight",
    "grad_w_reduce",
    "ngram_windows",
]
