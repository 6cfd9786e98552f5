"""Checks that the tests notice small defects.

Every entry of `mutations.toml` beside this file changes one place of the package. Each change is
made alone, in a temporary copy of the repository, and the tests that the entry names run there. A
change that all of them survive is reported as not caught.

    python tools/mutation_check.py                # all of them
    python tools/mutation_check.py topk host:     # those whose kind and name contain a word
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = Path(__file__).with_suffix("").with_name("mutations.toml")
COPIED = ("tile_kernels", "tests", "examples", "benchmarks", "docs", "tools", "pyproject.toml")
TESTS_FAILED = 1  # pytest's exit code; others mean that it could not run the tests
TIMED_OUT = -1


class BadEntryError(Exception):
    """An entry that does not fit the sources."""


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: What the change breaks.
        kind: `kernel` or `host`.
        file: The file, relative to the repository.
        old: The text to replace, which occurs once in the file.
        new: What replaces it.
        tests: Arguments of pytest: the tests that should fail.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def title(self) -> str:
        """The kind and the name."""
        return f"{self.kind}: {self.name}"

    def changed(self, root: Path) -> str:
        """The text of the file in `root` with the change."""
        path = root / self.file
        if not path.exists():
            raise BadEntryError(f"{self.name}: there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise BadEntryError(
                f"{self.name}: the old text must occur once in {self.file}, found {count} times:\n"
                f"{self.old}"
            )
        return text.replace(self.old, self.new)


def read_entries(path: Path = ENTRIES) -> list[Mutation]:
    """The entries of the data file."""
    with path.open("rb") as file:
        return [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]


def make_copy(folder: Path) -> None:
    """Copies what tests need."""
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", "build")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)


def run_tests(folder: Path, selection: str, seconds: float) -> tuple[int, str]:
    """The exit code of pytest in `folder`, and the first test that failed or the last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rfE"]
    # Modules are imported from the copy: the working directory comes first in sys.path.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *shlex.split(selection)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f"no result after {seconds:.0f} s"
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    return done.returncode, failed[1] if failed else lines[-1]


def check_selections(folder: Path, mutations: Iterable[Mutation], seconds: float) -> list[str]:
    """Selections that fail, or select nothing, where nothing is changed."""
    bad = []
    for selection in dict.fromkeys(mutation.tests for mutation in mutations):
        code, line = run_tests(folder, selection, seconds)
        print(f"{'passes' if code == 0 else 'FAILS '}  {selection}", flush=True)
        if code:
            bad.append(f"pytest {selection}: {line}")
    return bad


def check(folder: Path, mutation: Mutation, seconds: float) -> tuple[bool, str]:
    """Whether the tests notice the change, and which test or what else was seen."""
    path = folder / mutation.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutation.changed(folder), encoding="utf-8")
    try:
        code, line = run_tests(folder, mutation.tests, seconds)
    finally:
        path.write_text(before, encoding="utf-8")
    if code not in (0, TESTS_FAILED, TIMED_OUT):
        raise BadEntryError(f"{mutation.name}: pytest {mutation.tests} could not run: {line}")
    return code == TESTS_FAILED, line


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code is 1 where a change is not caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", help="check entries whose `kind: name` contains one of these"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of each run of tests")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a change first"
    )
    options = parser.parse_args(arguments)
    mutations = [
        entry
        for entry in read_entries()
        if not options.words or any(word in entry.title for word in options.words)
    ]
    try:
        for mutation in mutations:
            mutation.changed(ROOT)
    except BadEntryError as error:
        print(error, file=sys.stderr)
        return 2
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        make_copy(folder)
        if not options.no_baseline:
            bad = check_selections(folder, mutations, options.seconds)
            if bad:
                print("These fail without a change:", *bad, sep="\n", file=sys.stderr)
                return 2
        print("| | change | result | test |\n|---|---|---|---|", flush=True)
        for number, mutation in enumerate(mutations, start=1):
            started = time.monotonic()
            try:
                caught, line = check(folder, mutation, options.seconds)
            except BadEntryError as error:
                print(error, file=sys.stderr)
                return 2
            missed += not caught
            result = "caught" if caught else "NOT CAUGHT"
            seconds = time.monotonic() - started
            row = f"| {number} | {mutation.title} | {result} | {line}"
            print(f"{row} ({seconds:.0f} s) |", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
