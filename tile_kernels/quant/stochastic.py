"""Stochastic rounding to the bit: 16 random bits for each value, and what they make of it.

A value between two neighbours of the target's grid is rounded away from zero if
`frac + R / 65536 >= 1`, where `frac` is its position between them and `R` its random bits: up with
the probability `frac`, to 16 bits. Subnormal numbers have a grid too. Magnitudes beyond the largest
finite number become that; NaN stays NaN.

The bits come from a generator with a counter, Philox 4x32-10: the key is the seed, the counter the
position, so that any order of evaluation and any device give the same. Without a seed they are a
hash of four neighbouring values and their position, with which TileKernels feeds an instruction of
Blackwell's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime.philox import philox

_MASK = 0xFFFFFFFF
HASH = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
PER_COUNTER = 8  # values that the four words of one counter serve
PER_HASH = 4  # values of a hash
NAN_BITS = 0x7FFFFFFF  # every NaN counts as this one

# Mantissa bits that are dropped, codes that an exponent of float32 is off, the least normal
# exponent, steps of the subnormal grid in 1, the largest code, that of NaN.
GRIDS = {
    "bfloat16": (16, 0, 1, 2.0**133, 0x7F7F, 0x7FC0),
    "e4m3": (20, 120 << 3, 121, 2.0**9, 0x7E, 0x7F),
    "e2m1": (22, 126 << 1, 127, 2.0, 7, 7),
}


def seeded_bits(seed: Tensor | int, rows: Tensor, width: int) -> Tensor:
    """16 bits for each of `width` columns of rows with these numbers: int32 `[len(rows), width]`.

    Column `c` of row `r` has half `c % 2` of word `c % 8 // 2` of the sequence `2**32 r + c // 8`.
    """
    counters = torch.arange(-(-width // PER_COUNTER), device=rows.device)
    words = torch.stack(philox(seed, (rows[:, None] << 32) + counters[None, :]), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.flatten(1)[:, :width].int()


def reversed_halves(bits: Tensor) -> Tensor:
    """16 bits in the opposite order.

    >>> hex(int(reversed_halves(torch.tensor(0x238D))))
    '0xb1c4'
    """
    result = torch.zeros_like(bits)
    for i in range(16):
        result |= (bits >> i & 1) << 15 - i
    return result


def hash_words(quads: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words, int64, of the patterns of four float32, int64 `[..., 4]`, and their index.

    >>> x = torch.tensor([1.1, -0.3, 2.7, 0.05]).view(torch.int32).long() & 0xFFFFFFFF
    >>> [hex(int(word)) for word in hash_words(x, torch.tensor(1))]
    ['0xcddc0d09', '0x9a933217']
    """
    factors = torch.tensor(HASH, device=quads.device)
    h = (quads * factors).sum(-1) + index & _MASK
    h = (h ^ h >> 23) * 0x7FEB352D & _MASK
    h = h ^ h >> 16
    w0, w1 = h * 0x846CA68B & _MASK, h * 0xD35A2D97 & _MASK
    return w0 ^ w0 >> 11, w1 ^ w1 >> 11


def hashed_bits(values: Tensor, fmt: str) -> Tensor:
    """16 bits for each float32 of `[rows, width]`: of itself, its three neighbours and its column.

    Values past the end of a row count as 0.
    """
    missing = -values.shape[1] % PER_HASH
    padded = torch.nn.functional.pad(values, (0, missing))
    patterns = padded.view(torch.int32).long() & _MASK
    patterns = patterns.masked_fill(padded.isnan(), NAN_BITS).unflatten(1, (-1, PER_HASH))
    index = torch.arange(patterns.shape[1], device=values.device)
    w0, w1 = hash_words(patterns, index)
    if fmt == "bfloat16":
        bits = [w0 & 0xFFFF, w0 >> 16, w1 & 0xFFFF, w1 >> 16]
    else:
        first, second = w0 & 0xFFFF, w0 >> 16
        if fmt == "e2m1":  # bytes 2 and 0, 3 and 1
            first, second = w0 >> 8 & 0xFF00 | w0 & 0xFF, w0 >> 16 & 0xFF00 | w0 >> 8 & 0xFF
        bits = [first, reversed_halves(first), second, reversed_halves(second)]
    return torch.stack(bits, -1).flatten(1)[:, : values.shape[1]].int()


def rounded_codes(values: Tensor, bits: Tensor, fmt: str) -> Tensor:
    """float32 and 16 bits each to codes of `bfloat16`, `e4m3` or `e2m1`: int32, with their sign.

    >>> rounded_codes(torch.tensor([1.5, 1.5]), torch.tensor([0x7FFF, 0x8000]).int(), "e2m1")
    tensor([3, 3], dtype=torch.int32)
    >>> rounded_codes(torch.tensor([1.25, 1.25]), torch.tensor([0x7FFF, 0x8000]).int(), "e2m1")
    tensor([2, 3], dtype=torch.int32)
    """
    dropped, rebias, least, steps, largest, nan = GRIDS[fmt]
    pattern = values.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    # The upper 16 of the dropped bits meet the random ones; a carry goes to the next code.
    normal = ((magnitude.long() + (bits.long() << dropped - 16)) >> dropped) - rebias
    if fmt == "bfloat16":  # its subnormal grid is that of float32's exponents
        codes = normal
    else:
        scaled = values.abs().clamp(max=2.0**20) * (steps * 65536)
        subnormal = (scaled.nan_to_num().long() + bits.long()) >> 16
        codes = torch.where(magnitude >> 23 >= least, normal, subnormal)
    codes = codes.clamp(max=largest).int()
    sign_bit = {"bfloat16": 15, "e4m3": 7, "e2m1": 3}[fmt]
    codes = codes | (pattern < 0).int() << sign_bit
    return codes.masked_fill(values.isnan(), nan)


def bits_of(values: Tensor, fmt: str, seed: Tensor | int | None) -> Tensor:
    """The random bits of float32 `[rows, width]`, of a hash or of a seed."""
    if seed is None:
        return hashed_bits(values, fmt)
    rows = torch.arange(values.shape[0], device=values.device)
    return seeded_bits(seed, rows, values.shape[1])
