"""Prepared calls: what a call of an operator allocates and launches, as positions in a list.

A `Plan` holds what follows from the launches of an operator; it serves every call whose arguments
differ in dynamic sizes alone. What follows from the sizes is a `Sized`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import (
    ALIGNMENT,
    Host,
    Launch,
    Out,
    Size,
    Spec,
    contiguous_strides,
)
from tile_kernels.runtime.positions import getter
from tile_kernels.runtime.pytorch import empty_strided_cuda

MAX_SIZES = 512  # that a plan remembers; the oldest is dropped first


class Sized(NamedTuple):
    """What depends on the dynamic sizes of a call."""

    allocations: tuple[tuple[Any, Any, torch.dtype], ...]
    views: tuple[tuple[int, Any, Any], ...]  # (position, shape, strides)
    constants: tuple[Any, ...]
    steps: tuple[tuple[Callable[..., Any], int, tuple[Any, ...]], ...]
    launches: tuple[Callable[[list[Any]], Any], ...]
    spans: tuple[tuple[int, int], ...]  # (position, bytes from the first element to the last)


class Plan:
    """The launches of an operator for one cache key.

    A call works on a list of values: its tensors and numbers, the caller's buffers, then in this
    order what `run` appends: allocations, views, constants, results of steps.

    Args:
        outs: The results, then scratch.
        num_results: How many of `outs` are results.
        given: The caller's buffers for the results.
        num_values: How many arguments and buffers there are.
        mutated: The positions of arguments that are written.
        device: Where everything is.
        cached: Whether the plan serves several calls. One that does not allocates through the
            dispatcher, so that modes see it.
    """

    def __init__(
        self,
        outs: Sequence[Out],
        num_results: int,
        given: Sequence[Spec],
        num_values: int,
        mutated: Sequence[int],
        device: torch.device,
        cached: bool,
    ) -> None:
        self.device = device.index or 0
        self.sizes: dict[tuple[Any, ...], Sized] = {}
        self._num_given, self._num_results = len(given), num_results
        self._first_out = num_values - len(given)
        self.written = (*mutated, *range(self._first_out, num_values))
        self._mutates = bool(mutated)
        fast = empty_strided_cuda(device) if cached else None
        self._allocate = fast or functools.partial(_allocate, device)
        view_at = first_view = self._first_out + len(outs)
        results: list[int] = []
        self.specs: list[Spec] = []  # what launches get
        for i, out in enumerate(outs):
            memory_at = result_at = self._first_out + i  # buffers come before allocations
            if out.base is not None:  # launches get the base, the caller the view
                if i < len(given):
                    memory_at = view_at
                else:
                    result_at = view_at
                view_at += 1
            aligned = given[i].alignment if i < len(given) else ALIGNMENT
            shape, strides, dtype = out.memory
            self.specs.append(Spec(shape, strides, dtype, device, aligned, memory_at))
            results.append(result_at)
        self._first_constant, self._has_views = view_at, view_at > first_view
        self._results = itemgetter(*results[:num_results]) if num_results else _nothing

    def finish(
        self, launches: Sequence[Launch | Host], handle: Callable[[Launch, Any], Callable[..., Any]]
    ) -> None:
        """Takes the launches over. `handle(launch, problem)` is what runs one."""
        constants: list[Any] = []
        steps: list[tuple[Any, int, tuple[Any, ...]]] = []
        positions: dict[int, int] = {}
        flat = [x for each in launches for x in each.arguments]
        first_step = self._first_constant + sum(not isinstance(x, Spec) for x in flat)

        def position(value: Any) -> int:
            if not isinstance(value, Spec):
                constants.append(value)
                return self._first_constant + len(constants) - 1
            if isinstance(value.source, int):
                return value.source
            if id(value) not in positions:
                parent, function, operands = value.source
                at = position(parent)
                positions[id(value)] = first_step + len(steps)
                steps.append((function, at, operands))
            return positions[id(value)]

        positions_of = [[position(x) for x in each.arguments] for each in launches]

        def bind(record: Any) -> tuple[Any, ...]:
            handles = (
                handle(each, sized(each.problem, record)) if isinstance(each, Launch)
                else each.function for each in launches
            )  # fmt: skip
            return tuple(zip(handles, positions_of))

        self._constants, self._steps, self._bind = tuple(constants), tuple(steps), bind
        problems = [x for each in launches if isinstance(each, Launch) for x in each.problem]
        self._sized_problems = any(type(x) is Size for x in problems)
        self._sized_constants = any(type(x) is Size for x in constants)
        self._bound: tuple[Any, ...] | None = None

    def size(
        self, record: Any, outs: Sequence[Out], given: Sequence[Tensor], values: Sequence[Any]
    ) -> Sized:
        """What depends on the sizes of `record`, which is checked; `outs` are its results."""
        for out, buffer in zip(outs, given):
            checks.buffer(out.name, buffer, out.shape, out.dtype, out.strides)
        allocations = tuple([out.memory for out in outs[self._num_given :]])
        views = self._views(outs, given) if self._has_views else ()
        constants, bound = self._constants, self._bound
        if self._sized_constants:
            constants = sized(constants, record)
        spans: list[tuple[int, int]] = []
        if self.written:
            spans = [(i, _byte_span(x)) for i, x in enumerate(values) if isinstance(x, Tensor)]
        nonempty = tuple([(i, size) for i, size in spans if size])
        results = outs[: self._num_results]
        if results and not self._mutates and all(0 in out.shape for out in results):
            return Sized(allocations, views, constants, (), (), nonempty)  # an empty grid
        if bound is None or self._sized_problems:
            bound = self._bound = self._bind(record)
        launches = tuple([_fixed(handle, positions) for handle, positions in bound])
        return Sized(allocations, views, constants, self._steps, launches, nonempty)

    def run(self, values: list[Any], sized: Sized) -> Any:
        """Allocates and launches. `values` holds the arguments and buffers, and is extended."""
        allocations, views, constants, steps, launches, _ = sized
        allocate = self._allocate
        for shape, strides, dtype in allocations:
            values.append(allocate(shape, strides, dtype))
        for position, shape, strides in views:
            values.append(values[position].as_strided(shape, strides))
        values += constants
        for function, position, operands in steps:
            values.append(function(values[position], *operands))
        for launch in launches:
            launch(values)
        if self.written:
            # Kernels write without the dispatcher, which would inform autograd.
            increment_version([values[i] for i in self.written if not values[i].is_inference()])
        return self._results(values)

    def conflicts(self, values: list[Any], sized: Sized, in_place: tuple[int, ...]) -> bool:
        """Whether a written tensor shares memory with another value, or may not be written.

        It may be the very tensor at one of the positions `in_place`.
        """
        written = self.written
        if not torch.is_inference_mode_enabled():
            for i in written:
                if values[i].is_inference():
                    return True
        same = [i for i in in_place if any(values[i] is values[j] for j in written)]
        spans = [(i, values[i].data_ptr(), size) for i, size in sized.spans if i not in same]
        for i, start, size in spans:
            if i in written:
                end = start + size
                for j, other, other_size in spans:
                    if other < end and start < other + other_size and i != j:
                        return True
        return False

    def _views(
        self, outs: Sequence[Out], given: Sequence[Tensor]
    ) -> tuple[tuple[int, Any, Any], ...]:
        """A result that is a view of its memory, or the memory behind a caller's buffer."""
        found: list[tuple[int, Any, Any]] = []
        for i, out in enumerate(outs):
            if out.base is None:
                continue
            shape, strides = tuple(out.shape), tuple(out.strides or ())
            if i < len(given):
                shape, strides = tuple(out.base), contiguous_strides(out.base)
                needed = given[i].storage_offset() + math.prod(shape)
                if given[i].untyped_storage().nbytes() < needed * given[i].element_size():
                    raise ValueError(
                        f"{out.name} must be a view of a {list(shape)} buffer, "
                        "padding rows included"
                    )
            found.append((self._first_out + i, shape, strides))
        return tuple(found)


def remember(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Inserts into a bounded cache. Threads may race: their entries are equal."""
    while len(cache) >= limit:
        with contextlib.suppress(RuntimeError, StopIteration):  # changed by another thread
            cache.pop(next(iter(cache)), None)
    cache[key] = value


def sized(values: tuple[Any, ...], record: Any) -> tuple[Any, ...]:
    """`values` with every `Size` evaluated."""
    return tuple([x.value(record) if type(x) is Size else x for x in values])


def _fixed(handle: Callable[..., Any], positions: Sequence[int]) -> Callable[[list[Any]], Any]:
    """`handle` as a function of the values of a call, for calls of one size."""
    fixed = getattr(handle, "fixed", None)  # of a Launcher, which is not loaded before it is used
    if fixed is not None:
        return fixed(positions)
    arguments = getter(positions)
    return lambda values: handle(*arguments(values))


def _nothing(values: list[Any]) -> None:  # noqa: ARG001
    return None


def _byte_span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if x.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return (reach + 1) * x.element_size()


def _allocate(device: torch.device, shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
