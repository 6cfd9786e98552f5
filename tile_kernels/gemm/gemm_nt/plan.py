"""Plan of the dense products. Needs no TileLang."""

from __future__ import annotations

from typing import Any

from tile_kernels.gemm import tiling
from tile_kernels.gemm.tiling import FEW_ROWS, NARROW, WIDE, Plan, Problem
from tile_kernels.runtime.device import Device
from tile_kernels.utils import ceil_div

SMALL, MEDIUM, LARGE = "small", "medium", "large"


def size_class(m: int, n: int, num_sms: int) -> str:
    """Which tile a problem gets: one kernel for each class, whatever the number of rows."""
    if ceil_div(m, FEW_ROWS.rows) * ceil_div(n, FEW_ROWS.columns) <= num_sms or m <= FEW_ROWS.rows:
        return SMALL  # each tile has an SM, or the rows are too few for larger ones
    tiles = ceil_div(m, WIDE.rows) * ceil_div(n, WIDE.columns)
    return MEDIUM if tiles < num_sms else LARGE


def plan(num_rows: int, *problem: Any) -> Plan:
    """`num_rows`, then the fields of `Problem`, then the device."""
    *fields, device = problem
    return _plan(num_rows, Problem(*fields), device)


def _plan(num_rows: int, problem: Problem, device: Device) -> Plan:
    wide = tiling.wide(problem)
    medium = NARROW if wide.columns == WIDE.columns else wide
    by_class = {SMALL: FEW_ROWS, MEDIUM: medium, LARGE: wide}
    tile = by_class[size_class(num_rows, problem.n, device.num_sms)]
    return tiling.with_tile(problem, tile, device)
