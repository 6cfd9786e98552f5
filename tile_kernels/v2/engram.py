"""Engram: the gate takes the keys of all streams and the value in one tensor `kv`."""

from tile_kernels.engram.gate.op import engram_gate_packed_bwd, engram_gate_packed_fwd
from tile_kernels.engram.grad_w.op import grad_w_reduce as grad_w_reduce
from tile_kernels.engram.hash.op import engram_hash as engram_hash
from tile_kernels.engram.sinkhorn.op import (
    engram_sinkhorn_finalize as engram_sinkhorn_finalize,
    engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update,
    engram_sinkhorn_step as engram_sinkhorn_step,
    engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce,
)
from tile_kernels.engram.weight.op import fused_weight as fused_weight
from tile_kernels.runtime import checks

__all__ = [
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_hash",
    "engram_sinkhorn_finalize",
    "engram_sinkhorn_momentum_update",
    "engram_sinkhorn_step",
    "engram_sinkhorn_step_reduce",
    "fused_weight",
    "grad_w_reduce",
]

engram_gate_fwd = checks.named_errors(engram_gate_packed_fwd, "engram_gate_fwd", __name__)
engram_gate_bwd = checks.named_errors(engram_gate_packed_bwd, "engram_gate_bwd", __name__)
