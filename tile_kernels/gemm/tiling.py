"""Plans that the matrix products share. Needs no TileLang."""

from __future__ import annotations

from typing import Any, NamedTuple

from tile_kernels.runtime.device import Device

BLOCK = 128  # rows or columns that share a scale of b, and rows at which groups start
CODE_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2}
STEP_BYTES = 128  # of a row of an operand that one step of the loop multiplies
HOPPER = "sm_90a"

# Which group a row belongs to.
DENSE, CONTIGUOUS, PSUM, MASKED, K_GROUPED = "dense", "contiguous", "psum", "masked", "k_grouped"
# Scales of an operand: none; one for each row; one for 128 rows, contiguous or with the last two
# dimensions swapped. `_ue8m0`: four packed exponents in a word instead of a float32.
NONE, ROW, ROW_UE8M0 = "none", "row", "row_ue8m0"
SQUARE, SQUARE_TRANSPOSED = "square", "square_transposed"
SQUARE_UE8M0, SQUARE_TRANSPOSED_UE8M0 = "square_ue8m0", "square_transposed_ue8m0"
# As SQUARE, of packed e2m1 codes with a 4-bit shift for each 32 channels of a row: a code is
# multiplied by two to the power of `shift + LEAST_SHIFT`, or it is zero or NaN for two shifts.
SQUARE_E2M1 = "square_e2m1"
GROUP, LEAST_SHIFT, ZERO_SHIFT, NAN_SHIFT = 32, -5, 14, 15


class Tile(NamedTuple):
    """How a product is divided.

    `rows` (64 or 128) and `columns` (128 or 256) of the result are computed by one block in one
    pass, with a ring of `stages` operand tiles in shared memory. `panel` tiles of rows run next to
    each other, so that concurrent blocks share operands in L2. With `separate`, each warpgroup
    stores its rows without waiting for the other. `cluster` blocks receive the same tile of `a` by
    one multicast copy.

    With `ahead`, the barrier of the next stage is awaited while a product runs. With `alternate`,
    the two warpgroups issue their products in turn, so that one promotes its sums while the tensor
    cores work for the other; it needs `separate` and 128 rows. With `copied_scales`, the warp that
    copies operands also writes the scales of 128x128 blocks to shared memory.
    """

    rows: int
    columns: int
    stages: int
    panel: int
    separate: bool
    cluster: int
    ahead: bool = False
    alternate: bool = False
    copied_scales: bool = False


class Problem(NamedTuple):
    """What a kernel is specialised for.

    `m` is 0 where the number of rows is dynamic, `k` is 0 where the number of channels is.
    `addend` names the tensor that is added to the product: none, "c", or "d" itself.
    """

    layout: str
    dtype: str
    m: int
    n: int
    k: int
    a_stride: int
    d_stride: int
    out_dtype: str
    addend: str
    a_scale: str
    b_scale: str


class Plan(NamedTuple):
    """The fields of `Problem`, then those of `Tile`, then the number of blocks."""

    layout: str
    dtype: str
    m: int
    n: int
    k: int
    a_stride: int
    d_stride: int
    out_dtype: str
    addend: str
    a_scale: str
    b_scale: str
    rows: int
    columns: int
    stages: int
    panel: int
    separate: bool
    cluster: int
    ahead: bool
    alternate: bool
    copied_scales: bool
    blocks: int

    @property
    def depth(self) -> int:
        """Channels of one step."""
        return STEP_BYTES // CODE_BYTES[self.dtype]


# Tiles by purpose, H200, device time with cold L2. FP8 dense, 4096 rows, n 4096, k 7168: 176.0 us
# with all three options, 178.1 without `alternate`, 181.1 without any; n 7168, k 2048: 96.0, 95.7,
# 101.4. Panels of 8 tiles, 3 stages and pairs of blocks that share an operand were slower.
WIDE_FP8 = Tile(128, 256, 4, 4, True, 1, ahead=True, alternate=True, copied_scales=True)
# 8 x 4096 rows, n 4096, k 7168: 1439 us, without `alternate` 1479 (joint stores), without any
# 1511; 32 x 512 rows: 724, 748, 765; pairs of blocks that share `b` 1478.
WIDE_FP8_GROUPED = WIDE_FP8._replace(panel=8)
# bfloat16 operands are not promoted: nothing to alternate with. Not timed with `ahead`.
WIDE = Tile(128, 256, 4, 4, separate=True, cluster=1)
WIDE_GROUPED = Tile(128, 256, 4, 8, separate=False, cluster=1)
# Row scales of both operands take twice the arithmetic and registers of a half as wide tile. Sums
# over groups, 4 x 8192 rows, 4096 x 7168: 2146 us with `ahead`, 2283 without.
NARROW = Tile(128, 128, 5, 8, separate=True, cluster=1, ahead=True)
NARROW_FLOAT32 = Tile(128, 128, 6, 8, separate=True, cluster=1, ahead=True)
# Few rows: the weights stream through a deep ring. 128 rows, n 4096, k 7168: 21.0 us, 6 stages
# 22.9, 128 x 128 29.8, 128 x 256 45.1.
# e2m1, 32 x 16 rows: 225.4 us with `ahead`, 235.3 without.
FEW_ROWS = Tile(64, 128, 8, 8, separate=True, cluster=1, ahead=True)

# Set by the benchmark to time other tiles; None: what the plan chooses.
override: Tile | None = None


def with_tile(problem: Problem, tile: Tile, device: Device) -> Plan:
    """The plan with this tile, or with the one that the benchmark asks for."""
    if device.arch != HOPPER:
        raise ValueError(
            f"no kernel for {device.name} ({device.arch}): these products need a Hopper GPU "
            f"({HOPPER})"
        )
    tile = override or tile
    return Plan(*problem, *tile, device.num_sms // tile.cluster * tile.cluster)


def wide(problem: Problem) -> Tile:
    """The widest tile that the registers allow; those that expand e2m1 take some."""
    if problem.b_scale in (ROW, ROW_UE8M0, SQUARE_E2M1):
        return NARROW_FLOAT32 if problem.out_dtype == "float32" else NARROW
    grouped = problem.layout in (CONTIGUOUS, PSUM)
    if problem.a_scale == NONE:
        return WIDE_GROUPED if grouped else WIDE
    return WIDE_FP8_GROUPED if grouped else WIDE_FP8


def plan_wide(*problem: Any) -> Plan:
    """The fields of `Problem`, then the device. The number of rows does not matter."""
    *fields, device = problem
    given = Problem(*fields)
    return with_tile(given, wide(given), device)
