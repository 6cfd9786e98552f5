"""Importing costs little, needs no GPU and no compiler, and loads nothing that is not used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tile_kernels
from tests.requirements import run_fresh

HEAVY = ("tilelang", "tvm", "tvm_ffi", "rich", "matplotlib", "pytest", "hypothesis")
ATTRIBUTES = ("config", "moe", "transpose", "torch", "testing")


def test_import_loads_nothing_heavy_and_gives_the_families() -> None:
    code = f"""
import json, sys, tile_kernels
found = [getattr(tile_kernels, name).__name__ for name in {ATTRIBUTES}]
tile_kernels.get_num_sms, tile_kernels.set_num_sms, tile_kernels.get_device_num_sms
print(json.dumps([found, [name for name in {HEAVY} if name in sys.modules]]))
"""
    found, heavy = json.loads(run_fresh(code))
    assert found == [f"tile_kernels.{name}" for name in ATTRIBUTES]
    assert heavy == []


@pytest.mark.parametrize(
    ("use", "budget"),
    [
        ("[getattr(tile_kernels, family) for family in tile_kernels.FAMILIES]", 1.05),
        ("tile_kernels.moe.topk_gate, tile_kernels.quant.per_token_cast", 1.1),
    ],
)
def test_import_budget(use: str, budget: float, tmp_path: Path) -> None:
    """Times `import torch`: all families, which load no operator; and two operators.

    Both are read as bytecode, as both are once installed; the first run writes it. The best of
    five.
    """
    bytecode = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    code = f"""
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import tile_kernels
{use}
print((time.perf_counter() - start) / (middle - start))
"""
    run_fresh(code, **bytecode)
    assert min(float(run_fresh(code, **bytecode)) for _ in range(5)) <= budget


def test_version_is_in_one_place() -> None:
    """Whatever distribution installed this package: its metadata has the same version."""
    import importlib.metadata

    names = importlib.metadata.packages_distributions()["tile_kernels"]
    assert {importlib.metadata.version(name) for name in names} == {tile_kernels.__version__}


def test_unknown_attributes_are_named() -> None:
    assert not hasattr(tile_kernels, "no_such_family")
    assert set(tile_kernels.__all__) <= set(dir(tile_kernels))
    for name in tile_kernels.__all__:
        assert getattr(tile_kernels, name) is not None


@pytest.mark.parametrize(
    ("version", "refused"), [("2.1.0", True), ("1.0.0", True), ("0.1.0", False)]
)
def test_the_other_distribution_is_refused(version: str, refused: bool, tmp_path: Path) -> None:
    """DeepSeek's `tile-kernels` owns the same folder; its releases start at 1.0."""
    info = tmp_path / f"tile_kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tile-kernels\nVersion: {version}\n"
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import tile_kernels
except ImportError as error:
    print(error)
"""
    message = run_fresh(code)
    assert bool(message) is refused
    if refused:
        assert message.startswith(f"tile-kernels {version} (DeepSeek's) and moe-tile-kernels")
        assert "pip uninstall tile-kernels moe-tile-kernels" in message
