"""Windows of ranks that are threads: the memory that `symm` shares between GPUs, on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tile_kernels.ep import buffer as buffer_module
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.engines.window import Region, Window


class Threads(Window):
    """The windows of all threads. Barriers stand for the flags.

    With `one_storage` all tensors are views of the window's own, as the emulator needs them; then
    regions are never free again.
    """

    def __init__(self, engine: Engine, num_bytes: int, one_storage: bool = False) -> None:
        self._engine, self._one_storage = engine, one_storage
        self.own = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        address = torch.tensor([self.own.data_ptr()]).view(torch.uint8)
        addresses = engine.gather(address).view(torch.int64).flatten().tolist()
        super().__init__(addresses, engine.index, num_bytes)
        self.kept: list[Region] = []
        self.log: list[str] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self, region: Region, start: int, num_bytes: int) -> Tensor:
        if self._one_storage:
            self.kept.append(region)
            return self.own[region.start + start :][:num_bytes]
        array = (ctypes.c_uint8 * num_bytes).from_address(
            self.own.data_ptr() + region.start + start
        )
        array.region = region
        return torch.frombuffer(array, dtype=torch.uint8)

    def begin(self, phase: str) -> None:
        self.log.append(phase)
        self._engine.barrier(phase)

    def end(self, phase: str) -> None:
        self._engine.barrier(phase)


def use_windows(
    monkeypatch: pytest.MonkeyPatch, sizes: int | Sequence[int] = 1 << 20, **options: Any
) -> dict[int, Threads]:
    """Lets every buffer over threads have windows; returns those made last, by rank."""
    made: dict[int, Threads] = {}

    def with_window(world: Engine, *_: Any) -> Engine:
        size = sizes if isinstance(sizes, int) else sizes[world.index]
        world.window = made[world.index] = Threads(world, size, **options)
        return world

    monkeypatch.setattr(buffer_module, "data_engine", with_window)
    return made
