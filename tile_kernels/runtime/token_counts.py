"""The kernels that a computation needs for every number of tokens up to a limit.

The computation runs on meta tensors at some token counts, with its launches recorded. Between two
counts at which the same kernels are launched, the numbers in the problems of the launches (rows,
columns, parts) follow the token count on a line, and the plans, which are plain Python, are
evaluated at every count. A run in the middle confirms the line; where it does not, or where other
kernels are launched, both halves are searched likewise.

What depends on remainders of a number, such as a vector width, must be computed by the plan: a
problem has the number itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.launch import Kernel, Request, recording

MAX_TOKENS = 16384
TOLERANCE = 1 / 64  # of a number from the line between its neighbours
Variant = tuple[Kernel, tuple[Any, ...]]  # a kernel and its static arguments


def probes(max_count: int) -> list[int]:
    """Counts at which the computation itself runs: powers of two, and those behind them.

    >>> probes(9)
    [1, 2, 3, 4, 5, 8, 9]
    """
    powers = [1 << i for i in range(max_count.bit_length())]
    both = {power + step for power in powers for step in (0, 1)}
    return sorted(count for count in {*both, max_count} if count <= max_count)


def variants(
    run: Callable[[int], Any], device: Device, max_count: int = MAX_TOKENS
) -> dict[Variant, None]:
    """The kernels that `run(count)` launches on `device` for any count of `1..max_count`.

    Args:
        run: Runs the computation for a count on meta tensors.
        device: The device that plans see.
        max_count: The largest count.

    Returns:
        Kernels with their static arguments, as keys in the order in which they were found.
    """
    planner = _Planner(device)
    counts = probes(max_count)
    recorded = [_recorded(run, count) for count in counts]
    for requests in recorded:
        planner.add(requests)
    pairs = list(zip(counts, recorded))
    for low, high in itertools.pairwise(pairs):
        _between(run, planner, low, high)
    return planner.found


def _recorded(run: Callable[[int], Any], count: int) -> list[Request]:
    with recording() as requests:
        run(count)
    return requests


def _between(
    run: Callable[[int], Any],
    planner: _Planner,
    low: tuple[int, list[Request]],
    high: tuple[int, list[Request]],
) -> None:
    """Adds what is launched at counts between two whose launches are known."""
    (first, before), (last, after) = low, high
    if last - first <= 1:
        return
    middle = (first + last) // 2
    found = middle, _recorded(run, middle)
    planner.add(found[1])
    if _on_a_line(before, found[1], after, (middle - first) / (last - first)):
        for one, other in zip(before, after):
            if one.problem != other.problem:
                problems = _line(one.problem, other.problem, last - first)
                planner.add(Request(one.kernel, problem) for problem in problems)
        return
    _between(run, planner, low, found)
    _between(run, planner, found, high)


def _on_a_line(
    before: Sequence[Request], middle: Sequence[Request], after: Sequence[Request], share: float
) -> bool:
    """Whether the same kernels are launched, and numbers grow evenly: in `middle` by `share`."""
    launches = list(itertools.zip_longest(before, middle, after))
    return all(None not in each and _are_even(*each, share) for each in launches)


def _are_even(before: Request, middle: Request, after: Request, share: float) -> bool:
    problems = before.problem, middle.problem, after.problem
    if not before.kernel is middle.kernel is after.kernel or len(set(map(len, problems))) > 1:
        return False
    for low, value, high in zip(*problems):
        if low == value == high:
            continue
        if not type(low) is type(value) is type(high) is int:
            return False
        # Rows are rounded up to multiples of a tile, for each expert: no line fits exactly.
        if abs(low + share * (high - low) - value) > TOLERANCE * value:
            return False
    return True


def _line(before: tuple[Any, ...], after: tuple[Any, ...], steps: int) -> Iterable[tuple[Any, ...]]:
    """The problems between two, whose numbers change in `steps` equal steps."""
    changing = [(i, a, b - a) for i, (a, b) in enumerate(zip(before, after)) if a != b]
    problem = list(before)
    for step in range(1, steps):
        for i, start, change in changing:
            problem[i] = start + change * step // steps
        yield tuple(problem)


class _Planner:
    """Collects the variants of requests; a problem is planned once."""

    def __init__(self, device: Device) -> None:
        self.found: dict[Variant, None] = {}
        self._device = device
        self._planned: set[tuple[Kernel, tuple[Any, ...]]] = set()

    def add(self, requests: Iterable[Request]) -> None:
        """Plans them."""
        for request in requests:
            key = request.kernel, request.problem
            if key not in self._planned:
                self._planned.add(key)
                static = request.kernel.static_arguments(request.problem, self._device)
                self.found[request.kernel, tuple(static)] = None
