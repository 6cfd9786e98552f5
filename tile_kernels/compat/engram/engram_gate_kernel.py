"""The gate's two passes at their second import path."""

from tile_kernels.engram.gate.op import engram_gate_bwd, engram_gate_fwd

__all__ = ["engram_gate_bwd", "engram_gate_fwd"]
