"""What an attention layer remembers of sequences while it decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels import attention
from tile_kernels.attention import KVCompressorState
from tile_kernels.modeling.attention.sequences import Places

PAGE = 64  # entries of a page
LAYOUTS = {"bf16": "bf16", "fp8": "v4"}  # of pages, by the name of the cache


class AttentionState(NamedTuple):
    """The cache of an attention layer: window, entries, keys of the indexer, open windows.

    Its size is fixed by the number of sequences and the longest context, and nothing of it moves,
    so that CUDA graphs can record what reads and writes it. `CompressedSparseAttention.state` and
    `HeavilyCompressedAttention.state` make one.

    Attributes:
        window: `[num_sequences, window, 1, 512 or 584]`: a ring of the last rows; the row of the
            token at position `t` is at `t` modulo `window`.
        entries: `[num_pages, 64, 1, 512 or 584]`: the entries so far, in pages that follow each
            other; or None, in a layer without compression.
        keys: The indexer's keys, `[num_sequences * max_entries + 1, ...]`: data, and scales where
            the format has them. The last row takes what is not to be kept. Empty without indexer.
        compressor: Tokens of windows that are not complete, or None.
        indexer: The same for the indexer, or None.
        lengths: `[num_sequences]`, int32: the tokens of each sequence so far.
    """

    window: Tensor
    entries: Tensor | None
    keys: tuple[Tensor, ...]
    compressor: KVCompressorState | None
    indexer: KVCompressorState | None
    lengths: Tensor

    @property
    def num_sequences(self) -> int:
        """How many sequences there is room for."""
        return self.lengths.shape[0]

    @property
    def max_entries(self) -> int:
        """Entries that there is room for in each sequence, whole pages of them."""
        return 0 if self.entries is None else self._num_rows // max(self.num_sequences, 1)

    @property
    def _num_rows(self) -> int:
        return 0 if self.entries is None else self.entries.shape[0] * self.entries.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors, as allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.window, self.lengths, *self.keys)
        if self.entries is not None:
            yield self.entries
        for each in (self.compressor, self.indexer):
            if each is not None:
                yield from each

    def reset(self, slots: Tensor | None = None) -> None:
        """Removes the tokens of some sequences, or of all.

        Args:
            slots: Indices of sequences; those outside the state are ignored. None: all sequences.
        """
        KVCompressorState((self.window, self.lengths)).reset(slots)
        for each in (self.compressor, self.indexer):
            if each is not None:
                each.reset(slots)

    # ---- writing --------------------------------------------------------------------------------

    def write_window(self, rows: Tensor, places: Places) -> None:
        """Writes rows to the ring buffers of the windows.

        Args:
            rows: `[n, 512]`, bfloat16.
            places: The sequence and the position of the token of each row.
        """
        size = self.window.shape[1]
        slots = places.sequence * size + places.position % size
        attention.kv_cache_append(self.window, _slots(slots, places.exists), rows)

    def write_entries(self, rows: Tensor, places: Places) -> None:
        """Writes entries to the cache; those past its end are dropped.

        Args:
            rows: `[n, 512]`, bfloat16.
            places: The sequence of each entry and its index there.
        """
        if self.entries is not None:
            slots = _slots(self._entry(places), self._kept(places))
            attention.kv_cache_append(self.entries, slots, rows)

    def write_keys(self, parts: tuple[Tensor, ...], places: Places) -> None:
        """Writes keys of the indexer to the cache; those past its end are dropped.

        Args:
            parts: `[n, ...]`: the data, and the scales where the format has them.
            places: The sequence of the entry of each key and its index there.
        """
        row = torch.where(self._kept(places), self._entry(places), self._num_rows)
        for kept, part in zip(self.keys, parts):
            # PyTorch does not index all dtypes of 8 bits.
            dtype = torch.uint8 if kept.element_size() == 1 else kept.dtype
            kept.view(dtype)[row] = part.view(dtype)

    def _entry(self, places: Places) -> Tensor:
        return places.sequence * self.max_entries + places.position

    def _kept(self, places: Places) -> Tensor:
        return places.exists & (places.position < self.max_entries)


def _slots(slots: Tensor, exists: Tensor) -> Tensor:
    return torch.where(exists, slots, -1).to(torch.int32)


def empty_keys(fmt: str, count: int, dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """Room for so many keys of the indexer, and a last row for those that are not kept."""
    rows = count + 1
    if fmt == "bf16":
        return (torch.zeros(rows, dim, dtype=torch.bfloat16, device=device),)
    if fmt == "e4m3":
        codes = torch.zeros(rows, dim, dtype=torch.float8_e4m3fn, device=device)
        return codes, torch.zeros(rows, device=device)
    codes = torch.zeros(rows, dim // 2, dtype=torch.int8, device=device)
    return codes, torch.zeros(rows, dim // 32, dtype=torch.uint8, device=device)
