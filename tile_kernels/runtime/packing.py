"""Building bundles of compiled kernels, and wheels that hold one."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tile_kernels.runtime import bundles, compilation, sources
from tile_kernels.runtime.device import Device, described
from tile_kernels.runtime.warmup import (
    Call,
    Compilation,
    WarmupReport,
    benchmark_calls,
    compilations,
    compile_all,
    model_compilations,
)


def pack(
    path: Path,
    *,
    arch: str,
    calls: Iterable[Call] = (),
    models: Iterable[Any] = (),
    training: bool | None = None,
    max_tokens: int | None = None,
    num_sms: int | None = None,
    wheel: bool = False,
    jobs: int | None = None,
    progress: bool = True,
) -> tuple[Path, WarmupReport]:
    """Compiles kernels for one architecture into a bundle. Needs TileLang and nvcc, and no GPU.

    Args:
        path: The bundle; with `wheel` the folder for the wheel. Folders are created.
        arch: As of `tile_kernels.warmup`.
        calls: As of `tile_kernels.warmup`.
        models: As `model` of `tile_kernels.warmup`, several. Without calls and models: the
            operators' benchmark shapes.
        training: As of `tile_kernels.warmup`.
        max_tokens: As of `tile_kernels.warmup`.
        num_sms: Multiprocessors of the GPUs that will run the kernels, some of which are compiled
            for their number. None: as the described device of `arch` has (132 for `sm_90a`).
        wheel: Whether to write a wheel instead of a bare bundle.
        jobs: Compiles at a time; None: the number of cores.
        progress: Whether to show a progress bar.

    Returns:
        The file that was written, and the kernels with the seconds that each took.
    """
    device = described(arch)
    if num_sms is not None:
        if not num_sms > 0:
            raise ValueError(f"pack: num_sms must be at least 1, got {num_sms}")
        device = dataclasses.replace(device, num_sms=num_sms)
    if path.is_file() if wheel else path.is_dir():  # told before minutes of compiling
        kinds = ("folder", "file") if wheel else ("file", "folder")
        raise ValueError(f"pack: path must be a {kinds[0]}, got the {kinds[1]} {path}")
    (path if wheel else path.parent).mkdir(parents=True, exist_ok=True)
    calls, models = list(calls), list(models)
    work: dict[Compilation, None] = {}
    for model in models:
        found = model_compilations(model, device, training=training, max_tokens=max_tokens)
        work |= dict.fromkeys(found)
    if not calls and not models:
        calls = benchmark_calls()
    work |= dict.fromkeys(compilations(calls, device))
    report = compile_all(list(work), device, jobs, progress)
    kernels = [_packed(item) for item in work]
    if not wheel:
        bundles.write(path, kernels, device.arch, _facts(device))
        return path, report
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "kernels.zip"
        bundles.write(bundle, kernels, device.arch, _facts(device))
        return _write_wheel(path, bundle.read_bytes(), device.arch), report


def _packed(item: Compilation) -> bundles.Packed:
    key = bundles.Key(item.kernel.module, item.kernel.name, item.static, item.arch)
    if not key.packaged:
        raise ValueError(f"pack: {item.label} is a kernel of {key.module}, not of this package")
    with compilation.warming():
        binary = bundles.find(key) or bundles.find_cached(key)
        if binary is None:
            bundles.need_compiler(key)
            binary = item.kernel.definition.binary(item.static, item.arch)
            bundles.store(key, binary)
    return bundles.Packed(key, binary)


def _facts(device: Device) -> dict[str, Any]:
    compiler = sources.nvcc()
    text = ""
    if compiler:
        text = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True
        ).stdout
    release = re.search(r"release (\S+),", text)
    return {
        "num_sms": device.num_sms,
        "tilelang": importlib.metadata.version("tilelang") if bundles.has_compiler() else "none",
        "nvcc": release[1] if release else "unknown",
    }


def _write_wheel(folder: Path, bundle: bytes, arch: str) -> Path:
    """A wheel that holds a bundle and nothing to run; `bundles.roots` finds it by its package."""
    package = bundles.wheel_package(arch)
    name, version = package.replace("_", "-"), bundles.version()
    info = f"{package}-{version}.dist-info"
    summary = f"Compiled kernels of {bundles.DISTRIBUTION} {version} for {arch}"
    metadata = [
        "Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", f"Summary: {summary}",
        "License-Expression: MIT", "Requires-Python: >=3.11",
        f"Requires-Dist: {bundles.DISTRIBUTION}=={version}",
    ]  # fmt: skip
    wheel = [
        "Wheel-Version: 1.0",
        "Generator: tile-kernels pack",
        "Root-Is-Purelib: true",
        "Tag: py3-none-any",
    ]
    files = {
        f"{package}/__init__.py": f'"""{summary}."""\n'.encode(),
        f"{package}/kernels.zip": bundle,
        f"{info}/METADATA": ("\n".join(metadata) + "\n").encode(),
        f"{info}/WHEEL": ("\n".join(wheel) + "\n").encode(),
    }
    record = [f"{each},sha256={_digest(content)},{len(content)}" for each, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in files.items():
            bundles.add_file(archive, each, content)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
