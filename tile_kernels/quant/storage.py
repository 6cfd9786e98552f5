"""How values and scales are stored, and how wide kernels can access them. Needs no TileLang.

Sources and formats go by name: `bfloat16` and `float32` are plain, `e4m3`, `e2m1` and `e5m6` come
with scales. Values are counted unpacked; `BITS` is what one takes in memory.
"""

from __future__ import annotations

import math
from typing import Any

from tile_kernels.runtime.device import Device

BITS = {"bfloat16": 16, "float32": 32, "e4m3": 8, "e2m1": 4, "e5m6": 12}
ACCESS_BITS = 128  # the widest global access
LANES = 32

GROUPS = (16, 32, 64, 128)  # channels of a scale that the lanes of a warp share out

# Layouts of scales: rows and columns of float32, columns and rows of four packed exponents, rows
# and columns of e4m3.
ROW, COLUMN, PACKED, PACKED_ROW = "row", "column", "packed", "packed_row"
E4M3_ROW, E4M3_COLUMN = "e4m3_row", "e4m3_column"


def is_packed(layout: str) -> bool:
    """Whether an element holds the exponents of four groups."""
    return layout in (PACKED, PACKED_ROW)


def is_by_rows(layout: str) -> bool:
    """Whether the scales of a row are neighbours, without padding."""
    return layout in (ROW, PACKED_ROW, E4M3_ROW)


def is_e4m3(layout: str) -> bool:
    """Whether scales are e4m3."""
    return layout in (E4M3_ROW, E4M3_COLUMN)


def scale_dtype(layout: str) -> str:
    """The dtype of an element of the scales."""
    return "int32" if is_packed(layout) else "float8_e4m3fn" if is_e4m3(layout) else "float32"


def scale_bits(dtype: str) -> int:
    """The bits of an element of scales of that dtype."""
    return 8 if dtype == "float8_e4m3fn" else 32


def row_padding(layout: str) -> int:
    """The multiple of rows that a column of scales is padded to: 16 bytes."""
    return 1 if is_by_rows(layout) else 16 if is_e4m3(layout) else 4


# Results of a cast: data and scales, scales alone, data by given scales, the values that come back.
CAST, SCALES, GIVEN, FAKE = "cast", "scales", "given", "fake"

# Rounding: to the nearest, or stochastic, by a hash of the values or by a seed.
NEAREST, HASHED, SEEDED = "nearest", "hashed", "seeded"

# Conversions from float32 to e2m1: `e2m1_code`, `e2m1_word`, `e2m1_pair` of the primitives.
ARITHMETIC, HALVES, INSTRUCTION = "arithmetic", "halves", "instruction"


def storage(name: str) -> tuple[str, int]:
    """The dtype of the buffer that holds such values, and its bits."""
    return {
        "bfloat16": ("bfloat16", 16),
        "float32": ("float32", 32),
        "e4m3": ("float8_e4m3fn", 8),
        "e2m1": ("uint8", 8),
        "e5m6": ("int32", 32),
    }[name]


def units(name: str, count: int) -> int:
    """How many elements of the buffer hold `count` values."""
    return count * BITS[name] // storage(name)[1]


def access(name: str, width: int, alignment: int, max_values: int) -> int:
    """Values per load or store of rows of `width`, whose first lies at a multiple of `alignment`.

    At most 16 bytes and `max_values`, and a divisor of the row, so that every row is accessed
    alike. Of e5m6 eight are 3 words, stored one by one, and 32 are 3 times 16 bytes.
    """
    if name == "e5m6":
        return 32 if width % 32 == 0 and alignment % 16 == 0 and max_values % 32 == 0 else 8
    bits = storage(name)[1]
    elements = math.gcd(ACCESS_BITS // bits, units(name, width), max(1, 8 * alignment // bits))
    return math.gcd(elements * bits // BITS[name], max_values)


def access_width(name: str, values: int) -> int:
    """The bits of an access of `values` values."""
    return 128 if (name, values) == ("e5m6", 32) else 32 if name == "e5m6" else values * BITS[name]


def cast_accesses(
    plan: Any, target: str, scale_bits: int, source_scale_bits: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bits of the loads and of the stores of a kernel that does `plan.task`.

    It stores values of `target`, and scales with `scale_bits` per access. It reads scales of the
    source with `source_scale_bits`, if it has any.
    """
    loads, stores = {access_width(plan.source, plan.load)}, set()
    if source_scale_bits:
        loads.add(source_scale_bits)
    if plan.task == GIVEN:
        loads.add(scale_bits)
    if plan.task != SCALES:
        stores.add(access_width(target, plan.store))
    if plan.task in (CAST, SCALES):
        stores.add(scale_bits)
    return tuple(sorted(loads)), tuple(sorted(stores))


def e2m1_conversion(fmt: str, exact: bool, device: Device) -> str:
    """The fastest conversion to e2m1.

    `exact`: products and vectors are such as `e2m1_word` needs them, 8 values at a time.
    """
    if fmt == "e2m1" and device.arch.startswith(("sm_10", "sm_12")):
        return INSTRUCTION
    return HALVES if fmt == "e2m1" and exact else ARITHMETIC


def threads_of_row(width: int, chunk: int, max_values: int) -> int:
    """Threads of a block that takes a whole row, `chunk` values at a time.

    As few idle ones as possible, then as few, with at most `max_values` each if that suffices.
    """
    chunks = -(-width // chunk)
    options = range(LANES, 1025, LANES)
    kept = [t for t in options if -(-chunks // t) * chunk <= max_values] or [1024]
    return min(kept, key=lambda t: (-(-chunks // t) * t, t if t >= 128 else 4096 - t))
