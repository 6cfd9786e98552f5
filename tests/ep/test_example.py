"""The example runs, with threads and under torchrun, and finds what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [([], 4), ([*TORCHRUN, "2"], 2), ([*TORCHRUN, "4"], 4)],
    ids=["threads", "torchrun 2", "torchrun 4"],
)
def test_example(launcher: list[str], num_ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, "examples/ep_moe.py"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens = sum([40, 0, 17, 23][:num_ranks])
    same = f"{num_ranks} ranks, {tokens} tokens: the output is the same bit for bit"
    assert same in done.stdout
    assert done.stdout.count("differs by at most") == 3


@pytest.mark.gpu
def test_example_on_a_gpu() -> None:
    test_example([*TORCHRUN, "1"], 1)
