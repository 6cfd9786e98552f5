"""The PyTorch references: plain, readable, the definition of right. They run on any device.

Each is defined in `reference.py` of its operator's folder. Here they have the names, arguments and
import paths of TileKernels; those that TileKernels does not have go by the operator's public name.
"""

from tile_kernels.attention.cache.reference import (
    cache_indices as cache_indices,
    kv_cache_append as kv_cache_append,
    kv_cache_gather as kv_cache_gather,
)
from tile_kernels.attention.attention_bwd.reference import (
    hca_attention_bwd as hca_attention_bwd,
    sparse_attention_bwd as sparse_attention_bwd,
)
from tile_kernels.attention.compress.reference import (
    kv_compress as kv_compress,
    kv_compress_bwd as kv_compress_bwd,
    kv_compress_packed as kv_compress_packed,
    kv_compress_packed_bwd as kv_compress_packed_bwd,
)
from tile_kernels.attention.decode.reference import (
    decode_plan as decode_plan,
    sparse_attention_decode as sparse_attention_decode,
)
from tile_kernels.attention.hca.reference import hca_attention as hca_attention
from tile_kernels.attention.indexer_reference import indexer_ranges as indexer_ranges
from tile_kernels.attention.indices.reference import attention_indices as attention_indices
from tile_kernels.attention.kl.reference import indexer_kl as indexer_kl
from tile_kernels.attention.logits.reference import (
    indexer_logits as indexer_logits,
    indexer_logits_bwd as indexer_logits_bwd,
)
from tile_kernels.attention.norm_rope.reference import (
    kv_compress_norm_rope_cast as kv_compress_norm_rope_cast,
)
from tile_kernels.attention.select.reference import indexer_select as indexer_select
from tile_kernels.attention.sparse.reference import (
    flash_mla_sparse_fwd as flash_mla_sparse_fwd,
    sparse_attention as sparse_attention,
)
from tile_kernels.attention.step.reference import kv_compress_step as kv_compress_step
from tile_kernels.attention.target.reference import attention_target as attention_target
from tile_kernels.attention.topk.reference import indexer_topk as indexer_topk
from tile_kernels.engram.gate.reference import (
    engram_gate_packed_bwd as engram_gate_packed_bwd,
    engram_gate_packed_fwd as engram_gate_packed_fwd,
)
from tile_kernels.engram.sinkhorn.reference import (
    engram_sinkhorn_finalize as engram_sinkhorn_finalize,
    engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update,
    engram_sinkhorn_step as engram_sinkhorn_step,
    engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce,
)
from tile_kernels.gemm.fp8_fp4.reference import (
    expanded_fp4_weights as expanded_fp4_weights,
    fp8_fp4_gemm_nt as fp8_fp4_gemm_nt,
    m_grouped_fp8_fp4_gemm_nt_contiguous as m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked as m_grouped_fp8_fp4_gemm_nt_masked,
)
from tile_kernels.gemm.gemm_nt.reference import (
    bf16_gemm_nt as bf16_gemm_nt,
    fp8_gemm_nt as fp8_gemm_nt,
)
from tile_kernels.gemm.k_grouped.reference import (
    k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous,
    k_grouped_fp8_gemm_nt_contiguous as k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous as k_grouped_fp8_gemm_tn_contiguous,
)
from tile_kernels.gemm.m_grouped.reference import (
    m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous as m_grouped_fp8_gemm_nt_contiguous,
)
from tile_kernels.gemm.masked.reference import (
    m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_masked as m_grouped_fp8_gemm_nt_masked,
)
from tile_kernels.gemm.mn_major.reference import (
    get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor,
)
from tile_kernels.mhc.partials.reference import (
    mhc_pre_from_partials as mhc_pre_from_partials,
    mhc_reduce_partials as mhc_reduce_partials,
    mhc_reduce_partials_bwd as mhc_reduce_partials_bwd,
)
from tile_kernels.moe.hash.reference import hash_gate as hash_gate
from tile_kernels.moe.mapping.reference import get_fused_mapping as get_fused_mapping
from tile_kernels.moe.moe_topk.reference import (
    moe_topk_gate_backward as moe_topk_gate_backward,
    moe_topk_gate_forward as moe_topk_gate_forward,
)
from tile_kernels.quant.back.reference import (
    cast_back_e5m6 as cast_back_e5m6,
    cast_back_from_e5m6 as cast_back_from_e5m6,
    per_token_cast_back as per_token_cast_back,
)
from tile_kernels.quant.common import unpack_from_e2m1fn_x2 as unpack_from_e2m1fn_x2
from tile_kernels.quant.fake.reference import fake_cast as fake_cast
from tile_kernels.quant.lossless.reference import per_block_cast_lossless as per_block_cast_lossless
from tile_kernels.quant.norm.reference import (
    norm_backward as norm_backward,
    norm_forward as norm_forward,
    norm_forward_and_per_token_cast as norm_forward_and_per_token_cast,
)
from tile_kernels.quant.per_block.reference import (
    per_block_cast as per_block_cast,
    per_block_cast_with_precomputed_sf as per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only as per_block_cast_with_sf_only,
)
from tile_kernels.quant.per_channel.reference import (
    per_channel_cast_fused_and_transpose as per_channel_cast_fused_and_transpose,
    per_channel_cast as per_channel_cast,
    per_channel_cast_and_transpose as per_channel_cast_and_transpose,
    swiglu_forward_and_per_channel_cast_and_transpose as swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.quant.per_token.reference import (
    cast_to_e5m6 as cast_to_e5m6,
    per_token_cast as per_token_cast,
    per_token_cast_to_e5m6 as per_token_cast_to_e5m6,
    per_token_cast_with_precomputed_sf as per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only as per_token_cast_with_sf_only,
)
from tile_kernels.quant.plain.reference import plain_cast as plain_cast
from tile_kernels.quant.split.reference import split_to_bf16 as split_to_bf16
from tile_kernels.quant.swiglu.reference import (
    swiglu_backward as swiglu_backward,
    swiglu_backward_and_per_token_cast as swiglu_backward_and_per_token_cast,
    swiglu_forward as swiglu_forward,
    swiglu_forward_and_per_token_cast as swiglu_forward_and_per_token_cast,
)
from tile_kernels.torch.cast import *
from tile_kernels.torch.engram import *
from tile_kernels.torch.expand_to_fused import *
from tile_kernels.torch.mhc import *
from tile_kernels.torch.moe import *
from tile_kernels.torch.per_channel_cast_fused import *
from tile_kernels.torch.reduce_fused import *
from tile_kernels.torch.topk import *
from tile_kernels.transform.rotary.reference import (
    apply_rotary as apply_rotary,
    rotary_embedding as rotary_embedding,
)
from tile_kernels.transpose.reference import (
    batched_transpose as batched_transpose,
    transpose as transpose,
)

topk_gate = stable_topk  # noqa: F405

# Every function that was imported.
__all__ = sorted(name for name, value in globals().items() if callable(value))  # noqa: PLE0605
