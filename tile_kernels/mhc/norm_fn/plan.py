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
DEPTH = 128  # columns of a step
FEW_ROWS = 64  # of a tile, for up to three of them
MAX_ROWS, MAX_STREAMED_ROWS = 192, 256  # of a tile otherwise; the weights are read per tile
MAX_STAGES, MAX_STREAMED_STAGES = 5, 8
# The cut of the columns, see `cut_columns`.
LEAVES, MIN_LEAF_STEPS = 56, 2
GROUPS = 8
LEAF_COST = 1.15  # writing a leaf and reading it again, relative to computing it
GRADIENT_ROWS = 64  # of a tile in the backward pass
GRADIENT_STAGES, ADDING_STAGES = 3, 2  # two blocks fit in a multiprocessor


def padded(mixes: int) -> int:
    """Rows of the weights for the matrix units: a multiple of 16, the others zero."""
    return -(-mixes // 16) * 16


# ---- how many blocks share a sum ----------------------------------------------------------------


def _num_sms(device: torch.device) -> int:
    """Of the device itself: the order of a sum must not depend on the SM budget."""
    return config.get_device_num_sms(device if device.type == "cuda" else None)


class Columns(NamedTuple):
    """How the columns of a projection are cut, by their number alone.

    A leaf of `leaf` columns is summed by the matrix units, from zero; `fold` leaves in order are a
    group, and the groups in order are the value of a row. `leaves` and `groups` are those of a row.
    """

    leaf: int
    leaves: int
    fold: int
    groups: int


@functools.cache
def cut_columns(size: int) -> Columns:
    """Leaves that occupy many multiprocessors for one token, groups that do for many tokens."""
    steps = math.ceil(size / DEPTH)
    leaf_steps = max(MIN_LEAF_STEPS, steps // LEAVES)
    leaves = math.ceil(steps / leaf_steps)
    fold = math.ceil(leaves / GROUPS)
    return Columns(leaf_steps * DEPTH, leaves, fold, math.ceil(leaves / fold))


class Division(NamedTuple):
    """How a launch divides a projection, which changes no bits.

    The result has `parts` parts, each the sum of `fold` leaves; a block computes `run` of them.
    """

    parts: int
    run: int
    fold: int


def divide(rows: int, size: int, device: torch.device) -> Division:
    """Parts and blocks that fill the device: groups if there are enough, otherwise leaves."""
    return _divide(max(1, -(-rows // tile_rows(rows))), size, _num_sms(device))


@functools.cache
def _divide(tiles: int, size: int, num_sms: int) -> Division:
    """The fewest leaves for one multiprocessor; a leaf that is written counts as more of them."""
    columns = cut_columns(size)

    def time(division: Division) -> tuple[float, int]:
        blocks = tiles * -(-division.parts // division.run)
        leaves = -(-blocks // num_sms) * division.run * division.fold
        return leaves * (1 if division.fold > 1 else LEAF_COST), -division.run

    choices = [Division(columns.groups, run, columns.fold) for run in range(1, columns.groups + 1)]
    if columns.fold > 1:
        choices += [Division(columns.leaves, run, 1) for run in range(1, columns.fold + 1)]
    return min(choices, key=time)


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
    """A block has `tile` rows, of which it reads `depth` columns in a step, `stages` - 1 ahead.

    `unit` columns are multiplied at once; like `leaf`, it determines the bits of a result and does
    not depend on the number of rows. `streamed`: copies by TMA, for a warpgroup of the block.
    `fenced`: the matrix units read shared memory through the async proxy (Hopper's wgmma), which
    needs a fence after ordinary stores.
    """

    mixes: int
    padded: int
    size: int
    tile: int
    leaf: int
    depth: int
    unit: int
    stages: int
    streamed: bool
    fenced: bool


def tile_rows(rows: int, most: int = MAX_STREAMED_ROWS) -> int:
    """Rows of a tile: small tiles for few of them."""
    return FEW_ROWS if rows <= 3 * FEW_ROWS else most


def _copied_stages(mixes: int, padded: int, tile: int, depth: int, device: Device) -> int:
    """Stages that fit beside the weights in two parts."""
    column = BF16 * tile + FP32 * mixes
    return (device.smem_per_block // depth - 2 * BF16 * padded) // column


def plan_products(mixes: int, padded: int, size: int, rows: int, device: Device) -> ProductPlan:
    """Deep steps, for long runs of memory, where two of them fit; then as many as there is room."""
    fenced = device.arch == "sm_90a"
    leaf = cut_columns(size).leaf
    depths = (DEPTH, DEPTH // 2, DEPTH // 4)
    unit = next(
        min(depth, DEPTH // 2)
        for depth in depths
        if _copied_stages(mixes, padded, FEW_ROWS, depth, device) >= 2
    )
    streamed = fenced and tile_rows(rows) > FEW_ROWS
    if streamed:
        tile, depth = MAX_STREAMED_ROWS if padded <= 32 else MAX_STREAMED_ROWS // 2, unit
        room = (device.smem_per_block - 1024) // ((tile + 2 * padded) * depth * BF16)
        stages = min(MAX_STREAMED_STAGES, room)
    else:
        most = tile_rows(rows, MAX_ROWS)
        tile, depth, stages = next(
            (tile, depth, min(MAX_STAGES, stages))
            for tile in (most, 2 * FEW_ROWS, FEW_ROWS)
            for depth in depths
            if depth >= unit and (stages := _copied_stages(mixes, padded, tile, depth, device)) >= 2
        )
        stages = min(stages, math.ceil(size / depth) + 1)
    return ProductPlan(mixes, padded, size, tile, leaf, depth, unit, stages, streamed, fenced)


class ProductMixPlan(NamedTuple):
    mixes: int
    padded: int
    size: int


def plan_mixes_of_products(mixes: int, padded: int, size: int, device: Device) -> ProductMixPlan:
    return ProductMixPlan(mixes, padded, size)


class MixGradientPlan(NamedTuple):
    mixes: int
    padded: int
    size: int


def plan_mix_gradients(mixes: int, padded: int, size: int, device: Device) -> MixGradientPlan:
    return MixGradientPlan(mixes, padded, size)


class ProductGradientPlan(NamedTuple):
    """Some columns of several tiles of rows for a block, of which `stages` are in flight."""

    mixes: int
    padded: int
    size: int
    accumulate: bool
    stages: int


def plan_product_gradients(
    mixes: int, padded: int, size: int, accumulate: bool, device: Device
) -> ProductGradientPlan:
    width = gradient_columns(padded)
    weights = 2 * padded * width * BF16
    tile = GRADIENT_ROWS * ((width * (1 + accumulate) + 2 * padded) * BF16 + 4)
    most = ADDING_STAGES if accumulate else GRADIENT_STAGES
    stages = max(1, min(most, (device.smem_per_block - 1024 - weights) // tile))
    return ProductGradientPlan(mixes, padded, size, accumulate, stages)
