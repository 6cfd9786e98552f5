from tile_kernels.gemm.alignment import (
    get_k_alignment_for_contiguous_layout as get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout as get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size as get_tma_aligned_size,
)
from tile_kernels.gemm.fp4_weights import (
    Fp4Weights as Fp4Weights,
    prepare_fp4_weights as prepare_fp4_weights,
)
from tile_kernels.gemm.fp8_fp4.op import (
    fp8_fp4_gemm_nt as fp8_fp4_gemm_nt,
    m_grouped_fp8_fp4_gemm_nt_contiguous as m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked as m_grouped_fp8_fp4_gemm_nt_masked,
)
from tile_kernels.gemm.gemm_nt.op import (
    bf16_gemm_nt as bf16_gemm_nt,
    fp8_gemm_nn as fp8_gemm_nn,
    fp8_gemm_nt as fp8_gemm_nt,
    fp8_gemm_tn as fp8_gemm_tn,
    fp8_gemm_tt as fp8_gemm_tt,
)
from tile_kernels.gemm.k_grouped.op import (
    k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous,
    k_grouped_fp8_gemm_nt_contiguous as k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous as k_grouped_fp8_gemm_tn_contiguous,
)
from tile_kernels.gemm.m_grouped.op import (
    m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous as m_grouped_fp8_gemm_nt_contiguous,
)
from tile_kernels.gemm.masked.op import (
    m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_masked as m_grouped_fp8_gemm_nt_masked,
)
from tile_kernels.gemm.mn_major.op import (
    get_mn_major_tma_aligned_tensor as get_mn_major_tma_aligned_tensor,
)
