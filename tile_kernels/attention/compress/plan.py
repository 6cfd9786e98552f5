"""Plans of the compression's kernels. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.attention.geometry import (
    WindowPlan,
    blocks_per_sm,
    can_copy_ahead,
    geometry,
)
from tile_kernels.runtime.device import Device


def plan_compress(
    channels: int,
    window: int,
    series: int,
    ragged: bool,
    dtype: str,
    out_dtype: str,
    vector: int,
    device: Device,
) -> WindowPlan:
    """As many blocks as can run at a time: each walks over windows and loads its biases once."""
    geo = geometry(channels, window, series, vector)
    workers = max(1, blocks_per_sm(geo) * device.num_sms // geo.blocks_across)
    ahead = can_copy_ahead(geo, dtype, blocks_per_sm(geo), device)
    return WindowPlan(channels, window, series, ragged, dtype, out_dtype, vector, ahead, workers)


class PlacesPlan(NamedTuple):
    window: int


def plan_places(window: int, device: Device) -> PlacesPlan:
    return PlacesPlan(window)


def plan_gradients(
    channels: int,
    window: int,
    series: int,
    ragged: bool,
    dtype: str,
    out_dtype: str,
    vector: int,
    device: Device,
) -> WindowPlan:
    """As the forward pass; each thread has its sums of bias gradients in shared memory too."""
    geo = geometry(channels, window, series, vector)
    sums = 4 * geo.rows * geo.vector * geo.threads
    ahead = can_copy_ahead(geo, dtype, blocks_per_sm(geo, gradient=True), device, sums)
    return WindowPlan(channels, window, series, ragged, dtype, out_dtype, vector, ahead)
