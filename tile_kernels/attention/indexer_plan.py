"""What plans of the indexer share: tiles of queries and keys, and lists. Needs no TileLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tile_kernels.runtime.device import Device

KEYS = 128  # shares of the keys are multiples of it, and expanded keys have marks by it
GROUP = 32  # values of packed e2m1 that share an exponent
MAX_COLUMNS = 128  # of the product: heads of all queries of a block
WARPGROUP_COLUMNS = 256  # of a warpgroup of a pipelined block
# A CUDA prototype of this kernel on an H200, 64 heads x 128 in e4m3, 4096 queries x 65536 keys: 2
# warpgroups with 256 columns each 3690 us; 4 with 128 each 3890; 2 with 128 columns and two tiles
# in flight 3720 to 3850; warpgroups that multiply by turns 5180 to 5420.
WARPGROUPS = 2
STAGES = (4, 3, 2)  # tiles of keys, the one in use and those in flight
MANY_KEYS, FEW_KEYS = 128, 64  # of a tile
PIPELINED_HEADS = 64
# The same prototype: 12 tiles 3684 us, 8 tiles 3800, 18 tiles 3703.
PIPELINED_STAGES = (12, 8, 5, 4)
MANY_BLOCKS = 4  # of an SM, with few keys each
SPARE = 1280  # bytes of shared memory that are lost to alignment, and few others
BF16, E4M3, E2M1 = "bfloat16", "float8_e4m3fn", "e2m1"
SIZE = {BF16: 2, E4M3: 1}
# Which blocks a launch computes: all, exactly; all, with marks on those that are not exact; those
# that are marked.
ALL, MARKING, MARKED = "all", "marking", "marked"

P = TypeVar("P")


class Tile(NamedTuple):
    """What a block holds: `queries` of `padded` heads each, `stages` tiles of `keys` keys.

    `source` and `key_format` are the formats of q and k, `unit` what the matrix units take.
    `fenced`: these read shared memory through Hopper's async proxy, which needs a fence after
    writes.
    """

    source: str
    key_format: str
    unit: str
    heads: int
    padded: int
    depth: int
    keys: int
    queries: int
    stages: int
    fenced: bool

    @property
    def columns(self) -> int:
        """Rows (query, head) of the block, columns of the product."""
        return self.queries * self.padded

    @property
    def pipelined(self) -> bool:
        """Whether warps have roles: some copy keys, others multiply (see `logits/pipelined.py`)."""
        return self.columns > MAX_COLUMNS

    @property
    def warpgroup_queries(self) -> int:
        """Queries of a warpgroup of a pipelined block."""
        return WARPGROUP_COLUMNS // self.padded

    @property
    def threads(self) -> int:
        """A warp for 16 keys; in pipelined blocks for the columns of each warpgroup."""
        return 2 * self.keys * (WARPGROUPS if self.pipelined else 1)

    @property
    def all_threads(self) -> int:
        """With the warpgroup of a pipelined block that copies keys."""
        return self.threads + (2 * self.keys if self.pipelined else 0)

    @property
    def groups(self) -> int:
        """Groups of a row that have an exponent each, in e2m1."""
        return self.depth // GROUP

    @property
    def rounds(self) -> int:
        """Groups of a tile of keys for each thread."""
        return -(-self.keys * self.groups // self.threads)

    @property
    def expanded(self) -> bool:
        """Whether tiles change their format between memory and the matrix units."""
        return self.key_format != self.unit

    def row(self, source: str) -> tuple[int, str]:
        """A row of q or k in memory: its elements, eight codes of e2m1 in one, and their dtype."""
        return (self.depth // 8, "uint32") if source == E2M1 else (self.depth, source)

    @property
    def packed(self) -> bool:
        """Whether tiles come through registers: e2m1, a group for each thread."""
        return self.key_format == E2M1

    @property
    def bulk(self) -> bool:
        """Whether tiles are copied by Hopper's TMA, which one thread starts."""
        return self.fenced and not self.expanded

    @property
    def ahead(self) -> bool:
        """Whether a tile is expanded while the one before is multiplied: where products are
        asynchronous."""
        return self.expanded and self.fenced

    @property
    def slots(self) -> int:
        """Tiles that the matrix units may read from: all stages, or the expanded ones."""
        return 1 + self.ahead if self.expanded else self.stages

    @property
    def factor_slots(self) -> int:
        """Tiles whose keys have factors in shared memory; some are fetched one tile earlier."""
        return self.stages * (1 + self.ahead)

    @property
    def raw(self) -> tuple[int, int, int]:
        """The shape of tiles that wait for their expansion in shared memory."""
        waiting = self.expanded and not self.packed
        return (self.stages, self.keys, self.depth) if waiting else (1, 1, 1)

    @property
    def blocks(self) -> int:
        """Blocks that share the registers of an SM, if shared memory has room for them: one where
        a tile fills many registers."""
        if self.packed and (self.unit == BF16 or self.rounds > 2):
            return 1
        return MANY_BLOCKS if self.bulk and self.keys == FEW_KEYS else 2

    def bytes(self) -> int:
        """Shared memory that it takes."""
        rows = self.columns + self.slots * self.keys
        raw = self.raw[0] * self.raw[1] * self.raw[2]  # e4m3
        scales = self.columns + self.factor_slots * self.keys + 2 * self.queries * self.keys
        landing = 1024 if self.bulk else 0  # barriers, aligned
        return rows * self.depth * SIZE[self.unit] + raw + 4 * scales + landing


def flat(tile: Tile, *others: Any) -> tuple[Any, ...]:
    """The static arguments of a kernel whose plan has a tile, then `others`."""
    return (*tile, *others)


def with_tile(plan: Callable[..., P], static: tuple[Any, ...]) -> P:
    """The plan of the static arguments that `flat` gave."""
    size = len(Tile._fields)
    return plan(Tile(*static[:size]), *static[size:])


def tile_plan(
    source: str,
    key_format: str,
    exact: bool,
    heads: int,
    depth: int,
    max_queries: int,
    device: Device,
    query_bytes: Callable[[int], int] = lambda _: 0,
    shared_bytes: int = 0,
) -> tuple[Tile, int]:
    """The largest tile that fits, and the bytes of shared memory that are left.

    It must fit beside `query_bytes(keys)` for each query and `shared_bytes` for all. `exact`: in
    bfloat16, for any exponents of e2m1.
    """
    low = exact or source == BF16 or device.arch == "sm_80"  # which has no e4m3
    unit = BF16 if low else E4M3
    padded = max(8, 1 << (heads - 1).bit_length())
    queries = max(1, min(MAX_COLUMNS // padded, max_queries))
    fenced = device.arch == "sm_90a"
    numbers = STAGES[-1:] if key_format != unit else STAGES
    # Many blocks of an SM are better than large ones: some multiply while others sum over heads.
    # But not with fewer queries each, for which keys would be read more often.
    sizes = [(2, MANY_KEYS), (2, FEW_KEYS), (1, MANY_KEYS), (1, FEW_KEYS)]
    if fenced and key_format == unit:
        sizes = [(MANY_BLOCKS, FEW_KEYS), *sizes]
    for blocks, keys in sizes:
        room = device.smem_per_sm // blocks - 1024 if blocks > 1 else device.smem_per_block
        for halved in range(queries.bit_length() if blocks <= 2 else 1):
            for stages in numbers:
                fewer = queries >> halved
                tile = Tile(
                    source, key_format, unit, heads, padded, depth, keys, fewer, stages, fenced
                )
                left = room - tile.bytes() - fewer * query_bytes(keys) - shared_bytes - SPARE
                if left >= 0:
                    return tile, left
    less = ", or topk smaller," if shared_bytes else ""
    raise ValueError(
        f"q must have fewer heads or channels{less} for {device.name}, got {heads} heads of {depth}"
    )


def pipelined_tile(
    source: str, key_format: str, heads: int, depth: int, device: Device
) -> Tile | None:
    """The tile of a pipelined block, or None where there is no such kernel: without Hopper's matrix
    units and copies, and for few heads, whose sums would take too many registers."""
    unit = BF16 if source == BF16 else E4M3
    padded = 1 << (heads - 1).bit_length()
    if device.arch != "sm_90a" or key_format != unit or padded < PIPELINED_HEADS:
        return None
    queries = WARPGROUPS * WARPGROUP_COLUMNS // padded
    for stages in PIPELINED_STAGES:
        tile = Tile(
            source, key_format, unit, heads, padded, depth, FEW_KEYS, queries, stages, True
        )  # fmt: skip
        if tile.bytes() + SPARE <= device.smem_per_block:
            return tile
    return None


class ExpandPlan(NamedTuple):
    """Of the kernel that expands keys of e2m1."""

    depth: int


def plan_expand(depth: int, device: Device) -> ExpandPlan:  # noqa: ARG001
    """The same on every device."""
    return ExpandPlan(depth)


# ---- lists --------------------------------------------------------------------------------------

BIN_BITS = 9
BINS = 1 << BIN_BITS  # of a count by key; also the room for one


def list_entries(min_keys: int, threads: int) -> int:
    """Entries of a list for each thread, for `min_keys` of all: an even number, so that several are
    read at once, and no multiple of eight, so that neighbours read from different banks."""
    entries = -(-min_keys // threads)
    entries += entries % 2
    return entries if entries % 8 else entries + 2
