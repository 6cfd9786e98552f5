"""How the kernels of the convolution divide columns and tokens. Needs no TileLang.

Tokens that are a multiple of the dilation apart form a series, in which the taps are neighbours. A
thread takes a vector of columns and walks along a chunk of a series with the last values in
registers, so that a row is read once, and once more at the start of each chunk.
"""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import WARP, Device

VECTOR = 8  # columns of a thread: bfloat16 of 16 bytes
GRADIENT_VECTOR = 4  # of the gradients, which need three times the registers
MAX_TAPS = 8
NORM_WARPS = 8  # rows of a block
ROW_THREADS = 128
CHUNK = 32  # tokens of a series that a thread walks along
MAX_THREADS = 128


class Plan(NamedTuple):
    """`vector` columns for each of `threads`; `summed` tells whether streams are added."""

    streams: int
    hidden: int
    taps: int
    dilation: int
    dtype: str
    threads: int
    summed: bool


class NormPlan(NamedTuple):
    hidden: int


class RowPlan(NamedTuple):
    streams: int
    hidden: int
    dtype: str
    sums: int
    direct: bool


def threads_of(hidden: int, vector: int) -> int:
    """Whole warps: as few idle threads as possible, then as many as are allowed."""
    vectors = -(-hidden // vector)
    options = range(WARP, MAX_THREADS + 1, WARP)
    return min(options, key=lambda threads: (-(-vectors // threads) * threads, -threads))


def num_tiles(hidden: int, vector: int) -> int:
    """Blocks side by side that cover a row."""
    return -(-hidden // (vector * threads_of(hidden, vector)))


def num_sums(hidden: int) -> int:
    """Sums over parts of a row: one for each warp that computes gradients of it."""
    threads = threads_of(hidden, GRADIENT_VECTOR)
    return num_tiles(hidden, GRADIENT_VECTOR) * threads // WARP


def num_parts(num_tokens: int, dilation: int) -> int:
    """Chunks of all series: so many sums over tokens there are."""
    return dilation * (-(-num_tokens // (dilation * CHUNK)))


def plan(
    streams: int, hidden: int, taps: int, dilation: int, dtype: str, summed: bool, device: Device
) -> Plan:
    threads = threads_of(hidden, VECTOR)
    return Plan(streams, hidden, taps, dilation, dtype, threads, summed)


def plan_bwd(
    streams: int, hidden: int, taps: int, dilation: int, dtype: str, device: Device
) -> Plan:
    threads = threads_of(hidden, GRADIENT_VECTOR)
    return Plan(streams, hidden, taps, dilation, dtype, threads, False)


def plan_norms(hidden: int, device: Device) -> NormPlan:
    return NormPlan(hidden)


def plan_rows(streams: int, hidden: int, dtype: str, direct: bool, device: Device) -> RowPlan:
    return RowPlan(streams, hidden, dtype, num_sums(hidden), direct)
