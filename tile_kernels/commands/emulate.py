"""`tile-kernels emulate`: other people's TileLang scripts and test files, on this CPU."""

from __future__ import annotations

import argparse

from tile_kernels.emulator import runner


def emulate(options: argparse.Namespace) -> int:
    """Run a script in a child process; the exit status is the script's, or says what went wrong."""
    return runner.run(options)
