"""Checks that `constraints.txt` can be installed from the package index, with PyTorch's CUDA wheel.

    python tools/check_constraints.py [--python-version 3.12]

The development environment may hold another wheel of PyTorch, for example one without CUDA, whose
requirements are fewer. This resolves what `make` installs without that: settings of pip that add
packages of other origin are not used. Nothing is installed; pip reads the requirements of each
wheel (some 30 MB in all) and not the wheels. The exit status is 0 if everything resolves, 1 if
packages conflict, 2 if that could not be found out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFLICT, UNKNOWN = 1, 2

# What pip prints if it cannot reach the index.
NO_NETWORK = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ProxyError")


class CheckError(Exception):
    """Why the check did not pass, and the exit status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def resolve(
    requirements: list[str], constraints: Path, *, options: list[str] | None = None
) -> dict[str, str]:
    """The version of each package that pip would install, by its name.

    Raises:
        CheckError: If packages conflict, or if pip failed for another reason.
    """
    others = {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT"}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    environment["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
            *("--use-feature=fast-deps", "--only-binary=:all:", "--progress-bar=off"),
            *("--target", str(Path(folder) / "target"), "--report", str(report)),
            *("--constraint", str(constraints), *(options or []), *requirements),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found = json.loads(report.read_text())["install"]
            return {item["metadata"]["name"]: item["metadata"]["version"] for item in found}
    # The end names the packages that conflict; before it, every package has two lines.
    output = "\n".join([*done.stdout.splitlines()[-20:], *done.stderr.splitlines()])
    if any(sign in output for sign in NO_NETWORK):
        raise CheckError(UNKNOWN, f"{output}\nthe package index cannot be reached: nothing checked")
    if "ResolutionImpossible" in output:
        raise CheckError(CONFLICT, f"{output}\n{constraints.name} cannot be installed")
    raise CheckError(UNKNOWN, f"{output}\npip failed with status {done.returncode}")


def check_cuda(versions: dict[str, str]) -> None:
    """Refuses a resolution without the packages of CUDA, which would show nothing.

    Raises:
        CheckError: If PyTorch is a build without CUDA.
    """
    if "+" in versions["torch"] or "cuda-toolkit" not in versions:
        raise CheckError(
            UNKNOWN, f"torch {versions['torch']} is not the CUDA wheel of the package index"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python-version", help="resolve for another Python, for example 3.12")
    python = parser.parse_args().python_version
    options = ["--python-version", python] if python else []
    try:
        versions = resolve([f"{ROOT}[dev]"], ROOT / "constraints.txt", options=options)
        check_cuda(versions)
    except CheckError as error:
        print(f"check_constraints: {error}", file=sys.stderr)
        sys.exit(error.status)
    print(f"constraints.txt resolves: {len(versions)} packages, torch {versions['torch']}")


if __name__ == "__main__":
    main()
