"""Each class of bug is diagnosed for what it is, and the kernel without it is clean."""

from __future__ import annotations

from typing import Any

import pytest

from tile_kernels.emulator import Emulated, EmulationError

from .planted_bugs import BUGS, Bug


def _run(bug: Bug, planted: bool, **options: Any) -> None:
    edit = bug.edit if planted else None
    emulated = Emulated.build(bug.kernel(planted), pass_configs=bug.configs, transform=edit)
    args = list(bug.args())
    if not planted and not bug.edit and bug.kind == "misaligned":
        args[0] = args[0].clone()
    emulated(*args, fresh=bug.fresh, **options)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug(name: str) -> None:
    bug = BUGS[name]
    with pytest.raises(EmulationError) as caught:
        _run(bug, True)
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
