"""References of the expert gates at their import path in TileKernels."""

from tile_kernels.moe.top2_sum.reference import best_experts, top2_sum_gate
from tile_kernels.moe.topk.reference import stable_topk, topk_sum_and_topk_group_idx
from tile_kernels.moe.weight.reference import gate_scores, topk_weights, topk_weights_backward

__all__ = [
    "best_experts",
    "gate_scores",
    "stable_topk",
    "top2_sum_gate",
    "topk_sum_and_topk_group_idx",
    "topk_weights",
    "topk_weights_backward",
]
