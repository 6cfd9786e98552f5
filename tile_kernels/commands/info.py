"""`tile-kernels info` and `ops`: what this machine has, what the package has."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import tile_kernels
from tile_kernels.emulator import cache
from tile_kernels.runtime import backends, emulation, registry, sources, terminal
from tile_kernels.runtime.device import current_device
from tile_kernels.runtime.operator import Operator


def info(_: argparse.Namespace) -> int:
    """Show what this machine has."""
    device = current_device()
    if torch.cuda.is_available():
        gpu = f"{device.name}, {device.arch}, {device.num_sms} SMs, CUDA {torch.version.cuda}"
    else:
        gpu = "none: CPU tensors run the oracles; kernels compile, and run emulated"
    rows = [
        ["tile_kernels", tile_kernels.__version__],
        ["Python", sys.version.split()[0]],
        *([name, _version(name)] for name in ("torch", "tilelang", "apache-tvm-ffi", "matplotlib")),
        ["GPU", gpu],
        ["nvcc", _tool(sources.nvcc(), "kernels cannot be compiled: install a CUDA toolkit")],
        ["C++ compiler", _tool(shutil.which("g++"), "kernels cannot be emulated: install g++")],
        ["emulation", emulation.missing() or "ready"],
        ["emulation cache", str(cache.cache_dir())],
        ["backend", os.environ.get("TILE_KERNELS_BACKEND", "auto")],
        [
            "kernel cache",
            os.environ.get("TILELANG_CACHE_DIR", str(Path.home() / ".tilelang/cache")),
        ],
    ]
    terminal.show_table("tile-kernels", [("", "left"), ("", "left")], rows)
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"missing: pip install {package}"


def _tool(path: str | None, missing: str) -> str:
    if path is None:
        return f"missing: {missing}"
    lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    versions = [line for line in lines.splitlines() if "release" in line or "g++" in line]
    return f"{path} ({versions[0].strip() if versions else 'unknown version'})"


def list_ops(options: argparse.Namespace) -> int:
    """Show the registry."""
    rows = [[op.name, _signature(op), _least_work(op)] for op in registry.select(options.which)]
    columns = [("operator", "left"), ("signature", "left"), ("least work", "left")]
    title = f"operators, each on the backends {', '.join(backends.BACKENDS)}"
    terminal.show_table(title, columns, rows)
    return 0


def _signature(op: Operator) -> str:
    from rich.markup import escape

    return escape(str(inspect.signature(op.body)).replace("'", ""))


def _least_work(op: Operator) -> str:
    case = op.cases.benchmarks[0]
    cost = op.cost(**case.build("meta"))
    flops = f", {cost.flops / 1e9:.1f} GFLOP" if cost.flops else ""
    return f"{cost.bytes / 1e6:.1f} MB{flops} ({case.label})"
