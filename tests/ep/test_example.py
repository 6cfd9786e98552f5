"""The example runs, with threads and under torchrun, and finds what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "launcher",
    [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]],
    ids=["threads", "torchrun"],
)
def test_example(launcher: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, "examples/ep_moe.py"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the output is the same bit for bit" in done.stdout
    assert done.stdout.count("differs by at most") == 3
