"""All-gather and reduce-scatter in sessions, as context parallelism uses them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.agreement import Settings, agree, checked, unreachable
from tile_kernels.ep.base import BufferBase
from tile_kernels.ep.engines import Engine
from tile_kernels.ep.model import SECTION
from tile_kernels.ep.requests import SUMMED, Limits
from tile_kernels.ep.rows import Field, as_bytes
from tile_kernels.ep.sizes import shapes_of
from tile_kernels.runtime import checks
from tile_kernels.utils import align

MAX_GATHERS = 32


class GatherSessions:
    """The sessions of one buffer. What they gather lies in one allocation, valid until they end."""

    def __init__(
        self, engine: Engine, identity: Settings, num_max_session_bytes: int, num_max_gathers: int
    ) -> None:
        self._engine, self._identity = engine, identity
        self._max_bytes = num_max_session_bytes
        self._max_gathers = num_max_gathers
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
        """Close it, once no rank reads its memory."""
        if not self._open:
            raise RuntimeError("ElasticBuffer.destroy_agrs_session: there is no open session")
        self._open = False
        self._agree("destroy_agrs_session", [], None)

    def abandon(self) -> None:
        """Close it after an error, without waiting for ranks that may never come."""
        self._open = False

    def next_views(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Views of session memory for the next tensors `[R, *shape]`; does not reserve it."""
        memory = self._memory_on(device)
        offset, views = self._offset, []
        for shape in shapes:
            full = (self._engine.size, *shape)
            size = math.prod(full) * dtype.itemsize
            if offset + size > self._max_bytes:
                raise ValueError(
                    f"the session must fit num_max_session_bytes = {self._max_bytes}, but "
                    f"{offset + size} bytes are needed by now"
                )
            part = memory[offset : offset + size]
            views.append(part.view(dtype).view(full))
            offset += align(size, SECTION)
        return views

    def own_views(
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
        return [full[self._engine.index] for full in self.next_views(shapes, dtype, device)]

    def _memory_on(self, device: torch.device) -> Tensor:
        if self._memory is None or self._memory.device != device:
            if self._offset:
                raise ValueError(
                    f"all tensors of a session must be on one device, got {device} after "
                    f"{self._memory.device if self._memory is not None else 'none'}"
                )
            # Rounded up, so that views of any dtype end inside.
            size = align(self._max_bytes, SECTION)
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory

    def _check(self, call: str, tensors: Sequence[Any]) -> None:
        if not self._open:
            raise ValueError("there is no open session")
        if not tensors:
            raise ValueError("give at least one tensor")
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensor {index} must be a Tensor, got {type(tensor).__name__}")
            if not tensor.is_contiguous():
                raise ValueError(f"tensor {index} must be contiguous, got {tensor.stride()}")
        if call == "all_gather" and self._num_gathers >= self._max_gathers:
            raise ValueError(
                f"a session has at most {self._max_gathers} all-gathers, this would be one more"
            )

    def _agree(self, call: str, tensors: Sequence[Any], error: Exception | None) -> None:
        settings: Settings = {
            **self._identity, "session": self._session, "num_gathers": self._num_gathers
        }  # fmt: skip
        if error is None:
            settings["tensors"] = "; ".join(
                f"{Field(each.dtype, each.numel())} {tuple(each.shape)}" for each in tensors
            )[:600]
        agree(self._engine, f"ElasticBuffer.{call}", settings, error)

    def all_gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`[R, *shape]` of each tensor, in the memory of the session."""
        previous_offset = self._offset
        views, error = checked(lambda: self._reserve(tensors))
        try:
            self._agree("all_gather", tensors, error)
        except (TypeError, ValueError):
            self._offset = previous_offset
            raise
        if views is None:
            raise unreachable()
        self._num_gathers += 1
        for tensor, view in zip(tensors, views):
            row = as_bytes(tensor.reshape(1, -1))
            gathered = self._engine.gather(row[0], "ElasticBuffer.all_gather")
            as_bytes(view.view(len(view), -1)).copy_(gathered)
        return views

    def _reserve(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._check("all_gather", tensors)
        views: list[Tensor] = []
        for tensor in tensors:
            views += self.next_views([tensor.shape], tensor.dtype, tensor.device)
            self._offset += align(views[-1].numel() * tensor.element_size(), SECTION)
        return views

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each `[R, *shape]`, the sum over ranks of this rank's part, `[*shape]`.

        In float32, in the order of the ranks, rounded once.
        """
        _, error = checked(lambda: self._check_parts(tensors))
        self._agree("reduce_scatter", tensors, error)
        size = self._engine.size
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

    def _check_parts(self, tensors: Sequence[Tensor]) -> None:
        self._check("reduce_scatter", tensors)
        size = self._engine.size
        for index, tensor in enumerate(tensors):
            if tensor.dtype not in SUMMED:
                raise TypeError(f"tensor {index} must be float32/16 or bfloat16")
            if tensor.dim() < 1 or tensor.shape[0] != size:
                raise ValueError(
                    f"tensor {index} must have shape [{size}, ...], got {tuple(tensor.shape)}"
                )


def check_config(
    num_max_session_bytes: int, num_max_gathers: int, num_ranks: int, limits: Limits
) -> None:
    """The arguments of `agrs_set_config`."""
    checks.integer("num_max_session_bytes", num_max_session_bytes, 1)
    checks.integer("num_max_all_gathers_per_session", num_max_gathers, 1, MAX_GATHERS)
    if num_ranks < 2:
        raise ValueError(f"sessions need at least two ranks, got {num_ranks}")
    limits.check_size(num_max_session_bytes)


def _check_counts(t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"t must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"t must be int32 or int64, got {t.dtype}")


class GatherMethods(BufferBase):
    """All-gather, reduce-scatter and sums over ranks of `ElasticBuffer`."""

    _sessions: GatherSessions | None = None

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        """Prepares for sessions of all-gathers. Collective.

        Args:
            num_max_session_bytes: The largest number of bytes of a session.
            num_max_all_gathers_per_session: The largest number of all-gathers of a session.
        """
        max_gathers = num_max_all_gathers_per_session
        self._configure(
            "ElasticBuffer.agrs_set_config",
            lambda: check_config(num_max_session_bytes, max_gathers, self.num_ranks, self._limits),
            {
                "num_max_session_bytes": num_max_session_bytes,
                "num_max_all_gathers_per_session": max_gathers,
            },
        )
        self._sessions = GatherSessions(
            self._fabric.world, self._identity, num_max_session_bytes, max_gathers
        )

    def _agrs(self, call: str) -> GatherSessions:
        self._check_alive(f"ElasticBuffer.{call}")
        if self._sessions is None:
            raise RuntimeError(f"ElasticBuffer.{call}: agrs_set_config must come first")
        return self._sessions

    def create_agrs_session(self) -> None:
        """Open a session. All ranks must gather the same things in the same order."""
        self._agrs("create_agrs_session").begin()

    def destroy_agrs_session(self) -> None:
        """Close the session; what it gathered is overwritten by the next. Collective."""
        self._agrs("destroy_agrs_session").end()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Begins a session that lasts as long as the `with` block.

        Args:
            enabled: If False, nothing happens.
        """
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        except BaseException:
            self._agrs("agrs_new_session").abandon()
            raise
        self.destroy_agrs_session()

    def agrs_get_inplace_tensor(
        self,
        shapes: Sequence[int] | Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns the memory of this rank's part of the next all-gather: fill it, then gather it.

        Args:
            shapes: A shape, or a sequence of shapes.
            dtype: The dtype of the tensors.
            device: The device of the memory. By default that of the group: the current GPU for NCCL
                and symmetric memory, else the CPU.

        Returns:
            A tensor, or for a sequence of shapes a tuple of tensors.
        """
        wanted, several = shapes_of(shapes)
        sessions = self._agrs("agrs_get_inplace_tensor")
        on = self._fabric.world.device if device is None else torch.device(device)
        views = sessions.own_views(wanted, dtype, on)
        return tuple(views) if several else views[0]

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Gathers the tensors of all ranks. Collective.

        On a CUDA device the transfer runs beside the current stream, and `wait()` makes the current
        stream wait for it. Results are in the memory of the session. A sequence counts as one
        all-gather.

        Args:
            t: A tensor, or a sequence of tensors.

        Returns:
            `([R, *shape], wait)`, or for a sequence `(*outs, wait)`. Call `wait()` before using the
            results.
        """
        return self._gathered("all_gather", t)

    def reduce_scatter(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Sums tensors over ranks, and returns this rank's part. Collective.

        Sums are computed in float32, in the order of the ranks, and rounded once.

        Args:
            t: `[R, *shape]`, or a sequence of such tensors.

        Returns:
            `([*shape], wait)`, or for a sequence `(*outs, wait)`. Call `wait()` before using the
            results.
        """
        return self._gathered("reduce_scatter", t)

    def _gathered(self, call: str, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        sessions = self._agrs(call)
        tensors: list[Any] = list(t) if isinstance(t, (tuple, list)) else [t]
        first = tensors[0] if tensors else None
        device = first.device if isinstance(first, Tensor) else torch.device("cpu")
        with self._on_comm_stream(device, None) as finish:
            outs = getattr(sessions, call)(tensors)
            event = finish([*tensors, *outs], True)
        return (*outs, event.current_stream_wait)

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        """Returns the sum of an integer tensor over all active ranks, for statistics. Collective.

        Args:
            t: A tensor of integers, of the same shape on all ranks.

        Example:
            >>> from tile_kernels.ep import ElasticBuffer, run_ranks
            >>> def load(group):
            ...     buffer = ElasticBuffer(group, num_bytes=2 << 20)
            ...     return buffer.sum_over_ranks(torch.tensor([1, group.rank])).tolist()
            >>> run_ranks(3, load)[0]
            [3, 3]
        """
        call = "ElasticBuffer.sum_over_ranks"
        _, error = checked(lambda: _check_counts(t))
        settings: Settings = {} if error else {"t": f"{t.dtype} {tuple(t.shape)}"}
        self._agree(call, settings, error)
        if t.numel() == 0:
            return t.clone()
        rows = self._fabric.world.gather(as_bytes(t.cpu().reshape(1, -1))[0], call)
        return rows.view(t.dtype).sum(0, dtype=t.dtype).view(t.shape).to(t.device)
