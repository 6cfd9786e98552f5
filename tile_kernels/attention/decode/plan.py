"""Plans of attention while decoding. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tile_kernels.attention.softmax_plan import Schedule, require_hopper
from tile_kernels.runtime.device import Device

TILE = 64  # keys
PAIR = 2 * TILE  # keys that the consumers take at once
HEADS = 64  # of a block

# Splits that do not depend on the batch: lists of up to so many keys are in one piece, longer ones
# in splits of at most FIXED_KEYS. H200, 128 heads, 128 + 1024 keys, in one piece and in splits of
# 640: 128 requests of 2 queries 236.4 and 335.6 us, 32 requests 56.2 and 48.1, 8 requests 55.5 and
# 40.6, 1 request 54.3 and 39.1. 64 requests of 2 queries, 2048 keys in "v3.2": in one piece 243.5
# us, in two 298.2. 4 requests with 128 + 8192 keys in splits of 1152 62.7 us, 640 45.2, 512 55.2,
# 256 72.2.
WHOLE_KEYS, FIXED_KEYS = 2048, 640

PLAN_THREADS = 256
CANDIDATES = 32  # lengths of splits that `decode_plan` compares
# What `decode_plan` expects, in tiles: of a block beside its keys, and of parts that are combined.
# Other values were not compared. H200, as above: 8 requests 25.2 us, 32 47.6, 128 of 2 246.9.
FIXED_COST, COMBINE_COST = 5, 4


# `items [num_items, 4]`, int32: the request, its first pair of tiles, the end of its pairs, and the
# number of the split, -1 where there is none; `splits [num_requests, 2]`, int32: the first split of
# a request, and how many it has.
DecodePlan = tuple[Tensor, Tensor]


def num_pairs(length: int, extra_length: int) -> int:
    """Pairs of tiles of a request: extra keys begin with a new tile."""
    return (-(-length // TILE) - (-extra_length // TILE) + 1) // 2


def fixed_split(pairs: int, keys: int) -> tuple[int, int]:
    """The number of splits, and the pairs of a split, for splits of at most `keys`.

    `keys` is 0 for the default, which depends on the length of the list alone.
    """
    if not keys:
        keys = WHOLE_KEYS if pairs <= WHOLE_KEYS // PAIR else FIXED_KEYS
    count = max(-(-pairs // max(keys // PAIR, 1)), 1)
    return count, max(-(-pairs // count), 1)


class AttendPlan(NamedTuple):
    """Numbers of requests, tokens, heads, pages and indices are dynamic."""

    layout: str
    with_sink: bool
    with_length: bool
    with_extra: bool
    with_extra_length: bool
    planned: bool
    in_parts: bool
    cluster: int
    ahead: bool
    slack: int


def plan_attend(
    layout: str,
    with_sink: bool,
    with_length: bool,
    with_extra: bool,
    with_extra_length: bool,
    planned: bool,
    in_parts: bool,
    paired: bool,
    device: Device,
) -> AttendPlan:
    """`paired`: the heads of a query are an even number of blocks, which share converted rows.

    H200, 128 heads, one piece, without and with it: 128 requests of 2 queries 287.4 and 236.4 us, 8
    requests 67.4 and 55.5; 64 of 2 in "v3.2" 345.4 and 243.5.
    """
    require_hopper("sparse_attention_decode", device)
    return AttendPlan(
        layout, with_sink, with_length, with_extra, with_extra_length, planned, in_parts,
        2 if paired else 1, *Schedule()[:2],
    )  # fmt: skip


def plan_combine(
    with_sink: bool, planned: bool, with_length: bool, with_extra_length: bool, device: Device
) -> tuple[bool, bool, bool, bool]:
    return with_sink, planned, with_length, with_extra_length


def plan_plan(with_length: bool, with_extra_length: bool, device: Device) -> tuple[bool, bool]:
    return with_length, with_extra_length
