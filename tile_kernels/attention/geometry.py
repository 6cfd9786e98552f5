"""How the threads of a block share the windows that it compresses."""

from __future__ import annotations

from typing import NamedTuple

THREADS = 128
HELD = 8  # rows of a window that a thread holds, values and scores, 16 bytes each
MOST_GROUPS = 16
MOST_LANES = 64  # 1 KiB of a row; what groups exchange fits the shared memory of small GPUs
MOST_SLOTS = 64


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
        """Turns that a thread takes for its channels."""
        return self.vector // self.part

    @property
    def rows(self) -> int:
        """Rows that a thread holds, of all series."""
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

    Long windows are not so many that a block should have several at a time.
    """
    most_items = HELD // series
    groups = min(MOST_GROUPS, power_of_two(-(-window // most_items)))
    items = min(most_items, -(-window // groups))
    chunks = -(-window // (groups * items))
    lanes = min(power_of_two(-(-channels // vector)), max(1, THREADS // groups), MOST_LANES)
    slots = min(MOST_SLOTS, max(1, THREADS // (lanes * groups))) if chunks == 1 else 1
    return Geometry(channels, window, series, vector, groups, items, chunks, lanes, slots)


def blocks_per_sm(geo: Geometry, gradient: bool = False) -> int:
    """Blocks that share a multiprocessor's registers and shared memory.

    Few where the next window is copied meanwhile, which long windows are too large for.
    """
    if gradient:
        return 2
    return 4 if geo.chunks > 1 else 3 if geo.groups == 1 else 2
