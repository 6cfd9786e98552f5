"""The names of TileKernels 1.0 keep their arguments; what was added comes behind them."""

from __future__ import annotations

import importlib

import pytest
import torch

import tile_kernels
from tests.signatures import check_signature, lines_of

# What the packages of TileKernels 1.0.0 export, with parameters and defaults.
SIGNATURES = {
"": """
get_num_sms()
get_device_num_sms()
set_num_sms(num_sms)
""",
    "engram": """
fused_weight(weight_hidden, weight_embed)
engram_gate_fwd(hidden_states, k, v, weight_fused, eps, clamp_value, save_for_backward=True)
engram_gate_bwd(grad_out, hidden_states, k, v, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value)
grad_w_reduce(grad_w_partial, weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed)
engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets)
""",
    "modeling.engram": """
engram_gate(hidden_states, k, v, weight_hidden, weight_embed, clamp_value, eps)
""",
    "modeling.mhc": """
expand_from_embedding(x, mhc_mult=4)
mhc_head(residual, fn, scale, base, *, norm_weight=None, norm_eps=1e-06, mhc_mult=4, pre_eps=1e-06, n_splits=16)
mhc_pre(residual, fn, scale, base, *, norm_weight=None, norm_eps=1e-06, mhc_mult=4, post_mult_value=1.0, pre_eps=1e-06, sinkhorn_eps=1e-06, sinkhorn_repeat=10, n_splits=16)
""",
    "modeling.mhc.ops": """
expand_to_mhc(hidden, mhc_mult, out=None)
mhc_head_compute_mix(input_mix, mhc_scale, mhc_base, mhc_pre_eps)
mhc_pre_norm_fn(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, fuse_grad_acc=True, n_splits=16)
mhc_post(x, residual, post_layer_mix, comb_res_mix, out=None)
mhc_pre_apply_mix(x, mix, out=None)
mhc_pre_big_fuse(residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, n_splits=16)
mhc_pre_split_mixes(input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
sinkhorn_normalize(x, repeat=10, eps=1e-06)
""",
    "moe": """
get_fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync=False)
reduce_fused(x, topk_weights, token_topk_to_pos, fp8_format='', sf=None, out=None)
expand_to_fused(x, token_topk_to_pos, pos_to_expert)
expand_to_fused_with_sf(x, num_per_channels, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf=False)
inplace_unique_group_indices(group_indices, num_groups)
aux_fi(topk_idx, num_experts, num_aux_topk)
group_count(group_idx, num_groups)
mask_indices_by_tp(indices, n, num_ep_ranks, tp_rank, num_tp_ranks)
normalize_weight(topk_weights)
top2_sum_gate(logits, bias, num_topk, num_topk_groups, num_groups, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks, scoring_func, mask=None, fix_routing_mask=None, to_physical_map=None, logical_count=None, unmapped_topk_idx=None)
topk_gate(scores, num_topk)
topk_sum_and_topk_group_idx(scores, num_topk_sum, num_topk_groups)
""",
    "quant": """
swiglu_forward_and_per_channel_cast_and_transpose(x, fmt, num_per_tokens, round_sf=False, without_transpose=False, swiglu_clamp_value=None)
per_channel_cast(x, fmt, num_per_tokens, round_sf=False)
per_channel_cast_fused(x, fmt, num_per_tokens, round_sf=False, num_per_channels=None, pos_to_token=None)
per_channel_cast_and_transpose(x, fmt, num_per_tokens, round_sf=False)
swiglu_forward_and_per_token_cast(x, fmt, num_per_channels, pos_to_token_topk=None, topk_weights=None, pos_to_expert=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, swiglu_clamp_value=None, clamped_count=None, sf_clamp_min=None)
swiglu_backward_and_per_token_cast(x, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels, round_sf=False, swiglu_clamp_value=None)
unpack_from_e2m1fn_x2(x, out_dtype=torch.float32)
per_token_cast(x, fmt, num_per_channels, x_block_size=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
per_token_cast_with_precomputed_sf(x, fmt, num_per_channels, sf, x_block_size=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
per_token_cast_with_sf_only(x, fmt, num_per_channels, x_block_size=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
per_block_cast(x, fmt, block_size, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
per_block_cast_with_precomputed_sf(x, fmt, block_size, sf, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
per_block_cast_with_sf_only(x, fmt, block_size, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
cast_back(x, fmt, x_block_size, x_special_fmt=None)
per_token_cast_back(x, fmt, num_per_channels, x_special_fmt=None)
per_block_cast_lossless(x, fmt, x_block_size, out_block_size, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
""",
    "testing": """
clear_unused_sf(sf, hidden, num_per_channels)
""",
    "torch": """
cast(x, fmt, block_size=(32, 32), sf=None, x_block_size=None, round_sf=False, use_tma_aligned_col_major_sf=False, use_packed_ue8m0=False)
cast_back(x, fmt, block_size=(32, 32))
cast_to_e5m6(x, num_per_channels, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
cast_back_from_e5m6(x, fmt, x_block_size)
expand_to_fused(x, token_topk_to_pos, pos_to_expert)
expand_to_fused_with_sf(x, num_per_channels, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf=False)
expand_to_mhc_ref(hidden, mhc_mult)
mhc_head_compute_mix_ref(input_mix, mhc_scale, mhc_base, mhc_pre_eps)
mhc_post_ref(x, residual, post_layer_mix, comb_res_mix)
mhc_pre_apply_mix_ref(x, mix)
mhc_pre_norm_fn_ref(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps)
mhc_pre_split_mixes_ref(input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
sinkhorn_normalize_ref(x, repeat=10, eps=1e-06)
reduce_fused(x, topk_weights, token_topk_to_pos, fp8_format='', sf=None)
swiglu_forward(x, pos_to_token_topk=None, topk_weights=None, swiglu_clamp_value=None, clamped_count=None)
swiglu_backward(x, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels, swiglu_clamp_value=None)
stable_topk(scores, num_topk)
topk_sum_and_topk_group_idx(scores, num_group_sum_topk, num_topk_groups)
top2_sum_gate(logits, bias, num_topk, num_topk_groups, num_groups, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks, scoring_func, mask=None, fix_routing_mask=None, to_physical_map=None, logical_count=None, unmapped_topk_idx=None)
inplace_unique_group_indices(group_indices, num_groups)
aux_fi(topk_idx, num_experts, num_aux_topk)
group_count(group_idx, num_groups)
mask_indices_by_tp(indices, n, num_ep_ranks, tp_rank, num_tp_ranks)
normalize_weight(topk_weights)
per_channel_cast_fused(x, num_per_tokens, num_per_channels, round_sf, pos_to_token)
""",
    "transpose": """
transpose(x)
batched_transpose(x)
""",
    "config": """
get_device_num_sms()
set_num_sms(num_sms)
get_num_sms()
get_max_smem_per_sm()
""",
    "utils": """
ceil_div(x, y)
align(x, y)
is_power_of_two(x)
""",
    "testing.numeric": """
assert_equal(x, y, check_dtype=True, check_shape=True, check_stride=True)
calc_diff(x, y)
check_bias(x, ref_x)
count_bytes(*tensors)
""",
    "testing.quant": """
clear_unused_sf(sf, hidden, num_per_channels)
""",
}  # fmt: skip
ALL = lines_of(SIGNATURES)


@pytest.mark.parametrize(("module", "line"), ALL, ids=lambda x: x.partition("(")[0])
def test_signature(module: str, line: str) -> None:
    check_signature("tile_kernels", module, line)


def test_other_names() -> None:
    ops = importlib.import_module("tile_kernels.modeling.mhc.ops")
    for name in ("mhc_multilayer_recompute", "mhc_post_bwd", "mhc_post_fwd"):
        assert callable(getattr(ops, name))
    engram = importlib.import_module("tile_kernels.modeling.engram")
    assert issubclass(engram.EngramGateFn, torch.autograd.Function)
    for name in ("bench", "generator", "numeric", "quant"):
        module = importlib.import_module(f"tile_kernels.testing.{name}")
        assert getattr(tile_kernels.testing, name) is module
