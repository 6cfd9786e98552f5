"""Prepared calls: what a call of an operator allocates and launches, as positions in a list.

A `Plan` holds what follows from the launches of an operator; it serves every call whose arguments
differ in dynamic sizes alone. A `Call` adds what follows from the sizes and can run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tile_kernels.runtime.declaration import (
    ALIGNMENT,
    Host,
    Launch,
    Out,
    Size,
    Spec,
    contiguous_strides,
)
from tile_kernels.runtime.outputs import check_output
from tile_kernels.runtime.pytorch import empty_strided_cuda

MAX_CALLS = 512  # sizes that a plan remembers; the oldest is dropped first


class Call:
    """A call that is ready to run.

    `run` works on a list of values: the tensors and numbers of the call, the caller's buffers, then
    in this order what it appends: allocations, views, constants, and results of `steps`.
    """

    __slots__ = (
        "allocate", "allocations", "constants", "device", "launches", "results", "spans", "steps",
        "views", "written",
    )  # fmt: skip
    allocate: Callable[..., Tensor]
    allocations: tuple[tuple[Any, Any, torch.dtype], ...]
    constants: tuple[Any, ...]
    device: int
    launches: tuple[tuple[Callable[..., Any], Callable[[list[Any]], Any]], ...]
    results: Callable[[list[Any]], Any]
    spans: tuple[tuple[int, int], ...]  # (position, bytes from the first element to the last)
    steps: tuple[tuple[Callable[..., Any], int, tuple[Any, ...]], ...]
    views: tuple[tuple[int, Any, Any], ...]
    written: tuple[int, ...]  # positions of buffers and of arguments that change in place

    def run(self, values: list[Any]) -> Any:
        """Allocates and launches. `values` holds the arguments and buffers, and is extended."""
        allocate = self.allocate
        for shape, strides, dtype in self.allocations:
            values.append(allocate(shape, strides, dtype))
        for position, shape, strides in self.views:
            values.append(values[position].as_strided(shape, strides))
        values += self.constants
        for function, position, operands in self.steps:
            values.append(function(values[position], *operands))
        for handle, arguments in self.launches:
            handle(*arguments(values))
        if self.written:
            # Kernels write without the dispatcher, which would inform autograd.
            increment_version([values[i] for i in self.written if not values[i].is_inference()])
        return self.results(values)

    def conflicts(self, values: list[Any], in_place: tuple[int, ...]) -> bool:
        """Whether a written tensor shares memory with another value, or may not be written.

        It may be the very tensor at one of the positions `in_place`.
        """
        spans = [(i, values[i].data_ptr(), size) for i, size in self.spans]
        for i, start, size in spans:
            if i not in self.written:
                continue
            if values[i].is_inference() and not torch.is_inference_mode_enabled():
                return True
            for k, other, other_size in spans:
                apart = start >= other + other_size or other >= start + size
                if k != i and not apart and not (k in in_place and values[k] is values[i]):
                    return True
        return False


class Plan:
    """The launches of an operator for one cache key, for any dynamic sizes."""

    def __init__(
        self,
        outs: Sequence[Out],
        num_results: int,
        given: Sequence[Spec],
        num_values: int,
        written: tuple[int, ...],
        device: torch.device,
        cached: bool,
    ) -> None:
        """`outs` are the results, then scratch. `num_values` counts arguments and buffers.

        Calls that are not cached allocate by the dispatcher, which modes can see.
        """
        self.device, self.written, self.cached = device, written, cached
        self._num_results = num_results
        self.calls: dict[tuple[Any, ...], Call] = {}
        self._num_given, self._first_out = len(given), num_values - len(given)
        view_at = self._first_out + len(outs)
        results: list[int] = []
        self.specs: list[Spec] = []  # what launches get
        for i, out in enumerate(outs):
            shape, strides, dtype = out.memory
            memory_at = result_at = self._first_out + i  # buffers come before allocations
            if out.base is not None:
                if i < len(given):
                    memory_at = view_at
                else:
                    result_at = view_at
                view_at += 1
            aligned = given[i].alignment if i < len(given) else ALIGNMENT
            self.specs.append(Spec(shape, strides, dtype, device, aligned, memory_at))
            results.append(result_at)
        self._first_constant = view_at
        self._has_views = view_at > self._first_out + len(outs)
        self._results = itemgetter(*results[:num_results]) if num_results else _nothing

    def finish(
        self, launches: Sequence[Launch | Host], handle: Callable[[Launch, Any], Callable[..., Any]]
    ) -> None:
        """Takes the launches over. `handle(launch, problem)` is what runs one."""
        self._handle, self._launches = handle, tuple(launches)
        constants = [x for each in launches for x in each.arguments if not isinstance(x, Spec)]
        self._constants, next_constant = tuple(constants), self._first_constant
        steps: list[tuple[Any, int, tuple[Any, ...]]] = []
        positions: dict[int, int] = {}
        first_step = self._first_constant + len(constants)

        def position(spec: Spec) -> int:
            if isinstance(spec.source, int):
                return spec.source
            if id(spec) not in positions:
                parent, function, operands = spec.source
                at = position(parent)
                positions[id(spec)] = first_step + len(steps)
                steps.append((function, at, operands))
            return positions[id(spec)]

        self._getters = []
        for each in launches:
            found = []
            for argument in each.arguments:
                if isinstance(argument, Spec):
                    found.append(position(argument))
                else:
                    found.append(next_constant)
                    next_constant += 1
            self._getters.append(_getter(found))
        self._steps = tuple(steps)
        problems = [each.problem for each in launches if isinstance(each, Launch)]
        self._sized_problems = any(type(x) is Size for problem in problems for x in problem)
        self._sized_constants = any(type(x) is Size for x in constants)
        self._handles: tuple[Any, ...] | None = None

    def call(
        self, record: Any, outs: Sequence[Out], given: Sequence[Tensor], values: Sequence[Any]
    ) -> Call:
        """The call for the sizes of `record`, checked, with the results `outs` and scratch."""
        call, first = Call(), self._first_out
        for out, buffer in zip(outs, given):
            check_output(out.name, buffer, out.shape, out.dtype, out.strides)
        call.allocations = tuple([out.memory for out in outs[self._num_given :]])
        call.views = self._views(outs, given) if self._has_views else ()
        call.constants, call.results = self._constants, self._results
        if self._sized_constants:
            call.constants = sized(self._constants, record)
        call.steps, call.launches = (), ()
        if not self._has_no_effect(outs):
            handles = self._handles
            if handles is None or self._sized_problems:
                handles = tuple(
                    self._handle(each, sized(each.problem, record))
                    if isinstance(each, Launch) else each.function
                    for each in self._launches
                )  # fmt: skip
                self._handles = handles
            call.steps, call.launches = self._steps, tuple(zip(handles, self._getters))
        call.written = (*self.written, *range(first, first + self._num_given))
        call.spans = ()
        if call.written:
            tensors = [(i, x) for i, x in enumerate(values) if isinstance(x, Tensor)]
            call.spans = tuple((i, _byte_span(x)) for i, x in tensors)
        call.device = self.device.index or 0
        fast = empty_strided_cuda(self.device) if self.cached else None
        call.allocate = fast or functools.partial(_allocate, self.device)
        return call

    def _has_no_effect(self, outs: Sequence[Out]) -> bool:
        """Whether all results are empty, as some dynamic sizes make them: a grid would be too."""
        results = outs[: self._num_results]
        return bool(results) and not self.written and all(0 in out.shape for out in results)

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


def _getter(positions: list[int]) -> Callable[[list[Any]], Any]:
    if len(positions) == 1:
        return itemgetter(slice(positions[0], positions[0] + 1))
    return itemgetter(*positions)


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
