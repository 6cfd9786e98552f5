"""What each part of the tiny model is worth: the same steps without it.

python -m examples.tiny_v4.ablate --steps 100
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.tiny_v4 import train

VARIANTS = {
    "everything": [],
    "without the memory": ["--no-engram"],
    "without streams": ["--no-mhc"],
    "without experts": ["--dense"],
    "without e4m3": ["--fp8", "off"],
    "none of it": ["--no-engram", "--no-mhc", "--dense"],
}


def losses(steps: int, out: Path, *more: str) -> dict[str, float]:
    """The loss on unseen text of each variant."""
    quiet = Console(quiet=True)
    found = {}
    for name, switches in VARIANTS.items():
        options = train.arguments(
            ["--steps", str(steps), "--out", str(out / name.replace(" ", "-")), *switches, *more]
        )
        found[name] = train.train(options, quiet)["test_loss"]
    return found


def main(given: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Train the tiny model without its parts.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("demo/ablation"))
    options = parser.parse_args(given)
    table = Table(title=f"text it has not seen, after {options.steps} steps")
    table.add_column("")
    table.add_column("nats per letter", justify="right")
    for name, loss in losses(options.steps, options.out).items():
        table.add_row(name, f"{loss:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
