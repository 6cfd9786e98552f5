"""Gates: those of `tile_kernels.moe`."""

from tile_kernels.moe.moe_topk.op import (
    moe_topk_gate as moe_topk_gate,
    moe_topk_gate_backward as moe_topk_gate_backward,
    moe_topk_gate_forward as moe_topk_gate_forward,
)
from tile_kernels.moe.topk.op import topk_gate as topk_gate
from tile_kernels.moe.weight.op import normalize_weight as normalize_weight
