"""Philox 4x32-10, the counter-based generator of cuRAND and PyTorch, on PyTorch tensors.

The same (seed, sequence) gives the same four words on every device, and no state is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # what is added to the key after each round
WORD = 0xFFFFFFFF


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of `x * factor`, both below 2^32."""
    low_half = (x & 0xFFFF) * factor  # below 2^48
    high_half = (x >> 16) * factor + (low_half >> 16)  # below 2^49
    return high_half >> 16, ((high_half & 0xFFFF) << 16) | (low_half & 0xFFFF)


def philox(seed: int | Tensor, sequence: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of each sequence: as `curand_init(seed, sequence, 0)` starts with.

    Args:
        seed: The key, 64 bits: an int, or an int64 tensor with one element on the same device.
        sequence: Any shape, int64, not negative.

    Returns:
        Four int64 tensors like `sequence`, with values in `0..2**32-1`.

    Example:
        >>> [hex(int(word)) for word in philox(0, torch.zeros((), dtype=torch.int64))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    key: list[int | Tensor] = [seed & WORD, seed >> 32 & WORD]
    zeros = torch.zeros_like(sequence)
    counter = [zeros, zeros, sequence & WORD, sequence >> 32]
    for _ in range(ROUNDS):
        high_0, low_0 = _product(counter[0], MULTIPLIERS[0])
        high_1, low_1 = _product(counter[2], MULTIPLIERS[1])
        counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0]
        key = [(word + step) & WORD for word, step in zip(key, KEY_STEPS)]
    return counter[0], counter[1], counter[2], counter[3]


def uniform(word: Tensor) -> Tensor:
    """A float32 in `(0, 1]` from a random word, with the roundings of `curand_uniform`.

    >>> uniform(torch.tensor([0, 2**32 - 1])).tolist()
    [1.1641532182693481e-10, 1.0]
    """
    return word.float() * 2.0**-32 + 2.0**-33
