"""`tile_kernels.v2`: the signatures of TileKernels 2.1, and that adapters pass on what they get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tile_kernels
from tests.signatures import check_signature, lines_of
from tile_kernels import mhc, quant, v2
from tile_kernels.mhc.partials.cases import CASES as PARTIALS
from tile_kernels.quant.swiglu.cases import CASES as SWIGLU

# What the packages of TileKernels 2.1.0 export, with parameters and defaults.
SIGNATURES = {
    "": """
get_amax_clamp_for_quant(fmt, use_e4m3_sf)
get_deterministic_algorithms()
get_device_num_sms()
get_max_smem_per_sm()
get_max_ub_per_vector_core(use_simt=True)
get_num_ai_cores()
get_num_cube_cores()
get_num_sms()
get_num_vec_cores()
get_pdl()
get_token_alignment()
set_amax_clamp_for_quant(fmt, use_e4m3_sf, clamp_min_value)
set_num_sms(num_sms)
set_pdl(use_pdl)
set_token_alignment(token_alignment)
use_deterministic_algorithms(enabled)
""",
    "config": """
get_amax_clamp_for_quant(fmt, use_e4m3_sf)
get_deterministic_algorithms()
get_device()
get_device_num_sms()
get_max_smem_per_sm()
get_max_ub_per_vector_core(use_simt=True)
get_num_ai_cores()
get_num_cube_cores()
get_num_sms()
get_num_vec_cores()
get_pdl()
get_token_alignment()
is_ascend()
reset_runtime_config()
set_amax_clamp_for_quant(fmt, use_e4m3_sf, clamp_min_value)
set_num_sms(num_sms)
set_pdl(use_pdl)
set_token_alignment(token_alignment)
use_deterministic_algorithms(enabled)
""",
    "utils": """
align(x, y)
ceil_div(x, y)
dtype_to_str(dtype)
is_power_of_two(x)
next_power_of_two(x)
str_to_dtype(fmt)
""",
    "moe": """
moe_topk_gate_forward(logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, scoring_func='sqrtsoftplus', mask=None, bias=None, image_bias=None, image_token_mask=None, fix_routing_mask=None, to_physical_map=None, logical_count=None, unmapped_topk_idx=None, force_random=None, out=None, scores=None)
moe_topk_gate(logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, scoring_func='sqrtsoftplus', mask=None, bias=None, image_bias=None, image_token_mask=None, fix_routing_mask=None, to_physical_map=None, logical_count=None, unmapped_topk_idx=None, force_random=None, out=None, scores=None)
moe_topk_gate_backward(scores, topk_idx, topk_weights, grad_topk_weights, routed_scaling_factor, scoring_func='sqrtsoftplus', mask=None, grad_scores_sum=None, out=None)
topk_gate(scores, num_topk)
normalize_weight(topk_weights)
""",
    "quant": """
per_token_cast(x, fmt, num_per_channels, x_block_size=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, use_e4m3_sf=False, stochastic_cast=False, out=None)
per_token_cast_with_sf_only(x, fmt, num_per_channels, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, use_e4m3_sf=False, out_sf=None)
per_token_cast_with_precomputed_sf(x, fmt, num_per_channels, sf, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, use_e4m3_sf=False, out=None)
per_token_cast_and_cast_back(x, fmt, num_per_channels, round_sf=False, use_e4m3_sf=False)
cast(x, dtype, stochastic_rounding=False)
per_block_cast(x, fmt, block_size, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, out=None)
per_block_cast_with_sf_only(x, fmt, block_size, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, out_sf=None)
per_block_cast_with_precomputed_sf(x, fmt, block_size, sf, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, out=None)
per_block_cast_lossless(x, fmt, x_block_size, out_block_size, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False)
cast_back(x, fmt, x_block_size, x_special_fmt=None)
per_token_cast_back(x, fmt, num_per_channels, x_special_fmt=None)
unpack_from_e2m1fn_x2(x, out_dtype=torch.float32)
per_channel_cast(x, fmt, num_per_tokens, round_sf=False, num_per_channels=None, use_packed_ue8m0=False)
batched_transpose_weight_sf(sf, block_size, transpose_sf1s, outs)
norm_forward(x, weight, eps, residual=None, out_scale=1.0, out=None, residual_out=None, with_rstd=False)
norm_forward_and_per_token_cast(x, weight, eps, fmt, num_per_channels, residual=None, out_scale=1.0, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, with_out_bf16=False, out=None, out_bf16=None, residual_out=None, mega_moe_sf=None, mega_moe_block_m=0, with_rstd=False)
norm_backward(out_grad, x, weight, rstd, residual_out_grad=None, out_scale=1.0, weight_grad=None)
swiglu_forward(x, fmt, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None, clamp_value=None, clamped_count=None)
swiglu_forward_and_per_token_cast(x, fmt, num_per_channels, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, clamp_value=None, clamped_count=None)
swiglu_backward(x, act_x_grad, fmt, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None, clamp_value=None, do_recompute=False)
swiglu_backward_and_per_token_cast(x, act_x_grad, fmt, num_per_channels, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False, clamp_value=None, do_recompute=False)
""",
    "transform": """
apply_rotary(query, cos_sin_cache, key=None, positions=None, interleaved=False, conjugate=False, seqlen_offset=0)
""",
    "engram": """
engram_gate_fwd(hidden_states, kv, weight_fused, eps, clamp_value, save_for_backward=True, image_token_mask=None, inplace=False)
engram_gate_bwd(grad_out, hidden_states, kv, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value, image_token_mask=None)
engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask=None)
fused_weight(weight_hidden, weight_embed)
grad_w_reduce(grad_w_partial, weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed)
engram_sinkhorn_momentum_update(grad, momentum_buffer, beta1, nesterov=True)
engram_sinkhorn_step(matrix, row_scale, col_scale, eps)
engram_sinkhorn_step_reduce(col_sumsq_partial, col_sumsq)
engram_sinkhorn_finalize(matrix, row_scale, col_scale, eps, alpha, out=None)
""",
    "modeling.engram": """
engram_gate(hidden, kv, weight_hidden, weight_embed, clamp_value, eps, image_token_mask)
""",
    "mhc": """
mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix, out=None)
mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, d_o)
mhc_multilayer_recompute(initial_residual, pre_mix_list, layer_output_list, post_mix_list, comb_mix_list, layer_input_list, residual_list)
expand_to_mhc_fwd(x, o)
expand_to_mhc_bwd(o_grad, x_grad)
mhc_pre_apply_mix_fwd(x, mix, o)
mhc_pre_apply_mix_bwd(o_grad, x, mix, x_grad)
mhc_head_compute_mix_fwd(input_mix, mhc_scale, mhc_base, output_mix, mhc_pre_eps, token_block_size=0)
mhc_head_compute_mix_bwd(output_mix_grad, input_mix, mhc_scale, mhc_base, input_mix_grad, mhc_scale_grad_partial, mhc_base_grad_partial, num_sms, token_block_size=0)
mhc_pre_split_mixes_fwd(input_mixes, mhc_scale, mhc_base, pre_layer_mix, post_layer_mix, comb_res_mix, mhc_post_mult_value, mhc_pre_eps)
mhc_pre_split_mixes_bwd(pre_layer_mix_grad, post_layer_mix_grad, comb_res_mix_grad, input_mixes, post_layer_mix, mhc_scale, mhc_base, input_mixes_grad, mhc_scale_grad, mhc_base_grad, mhc_post_mult_value)
mhc_sinkhorn_fwd(comb_res_mix, comb_res_mix_out, repeat, eps)
mhc_sinkhorn_bwd(grad_output, x, grad_input, repeat, eps)
mhc_fn_normw_merge_fwd(fn, normw, out_fn)
mhc_fn_normw_merge_bwd(fn, normw, out_fn_grad, fn_grad, normw_grad)
mhc_reduce_partials_and_rmsnorm_fwd(out_mul_splitted, sqrsum_splitted, out_mul, sqrsum, out, rms_group_size, rms_eps, n_splits)
mhc_reduce_partials_and_rmsnorm_bwd(out_grad, out_mul, sqrsum, out_mul_grad, sqrsum_grad, rms_group_size, rms_eps)
mhc_pre_big_fuse_fwd(gemm_out_mul, gemm_out_sqrsum, mhc_scale, mhc_base, residual, post_mix, comb_mix, layer_input, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, n_splits=16)
""",
    "rand": """
randn(*size, dtype=None, device=None)
randn_like(input)
set_seed(seed)
""",
    "testing": """
clear_unused_sf(sf, hidden, num_per_channels)
clear_unused_sf_col_pack(sf, num_tokens, num_per_tokens)
""",
    "testing.numeric": """
assert_equal(x, y, check_dtype=True, check_shape=True, check_stride=True)
calc_diff(x, y)
check_bias(x, ref_x)
count_bytes(*tensors)
""",
    "testing.quant": """
clear_unused_sf(sf, hidden, num_per_channels)
clear_unused_sf_col_pack(sf, num_tokens, num_per_tokens)
quant_level_rank(xc, fmt)
""",
    "torch": """
batched_transpose_weight_sf(sf, block_size, transpose_sf1s)
cast(x, fmt, block_size=(32, 32), sf=None, x_block_size=None, round_sf=False, use_tma_aligned_col_major_sf=False, use_packed_ue8m0=False, use_e4m3_sf=False)
cast_back(x, fmt, block_size=(32, 32))
make_offsets(vocab_sizes)
engram_hash_ref(ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask=None)
engram_gate_ref(hidden_states, kv, weight_hidden, weight_embed, clamp_value, eps, save_for_backward=False, image_token_mask=None)
engram_sinkhorn_momentum_update_ref(grad, momentum_buffer, beta1, nesterov=True)
engram_sinkhorn_step_ref(matrix, row_scale, col_scale, col_sumsq, eps)
engram_sinkhorn_finalize_ref(matrix, row_scale, col_scale, eps, alpha, out=None)
expand_to_mhc_ref(hidden, mhc_mult)
mhc_head_compute_mix_ref(input_mix, mhc_scale, mhc_base, mhc_pre_eps)
mhc_post_ref(x, residual, post_layer_mix, comb_res_mix)
mhc_pre_apply_mix_ref(x, mix)
mhc_pre_norm_fn_partials_ref(residual, fn, n_splits)
mhc_pre_norm_fn_ref(residual, mhc_fn, mhc_norm_weight, mhc_norm_eps)
mhc_pre_split_mixes_ref(input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
sinkhorn_normalize_ref(x, repeat=10, eps=1e-06)
reduce_fused(x, topk_weights, token_topk_to_pos, fp8_format='', sf=None)
rotary_embedding_ref(x, cos, sin, positions=None, seqlen_offsets=0, interleaved=False, conjugate=False)
get_mapping_from_psum(x, psum_num_tokens_per_expert)
swiglu_forward(x, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None, clamp_value=None, clamped_count=None)
swiglu_backward(x, grad_out, psum_num_tokens_per_expert=None, topk_weights=None, routed_scaling_factor=None, clamp_value=None, alignment=None)
stable_topk(scores, num_topk)
moe_topk_gate_forward(logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank, scoring_func, mask=None, bias=None, image_bias=None, image_token_mask=None, fix_routing_mask=None, to_physical_map=None, logical_count=None, unmapped_topk_idx=None, out=None)
moe_topk_gate_backward(scores, topk_idx, topk_weights, grad_topk_weights, routed_scaling_factor, scoring_func, mask=None, grad_scores_sum=None)
mask_indices_by_tp(indices, n, num_ep_ranks, tp_rank, num_tp_ranks)
normalize_weight(topk_weights)
norm_forward_ref(x, weight, eps, residual=None, out_scale=1.0)
norm_backward_ref(out_grad, x, weight, rstd, residual_out_grad=None, out_scale=1.0)
""",
}  # fmt: skip
ALL = lines_of(SIGNATURES)


@pytest.mark.parametrize(("module", "line"), ALL, ids=lambda x: x.partition("(")[0])
def test_signature(module: str, line: str) -> None:
    check_signature("tile_kernels.v2", module, line)


def test_submodules() -> None:
    for name in v2.SUBMODULES:
        assert getattr(v2, name).__name__ == f"tile_kernels.v2.{name}"
    assert {module.partition(".")[0] for module in SIGNATURES} - {""} == set(v2.SUBMODULES)
    assert v2.get_token_alignment() == 128
    with pytest.raises(AttributeError):
        v2.transpose  # noqa: B018


# ---- the adapters pass on what they get ----------------------------------------------------------


@pytest.fixture
def settings() -> Iterator[None]:
    """Settings that a test changes get their defaults back."""
    yield
    v2.config.reset_runtime_config()


@pytest.fixture
def alignment(settings: None) -> int:
    v2.set_token_alignment(4)
    return 4


def test_casts() -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 128)
    one = v2.quant.per_token_cast(x, "e4m3", 32, None, True, True)
    other = quant.per_token_cast(x, "e4m3", 32, None, True, True)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(one, other))
    assert one[1].stride() == other[1].stride()
    nvfp4 = v2.quant.per_token_cast(x, "e2m1", 16, None, False, False, False, True)
    assert nvfp4[1].dtype == torch.float8_e4m3fn
    sf = v2.quant.per_token_cast_with_sf_only(x, "e4m3", 32, False, True)
    assert torch.equal(sf, other[1])
    data = v2.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 32, sf, False, True)
    assert torch.equal(data.float(), other[0].float())
    buffer = torch.empty(1, 4)
    sf = v2.quant.per_block_cast_with_sf_only(x, "e4m3", (128, 32), round_sf=True, out_sf=buffer)
    assert sf is buffer
    expected = quant.per_block_cast_with_sf_only(x, "e4m3", (128, 32), round_sf=True)
    assert torch.equal(sf, expected)


def test_what_this_package_adds_is_by_keyword() -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 128)
    seeded: dict[str, Any] = {"stochastic_cast": True, "seed": 3}
    pairs = [each.per_token_cast(x, "e4m3", 32, **seeded) for each in (v2.quant, quant)]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(*pairs))
    for sf in (
        v2.quant.per_token_cast_with_sf_only(x, "e4m3", 32, amax_min=448.0),
        v2.quant.per_block_cast_with_sf_only(x, "e4m3", (128, 128), amax_min=448.0),
        v2.quant.per_channel_cast(x.repeat(32, 1), "e4m3", 32, amax_min=448.0)[1],
        v2.quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, amax_min=448.0)[1],
    ):
        assert (sf == 1).all()
    kind: dict[str, Any] = {"use_e4m3_sf": True, "global_sf": 0.5}
    data, sf = v2.quant.per_token_cast(x, "e2m1", 16, **kind)
    same = v2.quant.per_token_cast_with_precomputed_sf(x, "e2m1", 16, sf, **kind)
    assert torch.equal(data, same)
    ends, out = torch.tensor([1, 3], dtype=torch.int32), torch.empty(4, 64)
    result = v2.quant.swiglu_forward(x, "fp32", ends, alignment=2, out=out)
    assert result is out
    assert out.any(1).tolist() == [True, False, True, False]
    (x_grad,) = v2.quant.swiglu_backward(x, torch.ones(4, 64), "fp32", ends, alignment=2)
    assert x_grad.any(1).tolist() == [True, False, True, False]


def test_the_least_amax_is_a_setting(settings: None) -> None:
    """Of the operators and of their references; `reset_runtime_config` restores it."""
    v2.set_amax_clamp_for_quant("e4m3", False, 1.0)
    x = torch.full((1, 32), 0.5)
    for data, sf in (v2.quant.per_token_cast(x, "e4m3", 32), v2.torch.cast(x, "e4m3", (1, 32))):
        torch.testing.assert_close(sf, torch.tensor([[0.0022321430]]), rtol=1e-7, atol=0)
        assert data.float()[0, 0] == 224
    v2.config.reset_runtime_config()
    assert v2.torch.cast(x, "e4m3", (1, 32))[0].float()[0, 0] == 448


def test_the_alignment_of_experts_is_a_setting(settings: None) -> None:
    """Of all functions with ranges of experts, in both modules, and traced again when it changes."""
    x, grad = torch.randn(4, 64), torch.ones(4, 32)
    ends = torch.tensor([1, 3], dtype=torch.int32)
    codes = quant.per_token_cast(x, "e4m3", 32)
    found = torch.compile(lambda x: quant.swiglu_forward(x, "fp32", ends), backend="eager")
    calls: list[Any] = [
        lambda: found(x),
        lambda: quant.swiglu_backward(x, grad, "fp32", ends)[0],
        lambda: quant.swiglu_forward_and_per_token_cast(
            x, "e4m3", 32, psum_num_tokens_per_expert=ends
        )[1],
        lambda: quant.swiglu_backward_and_per_token_cast(
            codes, grad.bfloat16(), None, None, None, 32, psum_num_tokens_per_expert=ends
        )[1][1],
        lambda: v2.quant.swiglu_forward(x, "fp32", ends),
        lambda: v2.quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, ends)[1],
        lambda: v2.torch.swiglu_forward(x, ends),
        lambda: v2.torch.get_mapping_from_psum(x, ends)[:, None],
    ]
    for alignment, rows in ((1, [0, 1, 2]), (2, [0, 2]), (128, [0])):
        v2.set_token_alignment(alignment)
        for call in calls:
            assert call().any(1).nonzero().flatten().tolist() == rows


def test_packed_scales_by_rows() -> None:
    """Of every cast that has scales of rows: the words of the columns, contiguous."""
    torch.manual_seed(3)
    x, grad = torch.randn(128, 384).bfloat16(), torch.randn(128, 192).bfloat16()
    codes = torch.randint(-128, 128, (128, 192), dtype=torch.int8), torch.ones(128, 12)
    halves = v2.quant.per_token_cast(x, "e4m3", 32)
    casts: list[Any] = [
        lambda **flags: v2.quant.per_token_cast(x, "e4m3", 32, **flags)[1],
        lambda **flags: v2.quant.per_block_cast(x, "e4m3", (32, 32), **flags)[1],
        lambda **flags: v2.quant.per_block_cast_with_sf_only(x, "e4m3", (32, 32), **flags),
        lambda **flags: v2.quant.per_block_cast_lossless(codes, "e4m3", (1, 32), (32, 64), **flags)[
            1
        ],
        lambda **flags: v2.quant.swiglu_forward_and_per_token_cast(x, "e4m3", 32, **flags)[1],
        lambda **flags: v2.quant.swiglu_backward_and_per_token_cast(
            halves, grad, "e4m3", 32, **flags
        )[1][1],
    ]
    for cast in casts:
        columns, rows = (
            cast(round_sf=True, use_packed_ue8m0=True, use_tma_aligned_col_major_sf=by_columns)
            for by_columns in (True, False)
        )
        assert rows.is_contiguous()
        assert rows.dtype == torch.int32
        assert torch.equal(rows, columns)


def test_channel_cast() -> None:
    torch.manual_seed(2)
    x = torch.randn(128, 128).bfloat16()
    data, sf = v2.quant.per_channel_cast(x, "e4m3", 32, True, None, True)
    plain = quant.per_channel_cast(x, "e4m3", 32, True)
    assert sf.dtype == torch.int32
    assert sf.shape == (1, 128)
    assert torch.equal(data.float(), plain[0].float())
    quantized = v2.quant.per_token_cast(x, "e4m3", 32)
    again = v2.quant.per_channel_cast(quantized, "e4m3", 128, False, 32)
    assert again[1].shape == (1, 128)


def test_scales_of_weights() -> None:
    sf = torch.tensor([[1.0, 2, 4, 8], [0.5, 0.25, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2]])
    ((sf0, sf1),) = v2.quant.batched_transpose_weight_sf([sf], 32, [False], [None])
    assert sf0[0].item() & 0xFFFFFFFF == 0x8281807F
    assert sf1[0].item() & 0xFFFFFFFF == 0x807F7E7F


def vector(name: str, index: int) -> tuple[dict[str, Any], Any]:
    case = SWIGLU[name].vectors[index]
    arguments = case.arguments()
    assert arguments.pop("alignment", 4) == 4
    return arguments, case.expected()


def test_swiglu(alignment: int) -> None:
    arguments, (expected, count) = vector("swiglu_forward", 1)
    torch.testing.assert_close(v2.quant.swiglu_forward(**arguments), expected)
    assert torch.equal(arguments["clamped_count"], count)
    del arguments["fmt"]
    torch.testing.assert_close(v2.torch.swiglu_forward(**arguments), expected)
    assert torch.equal(arguments["clamped_count"], 2 * count)
    arguments, expected = vector("swiglu_backward", 0)
    found = v2.quant.swiglu_backward(**arguments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    for name in ("fmt", "do_recompute"):
        arguments.pop(name, None)
    tensors = arguments.pop("x"), arguments.pop("act_x_grad")
    *grads, out = v2.torch.swiglu_backward(*tensors, **arguments)
    torch.testing.assert_close(out, v2.torch.swiglu_forward(tensors[0], **arguments))
    for one, other in zip(grads, expected, strict=False):
        torch.testing.assert_close(one, other)
    assert len(grads) == 2
    del arguments["topk_weights"], arguments["routed_scaling_factor"]
    assert len(v2.torch.swiglu_backward(*tensors, **arguments)) == 2
    arguments, ((data, sf), _) = vector("swiglu_forward_and_per_token_cast", 0)
    found = v2.quant.swiglu_forward_and_per_token_cast(**arguments)
    assert torch.equal(found[0].float(), data.float())
    assert torch.equal(found[1], sf)


def test_quantized_swiglu_gradient(alignment: int) -> None:
    torch.manual_seed(3)
    x = quant.per_token_cast(torch.randn(5, 128), "e4m3", 32)
    grad, weights = torch.randn(5, 64).bfloat16(), torch.rand(5)
    psum = torch.tensor([2, 4, 5], dtype=torch.int32)
    x_grad, (data, sf), weight_grad, act = v2.quant.swiglu_backward_and_per_token_cast(
        x, grad, "e4m3", 32, psum, weights, 2.5, round_sf=True, do_recompute=True
    )
    plain = quant.per_token_cast_back(x, "fp32", 32)
    wide = v2.quant.swiglu_backward(plain, grad.float(), "fp32", psum, weights, 2.5, None, True)
    torch.testing.assert_close(x_grad, wide[0].bfloat16(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(weight_grad, wide[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(act, wide[2].bfloat16(), rtol=2**-7, atol=1e-6)
    assert not sf[2:4].any()
    exists = v2.torch.get_mapping_from_psum(x[0], psum)
    assert exists.tolist() == [True, True, False, False, True]
    codes = quant.per_token_cast_back((data, sf), "fp32", 32)[exists]
    torch.testing.assert_close(codes, wide[0][exists], rtol=0.07, atol=0.05)
    with pytest.raises(ValueError, match="fmt must be 'e4m3'"):
        v2.quant.swiglu_backward_and_per_token_cast(x, grad, "e2m1", 32)
    assert len(v2.quant.swiglu_backward_and_per_token_cast(x, grad, "e4m3", 32)) == 2


def engram_inputs() -> list[torch.Tensor]:
    torch.manual_seed(4)
    x, kv = torch.randn(2, 3, 2, 16).bfloat16(), torch.randn(2, 3, 3 * 16).bfloat16()
    weights = torch.rand(2, 16), torch.rand(2, 16)
    return [each.requires_grad_() for each in (x, kv, *weights)]


IMAGES = torch.tensor([[False, True, False], [False, False, True]])


@pytest.mark.parametrize("form", ["function", "class", "compiled"])
@pytest.mark.parametrize("masked", [False, True])
def test_engram(form: str, masked: bool) -> None:
    mask = IMAGES if masked else None
    inputs = engram_inputs()
    torch._dynamo.reset()
    gate = {
        "function": v2.modeling.engram.engram_gate,
        "class": v2.modeling.engram.EngramGateFn.apply,
        "compiled": torch.compile(
            v2.modeling.engram.engram_gate, fullgraph=True, backend="aot_eager"
        ),
    }[form]
    out = gate(*inputs, 1e-6, 1e-6, mask)
    plain = [each.detach().clone().requires_grad_() for each in inputs]
    expected = v2.torch.engram_gate_ref(
        plain[0], plain[1].view(2, 3, 3, 16), *plain[2:], 1e-6, 1e-6, image_token_mask=mask
    )
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    for one, other in zip(inputs, plain):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)
    if masked:
        assert torch.equal(out[IMAGES], inputs[0][IMAGES])
        assert inputs[1].grad is not None
        assert not inputs[1].grad[IMAGES].any()


def test_engram_adds_to_main_grad() -> None:
    plain, inputs = engram_inputs(), engram_inputs()
    inputs[2].main_grad = torch.ones(2, 16)  # type: ignore[attr-defined]
    for each in (plain, inputs):
        v2.modeling.engram.engram_gate(*each, 1e-6, 1e-6, IMAGES).float().sum().backward()
    assert inputs[2].grad is None
    total = inputs[2].main_grad - 1  # type: ignore[attr-defined]
    torch.testing.assert_close(total, plain[2].grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs[3].grad, plain[3].grad)  # type: ignore[arg-type]


def test_engram_refuses_other_shapes() -> None:
    x, _, *weights = engram_inputs()
    with pytest.raises(
        ValueError, match=r"kv must have the elements of \[2, 3, 3, 16\] for hidden"
    ):
        v2.modeling.engram.engram_gate(x, x, *weights, 1e-6, 1e-6, None)


# ---- references ----------------------------------------------------------------------------------


def test_references_into_buffers() -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 8)
    expected = v2.moe.moe_topk_gate(logits, 2, False, 0, 1.5, 0)
    out = torch.empty(4, 2, dtype=torch.int64), torch.empty(4, 2)
    found = v2.torch.moe_topk_gate_forward(logits, 2, False, 0, 1.5, 0, "sqrtsoftplus", out=out)
    for one, other, buffer in zip(found, expected, out):
        assert one is buffer
        torch.testing.assert_close(one, other)

    matrix, scale, other = torch.randn(6, 8), torch.ones(6), torch.ones(6)
    sums, total, columns = torch.empty(8), torch.empty(8), torch.rand(8)
    norms = v2.torch.engram_sinkhorn_step_ref(matrix, scale, columns, sums, 1e-20)
    same, partial = v2.engram.engram_sinkhorn_step(matrix, other, columns, 1e-20)
    v2.engram.engram_sinkhorn_step_reduce(partial, total)
    torch.testing.assert_close(norms, same)
    torch.testing.assert_close(scale, other)
    torch.testing.assert_close(sums, total)
    expected = v2.engram.engram_sinkhorn_finalize(matrix, scale, columns, 1e-20, 2.0)
    result = v2.torch.engram_sinkhorn_finalize_ref(matrix, scale, columns, 1e-20, 2.0, matrix)
    assert result is matrix
    torch.testing.assert_close(matrix, expected)

    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    expected = v2.quant.norm_forward(x, None, 1e-6, residual, with_rstd=True)
    for one, other in zip(v2.torch.norm_forward_ref(x, None, 1e-6, residual), expected):
        torch.testing.assert_close(one, other)


def test_hash_reference() -> None:
    ids = torch.tensor([[5, 7, 11], [5, 7, 11]], dtype=torch.int32)
    sizes = torch.tensor([[[10, 11], [12, 13]]], dtype=torch.int32)
    arguments = ids, torch.tensor([[3, 5, 7]]), sizes, v2.torch.make_offsets(sizes)
    found = v2.torch.engram_hash_ref(*arguments, torch.tensor([False, True]))
    assert found.tolist() == [[[4, 10, 22, 39], [-1] * 4]]


# ---- mHC ----------------------------------------------------------------------------------------


def test_mhc_forward_chain() -> None:
    """The single steps into buffers have the bits of the fused one."""
    a = PARTIALS["mhc_pre_from_partials"].small[0].build("cpu")
    n, m, h = a["residual"].shape
    q = m * (m + 2)
    out_mul, sums, mixes = torch.empty(n, 1, q), torch.empty(n, 1), torch.empty(n, q)
    splits = a["gemm_out_mul"].shape[0]
    v2.mhc.mhc_reduce_partials_and_rmsnorm_fwd(
        a["gemm_out_mul"][:, :, None], a["gemm_out_sqrsum"][:, :, None], out_mul, sums, mixes,
        m * h, a["rms_eps"], splits,
    )  # fmt: skip
    pre, post, logits = torch.empty(n, m), torch.empty(n, m), torch.empty(n, m * m)
    numbers = a["mhc_post_mult_value"], a["mhc_pre_eps"]
    v2.mhc.mhc_pre_split_mixes_fwd(
        mixes, a["mhc_scale"], a["mhc_base"], pre, post, logits, *numbers
    )
    comb, layer_input = torch.empty(n, m, m), torch.empty(n, h).bfloat16()
    v2.mhc.mhc_sinkhorn_fwd(logits.view(n, m, m), comb, a["sinkhorn_repeat"], a["mhc_sinkhorn_eps"])
    v2.mhc.mhc_pre_apply_mix_fwd(a["residual"], pre, layer_input)
    fused = torch.empty(n, m), torch.empty(n, m, m), torch.empty(n, h).bfloat16()
    order = ("gemm_out_mul", "gemm_out_sqrsum", "mhc_scale", "mhc_base", "residual")
    v2.mhc.mhc_pre_big_fuse_fwd(
        *(a.pop(name) for name in order), *fused, *a.values(), n_splits=splits
    )
    for one, other in zip(fused, (post, comb, layer_input)):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="n_splits must be"):
        v2.mhc.mhc_reduce_partials_and_rmsnorm_fwd(
            torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1), out_mul, sums, mixes, 1, 0.0, 3
        )


def test_mhc_worked_chain() -> None:
    """The mixes between the steps of the worked example; its results are the operator's."""
    a = PARTIALS["mhc_pre_from_partials"].vectors[0].arguments()
    out_mul, sums, mixes = torch.empty(1, 1, 8), torch.empty(1, 1), torch.empty(1, 8)
    v2.mhc.mhc_reduce_partials_and_rmsnorm_fwd(
        a["gemm_out_mul"][:, :, None], a["gemm_out_sqrsum"][:, :, None], out_mul, sums, mixes,
        16, a["rms_eps"], 2,
    )  # fmt: skip
    expected = torch.tensor([[0.32, 0.32, 1.2, 0.8, 0.4, -0.4, -0.4, 2.4]])
    torch.testing.assert_close(mixes, expected, rtol=1e-6, atol=1e-6)
    pre, post, logits = torch.empty(1, 2), torch.empty(1, 2), torch.empty(1, 4)
    v2.mhc.mhc_pre_split_mixes_fwd(
        mixes, a["mhc_scale"], a["mhc_base"], pre, post, logits, 2.0, 0.01
    )
    torch.testing.assert_close(pre, torch.tensor([[0.5499149, 0.5746363]]))
    torch.testing.assert_close(post, torch.tensor([[1.6043676, 1.5005201]]))
    torch.testing.assert_close(logits, torch.tensor([[0.8, -0.7, -0.9, 4.8]]))


def test_mhc_gradients() -> None:
    torch.manual_seed(6)
    n, m, h = 3, 2, 8
    x, mix = torch.randn(n, m, h).bfloat16(), torch.rand(n, m)
    grad, total = torch.randn(n, h).bfloat16(), torch.ones(n, m, h).bfloat16()
    mix_grad = v2.mhc.mhc_pre_apply_mix_bwd(grad, x, mix, total)
    expected = mhc.mhc_pre_apply_mix_bwd(grad, x, mix[..., None], torch.ones_like(total))
    assert torch.equal(mix_grad, expected[1][..., 0])
    assert torch.equal(total, expected[0])
    wide = torch.empty(n, m, h).bfloat16()
    v2.mhc.expand_to_mhc_fwd(grad, wide)
    assert torch.equal(wide[:, 1], grad)
    back = torch.empty(n, h).bfloat16()
    v2.mhc.expand_to_mhc_bwd(wide, back)
    assert torch.equal(back, (2 * grad.float()).bfloat16())

    logits, out = torch.randn(n, m, m), torch.empty(n, m, m)
    v2.mhc.mhc_sinkhorn_fwd(100 * logits, out, 3, 1e-6)
    assert out.isfinite().all()
    v2.mhc.mhc_sinkhorn_bwd(torch.ones(n, m, m), logits, out, 3, 1e-6)
    assert torch.equal(out, mhc.sinkhorn_normalize_bwd(torch.ones(n, m, m), logits, 3, 1e-6))

    fn, normw, product = torch.randn(8, 16), torch.rand(16), torch.empty(8, 16)
    v2.mhc.mhc_fn_normw_merge_fwd(fn, normw, product)
    assert torch.equal(product, fn * normw)
    fn_grad, normw_grad = torch.ones(8, 16), torch.ones(16)
    v2.mhc.mhc_fn_normw_merge_bwd(fn, normw, torch.ones(8, 16), fn_grad, normw_grad)
    torch.testing.assert_close(fn_grad, 1 + normw.expand(8, 16))
    torch.testing.assert_close(normw_grad, 1 + fn.sum(0))
    merges = v2.mhc.mhc_fn_normw_merge_fwd, v2.mhc.mhc_fn_normw_merge_bwd
    with pytest.raises(
        ValueError, match=r"mhc_fn_normw_merge_fwd: out_fn must have shape \[8, 16\]"
    ):
        merges[0](fn, normw, product[:1])
    with pytest.raises(
        ValueError, match=r"mhc_fn_normw_merge_bwd: normw_grad must have shape \[16\]"
    ):
        merges[1](fn, normw, product, fn_grad, normw_grad[:1])
    torch.testing.assert_close(fn_grad, 1 + normw.expand(8, 16))


def test_mhc_mixes_of_the_head() -> None:
    torch.manual_seed(7)
    n, m = 5, 4
    mix, scale, base = torch.randn(n, m), torch.randn(1), torch.randn(m)
    out = torch.empty(n, m)
    v2.mhc.mhc_head_compute_mix_fwd(mix, scale, base, out, 1e-2)
    assert torch.equal(out, mhc.mhc_head_compute_mix(mix, scale, base, 1e-2))
    grad, mix_grad = torch.randn(n, m), torch.empty(n, m)
    partials = torch.full((3, 1), 7.0), torch.full((3, m), 7.0)
    v2.mhc.mhc_head_compute_mix_bwd(grad, mix, scale, base, mix_grad, *partials, 3)
    expected = mhc.mhc_head_compute_mix_bwd(grad, mix, scale, base)
    assert torch.equal(mix_grad, expected[0])
    for partial, total in zip(partials, expected[1:]):
        assert torch.equal(partial.sum(0), total)

    mixes, wide_base = torch.randn(n, 24), torch.randn(24)
    buffers = torch.empty(n, 24), torch.empty(3), torch.empty(24)
    grads = torch.randn(n, m), torch.randn(n, m), torch.randn(n, m * m)
    three = torch.randn(3)
    v2.mhc.mhc_pre_split_mixes_bwd(
        *grads, mixes, torch.empty(n, m), three, wide_base, *buffers, 2.0
    )
    shaped = grads[0][..., None], grads[1][..., None], grads[2].view(n, m, m)
    expected = mhc.mhc_pre_split_mixes_bwd(*shaped, mixes, three, wide_base, 2.0)
    for one, other in zip(buffers, expected):
        assert torch.equal(one, other)


def test_partial_products() -> None:
    torch.manual_seed(8)
    residual, fn = torch.randn(3, 2, 8), torch.randn(8, 16)
    mul, squares = v2.torch.mhc_pre_norm_fn_partials_ref(residual, fn, 4)
    mixes, *_ = mhc.mhc_reduce_partials(mul, squares, 16, 1e-6)
    expected = tile_kernels.torch.mhc_pre_norm_fn_ref(residual, fn, None, 1e-6)
    torch.testing.assert_close(mixes, expected, rtol=1e-4, atol=1e-5)


def test_references_return_what_those_of_tilekernels_do() -> None:
    """Numbers, orders, shapes and dtypes of version 2.1.0."""
    residual = torch.tensor([[[[1.0, 2], [-1, 0.5]], [[3, 4], [5, 6]]]]).bfloat16()
    for shape in ((1, 2, 2, 2), (2, 1, 2, 2)):
        mul, squares = v2.torch.mhc_pre_norm_fn_partials_ref(
            residual.view(shape), torch.arange(8.0).view(2, 4), 2
        )
        assert mul.shape == (2, 2, 1, 2)
        assert mul.flatten().tolist() == [2, 14, 4, 32, -0.5, -2.5, 28, 72]
        assert squares.shape == (2, 2, 1)
        assert squares.flatten().tolist() == [5, 25, 1.25, 61]
    x, grad = torch.randn(3, 8), torch.randn(3, 4)
    assert [t.shape for t in v2.torch.swiglu_backward(x, grad)] == [(3, 8), (3, 4)]
    found = v2.torch.swiglu_backward(x, grad, None, torch.rand(3))
    assert [t.shape for t in found] == [(3, 8), (3,), (3, 4)]
    x, weight, rstd = torch.randn(3, 32).bfloat16(), torch.randn(32).bfloat16(), torch.rand(3)
    x_grad, weight_grad = v2.torch.norm_backward_ref(x, x, weight, rstd)
    assert (x_grad.dtype, weight_grad.dtype) == (torch.bfloat16, torch.float32)
    expected = (x.float().square() * rstd[:, None]).sum(0)
    torch.testing.assert_close(weight_grad, expected)


def test_rotary_reference() -> None:
    x, angles = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[0.5, 1.0]])
    found = v2.torch.rotary_embedding_ref(x, angles.cos(), angles.sin())
    expected = torch.tensor([-0.5606941, -2.2852793, 3.1121731, 3.8441513])
    torch.testing.assert_close(found[0, 0], expected)
