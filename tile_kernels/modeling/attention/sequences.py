"""Sequences that follow each other in the rows of a tensor: where tokens and entries belong."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels.runtime import checks


class Places(NamedTuple):
    """Of tokens or entries: sequence, position in it (both int64), and whether there is one."""

    sequence: Tensor
    position: Tensor
    exists: Tensor


class Sequences(NamedTuple):
    """Tokens of sequences one after the other.

    Attributes:
        cu_seqlens: `[num_sequences + 1]`, int32: where sequences begin, and the end of the last.
        num_tokens: The tokens of all sequences together.
        length: The length of each sequence, where all have the same; else None.
    """

    cu_seqlens: Tensor
    num_tokens: int
    length: int | None

    @classmethod
    def in_rows(cls, x: Tensor, cu_seqlens: Tensor | None, hidden: int) -> Sequences:
        """The sequences of `x`, `[B, L, hidden]` or `[T, hidden]` with or without bounds.

        Raises:
            ValueError: If `x` has another shape, or comes with bounds that it cannot have.
        """
        if x.dim() not in (2, 3) or x.shape[-1] != hidden:
            raise ValueError(
                f"x must be [B, L, {hidden}] or [T, {hidden}], got shape {tuple(x.shape)}"
            )
        if cu_seqlens is None:
            count, length = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
            steps = torch.arange(count + 1, device=x.device, dtype=torch.int32)
            return cls(steps * length, count * length, length)
        if x.dim() == 3:
            raise ValueError(
                f"cu_seqlens are for x of two dimensions, but x has shape {tuple(x.shape)}"
            )
        checks.tensor("cu_seqlens", cu_seqlens, ("B + 1",), torch.int32, contiguous=True)
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens must have at least 2 elements, got {cu_seqlens.shape[0]}")
        checks.tensor_on("cu_seqlens", cu_seqlens, x.device)
        return cls(cu_seqlens, x.shape[0], None)

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def bounds(self) -> Tensor:
        """`cu_seqlens` for operators, which need a sequence: an empty one if there is none."""
        return self.cu_seqlens if self.num_sequences else self.cu_seqlens.repeat(2)

    def lengths(self) -> Tensor:
        """The tokens of each sequence: `[num_sequences]`, int64."""
        return self._bounds().diff()

    def num_entries(self, ratio: int) -> int:
        """Rows for the entries of all sequences: as many as there are, or as there could be."""
        if self.length is None:
            return self.num_tokens // ratio
        return self.num_sequences * (self.length // ratio)

    def tokens(self) -> Places:
        """Where each token belongs."""
        bounds = self._bounds()
        row = torch.arange(self.num_tokens, device=bounds.device)
        sequence = torch.searchsorted(bounds, row, right=True) - 1
        exists = (sequence >= 0) & (sequence < self.num_sequences)
        sequence = sequence.clamp(0, self.num_sequences - 1)
        return Places(sequence, (row - bounds[sequence]).clamp(min=0), exists)

    def entries(self, ratio: int) -> Places:
        """Where each entry of `ratio` tokens belongs, in the order of `attention.kv_compress`."""
        counts = self.lengths() // ratio
        ends = counts.cumsum(0)
        row = torch.arange(self.num_entries(ratio), device=ends.device)
        sequence = torch.searchsorted(ends, row, right=True)
        exists = sequence < self.num_sequences
        sequence = sequence.clamp(max=self.num_sequences - 1)
        return Places(sequence, torch.where(exists, row - (ends - counts)[sequence], 0), exists)

    def _bounds(self) -> Tensor:
        """The bounds, moved to where they are in order and within the tokens."""
        return self.cu_seqlens.long().clamp(0, self.num_tokens).cummax(0).values
