"""What a test may need of the machine, and a fresh interpreter for those that need one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tile_kernels.runtime import sources

NEEDS_NVCC = "compiles with nvcc, which was not found: install a CUDA toolkit to run it"

# Compiling is optional for users, who may have no CUDA toolkit; CI must never skip it.
needs_nvcc = pytest.mark.skipif(
    sources.nvcc() is None and "CI" not in os.environ, reason=NEEDS_NVCC
)

NEEDS_TRANSFORMERS = "needs transformers, which was not found: pip install -e '.[dev]'"
# As above: in CI a package that is missing is an error.
lacks_transformers = importlib.util.find_spec("transformers") is None and "CI" not in os.environ

# Where an operator runs: backend and device.
TORCH = pytest.param(("torch", "cpu"), id="torch")
EMULATED = pytest.param(("emulate", "cpu"), id="emulate", marks=pytest.mark.emulated)
EMULATED_IN_FULL = pytest.param(("emulate", "cpu"), id="emulate", marks=pytest.mark.full)
CUDA = pytest.param(("tilelang", "cuda"), id="cuda", marks=pytest.mark.gpu)
GROUNDS = [TORCH, EMULATED, CUDA]


def run_fresh(code: str, **environment: str) -> str:
    """What `code` prints in a new interpreter with these variables added."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
