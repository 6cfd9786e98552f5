"""Runs a fast subset of the tests against versions of PyTorch, each in a fresh environment.

    python tools/torch_versions.py [--max-mb 300] [VERSION ...]
    python tools/torch_versions.py --python PYTHON

Versions are those of `torch==VERSION`, as `2.13.0+cpu`; by default every minor version from 2.10 on
that pip offers, its CPU build where there is one. A wheel that is larger than `--max-mb` is not
downloaded: builds for CUDA need gigabytes of other packages as well. The table says so, unless an
earlier run had that version.
TileLang is not installed. Writes `docs/measured/torch_versions.json`, of which `docs/tables.py`
makes a table. The second form downloads nothing: it runs the same in the environment of another
interpreter, which has a PyTorch and the packages of `TOOLS`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "measured" / "torch_versions.json"
OLDEST = (2, 10)
INDEX = "https://pypi.org/simple/torch/"
# What depends on PyTorch's internals: calls, custom ops, fake tensors, launches, new dtypes.
TESTS = (
    "tests/runtime/test_calls.py",
    "tests/runtime/test_launcher.py",
    "tests/test_config.py",
    "tests/integrations/test_deep_gemm.py",
    "tests/integrations/test_mx.py",
    "tests/integrations/test_plugins.py",
    "tests/integrations/test_serving.py",
)
CHECKS = ("moe", "engram", "transpose")
WITHOUT_TILELANG = "not emulated and not compiled and not multiprocess"
TOOLS = ("numpy", "rich", "pytest", "pytest-xdist", "hypothesis")


def offered(text: str) -> list[str]:
    """The newest version of each minor release from the oldest supported one on.

    `text` is the error of pip that lists versions.
    """
    found: dict[tuple[int, int], tuple[tuple[int, bool], str]] = {}
    listed = re.search(r"from versions: (.*)\)", text)
    for word in listed.group(1).split(", ") if listed else ():
        parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\+cpu)?", word)
        if parts is None:
            continue
        minor, rank = (int(parts[1]), int(parts[2])), (int(parts[3]), parts[4] is not None)
        if minor >= OLDEST and rank > found.get(minor, ((-1, False), ""))[0]:
            found[minor] = rank, word
    return [word for _, (_, word) in sorted(found.items())]


def wheel_mb(version: str, page: str) -> float | None:
    """The size of the wheel for this interpreter; None if the index has none."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    pattern = (
        rf'href="([^"#]+/torch-{re.escape(version)}-{tag}-{tag}-[^"#]*{platform.machine()}\.whl)'
    )
    found = re.search(pattern, page)
    if found is None:
        return None
    request = urllib.request.Request(found.group(1), method="HEAD")  # noqa: S310 - of the index
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return int(answer.headers["content-length"]) / 1e6


def run(version: str, folder: Path) -> dict[str, Any]:
    """Installs one version and runs the subset."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for words in ((f"torch=={version}",), TOOLS, ("--no-deps", str(ROOT))):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"result": "not installed", "reason": done.stderr.strip().splitlines()[-1][:200]}
    return subset(python)


def subset(python: Path) -> dict[str, Any]:
    """Runs the subset with an interpreter."""
    check = [str(python), "-m", "tile_kernels", "check", "--references-only", *CHECKS]
    tests = [str(python), "-m", "pytest", "-q", "-n", "0", "--tb=short", "-m", WITHOUT_TILELANG]
    tests += TESTS
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    version = [str(python), "-c", "import platform; print(platform.python_version())"]
    found_version = subprocess.run(version, capture_output=True, text=True, check=True).stdout
    report: dict[str, Any] = {"python": found_version.strip()}
    for name, command, pattern in (
        ("references", check, r"all (\d+) cases passed"),
        ("tests", tests, r"(\d+) passed(?!.*failed)"),
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=env
        )
        found = re.search(pattern, done.stdout)
        if done.returncode or found is None:
            sys.stderr.write(done.stdout[-3000:] + done.stderr[-1000:])
            return report | {"result": "failed", "reason": f"{name}: status {done.returncode}"}
        report[name] = int(found.group(1))
    return report | {"result": "passed"}


def installed_torch(python: Path) -> str:
    """The version of PyTorch of an interpreter, without the CUDA that it was built for."""
    code = "import torch; print(torch.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return re.sub(r"\+cu\d+$", "", done.stdout.strip())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--max-mb", type=float, default=300.0)
    parser.add_argument("--python", type=Path, help="an interpreter whose PyTorch is tested")
    options = parser.parse_args()
    results = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    if options.python:
        version = installed_torch(options.python)
        results[version] = subset(options.python)
        print(version, results[version], flush=True)
        OUTPUT.write_text(json.dumps(results, indent=2) + "\n")
        sys.exit(results[version]["result"] != "passed")
    ask = [sys.executable, "-m", "pip", "download", "--no-deps", "torch==0"]
    known = subprocess.run(ask, capture_output=True, text=True, check=False).stderr
    with urllib.request.urlopen(INDEX, timeout=60) as answer:
        page = answer.read().decode()
    for version in options.versions or offered(known):
        size = None if "+cpu" in version else wheel_mb(version, page)
        if size is not None and size > options.max_mb:
            if results.get(version, {}).get("result") == "passed":
                continue
            report = {"result": "not run", "reason": f"only a build for CUDA, of {size:.0f} MB"}
        else:
            with tempfile.TemporaryDirectory() as folder:
                report = run(version, Path(folder) / "venv")
        results[version] = report
        print(version, report, flush=True)
        OUTPUT.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(any(each["result"] == "failed" for each in results.values()))


if __name__ == "__main__":
    main()
