"""How the steps of the table optimizer divide rows. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import WARP, Device

THREADS = 128
WARPS = 4  # of a block; each has a row at a time
PARTS = 512  # of the rows, each with its sum of squares: fixed, so that no bit depends on a device
MAX_COLUMNS = 2048  # 64 values and 64 sums for each lane


class MomentumPlan(NamedTuple):
    grad: str
    buffer: str
    nesterov: bool
    vector: int


def plan_momentum(
    count: int, grad: str, buffer: str, nesterov: bool, alignment: int, device: Device
) -> MomentumPlan:
    """`vector` elements per access: 16 bytes of float32."""
    return MomentumPlan(grad, buffer, nesterov, math.gcd(count, 4, max(alignment // 4, 1)))


class RowPlan(NamedTuple):
    columns: int
    vector: int

    @property
    def accesses(self) -> int:
        """Accesses of a lane to a row."""
        return -(-self.columns // (WARP * self.vector))


def plan_rows(columns: int, alignment: int, device: Device) -> RowPlan:
    return RowPlan(columns, math.gcd(columns, 4, max(alignment // 4, 1)))


class ColumnPlan(NamedTuple):
    columns: int


def plan_columns(columns: int, device: Device) -> ColumnPlan:
    return ColumnPlan(columns)
