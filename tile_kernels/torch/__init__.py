"""The PyTorch references: plain, readable, the definition of right. They run on any device.

Each is defined in `reference.py` of its operator's folder. Here they have the names, arguments and
import paths of TileKernels; those that TileKernels does not have go by the operator's public name.
"""

from tile_kernels.attention.compress.reference import (
    kv_compress,
    kv_compress_bwd,
    kv_compress_packed,
    kv_compress_packed_bwd,
)
from tile_kernels.attention.indexer_reference import indexer_ranges
from tile_kernels.attention.logits.reference import indexer_logits, indexer_logits_bwd
from tile_kernels.attention.norm_rope.reference import kv_compress_norm_rope_cast
from tile_kernels.attention.select.reference import indexer_select
from tile_kernels.attention.step.reference import kv_compress_step
from tile_kernels.attention.topk.reference import indexer_topk
from tile_kernels.gemm.gemm_nt.reference import bf16_gemm_nt, fp8_gemm_nt
from tile_kernels.gemm.k_grouped.reference import (
    k_grouped_bf16_gemm_tn_contiguous,
    k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous,
)
from tile_kernels.gemm.m_grouped.reference import (
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
)
from tile_kernels.gemm.masked.reference import (
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_masked,
)
from tile_kernels.gemm.mn_major.reference import get_mn_major_tma_aligned_tensor
from tile_kernels.moe.hash.reference import hash_gate
from tile_kernels.moe.mapping.reference import get_fused_mapping
from tile_kernels.quant.back.reference import (
    cast_back_e5m6,
    cast_back_from_e5m6,
    per_token_cast_back,
)
from tile_kernels.quant.common import unpack_from_e2m1fn_x2
from tile_kernels.quant.fake.reference import fake_cast
from tile_kernels.quant.lossless.reference import per_block_cast_lossless
from tile_kernels.quant.per_block.reference import (
    per_block_cast,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
)
from tile_kernels.quant.per_channel.reference import (
    per_channel_cast,
    per_channel_cast_and_transpose,
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.quant.per_token.reference import (
    cast_to_e5m6,
    per_token_cast,
    per_token_cast_to_e5m6,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)
from tile_kernels.quant.swiglu.reference import (
    swiglu_backward,
    swiglu_backward_and_per_token_cast,
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
)
from tile_kernels.torch.cast import cast, cast_back
from tile_kernels.torch.engram import (
    engram_gate_bwd,
    engram_gate_fwd,
    engram_hash,
    fused_weight,
    grad_w_reduce,
    ngram_windows,
)
from tile_kernels.torch.expand_to_fused import expand_to_fused, expand_to_fused_with_sf
from tile_kernels.torch.mhc import (
    expand_to_mhc,
    expand_to_mhc_bwd,
    expand_to_mhc_ref,
    mhc_head_compute_mix,
    mhc_head_compute_mix_bwd,
    mhc_head_compute_mix_ref,
    mhc_multilayer_recompute,
    mhc_norm_fn_bwd,
    mhc_norm_fn_fwd,
    mhc_post,
    mhc_post_bwd,
    mhc_post_fwd,
    mhc_post_ref,
    mhc_pre_apply_mix,
    mhc_pre_apply_mix_bwd,
    mhc_pre_apply_mix_ref,
    mhc_pre_big_fuse,
    mhc_pre_fwd,
    mhc_pre_norm_fn_ref,
    mhc_pre_split_mixes,
    mhc_pre_split_mixes_bwd,
    mhc_pre_split_mixes_ref,
    sinkhorn_normalize,
    sinkhorn_normalize_bwd,
    sinkhorn_normalize_ref,
)
from tile_kernels.torch.moe import (
    aux_fi,
    group_count,
    inplace_unique_group_indices,
    mask_indices_by_tp,
    normalize_weight,
)
from tile_kernels.torch.per_channel_cast_fused import per_channel_cast_fused
from tile_kernels.torch.reduce_fused import reduce_fused
from tile_kernels.torch.topk import (
    gate_scores,
    stable_topk,
    top2_sum_gate,
    topk_sum_and_topk_group_idx,
    topk_weights,
    topk_weights_backward,
)
from tile_kernels.transpose.reference import batched_transpose, transpose

topk_gate = stable_topk

__all__ = [
    "aux_fi",
    "batched_transpose",
    "bf16_gemm_nt",
    "cast",
    "cast_back",
    "cast_back_e5m6",
    "cast_back_from_e5m6",
    "cast_to_e5m6",
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_hash",
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "expand_to_mhc",
    "expand_to_mhc_bwd",
    "expand_to_mhc_ref",
    "fake_cast",
    "fp8_gemm_nt",
    "fused_weight",
    "gate_scores",
    "get_fused_mapping",
    "get_mn_major_tma_aligned_tensor",
    "grad_w_reduce",
    "group_count",
    "hash_gate",
    "indexer_logits",
    "indexer_logits_bwd",
    "indexer_ranges",
    "indexer_select",
    "indexer_topk",
    "inplace_unique_group_indices",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "kv_compress",
    "kv_compress_bwd",
    "kv_compress_norm_rope_cast",
    "kv_compress_packed",
    "kv_compress_packed_bwd",
    "kv_compress_step",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "mask_indices_by_tp",
    "mhc_head_compute_mix",
    "mhc_head_compute_mix_bwd",
    "mhc_head_compute_mix_ref",
    "mhc_multilayer_recompute",
    "mhc_norm_fn_bwd",
    "mhc_norm_fn_fwd",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_post_ref",
    "mhc_pre_apply_mix",
    "mhc_pre_apply_mix_bwd",
    "mhc_pre_apply_mix_ref",
    "mhc_pre_big_fuse",
    "mhc_pre_fwd",
    "mhc_pre_norm_fn_ref",
    "mhc_pre_split_mixes",
    "mhc_pre_split_mixes_bwd",
    "mhc_pre_split_mixes_ref",
    "ngram_windows",
    "normalize_weight",
    "per_block_cast",
    "per_block_cast_lossless",
    "per_block_cast_with_precomputed_sf",
    "per_block_cast_with_sf_only",
    "per_channel_cast",
    "per_channel_cast_and_transpose",
    "per_channel_cast_fused",
    "per_token_cast",
    "per_token_cast_back",
    "per_token_cast_to_e5m6",
    "per_token_cast_with_precomputed_sf",
    "per_token_cast_with_sf_only",
    "reduce_fused",
    "sinkhorn_normalize",
    "sinkhorn_normalize_bwd",
    "sinkhorn_normalize_ref",
    "stable_topk",
    "swiglu_backward",
    "swiglu_backward_and_per_token_cast",
    "swiglu_forward",
    "swiglu_forward_and_per_channel_cast_and_transpose",
    "swiglu_forward_and_per_token_cast",
    "top2_sum_gate",
    "topk_gate",
    "topk_sum_and_topk_group_idx",
    "topk_weights",
    "topk_weights_backward",
    "transpose",
    "unpack_from_e2m1fn_x2",
]
