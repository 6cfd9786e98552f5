"""Builds sdist and wheel, and tests the wheel in a fresh environment outside of the checkout.

    python tools/dist.py [--output dist] [--release] [--skip-emulated]

The wheel is built from the sdist, so that both are complete. The environment has links to the
packages that this interpreter has, such as PyTorch, except this one; TileLang is left out for one
half of the checks. `--release` also refuses a version that CHANGELOG.md calls unreleased.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("tile_kernels", "moe_tile_kernels", "__editable__")
JIT = ("tilelang", "tvm", "tvm_ffi", "apache_tvm_ffi", "z3")
# Those of modules that import without TileLang, with the flags of pyproject.toml.
DOCTESTS = (
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o",
    "doctest_optionflags=ELLIPSIS NORMALIZE_WHITESPACE", "--doctest-modules",
    "--doctest-ignore-import-errors", "--pyargs", "tile_kernels",
)  # fmt: skip


class DistError(Exception):
    """What is wrong with the release, for the user."""


def version() -> str:
    """The version of the sources."""
    text = (ROOT / "tile_kernels" / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"', text, re.M).group(1)


def check_changelog(text: str, release: str, is_release: bool) -> None:
    """The version has a heading, with a date if it is about to be released."""
    heading = re.search(rf"^## {re.escape(release)}, (.+)$", text, re.M)
    if heading is None:
        raise DistError(f"CHANGELOG.md has no heading for {release}")
    if is_release and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading.group(1)):
        raise DistError(f"CHANGELOG.md says {heading.group(1)!r} for {release}, not a date")


def expected_files(root: Path) -> set[str]:
    """The files of the package that a wheel must have."""
    kept = {".py", ".pyi", ".typed"}
    found = set()
    for each in (root / "tile_kernels").rglob("*"):
        name = each.relative_to(root)
        packed = each.suffix in kept or "include" in name.parts
        if each.is_file() and packed and "__pycache__" not in name.parts:
            found.add(str(name))
    return found


def check_wheel(wheel: Path, root: Path) -> None:
    """The wheel has the package's files and no others."""
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    expected = expected_files(root)
    if names != expected:
        missing, extra = sorted(expected - names), sorted(names - expected)
        raise DistError(f"{wheel.name}: missing {missing[:5]}, unexpected {extra[:5]}")


def run(command: Sequence[str | Path], **options: object) -> None:
    """Runs a command whose output the user sees."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    done = subprocess.run(words, check=False, **options)
    if done.returncode:
        raise DistError(f"the command above failed with status {done.returncode}")


def build(output: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    output.mkdir(parents=True, exist_ok=True)
    for old in (*output.glob("moe_tile_kernels-*"),):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        builder = _environment(place / "builder", ())
        run([builder, "-m", "pip", "install", "--quiet", "setuptools>=77"])
        code = f"import setuptools.build_meta as b; b.build_sdist({str(output.resolve())!r})"
        copied = place / "source"  # setuptools writes into its folder
        _export(copied)
        run([builder, "-c", code], cwd=copied, stdout=subprocess.DEVNULL)
        (sdist,) = output.glob("moe_tile_kernels-*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(place / "unpacked", filter="data")
        (unpacked,) = (place / "unpacked").iterdir()
        code = f"import setuptools.build_meta as b; b.build_wheel({str(output.resolve())!r})"
        run([builder, "-c", code], cwd=unpacked, stdout=subprocess.DEVNULL)
    (wheel,) = output.glob("moe_tile_kernels-*.whl")
    return sdist, wheel


def _export(target: Path) -> None:
    """The files that git knows, or would add, as they are now."""
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in listed.splitlines():
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())


def _environment(folder: Path, hidden: tuple[str, ...], *, links: bool = False) -> Path:
    """A new virtual environment; with `links` it sees this interpreter's packages but `hidden`."""
    venv.create(folder, with_pip=True)
    if links:
        packages = folder / "linked-packages"
        packages.mkdir()
        for found in dict.fromkeys((sysconfig.get_paths()["purelib"], *sys.path)):
            if Path(found).name not in {"site-packages", "dist-packages"}:
                continue
            for each in Path(found).iterdir():
                link = packages / each.name
                if not each.name.startswith((*OURS, *hidden)) and not link.exists():
                    link.symlink_to(each)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "linked-packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


def test_wheel(wheel: Path, emulated: bool) -> None:
    """Installs the wheel outside of the checkout, without TileLang and with it, and runs it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        options = {"cwd": place, "env": environment | {"TILE_KERNELS_CACHE": str(place / "cache")}}
        for name, hidden in (("without-tilelang", JIT), ("with-tilelang", ())):
            python = _environment(place / name, hidden, links=True)
            run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel.resolve()])
            code = "import tile_kernels; print(tile_kernels.__version__, tile_kernels.__file__)"
            run([python, "-c", code], **options)
            command = python.with_name("tile-kernels")
            if hidden:
                run([command, "info"], **options)
                run([command, "check", "--references-only"], **options)
                run([python, *DOCTESTS], **options)
            elif emulated:
                run([command, "check", "transpose", "--jobs", "1"], **options)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--skip-emulated", action="store_true", help="run no kernel")
    options = parser.parse_args()
    try:
        check_changelog((ROOT / "CHANGELOG.md").read_text(), version(), options.release)
        sdist, wheel = build(options.output)
        check_wheel(wheel, ROOT)
        test_wheel(wheel, not options.skip_emulated)
    except DistError as error:
        sys.exit(f"dist: {error}")
    print(f"{sdist}\n{wheel}")


if __name__ == "__main__":
    main()
