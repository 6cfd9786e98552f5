"""Rows of a table that is spread over the ranks, fetched by their global index."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.ep.agreement import agree
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.requests import Settings
from tile_kernels.ep.rows import Field, as_bytes, field_of, pack, unpack
from tile_kernels.runtime import checks

STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


class EngramStore:
    """The table. Rank `r` holds the global rows `r * n .. (r + 1) * n - 1`.

    Fetching is collective on these engines: every rank asks the owners of its rows, and answers.
    """

    def __init__(self, engine: Engine, num_gpu_bytes: int, num_cpu_bytes: int) -> None:
        self._engine = engine
        self._gpu_bytes = num_gpu_bytes
        self._cpu_bytes = num_cpu_bytes
        self._rows: Tensor | None = None
        self._sf: Tensor | None = None

    def write(self, storage: Tensor, sf: Tensor | None) -> None:
        """Replace this rank's rows `[n, H]`; `sf` `[R * n, P]` is the same everywhere."""
        error: Exception | None = None
        settings: Settings = {}
        try:
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
            settings = {
                "storage": str(field_of(storage)),
                "num_entries": storage.shape[0],
                "sf": "none" if sf is None else str(field_of(sf)),
            }
        except (TypeError, ValueError) as problem:
            error = problem
        counts = [0] * self._engine.size
        agree(self._engine, "ElasticBuffer.engram_write", settings, error, counts)
        self._rows = storage.cpu().clone()
        self._sf = None if sf is None else sf.clone()
        self._engine.barrier("ElasticBuffer.engram_write")

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows `[T, Q * H]` at global `indices` `[T, Q]`, and their scales `[T, Q * P]`."""
        error: Exception | None = None
        owners = local = torch.empty(0, dtype=torch.int64)
        counts = [0] * self._engine.size
        try:
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
            wanted = indices.cpu().long().flatten()
            owners = wanted.div(max(1, num_entries), rounding_mode="floor")
            local = wanted - owners * num_entries
            counts = torch.bincount(owners, minlength=self._engine.size).tolist()
        except (TypeError, ValueError) as problem:
            error = problem
        asked = agree(self._engine, "ElasticBuffer.engram_fetch", {}, error, counts)
        if self._rows is None:
            raise RuntimeError("unreachable: a bad request is an error of every rank")
        order, phase = owners.argsort(stable=True), "ElasticBuffer.engram_fetch"
        questions = self._engine.exchange(pack([local[order, None]]), counts, asked, phase)
        (places,) = unpack(questions, [Field(torch.int64, 1)])
        answers = as_bytes(self._rows).index_select(0, places.flatten())
        rows = self._engine.exchange(answers, asked, counts, phase)
        found = torch.empty_like(rows).index_copy_(0, order, rows)
        (data,) = unpack(found, [field_of(self._rows)])
        num_tokens, num_rows = indices.shape
        data = data.view(num_tokens, num_rows * self._rows.shape[1]).to(indices.device)
        if self._sf is None:
            return data, None
        scales = self._sf.to(indices.device)[indices.long().flatten()]
        return data, scales.view(num_tokens, num_rows * self._sf.shape[1])
