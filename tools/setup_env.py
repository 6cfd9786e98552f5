"""Sets up the virtual environment of the Makefile: PyTorch first, then this package and its tools.

    python tools/setup_env.py [--torch REQUIREMENT_OR_WHEEL] [--venv .venv]

PyTorch is large and often installed already, so an installation that this package supports is
reused: that of the virtual environment if it has one, else that of the interpreter that runs this
script. Otherwise the version that `constraints.txt` pins is installed. `--torch` installs what it
names instead, for example a wheel without CUDA.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUTER_PACKAGES = "outer_site_packages.pth"

# Prints the version of PyTorch, where its package lies, and where it finds other packages.
PROBE = """
import json, sys
try:
    import torch
except Exception as error:
    if not isinstance(error, ModuleNotFoundError):
        print(f"{sys.executable} cannot import torch: {error}", file=sys.stderr)
    found = None
else:
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    found = [torch.__version__, torch.__path__[0], paths]
print(json.dumps([sys.version_info[:2], found]))
"""

# Prints which of the packages that are its arguments lie outside the environment, as requirements.
LIST_OUTER = """
import sys
from importlib.metadata import distribution
from pathlib import Path
for name in sys.argv[1:]:
    found = distribution(name)
    if not Path(found.locate_file("")).resolve().is_relative_to(Path(sys.prefix).resolve()):
        print(f"{name}=={found.version}")
"""


class SetupError(Exception):
    """What is wrong with the machine or the arguments, for the user."""


class Torch(NamedTuple):
    """An installed PyTorch."""

    version: str
    path: str
    site_packages: list[str]


def oldest_python(pyproject: str) -> tuple[int, int]:
    """The `requires-python` of the project, e.g. `(3, 11)`."""
    major, minor = re.search(r'^requires-python = ">=(\d+)\.(\d+)"', pyproject, re.M).groups()
    return int(major), int(minor)


def supports_torch(pyproject: str, version: str) -> bool:
    """Whether the project's bounds of PyTorch include `version`."""
    bounds = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', pyproject).groups()
    first, end = tuple(map(int, bounds[:2])), tuple(map(int, bounds[2:]))
    major, minor, rest = re.match(r"(\d+)\.(\d+)(.*)", version).groups()
    release = (int(major), int(minor))
    is_prerelease = re.match(r"[.\d]*(a|b|rc|dev)", rest) is not None
    return first <= release < end and not (release == first and is_prerelease)


def pinned_torch(constraints: str) -> str:
    """The requirement of PyTorch in `constraints.txt`."""
    return re.search(r"^torch==\S+", constraints, re.M).group()


def adapt_constraints(constraints: str, torch_version: str) -> str:
    """The pins to use beside PyTorch `torch_version`.

    That version is pinned, so that nothing replaces it. Another version than the tested one, or
    a build for another CUDA, may require other packages of CUDA than the tested ones; these are
    left to the bounds of `pyproject.toml`.
    """
    pinned = pinned_torch(constraints)
    lines = constraints.replace(pinned, f"torch=={torch_version}", 1).splitlines()
    if f"torch=={torch_version.removesuffix('+cpu')}" != pinned:
        lines = [line for line in lines if not line.startswith("nvidia-")]
    return "\n".join(lines) + "\n"


def probe(python: Path) -> tuple[tuple[int, int], Torch | None]:
    """The version of an interpreter and the PyTorch that it imports."""
    done = subprocess.run([str(python), "-c", PROBE], stdout=subprocess.PIPE, text=True, check=True)
    # PyTorch may print warnings first.
    version, found = json.loads(done.stdout.splitlines()[-1])
    return tuple(version), Torch(*found) if found else None


def run(*command: str | Path) -> None:
    """Runs a command whose output the user sees."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    if status := subprocess.run(words, check=False).returncode:
        raise SetupError(f"the command above failed with status {status}: {' '.join(words)}")


def make_venv(venv: Path) -> Torch | None:
    """Makes the environment, or keeps one of this Python; returns the PyTorch that it imports."""
    python = venv / "bin" / "python"
    if python.exists():
        version, torch = probe(python)
        if version == sys.version_info[:2]:
            return torch
    run(sys.executable, "-m", "venv", "--clear", venv)
    return None


def share_packages(venv: Path, torch: Torch) -> None:
    """Lets the environment import the packages beside `torch`, if it has not got them itself."""
    (site_packages,) = (venv / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in torch.site_packages]
    (site_packages / OUTER_PACKAGES).write_text("\n".join(lines) + "\n")


def copy_pinned(venv: Path, constraints: str) -> None:
    """Installs the pinned packages in the environment that it finds in another one, but PyTorch.

    Their commands are used from there, and the emulator expects CUDA's headers in one folder.
    """
    python = venv / "bin" / "python"
    names = [name for name in re.findall(r"^([\w-]+)==", constraints, re.M) if name != "torch"]
    outer = subprocess.check_output([str(python), "-c", LIST_OUTER, *names], text=True).split()
    if outer:
        run(python, "-m", "pip", "install", "--ignore-installed", "--no-deps", *outer)


def install_torch(venv: Path, requested: str | None, pyproject: str, constraints: str) -> Torch:
    """Installs the PyTorch that was requested, or reuses one, or installs the pinned one."""
    python = venv / "bin" / "python"
    inner = make_venv(venv)
    outer = None if requested or inner else probe(Path(sys.executable))[1]
    present = inner or outer
    if not requested and present and supports_torch(pyproject, present.version):
        print(f"reusing PyTorch {present.version} in {present.path}", flush=True)
        if outer:
            share_packages(venv, outer)
    else:
        if not requested and present:
            print(f"PyTorch {present.version} in {present.path} is not supported", flush=True)
        requirement = requested or pinned_torch(constraints)
        print(f"installing PyTorch: {requirement}", flush=True)
        run(python, "-m", "pip", "install", requirement)
    installed = probe(python)[1]
    if installed is None:
        raise SetupError(f"{python} cannot import torch: `{python} -c 'import torch'` tells why")
    if not supports_torch(pyproject, installed.version):
        raise SetupError(
            f"PyTorch {installed.version} is not supported; pyproject.toml gives the bounds"
        )
    return installed


def set_up(venv: Path, requested_torch: str | None) -> None:
    """Sets up `venv`; every step can be repeated."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    oldest = oldest_python(pyproject)
    if sys.version_info[:2] < oldest:
        raise SetupError(
            f"Python {oldest[0]}.{oldest[1]} or newer is required, {sys.executable} is "
            f"{sys.version.split()[0]}: choose another one with `make PYTHON=...`"
        )
    torch = install_torch(venv, requested_torch, pyproject, constraints)
    adapted = venv / "constraints.txt"
    adapted.write_text(adapt_constraints(constraints, torch.version))
    print("installing moe-tile-kernels and the tools for its development", flush=True)
    run(venv / "bin" / "python", "-m", "pip", "install", "-c", adapted, "-e", f"{ROOT}[dev]")
    copy_pinned(venv, constraints)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="a requirement, or the path of a wheel")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args()
    try:
        set_up(arguments.venv, arguments.torch)
    except SetupError as error:
        sys.exit(f"setup_env: {error}")


if __name__ == "__main__":
    main()
