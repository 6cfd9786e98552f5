"""Each class of bug is diagnosed for what it is, and the kernel without it is clean."""

from __future__ import annotations

from typing import Any

import pytest

from tile_kernels.emulator import Emulated, EmulationError

from .planted_bugs import BUGS, Bug


def _run(bug: Bug, planted: bool, contract: bool = False, **options: Any) -> None:
    edit = bug.edit if planted else None
    emulated = Emulated.build(
        bug.kernel(planted), pass_configs=bug.configs, transform=edit, contract=contract
    )
    args = list(bug.args())
    if not planted and not bug.edit and bug.kind == "misaligned":
        args[0] = args[0].clone()
    emulated(*args, fresh=bug.fresh, **options)


# The first two depend on what the compiler does at the higher level that contraction needs.
CONTRACTED = ["divergent barrier", "missing atomic", "bound of a local array", "missing barrier"]


@pytest.mark.parametrize(
    ("name", "contract"), [(n, False) for n in BUGS] + [(n, True) for n in CONTRACTED]
)
def test_planted_bug(name: str, contract: bool) -> None:
    bug = BUGS[name]
    with pytest.raises(EmulationError) as caught:
        _run(bug, True, contract)
    error = caught.value
    assert error.kind == bug.kind, str(error)
    assert bug.words in error.message
    assert bug.line in (error.python_text or ""), str(error)
    if bug.other_line is not None:
        assert bug.other_line in (error.other_python_text or ""), str(error)


@pytest.mark.parametrize("name", BUGS)
def test_the_kernel_without_it_is_clean(name: str) -> None:
    for order in ("forward", "reverse"):
        _run(BUGS[name], False, order=order)


@pytest.mark.parametrize("name", CONTRACTED)
def test_contraction_gives_no_false_report(name: str) -> None:
    _run(BUGS[name], False, contract=True)
