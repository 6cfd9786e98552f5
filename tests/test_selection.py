"""What `--op` selects, which markers tests get, and whether the mutations fit the sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests import selection
from tests.conftest import markers_of
from tests.requirements import run_fresh
from tile_kernels.runtime import registry

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"


sys.path.insert(0, str(ROOT / "tools"))
import mutation_check  # noqa: E402

sys.path.pop(0)


def test_an_unknown_operator_is_a_usage_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"^--op: no operator 'topkgate'; did you mean"):
        selection.select("topkgate")


@pytest.mark.parametrize(
    ("name", "files", "others"),
    [
        (
            "quant.per_token_cast",
            ["test_ops.py", "test_compile.py", "quant/test_per_token.py", "quant/test_encoders.py"],
            ["quant/test_lossless.py", "moe/test_topk.py", "quant/helpers.py", "ep/test_local.py"],
        ),
        ("engram.engram_gate_fwd", ["engram/test_gate.py", "engram/test_gate_reference.py"], []),
        ("moe.topk_gate", ["moe/test_topk.py", "test_messages.py"], ["attention/test_topk.py"]),
    ],
)
def test_files_of_an_operator(name: str, files: list[str], others: list[str]) -> None:
    for file in files:
        assert selection.may_test(TESTS / file, name), file
    for file in others:
        assert not selection.may_test(TESTS / file, name), file


def test_doctests_of_an_operator() -> None:
    package = ROOT / "tile_kernels"
    assert selection.may_test(package / "moe" / "topk" / "op.py", "moe.topk_gate")
    assert not selection.may_test(package / "moe" / "hash" / "op.py", "moe.topk_gate")


def test_all_operators_are_tested_by_default(request: pytest.FixtureRequest) -> None:
    everything = 1 if request.config.getoption("--op") else 60
    assert len(selection.operators()) >= everything


def test_kernels_of_two_operators_are_emulated_once() -> None:
    """All kinds of static arguments of both are run, those that the first one has shown by it."""
    first, second = ops = registry.get("mhc.mhc_pre_big_fuse"), registry.get("mhc.mhc_pre_fwd")
    chosen = selection.emulated_of(ops)
    run = [selection.kernels_of(op, sample) for op, samples in chosen.items() for sample in samples]
    every = [selection.kernels_of(op, sample) for op in ops for sample in op.cases.small]
    assert selection._kinds(frozenset().union(*run)) == selection._kinds(frozenset().union(*every))
    assert chosen[first] == selection.emulated_of((first,))[first]
    assert len(chosen[second]) < len(selection.emulated_of((second,))[second])
    assert second.cases.ordinary() in chosen[second]


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_a_backend_is_a_marker(backend: str, request: pytest.FixtureRequest) -> None:
    assert ("emulated" in markers_of(request.node)) == (backend == "emulate")


def test_emulation_is_a_marker(request: pytest.FixtureRequest) -> None:
    assert "emulate" != request.node.name  # noqa: SIM300 - the constant is what counts
    assert "emulated" in markers_of(request.node)


def test_processes_are_a_marker(request: pytest.FixtureRequest) -> None:
    assert "multiprocess" in markers_of(request.node)
    assert run_fresh("print(1)") == "1"


@pytest.mark.parametrize("entry", mutation_check.read_entries(), ids=lambda entry: entry.name)
def test_mutations_fit_the_sources(entry: Any) -> None:
    """The old text occurs once, and the file is still Python with the new one."""
    changed = entry.changed(ROOT)
    compile(changed, entry.file, "exec")
    assert changed != (ROOT / entry.file).read_text(encoding="utf-8")


def test_a_mutation_that_does_not_fit_is_an_error() -> None:
    entry = mutation_check.read_entries()[0]
    stale = mutation_check.Mutation(
        entry.name, entry.kind, entry.file, "no such text", "", entry.tests
    )
    with pytest.raises(mutation_check.BadEntryError, match=r"must occur once in .*, found 0 times"):
        stale.changed(ROOT)
