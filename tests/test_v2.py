"""`tile_kernels.v2`: the signatures of TileKernels 2.1, and that adapters pass on what they get."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels import mhc, quant, v2
from tile_kernels.mhc.partials.cases import CASES as PARTIALS
from tile_kernels.quant.swiglu.cases import CASES as SWIGLU

# Parameters with defaults, as TileKernels 2.1.0 has them; `...` is any default.
SIGNATURES = {
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
per_channel_cast(x, fmt, num_per_tokens, round_sf=False, num_per_channels=None, use_packed_ue8m0=False)
batched_transpose_weight_sf(sf, block_size, transpose_sf1s, outs=None)
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
engram_sinkhorn_momentum_update(grad, momentum_buffer, beta1, nesterov=True)
engram_sinkhorn_step(matrix, row_scale, col_scale, eps)
engram_sinkhorn_step_reduce(col_sumsq_partial, col_sumsq)
engram_sinkhorn_finalize(matrix, row_scale, col_scale, eps, alpha, out=None)
""",
    "modeling.engram": """
engram_gate(hidden, kv, weight_hidden, weight_embed, clamp_value, eps, image_token_mask)
""",
    "mhc": """
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
randn_like(x)
set_seed(seed)
""",
}  # fmt: skip
ALL = [(module, line) for module, lines in SIGNATURES.items() for line in lines.split("\n") if line]


@pytest.mark.parametrize(("module", "line"), ALL, ids=lambda x: x.partition("(")[0])
def test_signature(module: str, line: str) -> None:
    """Those that are positional are the same; more may be given by keyword."""
    name = line.partition("(")[0]
    function = getattr(importlib.import_module(f"tile_kernels.v2.{module}"), name)
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert f"{name}({', '.join(found)})" == line


def test_submodules() -> None:
    for name in v2.SUBMODULES:
        assert getattr(v2, name).__name__ == f"tile_kernels.v2.{name}"
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


def test_the_least_amax_is_a_setting(settings: None) -> None:
    """Of the operators and of their references; `reset_runtime_config` restores it."""
    v2.set_amax_clamp_for_quant("e4m3", False, 1.0)
    x = torch.full((1, 32), 0.5)
    for data, sf in (v2.quant.per_token_cast(x, "e4m3", 32), v2.torch.cast(x, "e4m3", (1, 32))):
        torch.testing.assert_close(sf, torch.tensor([[0.0022321430]]), rtol=1e-7, atol=0)
        assert data.float()[0, 0] == 224
    v2.config.reset_runtime_config()
    assert v2.torch.cast(x, "e4m3", (1, 32))[0].float()[0, 0] == 448


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
    torch.testing.assert_close(v2.torch.swiglu_forward(**arguments), expected)
    assert torch.equal(arguments["clamped_count"], 2 * count)
    arguments, expected = vector("swiglu_backward", 0)
    for functions in (v2.quant, v2.torch):
        for one, other in zip(functions.swiglu_backward(**arguments), expected, strict=True):
            torch.testing.assert_close(one, other)
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
    wide = v2.torch.swiglu_backward(plain, grad.float(), "fp32", psum, weights, 2.5, None, True)
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


def test_engram() -> None:
    torch.manual_seed(4)
    x = torch.randn(2, 3, 2, 16).bfloat16().requires_grad_()
    kv = torch.randn(2, 3, 3 * 16).bfloat16().requires_grad_()
    weight = torch.rand(2, 16)
    mask = torch.tensor([[False, True, False], [False, False, True]])
    out = v2.modeling.engram.engram_gate(x, kv, weight, weight, 1e-6, 1e-6, mask)
    expected = v2.torch.engram_gate_ref(
        x, kv.view(2, 3, 3, 16), weight, weight, 1e-6, 1e-6, image_token_mask=mask
    )
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert kv.grad is not None
    assert not kv.grad[mask].any()
    assert kv.grad[~mask].any()


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
    mixes, *_ = mhc.mhc_reduce_partials(mul[:, :, None], squares[:, :, None], 16, 1e-6)
    expected = tile_kernels.torch.mhc_pre_norm_fn_ref(residual, fn, None, 1e-6)
    torch.testing.assert_close(mixes, expected, rtol=1e-4, atol=1e-5)


def test_rotary_reference() -> None:
    x, angles = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[0.5, 1.0]])
    found = v2.torch.rotary_embedding_ref(x, angles.cos(), angles.sin())
    expected = torch.tensor([-0.5606941, -2.2852793, 3.1121731, 3.8441513])
    torch.testing.assert_close(found[0, 0], expected)
