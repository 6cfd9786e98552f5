"""Reference of the layout of scales."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.utils import align


def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """See `tile_kernels.gemm.get_mn_major_tma_aligned_tensor`."""
    *groups, rows, steps = sf.shape
    out = sf.new_zeros(*groups, steps, align(rows, 4)).mT[..., :rows, :]
    return out.copy_(sf)
