"""What each part of the tiny model is worth: the same steps without it.

python -m examples.tiny_v4.ablate --steps 100 --seeds 3

Options that are not this command's own go to each of the runs, such as `--hidden 128`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from examples.tiny_v4 import train
from tile_kernels.testing.benchmark import machine

VARIANTS = {
    "everything": [],
    "with dense attention": ["--attention", "dense"],
    "without the memory": ["--no-engram"],
    "without streams": ["--no-mhc"],
    "without experts": ["--dense"],
    "without e4m3": ["--fp8", "off"],
    "none of it": ["--attention", "dense", "--no-engram", "--no-mhc", "--dense"],
}


def losses(steps: int, seeds: int, out: Path, *more: str) -> dict[str, list[float]]:
    """The loss on unseen text of each variant, for each seed."""
    quiet = Console(quiet=True)

    def loss(name: str, seed: int) -> float:
        folder = out / f"{name.replace(' ', '-')}-{seed}"
        given = ["--steps", str(steps), "--seed", str(seed), "--out", str(folder)]
        options = train.arguments([*given, *VARIANTS[name], *more])
        return float(train.train(options, quiet)["test_loss"])

    return {name: [loss(name, seed) for seed in range(seeds)] for name in VARIANTS}


def rows(found: dict[str, list[float]]) -> list[tuple[str, str, str]]:
    """Of each variant the mean loss, and the least and the largest of its seeds."""
    return [
        (name, f"{statistics.fmean(all_of):.3f}", f"{min(all_of):.3f} to {max(all_of):.3f}")
        for name, all_of in found.items()
    ]


def markdown(result: dict[str, Any]) -> str:
    """The table of a result file for a document."""
    head = "| | nats per letter, mean | of the seeds |\n|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows(result["losses"]))


def main(given: list[str] | None = None) -> Path:
    """Print the table, and write what it is made of as `ablation.json`."""
    parser = argparse.ArgumentParser(
        description="Train the tiny model without its parts.",
        epilog="Other options are those of examples.tiny_v4.train.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=train.positive, default=100)
    parser.add_argument("--seeds", type=train.positive, default=1, help="runs of each variant")
    parser.add_argument("--out", type=Path, default=Path("demo/ablation"))
    options, more = parser.parse_known_args(given)
    if {"--seed", "--resume"} & set(more):
        parser.error("an ablation takes neither --seed nor --resume; --seeds says how many runs")
    if train.arguments(more).device == "cpu":
        torch.set_num_threads(1)  # tensors are too small for more
    found = losses(options.steps, options.seeds, options.out, *more)
    table = Table("", "nats per letter, mean", "of the seeds", title="text it has not seen")
    for row in rows(found):
        table.add_row(*row)
    Console().print(table)
    result = {
        "machine": machine(),
        "command": ["--steps", str(options.steps), "--seeds", str(options.seeds), *more],
        "losses": found,
    }
    path: Path = options.out / "ablation.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
