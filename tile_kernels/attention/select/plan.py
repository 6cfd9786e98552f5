"""Plan of the selection of keys. Needs no TileLang."""

from __future__ import annotations

from typing import Any, NamedTuple

from tile_kernels.attention.indexer_plan import (
    BINS,
    MARKED,
    STAGES,
    Tile,
    flat,
    list_entries,
    tile_plan,
)
from tile_kernels.runtime.device import Device

MAX_QUERIES = 4  # of a block
TOGETHER = 4  # tiles of scores that lists take at a time
SLOTS = TOGETHER + 1  # for them, and one more, which comes while lists take the others
SPARE = 64  # entries that a list may keep beside the best before the end, which is less work
SPARE_TILES = 1  # of keys that a list has room for beside those it must: it fills up less often
MAX_OWN = 18  # entries of a list for each thread, if there is more room


class Plan(NamedTuple):
    """A tile, and what lists need.

    `capacity`: entries of a list. `short`: it has keys in 16 bits, counted from the block's first.
    `role`: which blocks a launch computes.
    """

    tile: Tile
    topk: int
    capacity: int
    short: bool
    role: str


def plan(
    source: str,
    key_format: str,
    heads: int,
    depth: int,
    topk: int,
    short: bool,
    role: str,
    device: Device,
) -> tuple[Any, ...]:
    """The fields of a `Plan`, those of its tile one by one."""

    def min_entries(keys: int) -> int:
        """Entries of a list for each thread: for the best, what comes at a time, and some more."""
        return list_entries(topk + (TOGETHER + SPARE_TILES) * keys, 2 * keys)

    entry = 4 + (2 if short else 4)  # bytes

    def grown(entries: int, tile: Tile, left: int) -> int:
        """As many as fit into `left` bytes beyond the least, up to a bound."""
        max_entries = min_entries(tile.keys) + left // (entry * tile.threads * tile.queries)
        while (more := list_entries((entries + 1) * tile.threads, tile.threads)) <= min(
            max_entries, MAX_OWN
        ):
            entries = more
        return entries

    tile, left = tile_plan(
        source, key_format, role == MARKED, heads, depth, MAX_QUERIES, device,
        query_bytes=lambda keys: entry * 2 * keys * min_entries(keys) + 4 * (SLOTS - 2) * keys,
        shared_bytes=4 * BINS,
    )  # fmt: skip
    entries = grown(min_entries(tile.keys), tile, left)
    for stages in STAGES[1:]:  # long lists are worth more than many keys in flight
        fewer = tile._replace(stages=stages)
        if stages < tile.stages and entries * tile.threads < 2 * (topk + tile.keys):
            left += tile.bytes() - fewer.bytes()
            tile, entries = fewer, grown(entries, fewer, left)
    return flat(*Plan(tile, topk, entries * tile.threads, short, role))
