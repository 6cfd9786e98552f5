"""Plans of the compression's kernels. Needs no TileLang."""

from __future__ import annotations

import functools
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
    gradient: bool = False,
) -> WindowPlan:
    """As many blocks as can run at a time: each walks over windows and loads its biases once.

    Of the `gradient` each thread has its sums of bias gradients in shared memory too, and the
    launch chooses the number of blocks.
    """
    geo = geometry(channels, window, series, vector)
    blocks = blocks_per_sm(geo, gradient)
    sums = 4 * geo.rows * geo.vector * geo.threads if gradient else 0
    workers = 0 if gradient else max(1, blocks * device.num_sms // geo.blocks_across)
    ahead = can_copy_ahead(geo, dtype, blocks, device, sums)
    return WindowPlan(channels, window, series, ragged, dtype, out_dtype, vector, ahead, workers)


plan_gradients = functools.partial(plan_compress, gradient=True)


class PlacesPlan(NamedTuple):
    window: int


def plan_places(window: int, device: Device) -> PlacesPlan:
    return PlacesPlan(window)
