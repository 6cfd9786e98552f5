"""With clang as the compiler: what depends on how a compiler reports accesses, and on its lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# clang reports accesses in other ways than g++: a read before a write to the same place, arrays on
# the stack, copies of structures; and it merges equal calls of different lines.
BUGS = (
    "missing atomic", "uninitialised global memory", "bound of a local array",
    "uninitialised local array", "misaligned vector", "missing cp.async wait", "divergent barrier",
    "missing barrier", "swizzle",
)  # fmt: skip
KERNELS = (
    "test_elementwise_bit_for_bit", "test_e8m0_scales", "test_fp4_widening_covers_all_codes",
    "test_gemm_that_stores_with_stmatrix",
)  # fmt: skip


@pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed")
def test_planted_bugs_and_kernels() -> None:
    tests = [f"test_planted_bugs.py::test_planted_bug[{name}-False]" for name in BUGS]
    tests += [f"test_planted_bugs.py::test_the_kernel_without_it_is_clean[{name}]" for name in BUGS]
    tests += [f"test_emulated_kernels.py::{name}" for name in KERNELS]
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [str(folder / test) for test in tests],
        cwd=ROOT,
        env={**os.environ, "TILE_KERNELS_CXX": "clang++"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
