"""Plan of rotary position embedding. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.runtime.device import Device

BITS = {"bfloat16": 16, "float32": 32}
ACCESS_BITS = 128
# H200, 8192 tokens, 32 heads of 128 and 8 of the key in place: 44.1 us. With query and key in the
# same blocks: one unit per thread 46.5, 256 threads 47.8; two units whose loads are in flight at
# the same time 52.1, four 56.6.
THREADS = 128


class Plan(NamedTuple):
    """A thread rotates `vector` pairs of a head at a time: one unit.

    `positions` is the dtype of given positions, or empty. `batched`: there is a dimension before
    the tokens.
    """

    dtype: str
    cache_dtype: str
    dim: int
    vector: int
    cache_vector: int
    interleaved: bool
    keyed: bool
    positions: str
    batched: bool
    in_place: bool


def access(dtype: str, half: int, alignment: int) -> int:
    """Values per access: a divisor of half a head, at most 16 bytes, aligned."""
    values = ACCESS_BITS // BITS[dtype]
    return math.gcd(values, half, max(1, 8 * alignment // BITS[dtype]))


def plan(
    dtype: str,
    cache_dtype: str,
    dim: int,
    interleaved: bool,
    keyed: bool,
    positions: str,
    batched: bool,
    in_place: bool,
    alignment: int,
    cache_alignment: int,
    device: Device,
) -> Plan:
    vector = access(dtype, dim // 2, alignment)
    cache_vector = math.gcd(vector, access(cache_dtype, dim // 2, cache_alignment))
    return Plan(
        dtype, cache_dtype, dim, vector, cache_vector, interleaved, keyed, positions, batched,
        in_place,
    )  # fmt: skip
