"""The layout of the package: a folder for each operator, imports in one direction."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tile_kernels
from tests.requirements import run_fresh
from tile_kernels.runtime import registry

PACKAGE = Path(tile_kernels.__file__).parent
OPS = registry.all_ops()
FOLDERS = sorted({Path(*op.function.__module__.split(".")[1:-1]) for op in OPS})
FILES = ("op.py", "kernel.py", "reference.py", "cases.py")


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(name: str) -> list[Path]:
    return sorted(path for path in PACKAGE.rglob(name))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_folder_is_part_of_the_operators_name(op: registry.Registered) -> None:
    family, *rest, file = op.function.__module__.split(".")[1:]
    folder = (rest or [family])[-1]
    assert file == "op"
    assert folder in op.short_name
    functions = set(getattr(tile_kernels, family).__all__)
    assert not rest or folder not in functions, "a submodule would shadow the function"


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_an_operator_has_its_files(folder: Path) -> None:
    assert not [name for name in FILES if not (PACKAGE / folder / name).exists()]


@pytest.mark.parametrize("path", files("kernel.py"), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_kernels_import_no_host_files(path: Path) -> None:
    bad = (".op", ".cases", ".reference", "torch", "tile_kernels.runtime.operator")
    assert not [name for name in imports(path) if name.endswith(bad) or name.startswith("torch")]


@pytest.mark.parametrize("path", files("op.py"), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_operators_import_neither_cases_nor_tests_nor_tilelang(path: Path) -> None:
    for name in imports(path):
        assert not name.startswith(("tilelang", "tests", "tile_kernels.testing"))
        assert ".cases." not in name.removeprefix("tile_kernels.runtime.cases")
        assert not name.endswith((".cases", ".kernel")) or name == "tile_kernels.runtime.cases"


@pytest.mark.parametrize("path", files("plan.py"), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_plans_are_plain_python(path: Path) -> None:
    bad = ("tilelang", "torch", "tests")
    assert not [name for name in imports(path) if name.startswith(bad)]


def test_the_emulator_depends_on_nothing_else_of_the_package() -> None:
    for path in (PACKAGE / "emulator").rglob("*.py"):
        others = [name for name in imports(path) if name.startswith("tile_kernels")]
        assert all(name.startswith("tile_kernels.emulator") for name in others), path


def test_operators_and_plans_load_without_tilelang() -> None:
    code = """
import sys
sys.modules["tilelang"] = None
from tile_kernels.runtime import registry
from tile_kernels.runtime.device import described
from tile_kernels.runtime.warmup import compilations
for op in registry.all_ops():
    compilations([(op.name, op.cases.benchmarks[0].build("meta"))], described())
print("loaded")
"""
    assert run_fresh(code) == "loaded"
