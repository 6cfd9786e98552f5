"""`get_mn_major_tma_aligned_tensor`: scales in the layout that the products read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tile_kernels.gemm import scales
from tile_kernels.gemm.mn_major import reference
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec
from tile_kernels.runtime.operator import Operator

_MAX_GROUPS = 65535  # the limit of the grid's third dimension


class Arguments(NamedTuple):
    sf: Tensor

    def check(self) -> None:
        dims = (
            ("groups", "rows", "steps")
            if isinstance(self.sf, Tensor) and self.sf.dim() == 3
            else ("rows", "steps")
        )
        checks.tensor("sf", self.sf, dims, scales.SCALE_DTYPES, contiguous=True)
        if len(dims) == 3 and self.sf.shape[0] > _MAX_GROUPS:
            raise ValueError(f"sf must have at most {_MAX_GROUPS} groups, got {self.sf.shape[0]}")

    def outputs(self) -> Out:
        return scales.mn_major_out("out", self.sf)

    def launches(self, out: Spec) -> Launch | None:
        return scales.mn_major_launch(self.sf, out) if out.numel() else None


def cost(sf: Tensor) -> Cost:
    return Cost(bytes=2 * sf.numel() * sf.element_size())


GET_MN_MAJOR_TMA_ALIGNED_TENSOR = Operator(
    "gemm.get_mn_major_tma_aligned_tensor",
    Arguments,
    reference=reference.get_mn_major_tma_aligned_tensor,
    cost=cost,
    dynamic={"sf": 1},
)


@GET_MN_MAJOR_TMA_ALIGNED_TENSOR.public()
def get_mn_major_tma_aligned_tensor(sf: Tensor) -> Tensor:
    """Converts scales to the layout of the products, without a copy if they already have it.

    The products do this themselves with row-major scales, once per call. Scales that are used
    several times are better prepared, or made so by
    `quant.per_token_cast(..., use_tma_aligned_col_major_sf=True)`.

    Args:
        sf: `[rows, steps]` or `[groups, rows, steps]`, float32 or int32 (packed exponents),
            contiguous.

    Returns:
        The same values, with strides `(1, align(rows, 4))` in the last two dimensions; rows that
        pad a column are zero.

    Raises:
        TypeError: If `sf` has another dtype.
        ValueError: If `sf` has another rank or is not contiguous.

    Example:
        >>> import torch
        >>> get_mn_major_tma_aligned_tensor(torch.ones(5, 3)).stride()
        (1, 8)
    """
    if isinstance(sf, Tensor) and sf.dim() in (2, 3) and not sf.is_contiguous():
        GET_MN_MAJOR_TMA_ALIGNED_TENSOR.require(_check_layout, sf)
        return sf
    return GET_MN_MAJOR_TMA_ALIGNED_TENSOR(sf)


def _check_layout(sf: Tensor) -> None:
    checks.tensor(
        "sf",
        sf,
        ("rows", "steps")[: sf.dim()] if sf.dim() == 2 else ("groups", "rows", "steps"),
        scales.SCALE_DTYPES,
    )
    if not scales.is_mn_major(sf):
        raise ValueError(f"sf must be contiguous or MN-major, got strides {tuple(sf.stride())}")
