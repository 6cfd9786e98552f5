"""Compiling for a benchmark before it measures: its cases as processes, at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def in_processes(module: str, cases: Sequence[str], *options: str) -> None:
    """Runs `python -m MODULE --prepare CASE` for every case and waits for all."""
    command = [sys.executable, "-m", module, "--prepare", *options]
    started = [subprocess.Popen([*command, case]) for case in cases]
    for process in started:
        process.wait()
