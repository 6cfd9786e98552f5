"""The times of operators, layers and communication that the documents quote, with one command:

    python -m benchmarks                       lists the parts, their results and their dates
    python -m benchmarks run [PART ...]        measures some or all, the oldest results first
    python -m benchmarks run --minutes 25      as much of it as fits

Each part is a script in a separate process, most of them of this folder, and writes its results
itself. A part whose last run took longer than what is left of the time is not started. The others
are ended when the time is over; what they have written by then stays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tile_kernels.runtime import terminal
from tile_kernels.testing import benchmark

ROOT = Path(__file__).parents[1]
DURATIONS = "durations.json"


class Part(NamedTuple):
    """A script and its arguments, in which `{results}` and `{device}` are filled in."""

    module: str
    results: str  # a file, or a folder of files
    summary: str
    arguments: tuple[str, ...] = ()
    needs_gpu: bool = True


PARTS = {
    "operators": Part(
        "tile_kernels", "{device}", "every operator: device and host time",
        ("bench", "--save"),
    ),
    "layers": Part("benchmarks.layers", "layers.{device}.json", "whole layers beside PyTorch"),
    "attention_layer": Part(
        "benchmarks.attention_layer", "attention_layer.{device}.json",
        "an attention layer, stage by stage",
    ),
    "sparse_attention": Part(
        "benchmarks.sparse_attention", "sparse_attention.{device}.json",
        "attention over selected keys, forward and backward",
    ),
    "decode": Part("benchmarks.decode", "decode.{device}.json", "decoding against paged caches"),
    "long_context": Part(
        "examples.long_context", "long_context.{device}.json",
        "sparse attention beside dense attention in long texts",
    ),
    "gemm": Part("benchmarks.gemm", "gemm.{device}.json", "matrix products of experts"),
    "rivals": Part(
        "benchmarks.rivals", "rivals.{device}.json", "other libraries beside this one",
        ("--seconds", "300"),
    ),
    "tilekernels": Part(
        "benchmarks.tilekernels", "tilekernels.{device}.json",
        "DeepSeek's TileKernels beside this package, where it is installed",
    ),
    "transformers": Part(
        "benchmarks.transformers_block", "transformers.{device}.json",
        "a block of Hugging Face transformers before and after apply",
    ),
    "startup": Part(
        "benchmarks.startup", "startup.{device}.json", "from import to the first result"
    ),
    "host_times": Part(
        "benchmarks.host_times", "host_times.{device}.json", "host time of a call of every operator"
    ),
    "ep": Part(
        "benchmarks.ep", "ep.{device}.json", "dispatch and combine on symmetric memory",
        ("symm", "--json", "{results}"),
    ),
    "ep_overlap": Part(
        "benchmarks.ep_overlap", "ep_overlap.{device}.json", "communication beside computation",
        ("--json", "{results}"),
    ),
    "ep_gloo": Part(
        "benchmarks.ep", "ep.{device}.json", "dispatch and combine between processes on a CPU",
        ("gloo", "--json", "{results}"), needs_gpu=False,
    ),
}  # fmt: skip


def device_of(part: Part) -> str:
    """The name of the device in the names of results."""
    machine = benchmark.machine()
    return benchmark.slug(machine["device"] if part.needs_gpu else machine["cpu"])


def dates(path: Path) -> list[str]:
    """When the results of a file, or of the files of a folder, were measured."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.exists() else []
    return sorted(json.loads(file.read_text())["machine"]["date"] for file in files)


def durations(folder: Path) -> dict[str, float]:
    """The seconds that the last complete run of each part took."""
    path = folder / DURATIONS
    return json.loads(path.read_text()) if path.exists() else {}


def show(folder: Path, gpu: bool) -> None:
    """A table of the parts."""
    took = durations(folder)
    rows = []
    for name, part in PARTS.items():
        found = dates(folder / part.results.format(device=device_of(part)))
        missing = "needs a GPU" if part.needs_gpu and not gpu else "never"
        seconds = f"{took[name]:.0f}" if name in took else ""
        rows.append([name, part.summary, found[0] if found else missing, seconds])
    columns = [("part", "left"), ("measures", "left"), ("oldest result", "left"), ("s", "right")]
    terminal.show_table("Benchmarks", columns, rows)


def order(names: Sequence[str], folder: Path) -> list[str]:
    """The parts without results first, then by the date of their oldest result."""

    def age(name: str) -> str:
        part = PARTS[name]
        return next(iter(dates(folder / part.results.format(device=device_of(part)))), "")

    return sorted(names, key=age)


def run(names: Sequence[str], folder: Path, minutes: float | None) -> int:
    """Runs the parts one after the other.

    Returns:
        The number of parts that failed or were ended.
    """
    took, ends, failed = durations(folder), [], 0
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    for i, name in enumerate(names):
        left = None if deadline is None else deadline - time.monotonic()
        expected = took.get(name)
        if left is not None and (left <= 0 or (expected or 0) > left):
            needs = f", needs {expected:.0f} s" if expected else ""
            ends.append([name, f"not started: {max(left, 0):.0f} s left{needs}", ""])
            continue
        estimate = f"about {expected:.0f} s" if expected else "never run to its end here"
        print(f"[{i + 1}/{len(names)}] {name}: {PARTS[name].summary} ({estimate})", flush=True)
        started = time.monotonic()
        outcome = _outcome(PARTS[name], folder, left)
        seconds = time.monotonic() - started
        ends.append([name, outcome, f"{seconds:.0f}"])
        if outcome == "measured":
            took[name] = round(seconds, 1)
            (folder / DURATIONS).write_text(json.dumps(took, indent=1, sort_keys=True) + "\n")
        else:
            failed += 1
    terminal.show_table("Results", [("part", "left"), ("outcome", "left"), ("s", "right")], ends)
    return failed


def _outcome(part: Part, folder: Path, limit: float | None) -> str:
    device = device_of(part)
    results = folder / part.results.format(device=device)
    arguments = [each.format(results=results, device=device) for each in part.arguments]
    command = [sys.executable, "-m", part.module, *arguments]
    try:
        status = subprocess.run(command, cwd=ROOT, check=False, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return "ended: the time was over"
    return "measured" if status == 0 else f"failed with status {status}"


def main(words: Sequence[str] | None = None) -> int:
    """Lists, or runs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command")
    running = commands.add_parser("run", help="measure")
    running.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    running.add_argument("--minutes", type=float, help="begin nothing that would take longer")
    options = parser.parse_args(words)
    folder, gpu = ROOT / benchmark.DEFAULT_FOLDER, torch.cuda.is_available()
    if options.command is None:
        show(folder, gpu)
        return 0
    possible = [name for name, part in PARTS.items() if gpu or not part.needs_gpu]
    for name in options.parts:
        if name not in PARTS:
            running.error(f"PART must be one of {', '.join(PARTS)}, got {name}")
        if name not in possible:
            running.error(f"{name} needs a GPU, and PyTorch finds none")
    return min(1, run(order(options.parts or possible, folder), folder, options.minutes))


if __name__ == "__main__":
    sys.exit(main())
