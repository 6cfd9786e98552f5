"""FP8 matrix products with scales, dense and of groups, with the calls of DeepGEMM."""

from tile_kernels.gemm.alignment import (
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
)
from tile_kernels.gemm.fp4_weights import Fp4Weights, prepare_fp4_weights
from tile_kernels.gemm.fp8_fp4.op import (
    fp8_fp4_gemm_nt,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked,
)
from tile_kernels.gemm.gemm_nt.op import (
    bf16_gemm_nt,
    fp8_gemm_nn,
    fp8_gemm_nt,
    fp8_gemm_tn,
    fp8_gemm_tt,
)
from tile_kernels.gemm.k_grouped.op import (
    k_grouped_bf16_gemm_tn_contiguous,
    k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous,
)
from tile_kernels.gemm.m_grouped.op import (
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
)
from tile_kernels.gemm.masked.op import (
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_masked,
)
from tile_kernels.gemm.mn_major.op import get_mn_major_tma_aligned_tensor

__all__ = [
    "Fp4Weights",
    "bf16_gemm_nt",
    "fp8_fp4_gemm_nt",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_tma_aligned_size",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "prepare_fp4_weights",
]
