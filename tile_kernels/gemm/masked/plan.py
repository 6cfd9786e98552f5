"""Plan of the products of groups whose sizes are known on the device. Needs no TileLang."""

from __future__ import annotations

from typing import Any

from tile_kernels.gemm import tiling
from tile_kernels.gemm.tiling import FEW_ROWS, Plan, Problem


def is_small(expected_m: int, max_m: int) -> bool:
    """Whether groups are expected to fit into one tile of few rows."""
    return min(expected_m, max_m) <= FEW_ROWS.rows


def plan(small: bool, *problem: Any) -> Plan:
    """`small`, then the fields of `Problem`, then the device."""
    if not small:
        return tiling.plan_wide(*problem)
    *fields, device = problem
    return tiling.with_tile(Problem(*fields), FEW_ROWS, device)
