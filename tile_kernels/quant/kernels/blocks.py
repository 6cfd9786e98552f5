"""Casts with scales for blocks of rows and channels."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.quant.kernels.common import (
    LANES,
    PACKED,
    ROW,
    access,
    access_width,
    e2m1_prelude,
    encode_and_store,
    exponent_of,
    scale_of,
    storage,
    unit_of_factors,
    units,
    way_to_e2m1,
    write_scale,
)
from tile_kernels.quant.kernels.tokens import GIVEN, SCALES
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

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


def place_of(tile: Tile, tiles: int, team: Any) -> tuple[Any, Any, Any]:
    """In a kernel: the row of blocks, the thread's first channel, and its first row in the block.

    `tiles` of `tile` are as wide as a row; `team` counts teams over the whole grid.
    """
    tx = T.get_thread_binding()
    return (
        T.alloc_var(T.int32, init=team // tiles),
        T.alloc_var(T.int32, init=(team % tiles * tile.lanes + tx % tile.lanes) * tile.chunk),
        T.alloc_var(T.int32, init=tx % tile.team // tile.lanes),
    )


def scale_storage(layout: str, blocks: Any, groups: int, padded: Any) -> tuple[Any, str]:
    """The shape and the dtype of a buffer for the scales of `blocks x groups` blocks."""
    if layout == ROW:
        return (blocks, groups), "float32"
    if layout == PACKED:
        return (-(-groups // 4), padded), "uint8"
    return (groups, padded), "float32"


def team_max(tile: Tile, teams: int, dtype: str) -> Any:
    """A macro: the largest `value` of all threads of a block. All threads of the kernel call it."""
    warps = tile.team // LANES
    blocks = tile.lanes // tile.sharing
    # Distances between lanes of one block: neighbours, and the same channels of other rows.
    distances = [d for d in (1, 2, 4, 8, 16) if d < tile.sharing or d >= tile.lanes]

    @T.macro
    def reduced(value, tx):
        most = T.alloc_var(dtype, init=value)
        for d in distances:
            most = T.max(most, T.shfl_xor(most, d))
        if warps > 1:
            shared = T.alloc_shared((teams * warps, blocks), dtype)
            place = tx % tile.lanes // tile.sharing
            lane = tx % LANES
            if lane % min(tile.sharing, LANES) == 0 and lane < tile.lanes:
                shared[tx // LANES, place] = most
            T.sync_threads()
            for w in T.unroll(warps):
                most = T.max(most, shared[tx // tile.team * warps + w, place])
        return most

    return reduced


def write_block_scale(layout: str, groups: int) -> Any:
    """A macro: the scale of block `(m, g)`, with the padding after the last row and the last group.

    A packed scale is a byte of its buffer.
    """
    write = write_scale(layout)
    words = -(-groups // 4)

    @T.macro
    def write_byte(sf, m, g, value):
        sf[g // 4, m * 4 + g % 4] = T.cast(value, T.uint8)
        if groups % 4:
            if g == groups - 1:
                for i in T.unroll(4 * words - groups):
                    sf[words - 1, m * 4 + groups % 4 + i] = T.uint8(0)

    @T.macro
    def written(sf, m, g, blocks, padded, scale):
        if layout == PACKED:
            write_byte(sf, m, g, exponent_of(scale))
        else:
            write(sf, m, g, scale)
        if layout != ROW:
            if m == blocks - 1:
                for i in T.unroll(3):
                    if blocks + i < padded:
                        if layout == PACKED:
                            write_byte(sf, blocks + i, g, 0)
                        else:
                            write(sf, blocks + i, g, T.float32(0))

    return written


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
    way: str  # to e2m1


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
    way = way_to_e2m1(fmt, exact, device)
    return Plan(source, fmt, width, *tile, load, store, layout, round_sf, task, threads, way)


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    loads = {access_width(plan.source, plan.load)}
    stores = set() if plan.task == SCALES else {access_width(plan.fmt, plan.store)}
    if plan.task == GIVEN:
        loads.add(32)
    else:
        stores.add(8 if plan.layout == PACKED else 32)
    return tuple(sorted(loads)), tuple(sorted(stores))


@kernel(plan=plan, access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_blocks(*static: Any) -> Any:
    """A team per row of blocks and `lanes * chunk` channels; the values stay in registers."""
    plan = Plan(*static)
    tile = Tile(plan.rows, plan.channels, plan.chunk, plan.lanes, plan.team)
    chunk, steps = plan.chunk, tile.steps
    teams = plan.threads // tile.team
    tiles = -(-plan.width // tile.width)
    groups = -(-plan.width // plan.channels)
    dtype = storage(plan.source)[0]
    largest = team_max(tile, teams, "float32")
    scaled = scale_of(plan.fmt, plan.round_sf)
    written = write_block_scale(plan.layout, groups)
    encode = encode_and_store(plan.fmt, plan.width, chunk, plan.store, way=plan.way)
    unit = unit_of_factors(plan.way)

    rows, blocks, padded = T.dynamic("rows blocks padded")
    row_stride, sf_stride = T.dynamic("row_stride sf_stride")
    shape, scales = scale_storage(plan.layout, blocks, groups, padded)

    @T.prim_func
    def cast_row_of_blocks(
        x: T.StridedTensor[(rows, plan.width), (row_stride, 1), dtype],
        out: T.Tensor[(rows, units(plan.fmt, plan.width)), storage(plan.fmt)[0]],
        sf: T.StridedTensor[shape, (sf_stride, 1), scales],
        clamp_min: T.float32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(rows, plan.rows) * tiles, teams),
            threads=plan.threads,
            prelude=e2m1_prelude(plan.way),
        ) as block:
            T.assume(row_stride % plan.load == 0)
            tx = T.get_thread_binding()
            m, first, top = place_of(tile, tiles, block * teams + tx // tile.team)
            row = T.alloc_var(T.int32)
            raw = T.alloc_local((steps * chunk,), dtype)
            values = T.alloc_local((chunk,), T.float32)
            scale = T.alloc_local((2,), T.float32)
            inverse = T.alloc_local((1,), T.float32)
            amax = T.alloc_var(T.float32, init=T.float32(0))
            # Past an edge: the last row or the last channels again, which are in the same block.
            for s in T.unroll(steps):
                row = T.min(m * plan.rows + s * tile.at_a_time + top, rows - 1)
                for c in T.unroll(chunk // plan.load):
                    vector = T.min(first // plan.load + c, plan.width // plan.load - 1)
                    for v in T.vectorized(plan.load):
                        raw[s * chunk + c * plan.load + v] = x[row, vector * plan.load + v]
            g = first // plan.channels
            if plan.task == GIVEN:
                inverse[0] = T.float32(0)
                if m * plan.rows < rows and first < plan.width:
                    inverse[0] = T.ieee_fdiv(T.float32(1), sf[m, g])
            else:
                for i in T.unroll(steps * chunk):
                    amax = T.max(amax, T.abs(T.cast(raw[i], T.float32)))
                scaled(largest(amax, tx), clamp_min, scale)
                inverse[0] = T.ieee_mul(scale[1], T.float32(unit)) if unit != 1 else scale[1]
                if top == 0 and tx % tile.sharing == 0:
                    if m * plan.rows < rows and first < plan.width:
                        written(
                            sf, m, g, T.ceildiv(rows, plan.rows),
                            padded // 4 if plan.layout == PACKED else padded, scale[0],
                        )  # fmt: skip
            if plan.task != SCALES:
                for s in T.unroll(steps):
                    row = m * plan.rows + s * tile.at_a_time + top
                    if row < rows:
                        for v in T.unroll(chunk):
                            values[v] = T.cast(raw[s * chunk + v], T.float32)
                        encode(values, 0, inverse, chunk, out, row, first)

    return cast_row_of_blocks
