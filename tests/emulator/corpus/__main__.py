"""`python -m tests.emulator.corpus [word ...] [--json FILE]`: run the corpus, print the table.

`--json benchmarks/results/emulator_corpus.json` updates the file that the documentation quotes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tilelang
import torch

from tile_kernels.emulator import EmulationError
from tile_kernels.emulator.jit import Settings, emulated_tilelang

from . import Case, cases

OUTCOMES = ("right", "refused", "reported", "wrong", "error")


def outcome(case: Case, settings: Settings) -> tuple[str, str]:
    """How a case ended, and a sentence about it.

    `right` agrees with PyTorch; `refused` names something that the emulator does not have;
    `reported` is a bug that it claims to have found in the kernel; `wrong` differs from PyTorch.
    """
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stderr(io.StringIO()), emulated_tilelang(settings):
            case.run()
    except EmulationError as e:
        return ("refused" if e.kind in {"unsupported", "toolchain"} else "reported"), str(e)
    except AssertionError as e:
        return "wrong", str(e)
    except Exception as e:
        frame = traceback.extract_tb(e.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return "error", f"{type(e).__name__}: {e} ({place})"
    return "right", ""


def main() -> None:
    """Run the cases whose names contain one of the words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mode", choices=("check", "fast"), default="check")
    parser.add_argument("--order", default="forward")
    options = parser.parse_args()
    chosen = [c for c in cases() if not options.words or any(w in c.name for w in options.words)]
    rows: list[dict[str, Any]] = []
    for c in chosen:
        started = time.perf_counter()
        result, text = outcome(c, Settings(mode=options.mode, order=options.order))
        seconds = round(time.perf_counter() - started, 2)
        rows.append({"name": c.name, "outcome": result, "text": text})
        shown = "\n    ".join(text.splitlines()[:6])
        print(
            f"{result:9} {seconds:6.1f} s  {c.name}" + (f"\n    {shown}" if text else ""),
            flush=True,
        )
    counts = Counter(r["outcome"] for r in rows)
    summary = {"kernels": len(rows), **{o: counts[o] for o in OUTCOMES}}
    print(", ".join(f"{name} {value}" for name, value in summary.items()))
    if options.json:
        write(options.json, {"mode": options.mode, "order": options.order}, summary, rows)


def write(path: Path, settings: dict[str, str], summary: Any, rows: list[dict[str, Any]]) -> None:
    """Add the results of this version of TileLang to a file, or replace them there."""
    settings |= {"torch": torch.__version__}
    settings["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    content = json.loads(path.read_text()) if path.exists() else {}
    content[tilelang.__version__] = {
        "settings": settings,
        "summary": summary,
        "outcomes": {r["name"]: r["outcome"] for r in rows},
        "messages": {r["name"]: r["text"].splitlines()[0] for r in rows if r["text"]},
    }
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
