"""All-gather and reduce-scatter in sessions, as context parallelism uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.agreement import agree
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.model import SECTION
from tile_kernels.ep.requests import SUMMED, Settings
from tile_kernels.ep.rows import Field, as_bytes
from tile_kernels.runtime import checks
from tile_kernels.utils import align

MOST_GATHERS = 32
Wait = Callable[[], None]


class GatherSessions:
    """The sessions of one buffer. What they gather lies in one allocation, valid until they end."""

    def __init__(self, engine: Engine, num_max_session_bytes: int, num_max_gathers: int) -> None:
        self._engine = engine
        self._most_bytes = num_max_session_bytes
        self._most_gathers = num_max_gathers
        self._memory: Tensor | None = None
        self._offset = 0
        self._num_gathers = 0
        self._session = 0
        self._open = False

    def begin(self) -> None:
        """Open a session; the memory of the last one is used again."""
        if self._open:
            raise RuntimeError("ElasticBuffer.create_agrs_session: there is an open session")
        self._open = True
        self._session += 1
        self._offset = self._num_gathers = 0

    def end(self) -> None:
        """Close it, once no rank reads what it gathered."""
        if not self._open:
            raise RuntimeError("ElasticBuffer.destroy_agrs_session: there is no open session")
        self._open = False
        self._engine.barrier("ElasticBuffer.destroy_agrs_session")

    def abandon(self) -> None:
        """Close it after an error, without waiting for ranks that may never come."""
        self._open = False

    def places(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Where tensors `[R, *shape]` gathered next will lie; does not advance."""
        memory = self._memory_on(device)
        offset, views = self._offset, []
        for shape in shapes:
            full = (self._engine.size, *shape)
            size = math.prod(full) * dtype.itemsize
            if offset + size > self._most_bytes:
                raise ValueError(
                    f"the session must fit num_max_session_bytes = {self._most_bytes}, but "
                    f"{offset + size} bytes are needed by now"
                )
            part = memory[offset : offset + size]
            views.append(part.view(dtype).view(full))
            offset += align(size, SECTION)
        return views

    def own_places(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """This rank's parts of them: gathering these copies nothing here."""
        if not self._open:
            raise RuntimeError("ElasticBuffer.agrs_get_inplace_tensor: there is no open session")
        for shape in shapes:
            if any(size < 0 for size in shape):
                raise ValueError(
                    "ElasticBuffer.agrs_get_inplace_tensor: shapes must have sizes of at least 0, "
                    f"got {tuple(shape)}"
                )
        return [full[self._engine.index] for full in self.places(shapes, dtype, device)]

    def _memory_on(self, device: torch.device) -> Tensor:
        if self._memory is None or self._memory.device != device:
            if self._offset:
                raise ValueError(
                    f"all tensors of a session must be on one device, got {device} after "
                    f"{self._memory.device if self._memory is not None else 'none'}"
                )
            # Rounded up, so that views of any dtype end inside.
            size = align(self._most_bytes, SECTION)
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory

    def _check(self, call: str, tensors: Sequence[Any]) -> None:
        if not self._open:
            raise ValueError("there is no open session")
        if not tensors:
            raise ValueError("give at least one tensor")
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor {place} must be a Tensor, got {type(tensor).__name__}")
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {place} must be contiguous, got {tensor.stride()}")
        if call == "all_gather" and self._num_gathers >= self._most_gathers:
            raise ValueError(
                f"a session has at most {self._most_gathers} all-gathers, this would be one more"
            )

    def _agree(self, call: str, tensors: Sequence[Any], error: Exception | None) -> None:
        settings: Settings = {"session": self._session, "num_gathers": self._num_gathers}
        if error is None:
            settings["tensors"] = "; ".join(
                f"{Field(each.dtype, each.numel())} {tuple(each.shape)}" for each in tensors
            )[:600]
        counts = [0] * self._engine.size
        agree(self._engine, f"ElasticBuffer.{call}", settings, error, counts)

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[R, *shape]` of each tensor, in the memory of the session."""
        error: Exception | None = None
        views: list[Tensor] = []
        before = self._offset
        try:
            self._check("all_gather", tensors)
            for tensor in tensors:
                views += self.places([tensor.shape], tensor.dtype, tensor.device)
                self._offset += align(views[-1].numel() * tensor.element_size(), SECTION)
        except (TypeError, ValueError) as problem:
            error = problem
        try:
            self._agree("all_gather", tensors, error)
        except (TypeError, ValueError):
            self._offset = before
            raise
        self._num_gathers += 1
        for tensor, view in zip(tensors, views):
            row = as_bytes(tensor.reshape(1, -1))
            gathered = self._engine.gather(row[0], "ElasticBuffer.all_gather")
            as_bytes(view.view(len(view), -1)).copy_(gathered)
        return views

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each `[R, *shape]`, the sum over ranks of this rank's part, `[*shape]`.

        In float32, in the order of the ranks, rounded once.
        """
        error: Exception | None = None
        size = self._engine.size
        try:
            self._check("reduce_scatter", tensors)
            for place, tensor in enumerate(tensors):
                if tensor.dtype not in SUMMED:
                    raise TypeError(f"tensor {place} must be float32/16 or bfloat16")
                if tensor.dim() < 1 or tensor.shape[0] != size:
                    raise ValueError(
                        f"tensor {place} must have shape [{size}, ...], got {tuple(tensor.shape)}"
                    )
        except (TypeError, ValueError) as problem:
            error = problem
        self._agree("reduce_scatter", tensors, error)
        ones = [1] * size
        results = []
        for tensor in tensors:
            sent = as_bytes(tensor.view(size, -1))
            parts = self._engine.exchange(sent, ones, ones, "ElasticBuffer.reduce_scatter")
            values = parts.view(tensor.dtype) if parts.numel() else tensor.view(size, -1)
            total = torch.zeros(values.shape[1], dtype=torch.float32, device=tensor.device)
            for value in values:
                total += value.float()
            results.append(total.to(tensor.dtype).view(tensor.shape[1:]))
        return results


def check_config(num_max_session_bytes: object, num_max_gathers: object, num_ranks: int) -> None:
    """The arguments of `agrs_set_config`."""
    checks.integer("num_max_session_bytes", num_max_session_bytes, 1)
    checks.integer("num_max_all_gathers_per_session", num_max_gathers, 1, MOST_GATHERS)
    if num_ranks < 2:
        raise ValueError(f"sessions need at least two ranks, got {num_ranks}")
