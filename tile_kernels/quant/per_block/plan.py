"""Tiles of the casts with scales for blocks of rows and channels. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.quant.storage import GIVEN, LANES, access, e2m1_conversion
from tile_kernels.runtime.device import Device

THREADS, FEW_THREADS = 256, 64  # of a kernel; few, where a thread does much with each value
STEPS = 4  # rows of a thread, where the block allows


class Tile(NamedTuple):
    """How threads lie over the blocks of `rows x channels` that share their rows.

    A team of threads takes the rows of one row of blocks, and `lanes * chunk` channels of them.
    Each thread has the same `chunk` neighbouring channels of several rows, `team / lanes` rows at a
    time.
    """

    rows: int
    channels: int
    chunk: int
    lanes: int
    team: int

    @property
    def width(self) -> int:
        """Channels of a team."""
        return self.lanes * self.chunk

    @property
    def at_a_time(self) -> int:
        """Rows that a team loads at a time."""
        return self.team // self.lanes

    @property
    def steps(self) -> int:
        """Rows of a thread."""
        return -(-self.rows // self.at_a_time)

    @property
    def sharing(self) -> int:
        """Neighbouring threads of one block."""
        return self.channels // self.chunk


def tile_of(
    rows: int, channels: int, chunk: int, steps: int = STEPS, threads: int = THREADS
) -> Tile:
    """A tile of `steps` rows per thread, more if need be, less if there are not as many.

    `channels` is `chunk` times a power of two, at most `threads`.
    """
    lanes = LANES
    while lanes > 1 and lanes * rows > threads * steps:
        lanes //= 2
    lanes = max(lanes, channels // chunk)
    wanted = (lanes << (rows - 1).bit_length()) // steps
    return Tile(rows, channels, chunk, lanes, min(threads, max(wanted, lanes, LANES)))


class Plan(NamedTuple):
    """`load` and `store` values per access; the rest is the problem and `Tile`."""

    source: str
    fmt: str
    width: int
    rows: int
    channels: int
    chunk: int
    lanes: int
    team: int
    load: int
    store: int
    layout: str
    round_sf: bool
    task: str
    threads: int
    conversion: str  # the conversion to e2m1


def plan(
    source: str,
    fmt: str,
    width: int,
    block: tuple[int, int],
    layout: str,
    round_sf: bool,
    task: str,
    alignment: int,
    out_alignment: int,
    device: Device,
) -> Plan:
    """16 bytes of the source per load; e4m3 of bfloat16 two of them, so that it stores 16 bytes."""
    chunk = 16 if (source, fmt) == ("bfloat16", "e4m3") else 8
    # 64 values per thread, or 32 in float32.
    steps = 2 * STEPS if (source, fmt) == ("bfloat16", "e2m1") else STEPS
    threads = FEW_THREADS if steps > STEPS and block == (32, 32) else THREADS
    tile = tile_of(*block, chunk, steps, threads)
    load = access(source, width, alignment, chunk)
    store = access(fmt, width, out_alignment, chunk)
    # Powers of two times bfloat16.
    exact = source == "bfloat16" and round_sf and task != GIVEN and store == chunk
    conversion = e2m1_conversion(fmt, exact, device)
    return Plan(source, fmt, width, *tile, load, store, layout, round_sf, task, threads, conversion)
