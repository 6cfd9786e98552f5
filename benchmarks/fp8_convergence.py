"""Training with experts in FP8 and in full precision: `python -m benchmarks.fp8_convergence`.

The demo's model at the smallest size that FP8 products take is trained for 300 steps with each
precision and several seeds. The final loss is the mean of the last 50 steps. All runs and their
means are written to one file, `fp8_convergence.<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from examples.tiny_v4 import train
from tile_kernels.testing import benchmark

# The smallest model whose experts have sizes that FP8 products take.
SIZES = ["--hidden", "128", "--intermediate", "128", "--layers", "1"]
PRECISIONS = {"fp8": ["--precision", "fp8"], "bf16": ["--precision", "bf16", "--fp8", "off"]}
SEEDS = 3
STEPS, LAST = 300, 50  # steps of a run, and those whose mean is the final loss


def run(out: Path, precision: str, *more: str) -> dict[str, Any]:
    """One training run, without output."""
    given = [*SIZES, *PRECISIONS[precision], "--out", str(out), *more]
    return train.train(train.arguments(given), Console(quiet=True))


def final_losses(device: str, seeds: int = SEEDS, steps: int = STEPS) -> dict[str, list[float]]:
    """The final loss of each precision, one number per seed."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            precision: [
                statistics.fmean(
                    run(
                        Path(folder) / f"{precision}{seed}", precision, "--steps", str(steps),
                        "--seed", str(seed), "--device", device,
                    )["losses"][-LAST:]
                )
                for seed in range(seeds)
            ]
            for precision in PRECISIONS
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Path:
    """Trains, prints and saves; returns the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses = final_losses(device, options.seeds, options.steps)
    means = {precision: statistics.fmean(found) for precision, found in losses.items()}
    difference = means["fp8"] / means["bf16"] - 1
    machine = benchmark.machine()
    content = {
        "machine": machine,
        "steps": options.steps,
        "final_loss_by_seed": losses,
        "final_loss": means,
        "relative_difference": difference,
    }
    print(f"final loss {means}, FP8 {difference:+.2%}")
    path = options.output / f"fp8_convergence.{benchmark.slug(machine['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


if __name__ == "__main__":
    print(main())
