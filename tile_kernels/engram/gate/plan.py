"""How the gate's kernels divide rows and tokens. Needs no TileLang.

Blocks are persistent and take whole rows. A thread owns the same vectors of 8 columns of every row:
it prefetches them into its part of shared memory, so that only the sums over a row need a barrier.
Rows that are too long for that are read where they are used.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from tile_kernels import config
from tile_kernels.runtime.device import WARP, Device

VECTOR = 8  # bfloat16 of 16 bytes
MAX_THREADS = 512
LONG_ROW_THREADS = 1024


def cuts(hidden: int) -> list[tuple[int, int]]:
    """Threads of a block and vectors of each in a row, those first that leave the fewest idle."""
    vectors = hidden // VECTOR
    steps = ((t, -(-vectors // t)) for t in range(WARP, MAX_THREADS + 1, WARP))
    return sorted(steps, key=lambda cut: (cut[0] * cut[1], cut[0]))


def long_cut(hidden: int) -> tuple[int, int]:
    """As `cuts`, for rows that are too long for the shared memory of a block."""
    return LONG_ROW_THREADS, -(-hidden // (VECTOR * LONG_ROW_THREADS))


# ---- forward ------------------------------------------------------------------------------------

MAX_STEPS = 4
MIN_THREADS = 128
RESIDENT = 512  # threads per multiprocessor: few with much each, since sums cost all the same
MAX_STAGES = 4
STREAMED = 3  # rows of x, k and v


class Plan(NamedTuple):
    """`stages` rows are prefetched, 0 for none.

    `blocks` share a multiprocessor, `workers` the tokens of a stream.
    """

    streams: int
    hidden: int
    threads: int
    steps: int
    stages: int
    blocks: int
    workers: int
    saved: bool
    residual: bool
    masked: bool


def plan(
    streams: int, hidden: int, saved: bool, residual: bool, masked: bool, device: Device
) -> Plan:
    enough = [cut for cut in cuts(hidden) if cut[1] <= MAX_STEPS and cut[0] >= MIN_THREADS]
    threads, steps = enough[0] if enough else long_cut(hidden)
    row = STREAMED * threads * steps * VECTOR * 2
    room = device.smem_per_block - 2048
    blocks = max(1, min(RESIDENT // threads, room // (2 * row)))
    stages = min(MAX_STAGES, room // (blocks * row))
    workers = max(1, blocks * device.num_sms // streams)
    return Plan(streams, hidden, threads, steps, stages, blocks, workers, saved, residual, masked)


# ---- backward -----------------------------------------------------------------------------------

MAX_BLOCKS_PER_SM = 4
COLUMNS_PER_SM = 16384  # of all streams, for which a block takes a multiprocessor or its share
OTHER_REGISTERS = 64  # registers of a thread beside its sums
ROWS = 3  # of each stream: the gradient, x and k; and one of v


def blocks_per_sm(streams: int, hidden: int) -> int:
    """Blocks of the backward pass that share a multiprocessor: several where rows are short."""
    return max(1, min(MAX_BLOCKS_PER_SM, COLUMNS_PER_SM // (streams * hidden)))


def count_parts(num_tokens: int, streams: int, hidden: int, device: torch.device) -> int:
    """Parts of the tokens, each with its own sum of weight gradients; at least one.

    They are as many as blocks fit on the device, for any SM budget, so that results do not depend
    on the budget. Part `p` of `n` has the tokens from `p * num_tokens // n` up to where the next
    one starts.
    """
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    # The number of tokens may be symbolic: it must not be compared here.
    return torch.sym_max(1, torch.sym_min(num_tokens, sms * blocks_per_sm(streams, hidden)))


class BackwardPlan(NamedTuple):
    """A block takes `group` streams of a token; with all of them, it has the gradient of v."""

    streams: int
    group: int
    hidden: int
    threads: int
    steps: int
    staged: bool
    blocks: int
    residual: bool
    masked: bool
    packed: bool  # the gradients of k and v are one tensor


def fits(threads: int, steps: int, group: int, per_sm: int, device: Device) -> bool:
    """Whether `per_sm` blocks with `group` streams have registers and shared memory enough.

    The warps of a quarter of a multiprocessor share 512 registers per lane.
    """
    warps = math.ceil(per_sm * threads / (4 * WARP))
    registers = VECTOR * group * steps + OTHER_REGISTERS
    staged_bytes = per_sm * ((ROWS * group + 1) * threads * steps * VECTOR * 2 + 2048)
    return registers <= min(255, 512 // warps) and staged_bytes <= device.smem_per_block


def plan_bwd(
    streams: int, hidden: int, residual: bool, masked: bool, packed: bool, device: Device
) -> BackwardPlan:
    """As many streams as registers and shared memory hold, all if possible."""
    max_per_sm = blocks_per_sm(streams, hidden)
    divisors = [n for n in range(streams, 0, -1) if streams % n == 0]
    for group, per_sm in itertools.product(divisors, range(max_per_sm, 0, -1)):
        fitting = [cut for cut in cuts(hidden) if fits(*cut, group, per_sm, device)]
        if fitting:
            fewest = fitting[0][0] * fitting[0][1]
            threads, steps = max(cut for cut in fitting if cut[0] * cut[1] == fewest)
            break
    else:
        threads, steps = long_cut(hidden)
    groups = streams // group
    blocks = max(1, per_sm * device.num_sms // (groups + (groups > 1)))
    return BackwardPlan(
        streams, group, hidden, threads, steps, bool(fitting), blocks, residual, masked, packed
    )
