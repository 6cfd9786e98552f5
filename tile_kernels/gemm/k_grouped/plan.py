"""Plan of the sums over groups of rows. Needs no TileLang."""

from __future__ import annotations

from typing import Any

from tile_kernels.gemm import tiling
from tile_kernels.gemm.tiling import Plan, Problem


def plan(*problem: Any) -> Plan:
    """The fields of `Problem`, then the device. The number of rows does not matter."""
    *fields, device = problem
    return tiling.with_tile(Problem(*fields), tiling.wide(Problem(*fields)), device)
