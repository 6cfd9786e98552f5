"""Plans of the kernel that writes streams and projects them at once. Needs no TileLang."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tile_kernels import config
from tile_kernels.mhc.norm_fn.plan import cut_columns
from tile_kernels.runtime.device import Device

HOPPER = "sm_90a"
MAX_STREAMS = 4  # a warpgroup for each
TILE = 64  # tokens of a block: the rows of a warpgroup
DEPTH = 64  # columns of a step, as many as are multiplied at once elsewhere
STAGES, WEIGHT_STAGES = 4, 2
WARPGROUP = 128  # threads
# Up to here streams are written first and projected then. H200, 4 streams of 7168 columns, at once
# and in turn: 64 tokens 24.5 and 14.3 us, 512 45.7 and 42.8, 1024 85.6 and 72.5, 2048 128.1 and
# 137.9, 4096 242.9 and 266.2.
FEW_TOKENS = 1024


def padded_mixes(mixes: int) -> int:
    """Rows of a part of the weights: the matrix units take multiples of 8."""
    return -(-mixes // 8) * 8


def fits(streams: int, hidden: int) -> bool:
    """Whether a block can have the same leaves of the projection as `mhc_norm_fn_fwd` has.

    A leaf must not cross streams.
    """
    return streams <= MAX_STREAMS and hidden % cut_columns(streams * hidden).leaf == 0


def projects_while_writing(device: torch.device) -> bool:
    """Whether that kernel runs on a device. Tensors that are on no GPU are planned for Hopper."""
    return device.type != "cuda" or config.planned_device(device.index).arch == HOPPER


class Division(NamedTuple):
    """As that of the projection: a stream has `parts` sums of `fold` leaves, a block does `run`."""

    parts: int
    run: int
    fold: int


@functools.cache
def divide(tokens: int, streams: int, hidden: int, num_sms: int) -> Division:
    """Of all divisions the one with which the last multiprocessor is done first."""
    columns = cut_columns(streams * hidden)
    leaves = hidden // columns.leaf  # of a stream
    tiles = -(-tokens // TILE)
    options = []
    for fold in {columns.fold, 1}:
        if leaves % fold:
            continue  # a group of leaves would cross streams
        parts = leaves // fold
        for run in range(1, parts + 1):
            waves = -(-tiles * -(-parts // run) // num_sms)
            # The start of a block takes about as long as a leaf; a part is written and read again.
            time = waves * (run * fold + 1) + tiles * parts / num_sms / 8
            options.append((time, run, Division(parts, run, fold)))
    return min(options)[2]


def num_sms(device: torch.device) -> int:
    """Of the device itself: what a block computes must not depend on the SM budget."""
    return config.get_device_num_sms(device if device.type == "cuda" else None)


class WritePlan(NamedTuple):
    """`stages` of streams and `weight_stages` of weights are in flight or in use."""

    streams: int
    hidden: int
    padded: int
    leaf: int
    stages: int
    weight_stages: int

    @property
    def consumers(self) -> int:
        """Threads that compute: a warpgroup for each stream that is written."""
        return self.streams * WARPGROUP

    @property
    def threads(self) -> int:
        """All threads of a block."""
        return self.consumers + WARPGROUP  # one warp of the last one copies


def plan_write(streams: int, hidden: int, padded: int, device: Device) -> WritePlan:
    """The matrix units take registers and bulk copies fill shared memory as on Hopper alone."""
    if device.arch != HOPPER:
        raise ValueError(
            f"no kernel for {device.name} ({device.arch}): streams are written and projected at "
            f"once on a Hopper GPU ({HOPPER}); elsewhere call mhc_post and mhc_pre_big_fuse"
        )
    leaf = cut_columns(streams * hidden).leaf
    return WritePlan(streams, hidden, padded, leaf, STAGES, WEIGHT_STAGES)
