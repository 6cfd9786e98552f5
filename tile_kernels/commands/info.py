"""`tile-kernels info` and `ops`: what this machine has, what the package has."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import os
import shutil
import subprocess
import sys

import torch

import tile_kernels
from tile_kernels.emulator import cache
from tile_kernels.runtime import backends, bundles, emulation, registry, sources, terminal
from tile_kernels.runtime.device import current_device
from tile_kernels.runtime.operator import Operator


def info(_: argparse.Namespace) -> int:
    """Show what this machine has."""
    device = current_device()
    if torch.cuda.is_available():
        gpu = f"{device.name}, {device.arch}, {device.num_sms} SMs, CUDA {torch.version.cuda}"
    else:
        gpu = "none: CPU tensors run the references; kernels compile, and run emulated"
    rows = [
        ["tile_kernels", tile_kernels.__version__],
        ["Python", sys.version.split()[0]],
        *([name, _version(name, extra)] for name, extra in _PACKAGES.items()),
        ["GPU", gpu],
        ["nvcc", _tool(sources.nvcc(), "kernels cannot be compiled: install a CUDA toolkit")],
        ["C++ compiler", _tool(shutil.which("g++"), "kernels cannot be emulated: install g++")],
        ["emulation", emulation.missing() or "ready"],
        ["emulation cache", str(cache.cache_dir())],
        ["backend", os.environ.get("TILE_KERNELS_BACKEND", "auto")],
        ["bundles of kernels", _bundles(device.arch)],
        ["kernel cache", str(cache.cache_dir("kernels"))],
    ]
    terminal.show_table("tile-kernels", [("", "left"), ("", "left")], rows)
    return 0


# Packages, and the extra of this one that installs each.
_PACKAGES = {"torch": "", "tilelang": "[jit]", "apache-tvm-ffi": "[jit]", "matplotlib": "[bench]"}


def _version(package: str, extra: str) -> str:
    from rich.markup import escape

    install = f"pip install '{bundles.DISTRIBUTION}{extra}'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return escape(f"missing: {install}")
    if package == "tilelang" and bundles.too_old(version):
        return escape(f"{version}, too old to compile these kernels: {install}")
    return version


def _bundles(arch: str) -> str:
    """Those that have kernels for this machine's GPU."""
    try:
        found = [root for root in bundles.roots(arch) if isinstance(root, bundles.Bundle)]
    except bundles.BundleError as error:
        return f"unusable: {error}"
    words = [
        f"{len(each.kernels)} kernels for {each.manifest['arch']} in {each.path}" for each in found
    ]
    return "; ".join(words) or f"none for {arch}"


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

    return escape(str(inspect.signature(op.function)).replace("'", ""))


def _least_work(op: Operator) -> str:
    case = op.cases.benchmarks[0]
    cost = op.cost(**case.build("meta"))
    flops = f", {cost.flops / 1e9:.1f} GFLOP" if cost.flops else ""
    return f"{cost.bytes / 1e6:.1f} MB{flops} ({case.label})"
