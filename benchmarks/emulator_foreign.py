"""Kernels of another package on the emulator: DeepSeek's TileKernels, compared with our references.

    python -m benchmarks.emulator_foreign FOLDER [--only FUNCTION ...]

Calls each operator of the package in FOLDER (`benchmarks/foreign.py` says how to install it there),
unmodified, in check mode, with small arguments: the samples of our operator of the same name, as
far as the package's signature and assertions accept them, and the arguments that
`benchmarks/foreign_arguments.py` builds. Writes `benchmarks/results/emulator_foreign.json`, one
entry for each version of the package. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import foreign_arguments
from benchmarks.foreign import ROOT, Answer, Case, Package, call

RESULTS = ROOT / "benchmarks" / "results" / "emulator_foreign.json"


def made(major: str) -> list[Case]:
    """All cases for a version, in the order in which they are tried."""
    torch.manual_seed(0)
    cases = list(foreign_arguments.written(major))
    for op, function in foreign_arguments.operators(major):
        cases += foreign_arguments.small(op, function, major)
    return cases


def run(package: Package, cases: list[Case], samples: int) -> dict[str, Any]:
    """Outcomes by operator: right, wrong, refused, reported, other error."""
    operators: dict[str, Any] = {}
    for number, case in enumerate(cases):
        entry = operators.setdefault(case.function, {"calls": [], "not accepted": []})
        if len(entry["calls"]) >= samples:
            continue
        began = time.perf_counter()
        answer = package.ask(case)
        seconds = time.perf_counter() - began
        outcome, text = judged(package, case, answer)
        print(
            f"{number} {case.function} {case.label}: {outcome} {seconds:.1f} s {text}", flush=True
        )
        if outcome != "not accepted":
            entry["calls"].append(
                {
                    "sample": case.label,
                    "outcome": outcome,
                    "text": text,
                    "launches": answer.launches,
                }
            )
        elif text not in entry["not accepted"]:
            entry["not accepted"].append(text)
    return {
        name: entry
        for name, entry in operators.items()
        if entry["calls"] or not all(r.startswith("absent") for r in entry["not accepted"])
    }


def judged(package: Package, case: Case, answer: Answer) -> tuple[str, str]:
    """The outcome of a call, compared with our reference if it ran, and the reason."""
    if answer.outcome != "ran":
        return answer.outcome, answer.value
    text = foreign_arguments.compared(package, case, answer.value, call(package.ours, case, "cpu"))
    return "right" if text in ("exact", "close") else "wrong", text


ENDS = ("wrong", "other error", "refused", "reported", "right")  # the worst first


def summary(operators: dict[str, Any]) -> dict[str, Any]:
    """Operators by the worst end of their calls; calls by their ends."""
    called = [entry["calls"] for entry in operators.values() if entry["calls"]]
    worst = [min((c["outcome"] for c in calls), key=ENDS.index) for calls in called]
    return {
        "operators": {"called": len(called), **{end: worst.count(end) for end in ENDS}},
        "calls": {
            "called": sum(map(len, called)),
            **{end: sum(c["outcome"] == end for calls in called for c in calls) for end in ENDS},
        },
        "not called": sorted(name for name, entry in operators.items() if not entry["calls"]),
    }


def main() -> None:
    """Run one version of the package and write its results beside those of the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the package is installed")
    parser.add_argument(
        "--only", nargs="+", metavar="FUNCTION", help="measure these again, leave the others"
    )
    parser.add_argument("--samples", type=int, default=3, help="calls per function")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    package = Package(options.folder, emulated=True)
    cases = made(package.version[0])
    if options.only:
        cases = [c for c in cases if c.function in options.only]
    try:
        found = run(package, cases, options.samples)
    finally:
        package.end()
    about = {
        "tilelang": package.tilelang,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    operators = {n: {**e, "run": about} for n, e in found.items()}
    everything = json.loads(options.json.read_text()) if options.json.exists() else {}
    before = everything.get(package.version, {}).get("operators", {}) if options.only else {}
    merged = {**before, **operators}
    everything[package.version] = {"summary": summary(merged), "operators": merged}
    options.json.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    for name, entry in sorted(operators.items()):
        print(name, [(c["sample"], c["outcome"], c["text"]) for c in entry["calls"]])


if __name__ == "__main__":
    main()
