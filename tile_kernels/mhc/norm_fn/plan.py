"""Plans of the projection to mixes and of its gradients. Needs no TileLang."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tile_kernels import config
from tile_kernels.runtime.device import Device

MAX_MIXES = 128
BF16, FP32 = 2, 4  # bytes
VECTOR = 8  # bfloat16 of 16 bytes
DEPTH, MAX_ROWS, FEW_ROWS = 128, 192, 64  # of a step and a tile; the weights are read per tile
MIN_STEPS = 2  # of a block, so that copies run ahead
MAX_WAVES = 3  # blocks of a multiprocessor, one after the other
MAX_STAGES = 4
GRADIENT_ROWS = 64  # of a tile in the backward pass
GRADIENT_STAGES = 3


def padded(mixes: int) -> int:
    """Rows of the weights for the matrix units: a multiple of 16, the others zero."""
    return -(-mixes // 16) * 16


# ---- how many blocks share a sum ----------------------------------------------------------------


def _num_sms(device: torch.device) -> int:
    """Of the device itself: the order of a sum must not depend on the SM budget."""
    return config.get_device_num_sms(device if device.type == "cuda" else None)


def count_splits(rows: int, size: int, device: torch.device) -> int:
    """Blocks that share the columns of a tile of rows, enough to fill the device."""
    tiles = max(1, -(-rows // (MAX_ROWS if rows > MAX_ROWS else FEW_ROWS)))
    return _fewest_splits(tiles, -(-size // DEPTH), _num_sms(device))


@functools.cache
def _fewest_splits(tiles: int, steps: int, num_sms: int) -> int:
    """How many blocks share `steps` steps, so that one multiprocessor has as few as possible."""
    limit = max(1, min(MAX_WAVES * num_sms // tiles, steps // MIN_STEPS))
    return min(range(1, limit + 1), key=lambda n: (-(-tiles * n // num_sms) * -(-steps // n), n))


def gradient_columns(padded: int) -> int:
    """Columns of a block in the backward pass: fewer, the more mixes it has to hold."""
    return 128 if padded <= 48 else 64


def count_shares(rows: int, size: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Blocks that share the rows of `columns` in the backward pass, and tiles of each."""
    tiles = -(-rows // GRADIENT_ROWS)
    chunks = -(-size // columns)
    shares = max(1, min(2 * _num_sms(device) // chunks, tiles))
    return shares, -(-tiles // shares)


# ---- kernels ------------------------------------------------------------------------------------


class ProductPlan(NamedTuple):
    """A block has `steps` steps of `depth` columns of its `tile` rows, which `splits` blocks share.

    `fenced`: the matrix units read shared memory through the async proxy (Hopper's wgmma), which
    needs a fence after ordinary stores.
    """

    mixes: int
    padded: int
    size: int
    tile: int
    splits: int
    depth: int
    steps: int
    stages: int
    fenced: bool


def plan_products(
    mixes: int, padded: int, size: int, rows: int, splits: int, device: Device
) -> ProductPlan:
    """Deep steps, for long runs of memory, where two of them fit; then as many as there is room."""
    tile = MAX_ROWS if rows > MAX_ROWS else FEW_ROWS
    column = BF16 * tile + FP32 * mixes  # bytes of a stage
    depth, stages = next(
        (depth, min(MAX_STAGES, left // column))
        for depth in (DEPTH, DEPTH // 2, DEPTH // 4)
        if (left := device.smem_per_block // depth - 2 * BF16 * padded) >= 2 * column
    )
    steps = math.ceil(math.ceil(size / depth) / splits)
    stages = min(stages, steps + 1)
    fenced = device.arch == "sm_90a"
    return ProductPlan(mixes, padded, size, tile, splits, depth, steps, stages, fenced)


class ProductMixPlan(NamedTuple):
    mixes: int
    padded: int
    size: int
    splits: int


def plan_mixes_of_products(
    mixes: int, padded: int, size: int, splits: int, device: Device
) -> ProductMixPlan:
    return ProductMixPlan(mixes, padded, size, splits)


class MixGradientPlan(NamedTuple):
    mixes: int
    padded: int
    size: int


def plan_mix_gradients(mixes: int, padded: int, size: int, device: Device) -> MixGradientPlan:
    return MixGradientPlan(mixes, padded, size)


class ProductGradientPlan(NamedTuple):
    """Some columns of several tiles of rows for a block; `splits` blocks share those columns."""

    mixes: int
    padded: int
    size: int
    splits: int
    accumulate: bool
    stages: int


def plan_product_gradients(
    mixes: int, padded: int, size: int, splits: int, accumulate: bool, device: Device
) -> ProductGradientPlan:
    width = gradient_columns(padded)
    weights = 2 * padded * width * BF16
    tile = GRADIENT_ROWS * ((width * (1 + accumulate) + 2 * padded) * BF16 + 4)
    stages = max(1, min(GRADIENT_STAGES, (device.smem_per_block - 1024 - weights) // tile))
    return ProductGradientPlan(mixes, padded, size, splits, accumulate, stages)
