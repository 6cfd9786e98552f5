"""Plans of the projection to mixes and of its gradients. Needs no TileLang."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tile_kernels import config
from tile_kernels.runtime.device import WARP, Device

MAX_MIXES = 128
BF16, FP32 = 2, 4  # bytes
VECTOR = 8  # bfloat16 of 16 bytes
DEPTH = 128  # columns of a step
TILE = 64  # rows of a warpgroup, and of a tile where there are few
MAX_ROWS = 192  # of a tile that all threads copy; the weights are read per tile
STREAMED_ROWS = 2 * TILE  # of a tile copied by TMA
FEW_ROWS = TILE  # up to here a block has one leaf
MAX_STAGES, MAX_STREAMED_STAGES = 5, 3
# The cut of the columns, see `cut_columns`.
LEAF_STEPS, MAX_LEAVES = 2, 256
GROUPS = 16
# H200, m * h = 28672, 24 mixes, products and the kernel that adds them up, in us. A leaf for a
# block: 1, 16 and 64 rows 6.6, 7.3 and 8.6 with 512 threads, 7.1, 7.7 and 9.0 with 256. Streamed,
# with 224 threads that cut weights: 256 rows 10.0 + 4.2, 512 rows 14.9 + 5.2, 1024 rows 23.2 + 2.7,
# 4096 rows 70.4 + 6.7, 8192 rows 133.0 + 10.8. With 96 of them 1024 rows take 25.0 + 2.7.
SINGLE_THREADS = 512
CUTTERS, FEW_CUTTERS = 224, 96  # of a streaming block; with the copying warp warpgroups
CUTTERS_MIXES = 32  # more mixes need more registers, and so fewer threads
GRADIENT_ROWS = 64  # of a tile in the backward pass
# H200, 4096 x 28672: 2 stages 147.7 us, 3 stages 147.9; adding to a gradient 203.1 and 252.9, since
# with 2 stages two blocks fit in a multiprocessor.
GRADIENT_STAGES, ADDING_STAGES = 3, 2


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
    leaf_steps = LEAF_STEPS * max(1, steps // (LEAF_STEPS * MAX_LEAVES // 2))
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
    """Leaves for few rows, groups of them where these occupy half of the multiprocessors."""
    if rows <= FEW_ROWS:
        return Division(cut_columns(size).leaves, 1, 1)
    return _divide(-(-rows // STREAMED_ROWS), size, _num_sms(device))


@functools.cache
def _divide(tiles: int, size: int, num_sms: int) -> Division:
    """Of the lengths of a run, the one with which the last multiprocessor is done first.

    Blocks run in waves of one per multiprocessor, and the start of a block takes about as long as a
    leaf. On an H200 this was the fastest of all divisions measured, for 256 to 8192 rows of 28672
    columns and 192 to 4097 rows of 16384. For 4096 rows of 28672 columns, runs of 1, 2, 3, 4 and 8
    groups took 77.4, 72.9, 102.2, 70.4 and 123.5 us.
    """
    columns = cut_columns(size)
    if 2 * tiles * columns.groups <= num_sms:
        parts, fold, longest = columns.leaves, 1, columns.fold
    else:
        parts, fold, longest = columns.groups, columns.fold, columns.groups

    def time(run: int) -> int:
        """In leaves. Short blocks, at the end of a row, run one after another in one place."""
        full, rest = divmod(parts, run)
        blocks = tiles * full + (-(-tiles // (run // rest)) if rest else 0)
        return -(-blocks // num_sms) * (run * fold + 1)

    return Division(parts, min(range(1, longest + 1), key=time), fold)


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
    not depend on the number of rows. `kind`: `"single"` for a leaf at once, `"streamed"` for copies
    by TMA from a warp of the block, `"copied"` for copies by all threads. `fenced`: the matrix
    units read shared memory through the async proxy (Hopper's wgmma), which needs a fence after
    ordinary stores.
    """

    mixes: int
    padded: int
    size: int
    tile: int
    leaf: int
    depth: int
    unit: int
    stages: int
    kind: str
    threads: int
    fenced: bool


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
        if _copied_stages(mixes, padded, TILE, depth, device) >= 2
    )
    few, room = rows <= FEW_ROWS, device.smem_per_block - 1024
    tile = TILE if few else STREAMED_ROWS
    column = (tile + 2 * padded) * BF16  # bytes of streams and weights
    if fenced and few and leaf * column <= room:
        depth, stages, kind, threads = leaf, 1, "single", SINGLE_THREADS
    elif fenced and not few:
        depth = next(depth for depth in depths if 2 * depth * column <= room)
        stages = min(MAX_STREAMED_STAGES, room // (depth * column))
        cutters = CUTTERS if padded <= CUTTERS_MIXES else FEW_CUTTERS
        kind, threads = "streamed", 2 * tile + cutters + WARP
    else:
        tile, depth, stages = next(
            (tile, depth, min(MAX_STAGES, stages))
            for tile in (TILE if few else MAX_ROWS, 2 * TILE, TILE)
            for depth in depths
            if depth >= unit and (stages := _copied_stages(mixes, padded, tile, depth, device)) >= 2
        )
        stages = min(stages, (leaf if few else size) // depth + 1)
        kind, threads = "copied", 2 * tile
    return ProductPlan(
        mixes, padded, size, tile, leaf, depth, unit, stages, kind, threads, fenced
    )  # fmt: skip


class MixPlan(NamedTuple):
    """Of kernels between the weights, the products and the mixes, which nothing is chosen for."""

    mixes: int
    padded: int
    size: int


def plan_mixes(mixes: int, padded: int, size: int, device: Device) -> MixPlan:
    return MixPlan(mixes, padded, size)


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
    max_stages = ADDING_STAGES if accumulate else GRADIENT_STAGES
    stages = max(1, min(max_stages, (device.smem_per_block - 1024 - weights) // tile))
    return ProductGradientPlan(mixes, padded, size, accumulate, stages)
