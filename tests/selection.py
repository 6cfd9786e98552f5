"""Which samples of an operator are emulated by default; `--full` takes them all.

Compiling a kernel for the emulator takes seconds, running it milliseconds. So kernels are chosen
such that every kernel of an operator and every kind of value of every static argument (flags,
names, 0, 1, larger) occurs; then every sample that these kernels serve is run.
"""

from __future__ import annotations

import functools
from typing import Any

from tile_kernels.runtime.cases import Sample
from tile_kernels.runtime.device import described
from tile_kernels.runtime.warmup import compilations

Kernels = frozenset[tuple[str, tuple[Any, ...]]]


def kind_of(value: Any) -> Any:
    """What distinguishes a static argument: its value, or only that it is a larger number."""
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if is_number and value not in (0, 1) else (type(value), value)


def kernels_of(op: Any, sample: Sample) -> Kernels:
    """The kernels that a sample launches, with their static arguments."""
    found = compilations([(op.name, sample.build("meta"))], described())
    return frozenset((item.kernel.name, item.static) for item in found)


@functools.cache
def emulated_by_default(op: Any) -> list[Sample]:
    """The small samples of an operator that are emulated without `--full`."""
    kernels = {sample.label: kernels_of(op, sample) for sample in op.cases.small}
    chosen: set[tuple[str, tuple[Any, ...]]] = set()
    seen: set[Any] = set()
    for needed in kernels.values():
        kinds = {
            (name, position, kind_of(value))
            for name, static in needed
            for position, value in enumerate(static)
        }
        if not kinds <= seen:
            seen |= kinds
            chosen |= needed
    return [sample for sample in op.cases.small if kernels[sample.label] <= chosen]
