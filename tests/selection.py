"""Which tests run: those of one operator with `--op`, and which samples are emulated by default.

Compiling a kernel for the emulator takes seconds, running it milliseconds. So few kernels are
chosen such that every kernel of an operator and every kind of value of every static argument
(flags, names, 0, 1, larger) occurs; then every sample that these kernels serve is run. `--full`
takes all samples.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Sample
from tile_kernels.runtime.device import described
from tile_kernels.runtime.warmup import compilations

_selected: list[str] = []


def select(name: str | None) -> None:
    """Let `operators` return one operator alone (None: all of them)."""
    try:
        _selected[:] = [] if name is None else [registry.get(name).name]
    except KeyError as error:
        raise pytest.UsageError(f"--op: {error.args[0]}") from error


def operators() -> list[Any]:
    """The operators that tests of all operators are for."""
    return [registry.get(name) for name in _selected] or registry.all_ops()


def _folder(name: str) -> Path:
    """The folder of an operator in the package."""
    op = registry.get(name)
    return Path(inspect.getfile(op.function)).parent


def _is_own_file(path: Path, name: str) -> bool:
    """Whether a test file is named like the operator's folder; or a module is in that folder."""
    folder = _folder(name)
    family = registry.get(name).family
    own = path.parent.name == family and re.fullmatch(rf"test_{folder.name}(_\w+)?", path.stem)
    return bool(own) or path.parent == folder


def may_test(path: Path, name: str) -> bool:
    """Whether a file can have tests of an operator: its own, of all operators, or it names it."""
    if _is_own_file(path, name):
        return True
    text = path.read_text(encoding="utf-8")
    of_all = "operators()" in text
    return path.stem.startswith("test_") and (of_all or _names(text, name))


def _names(text: str, name: str) -> bool:
    return re.search(rf"\b{registry.get(name).short_name}\b", text) is not None


def tests(item: pytest.Item, name: str) -> bool:
    """Whether a test is one of the operator: its parameter, in its file, or calling it."""
    if name in re.split(r"[\[\]-]", item.name) or _is_own_file(item.path, name):
        return True
    return isinstance(item, pytest.Function) and _names(inspect.getsource(item.function), name)


# Labels of samples whose values, addresses or strides are out of the ordinary.
_SPECIAL = re.compile(r"special|nan|-inf|extreme|ties|equal|zero|wild|misaligned|strid")

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
    return frozenset((f"{item.kernel.module}.{item.kernel.name}", item.static) for item in found)


def _kinds(kernels: Kernels) -> set[Any]:
    """The kernels with each kind of value of each static argument."""
    return {
        (name, position, kind_of(value))
        for name, static in kernels
        for position, value in enumerate(static)
    }


def _shown(label: str, kernels: Kernels) -> set[Any]:
    """What a sample shows: kinds of static arguments, and special values for its kernels."""
    special = _SPECIAL.search(label)
    names = frozenset(name for name, _ in kernels)
    return _kinds(kernels) | ({(special[0], names)} if special else set())


def emulated_by_default(op: Any) -> list[Sample]:
    """The small samples of an operator that are emulated without `--full`.

    The kernels of the ordinary sample, which many tests use, are always among them. The others are
    chosen one after the other, those first that show most for each kernel that must be compiled:
    so most kernels are run with NaN, infinities and ties, and with addresses and strides that
    forbid wide accesses. What an operator before this one shows of a kernel that both launch is not
    shown again.
    """
    return emulated_of(tuple(operators()))[op]


@functools.cache
def emulated_of(ops: tuple[Any, ...]) -> dict[Any, list[Sample]]:
    """The emulated samples of each of these operators, where no other ones are tested."""
    before: set[tuple[str, tuple[Any, ...]]] = set()
    found = {}
    for op in ops:
        kernels = _kernels_of_samples(op)
        chosen = _chosen(kernels, op.cases.ordinary().label, frozenset(before))
        before |= chosen
        found[op] = [sample for sample in op.cases.small if kernels[sample.label] <= chosen]
    return found


@functools.cache
def _kernels_of_samples(op: Any) -> dict[str, Kernels]:
    return {sample.label: kernels_of(op, sample) for sample in op.cases.small}


def _chosen(kernels: dict[str, Kernels], ordinary: str, before: Kernels) -> Kernels:
    """The kernels of an operator that are run, where those of `before` are run elsewhere."""
    shown = {label: _shown(label, needed) for label, needed in kernels.items()}
    chosen = set(kernels[ordinary])
    while True:
        seen = _kinds(before | chosen)
        for label, needed in kernels.items():
            if needed <= chosen:
                seen |= shown[label]
        gains = {
            label: len(shown[label] - seen) / max(len(needed - chosen - before), 0.5)
            for label, needed in kernels.items()
            if not needed <= chosen and not shown[label] <= seen
        }
        if not gains:
            return frozenset(chosen)
        chosen |= kernels[max(gains, key=lambda label: gains[label])]
