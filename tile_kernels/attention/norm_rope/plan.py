"""Plans of the compression with norm, rotation and cast. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.attention.compress.plan import plan_compress
from tile_kernels.attention.geometry import WindowPlan, power_of_two
from tile_kernels.runtime.device import Device

GROUP = 64  # channels that share a scale
MAX_THREADS = 1024  # of a row that is too long to be compressed and cast by one block


def row_vector(channels: int) -> int:
    """Channels of a thread where a row of entries is cast by itself."""
    return 8 if channels % 8 == 0 else 4 if channels % 4 == 0 else 2


class FusedPlan(NamedTuple):
    channels: int
    window: int
    series: int
    ragged: bool
    dtype: str
    vector: int
    rotated: int
    ahead: bool
    workers: int

    @property
    def compress(self) -> WindowPlan:
        """The plan of the compression itself."""
        channels, window, series, ragged, dtype, vector, _, ahead, workers = self
        return WindowPlan(
            channels, window, series, ragged, dtype, "float32", vector, ahead, workers
        )


def plan_fused(
    channels: int,
    window: int,
    series: int,
    ragged: bool,
    dtype: str,
    vector: int,
    rotated: int,
    device: Device,
) -> FusedPlan:
    inner = plan_compress(channels, window, series, ragged, dtype, "float32", vector, device)
    return FusedPlan(
        channels, window, series, ragged, dtype, vector, rotated, inner.ahead, inner.workers
    )


class RowsPlan(NamedTuple):
    channels: int
    window: int
    ragged: bool
    vector: int
    rotated: int

    @property
    def lanes(self) -> int:
        """Threads of a row."""
        return power_of_two(-(-self.channels // self.vector))


def plan_rows(
    channels: int, window: int, ragged: bool, vector: int, rotated: int, device: Device
) -> RowsPlan:
    return RowsPlan(channels, window, ragged, vector, rotated)
