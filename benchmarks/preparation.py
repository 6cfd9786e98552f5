"""Compiling for a benchmark before it measures: its cases as processes, at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence


def in_processes(module: str, groups: Iterable[Sequence[str]], *options: str) -> None:
    """Runs `python -m MODULE --prepare CASE ...` for every group of cases and waits for all."""
    command = [sys.executable, "-m", module, "--prepare", *options]
    started = [subprocess.Popen([*command, *group]) for group in groups]
    for process in started:
        process.wait()
