from tile_kernels.moe.count.op import group_count as group_count
from tile_kernels.moe.expand.op import (
    expand_to_fused as expand_to_fused,
    expand_to_fused_with_sf as expand_to_fused_with_sf,
)
from tile_kernels.moe.fi.op import aux_fi as aux_fi
from tile_kernels.moe.hash.op import hash_gate as hash_gate
from tile_kernels.moe.indices.op import (
    inplace_unique_group_indices as inplace_unique_group_indices,
    mask_indices_by_tp as mask_indices_by_tp,
)
from tile_kernels.moe.mapping.op import get_fused_mapping as get_fused_mapping
from tile_kernels.moe.moe_topk.op import (
    moe_topk_gate as moe_topk_gate,
    moe_topk_gate_backward as moe_topk_gate_backward,
    moe_topk_gate_forward as moe_topk_gate_forward,
)
from tile_kernels.moe.reduce.op import reduce_fused as reduce_fused
from tile_kernels.moe.top2_sum.op import top2_sum_gate as top2_sum_gate
from tile_kernels.moe.topk.op import (
    topk_gate as topk_gate,
    topk_sum_and_topk_group_idx as topk_sum_and_topk_group_idx,
)
from tile_kernels.moe.weight.op import (
    normalize_weight as normalize_weight,
    topk_weights as topk_weights,
    topk_weights_backward as topk_weights_backward,
)
