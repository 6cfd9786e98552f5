"""Kernels in the style of TileLang's public examples, each compared with PyTorch.

They are written as for a GPU (`device="cuda"`) and run unmodified on the emulator.
`python -m tests.emulator.corpus` runs all of them and prints a table; the test suite runs a part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

FAMILIES = ("gemm", "quantized", "attention", "recurrent", "rows", "memory", "parallel")


@dataclass(frozen=True)
class Case:
    """One kernel, or a few that belong together, with its comparison."""

    name: str
    family: str
    run: Callable[[], None]
    quick: bool  # part of the default test suite


_cases: dict[str, Case] = {}


def case(quick: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function that runs kernels and asserts that their results are right."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        family = run.__module__.rpartition(".")[2]
        name = f"{family}.{run.__name__}"
        if name in _cases:
            raise ValueError(f"two cases are named {name}")
        _cases[name] = Case(name, family, run, quick)
        return run

    return register


def cases() -> list[Case]:
    """All cases, in the order of the families."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    return sorted(_cases.values(), key=lambda c: FAMILIES.index(c.family))
