"""Sizes that the layouts of the products are multiples of."""

from __future__ import annotations

from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.runtime import checks
from tile_kernels.utils import align

_TMA_BYTES = 16


def get_m_alignment_for_contiguous_layout() -> int:
    """The number of rows to which each group of `m_grouped_fp8_gemm_nt_contiguous` is padded.

    >>> get_m_alignment_for_contiguous_layout()
    128
    """
    return BLOCK


def get_k_alignment_for_contiguous_layout() -> int:
    """The number of rows to which each group of `k_grouped_fp8_gemm_nt_contiguous` is padded.

    >>> get_k_alignment_for_contiguous_layout()
    128
    """
    return BLOCK


def get_mk_alignment_for_contiguous_layout() -> int:
    """The number of rows that serves both kinds of groups.

    >>> get_mk_alignment_for_contiguous_layout()
    128
    """
    return BLOCK


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Returns `x` elements rounded up to a multiple of 16 bytes.

    Args:
        x: The number of elements.
        element_size: The bytes of an element.

    Example:
        >>> get_tma_aligned_size(5, 4), get_tma_aligned_size(17, 1)
        (8, 32)
    """
    with checks.named("get_tma_aligned_size"):
        checks.integer("x", x, 0)
        checks.one_of("element_size", element_size, (1, 2, 4, 8, 16))
    return align(x, _TMA_BYTES // element_size)
