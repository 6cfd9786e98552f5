"""How the threads of a block share the windows that it compresses. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import Device

THREADS = 128
MAX_ROWS = 8  # of a window in the registers of a thread, values and scores, 16 bytes each
MAX_GROUPS = 16
MAX_LANES = 64  # 1 KiB of a row; what groups exchange fits the shared memory of small GPUs
MAX_SLOTS = 64


def power_of_two(number: int) -> int:
    """The smallest power of two from `number` up."""
    return 1 << max(number - 1, 0).bit_length()


class Geometry(NamedTuple):
    """A thread has `vector` channels of `items` tokens of a window, in each series.

    `lanes` neighbouring threads have the channels of a block, `groups` of them the tokens, `slots`
    of those different windows. Windows too long for one block's registers take several `chunks`.
    What a window's result is computed from, and in which order, depends on its length alone.
    """

    channels: int
    window: int
    series: int
    vector: int
    groups: int
    items: int
    chunks: int
    lanes: int
    slots: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.groups * self.slots

    @property
    def width(self) -> int:
        """Channels of a block."""
        return self.lanes * self.vector

    @property
    def part(self) -> int:
        """Channels that are computed at a time: 16 bytes of float32."""
        return min(self.vector, 4)

    @property
    def parts(self) -> int:
        """Steps that a thread takes for its channels."""
        return self.vector // self.part

    @property
    def rows(self) -> int:
        """Rows in the registers of a thread, of all series."""
        return self.series * self.items

    @property
    def exact(self) -> bool:
        """Whether all threads have as many tokens."""
        return self.groups * self.items * self.chunks == self.window

    @property
    def blocks_across(self) -> int:
        """Blocks that share the channels of a window."""
        return -(-self.channels // self.width)


def geometry(channels: int, window: int, series: int, vector: int) -> Geometry:
    """Few groups, so that little is exchanged, then as many channels as there are threads left.

    A block takes several windows at a time only where they fit into its registers.
    """
    max_items = MAX_ROWS // series
    groups = min(MAX_GROUPS, power_of_two(-(-window // max_items)))
    items = min(max_items, -(-window // groups))
    chunks = -(-window // (groups * items))
    lanes = min(power_of_two(-(-channels // vector)), max(1, THREADS // groups), MAX_LANES)
    slots = min(MAX_SLOTS, max(1, THREADS // (lanes * groups))) if chunks == 1 else 1
    return Geometry(channels, window, series, vector, groups, items, chunks, lanes, slots)


def blocks_per_sm(geo: Geometry, gradient: bool = False) -> int:
    """Blocks that share a multiprocessor's registers and shared memory.

    They are few where the next window is prefetched, for which long windows are too large.
    """
    if gradient:
        return 2
    return 4 if geo.chunks > 1 else 3 if geo.groups == 1 else 2


def bits_of(dtype: str) -> int:
    """The width of one number."""
    return 16 if dtype == "bfloat16" else 32


def shared_shapes(geo: Geometry) -> tuple[tuple[int, ...], ...]:
    """Shared memory of a block, in float32: biases, the sums of groups and those of windows."""
    staged = (geo.series, geo.groups * geo.items, geo.parts, geo.lanes * geo.part)
    exchange = (1, 1, 1) if geo.groups == 1 else (3, geo.groups, geo.slots * geo.width)
    return staged if geo.chunks == 1 else (1, 1, 1, 1), exchange, (3, exchange[2])


def can_copy_ahead(geo: Geometry, dtype: str, blocks: int, device: Device, others: int = 0) -> bool:
    """Whether the next window can be prefetched to shared memory.

    `blocks` of a multiprocessor must have room for the rows of one more window each, beside
    `others` bytes, and threads must have 16 bytes of a row.
    """
    rows = 2 * geo.rows * geo.threads * 16
    shared = sum(4 * math.prod(shape) for shape in shared_shapes(geo))
    room = device.smem_per_sm // blocks - 1024 - shared - others
    return geo.chunks == 1 and geo.vector * bits_of(dtype) == 128 and rows <= room


class WindowPlan(NamedTuple):
    """The static arguments of kernels that walk over windows."""

    channels: int
    window: int
    series: int
    ragged: bool
    dtype: str
    out_dtype: str
    vector: int
    ahead: bool  # copy the rows of the next window while one is computed
    workers: int = 0  # blocks that share the windows, if that is not up to the launch

    @property
    def geometry(self) -> Geometry:
        """How threads share windows."""
        return geometry(self.channels, self.window, self.series, self.vector)
