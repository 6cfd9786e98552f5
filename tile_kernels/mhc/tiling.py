"""How kernels on streams divide rows among threads and blocks. Needs no TileLang.

A thread owns some neighbouring columns of all streams of a token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tile_kernels.runtime.device import WARP, Device

REGISTERS = 65536  # of a multiprocessor
COLUMNS = 8  # of a thread at most: 16 bytes
MAX_THREADS = 512
MAX_ROW_THREADS = 256  # where a block takes a whole row
PART_THREADS = 128  # for a part of a row, where there are too few tokens to fill the device


def columns_of(hidden: int) -> int:
    """Columns of a thread and step: up to 16 bytes, and a divisor of the row."""
    return math.gcd(hidden, COLUMNS)


def access(count: int, size: int, alignment: int) -> int:
    """Elements of `size` bytes per load or store, where `count` lie together: up to 16 bytes."""
    return math.gcd(count, 16 // size, max(alignment // size, 1))


class Cut(NamedTuple):
    """How a row is divided: `parts` blocks of `threads`."""

    threads: int
    parts: int


def cut_row(hidden: int, num_tokens: int, device: Device, max_threads: int = MAX_THREADS) -> Cut:
    """As few idle threads as possible, then as few parts: a block reads long runs of memory.

    With few tokens a row is spread over as many blocks as it fills instead.
    """
    units = hidden // columns_of(hidden)
    if num_tokens < 2 * device.num_sms:
        threads = min(PART_THREADS, -(-units // WARP) * WARP)
        return Cut(threads, -(-units // threads))
    cuts = [Cut(t, -(-units // t)) for t in range(WARP, max_threads + 1, WARP)]
    return min(cuts, key=lambda cut: (cut.threads * cut.parts, cut.parts))


class RowSteps(NamedTuple):
    """How a block takes a whole row: in `steps` steps of its `threads`."""

    threads: int
    steps: int


def whole_row(hidden: int) -> RowSteps:
    """As few idle threads as possible, then as many threads as are allowed."""
    units = hidden // columns_of(hidden)
    options = range(WARP, MAX_ROW_THREADS + 1, WARP)
    threads = min(options, key=lambda t: (-(-units // t) * t, -t))
    return RowSteps(threads, -(-units // threads))


def resident(threads: int, streams: int, registers: int, registers_above_4: int) -> int:
    """Blocks per multiprocessor, by the registers of a thread up to 4 streams and above.

    The register limit leaves enough blocks that some read memory while others compute.
    """
    return max(1, REGISTERS // (threads * (registers if streams <= 4 else registers_above_4)))


class MixPlan(NamedTuple):
    """Of a kernel that mixes: `vector` columns and `mix_vector` mixes per access, and a `Cut`."""

    streams: int
    hidden: int
    vector: int
    mix_vector: int
    threads: int
    parts: int

    @staticmethod
    def access_bits(*static: int) -> tuple[tuple[int, ...], int]:
        """The widths of loads and stores."""
        plan = MixPlan(*static)
        return tuple(sorted({16 * plan.vector, 32 * plan.mix_vector})), 16 * plan.vector


def plan_mix(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    mix_alignment: int,
    device: Device,
    threads_above_4: int = MAX_THREADS,
) -> MixPlan:
    """Alignments are what divides all addresses, in bytes: of the streams, and of the mixes.

    A block of more than 4 streams has at most `threads_above_4` threads.
    """
    vector = access(columns_of(hidden), 2, alignment)
    mix_vector = access(streams, 4, mix_alignment)
    cut = cut_row(hidden, num_tokens, device, MAX_THREADS if streams <= 4 else threads_above_4)
    return MixPlan(streams, hidden, vector, mix_vector, *cut)


class GradientPlan(NamedTuple):
    """Of a kernel with sums over columns.

    With `added`, the streams' gradient is added to what the buffer holds.
    """

    streams: int
    hidden: int
    added: bool
    vector: int
    mix_vector: int
    threads: int
    steps: int

    @staticmethod
    def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The widths of loads and stores."""
        plan = GradientPlan(*static)
        loads = {16 * plan.vector, 32 * plan.mix_vector}
        return tuple(sorted(loads)), tuple(sorted({16 * plan.vector, 32}))


def plan_gradient(
    streams: int,
    hidden: int,
    added: bool,
    alignment: int,
    mix_alignment: int,
    device: Device,  # noqa: ARG001
) -> GradientPlan:
    """A block per token on any device: the order of sums must not depend on the device."""
    vector = access(columns_of(hidden), 2, alignment)
    mix_vector = access(streams, 4, mix_alignment)
    return GradientPlan(streams, hidden, added, vector, mix_vector, *whole_row(hidden))
