"""Rows of a table that is spread over the ranks, fetched by their global index."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels.ep.agreement import Settings, agree, checked, unreachable
from tile_kernels.ep.arguments import as_flag
from tile_kernels.ep.base import BufferBase
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.exchange import column_major
from tile_kernels.ep.rows import Field, as_bytes, field_of, pack, unpack
from tile_kernels.runtime import checks

STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


class _Lookup(NamedTuple):
    """The rank and the row there of each index, and the number of indices for each rank."""

    owners: Tensor
    local: Tensor
    counts: list[int]


class EngramStore:
    """The table. Rank `r` holds the global rows `r * n .. (r + 1) * n - 1`.

    Fetching is collective on these engines: every rank requests rows from their owners
    and replies to the others.
    """

    def __init__(
        self, engine: Engine, identity: Settings, num_gpu_bytes: int, num_cpu_bytes: int
    ) -> None:
        self._engine, self._identity = engine, identity
        self._gpu_bytes = num_gpu_bytes
        self._cpu_bytes = num_cpu_bytes
        self._rows: Tensor | None = None
        self._sf: Tensor | None = None

    def write(self, storage: Tensor, sf: Tensor | None) -> None:
        """Replace this rank's rows `[n, H]`; `sf` `[R * n, P]` is the same everywhere."""
        settings, error = checked(lambda: self._check_storage(storage, sf))
        settings = {**self._identity, **(settings or {})}
        agree(self._engine, "ElasticBuffer.engram_write", settings, error)
        self._rows = storage.cpu().clone()
        self._sf = None if sf is None else sf.clone()
        self._engine.barrier("ElasticBuffer.engram_write")

    def _check_storage(self, storage: Tensor, sf: Tensor | None) -> Settings:
        checks.tensor("storage", storage, ("num_entries", "hidden"), STORED, contiguous=True)
        num_bytes = storage.numel() * storage.element_size()
        if num_bytes > self._cpu_bytes:
            raise ValueError(
                f"storage must fit num_cpu_bytes = {self._cpu_bytes}, got {num_bytes} bytes"
            )
        if (storage.dtype == torch.float8_e4m3fn) != (sf is not None):
            raise ValueError("sf must be given for float8 storage, and only then")
        if sf is not None:
            num_rows = self._engine.size * storage.shape[0]
            dims = ("num_ranks * num_entries", "num_packs")
            checks.tensor("sf", sf, dims, shape=(num_rows, None))
            if sf.element_size() != 4:
                raise TypeError(f"sf must have elements of 4 bytes, got {sf.dtype}")
        return {
            "storage": str(field_of(storage)),
            "num_entries": storage.shape[0],
            "sf": "none" if sf is None else str(field_of(sf)),
        }

    def fetch(self, indices: Tensor, check: Callable[[], None]) -> tuple[Tensor, Tensor | None]:
        """The rows `[T, Q * H]` at global `indices` `[T, Q]`, and their scales `[T, Q * P]`.

        `check` raises on bad arguments of the call, an error of all ranks.
        """

        def checked_lookup() -> _Lookup:
            check()
            return self._lookup(indices)

        call = "ElasticBuffer.engram_fetch"
        lookup, error = checked(checked_lookup)
        counts = lookup.counts if lookup else None
        recv_counts = agree(self._engine, call, self._identity, error, counts).counts
        if lookup is None or self._rows is None:
            raise unreachable()
        order = lookup.owners.argsort(stable=True)
        packed = pack([lookup.local[order, None]])
        requests = self._engine.exchange(packed, lookup.counts, recv_counts, call)
        (local,) = unpack(requests, [Field(torch.int64, 1)])
        replies = as_bytes(self._rows).index_select(0, local.flatten())
        rows = self._engine.exchange(replies, recv_counts, lookup.counts, call)
        restored = torch.empty_like(rows).index_copy_(0, order, rows)
        (data,) = unpack(restored, [field_of(self._rows)])
        num_tokens, num_rows = indices.shape
        data = data.view(num_tokens, num_rows * self._rows.shape[1]).to(indices.device)
        if self._sf is None:
            return data, None
        scales = self._sf.to(indices.device)[indices.long().flatten()]
        return data, scales.view(num_tokens, num_rows * self._sf.shape[1])

    def _lookup(self, indices: Tensor) -> _Lookup:
        if self._rows is None:
            raise ValueError("engram_write must come first")
        num_entries, hidden = self._rows.shape
        last = self._engine.size * num_entries - 1
        checks.tensor("indices", indices, ("num_tokens", "num_rows"), torch.int32)
        checks.in_range("indices", indices, 0, last)
        size = indices.numel() * hidden * self._rows.element_size()
        if size > self._gpu_bytes:
            raise ValueError(
                f"the fetched rows must fit the {self._gpu_bytes} bytes that are not "
                f"num_cpu_bytes, got {size} bytes"
            )
        rows = indices.cpu().long().flatten()
        owners = rows.div(max(1, num_entries), rounding_mode="floor")
        counts = torch.bincount(owners, minlength=self._engine.size).tolist()
        return _Lookup(owners, rows - owners * num_entries, counts)


class EngramMethods(BufferBase):
    """The Engram methods of `ElasticBuffer`."""

    _engram: EngramStore

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Stores this rank's rows of the table. Collective.

        Args:
            storage: `[n, H]`, with the same `n` on all ranks.
            sf: `[R * n, P]`, of 4-byte elements and equal on all ranks: the scales of float8 rows;
                or None.
        """
        self._check_alive("ElasticBuffer.engram_write")
        with checks.named("ElasticBuffer.engram_write"):
            self._check_all_active()
        self._engram.write(storage, sf)

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Fetches rows of the table. Collective on these engines.

        Args:
            indices: `[T, Q]`, int32: global rows.
            num_qps: At most `num_allocated_qps`; has no effect on these engines.
            use_tma_aligned_col_major_sf: Whether the scale factors are column-major.

        Returns:
            A function that returns `[T, Q * H]` and scale factors `[T, Q * P]`, or None.
        """
        self._check_alive("ElasticBuffer.engram_fetch")
        column_major_sf = as_flag(use_tma_aligned_col_major_sf)

        def check() -> None:
            checks.boolean("use_tma_aligned_col_major_sf", column_major_sf)
            self._limits.check_num_qps(num_qps)

        data, sf = self._engram.fetch(indices, check)
        if sf is not None and column_major_sf:
            sf = column_major(sf)
        return lambda: (data, sf)
