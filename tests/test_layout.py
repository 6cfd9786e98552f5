"""The layout of the package: a folder for each operator, imports in one direction."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tile_kernels
from tests.requirements import run_fresh
from tile_kernels.emulator.launch import SHARED_LIMIT
from tile_kernels.runtime import registry
from tile_kernels.runtime.device import DESCRIBED

PACKAGE = Path(tile_kernels.__file__).parent
OPS = registry.all_ops()
FOLDERS = sorted({Path(*op.function.__module__.split(".")[1:-1]) for op in OPS})
FILES = ("__init__.py", "op.py", "kernel.py", "reference.py", "cases.py")


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


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_plans_need_no_tilelang(folder: Path) -> None:
    path = PACKAGE / folder / "plan.py"
    if path.exists():  # a folder may use the plan of another one
        bad = ("tilelang", "tests")
        assert not [name for name in imports(path) if name.startswith(bad)]
        assert not [name for name in imports(path) if name.endswith((".kernel", ".op", ".cases"))]


REFERENCES = sorted([*files("reference.py"), *files("*_reference.py")])


@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_references_import_neither_operators_nor_kernels(path: Path) -> None:
    for name in imports(path):
        assert not name.startswith(("tilelang", "tests", "tile_kernels.torch"))
        assert not name.endswith((".op", ".kernel", ".cases", "primitives", ".runtime.operator"))


@pytest.mark.parametrize("folder", [*tile_kernels.FAMILIES, "ep", "modeling", "runtime"])
def test_the_package_does_not_use_the_public_names_of_references(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith("tile_kernels.torch")], path


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_reference_has_the_operators_name_in_torch(op: registry.Registered) -> None:
    function = getattr(tile_kernels.torch, op.short_name)
    assert op.short_name in tile_kernels.torch.__all__
    if op.short_name in ("cast_back", "per_channel_cast_fused"):  # TileKernels' other arguments
        return
    folder = op.function.__module__.rpartition(".")[0]
    assert function.__module__ == f"{folder}.reference"


# The modules of TileKernels, and what they have there.
PATHS = {
    "cast": "cast cast_back",
    "engram": "make_offsets engram_hash_ref engram_gate_ref",
    "expand_to_fused": "expand_to_fused expand_to_fused_with_sf",
    "mhc": """expand_to_mhc_ref sinkhorn_normalize_ref mhc_head_compute_mix_ref
        mhc_pre_split_mixes_ref mhc_pre_apply_mix_ref mhc_post_ref mhc_pre_norm_fn_ref""",
    "moe": """aux_fi group_count mask_indices_by_tp normalize_weight
        inplace_unique_group_indices""",
    "per_channel_cast_fused": "per_channel_cast_fused",
    "reduce_fused": "reduce_fused",
    "topk": "stable_topk topk_sum_and_topk_group_idx top2_sum_gate",
}


@pytest.mark.parametrize("name", PATHS)
def test_references_at_the_import_paths_of_tilekernels(name: str) -> None:
    module = importlib.import_module(f"tile_kernels.torch.{name}")
    for function in PATHS[name].split():
        assert callable(getattr(module, function))
        if name != "engram":  # whose references TileKernels has there only
            assert getattr(tile_kernels.torch, function) is getattr(module, function)


def test_torch_has_the_modules_of_tilekernels_alone() -> None:
    found = {path.stem for path in (PACKAGE / "torch").glob("*.py")}
    assert found == {"__init__", *PATHS}


def test_the_emulator_depends_on_nothing_else_of_the_package() -> None:
    for path in (PACKAGE / "emulator").rglob("*.py"):
        others = [name for name in imports(path) if name.startswith("tile_kernels")]
        assert all(name.startswith("tile_kernels.emulator") for name in others), path


def test_operators_and_plans_load_without_tilelang() -> None:
    code = """
import sys
sys.modules["tilelang"] = None
from tile_kernels.emulator.launch import SHARED_LIMIT
from tile_kernels.runtime import registry
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.device import described
from tile_kernels.runtime.warmup import compilations
for op in registry.all_ops():
    compilations([(op.name, op.cases.benchmarks[0].build("meta"))], described())
print("loaded")
"""
    assert run_fresh(code) == "loaded"


def test_limits_of_the_emulator_are_those_of_the_devices() -> None:
    for arch, device in DESCRIBED.items():
        assert SHARED_LIMIT[arch.rstrip("a")] == device.smem_per_block


def test_nothing_imports_compat_but_the_package() -> None:
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "compat" not in path.parents and path != PACKAGE / "__init__.py":
            assert not [name for name in imports(path) if "tile_kernels.compat" in name], path


def test_import_paths_of_other_packages() -> None:
    for path in (PACKAGE / "compat").rglob("*.py"):
        parts = path.relative_to(PACKAGE / "compat").with_suffix("").parts
        if parts[-1] != "__init__":
            module = importlib.import_module(".".join(("tile_kernels", *parts)))
            assert module.__doc__
