"""Times of attention while decoding, over batches, splits and schedules.

    python -m benchmarks.decode [--schedules] [--output FOLDER]

A row has the time of a call inside a CUDA graph of ten calls (median of several replays), TFLOP/s
by `2 b s_q h (k + extra) (d + 512)`, and `copy_us`: a copy of the bytes of a call at 85 % of the
copy bandwidth that is measured in the same run. The file names machine, versions and date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.sparse_attention import COPY_SHARE, graph_us
from tile_kernels.attention import decode_plan, sparse_attention_decode
from tile_kernels.attention.decode import op, plan
from tile_kernels.attention.decode.cases import _served
from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.runtime import warmup
from tile_kernels.testing import benchmark, timing

LISTS = ("topk_length", "extra_indices", "extra_topk_length")


def given_for(arguments: dict[str, Any], splits: Any) -> dict[str, Any]:
    """The arguments of a call with these splits; `"plan"` makes a plan."""
    if splits != "plan":
        return {**arguments, "splits": splits}
    lists = {name: arguments.get(name) for name in LISTS}
    return {**arguments, "plan": decode_plan(arguments["q"], arguments["indices"], **lists)}


def calls() -> list[tuple[str, dict[str, Any]]]:
    """Operators and arguments without values of all rows, for a warm-up."""
    found: list[tuple[str, dict[str, Any]]] = []
    for _, make, splits in cases(False):
        arguments = make(torch.device("meta"))
        lists = {name: arguments.get(name) for name in LISTS}
        found.append(("attention.decode_plan", {n: arguments[n] for n in ("q", "indices")} | lists))
        given = (given_for(arguments, split) for split in splits)
        found += [("attention.sparse_attention_decode", each) for each in given]
    return found


def measure(name: str, arguments: dict[str, Any], splits: Any, bandwidth: float) -> dict[str, Any]:
    """One row."""
    given = given_for(arguments, splits)
    cost = op.cost(**arguments)
    us = graph_us(lambda: sparse_attention_decode(**given))
    return {
        "case": name, "splits": splits, "us": round(us, 2),
        "tflops": round(cost.flops / us / 1e6, 1),
        "copy_us": round(cost.bytes / bandwidth / 1e3 / COPY_SHARE, 2),
    }  # fmt: skip


def cases(schedules: bool) -> list[tuple[str, Any, list[Any]]]:
    """Label, arguments and splits."""
    large = [
        ("b128.s2.h128.128+1024", _served(128, 2), ["fixed", 1152, "plan", 640, 384]),
        ("b64.s1.h64.128+512", _served(64, heads=64, extra_k=512), ["fixed", 640, "plan", 384]),
    ]
    if schedules:
        return [(name, make, splits[1:]) for name, make, splits in large[:1]]
    return [
        *large,
        ("b32.s1.h128.128+1024", _served(32), ["fixed", 1152, "plan", 640, 384, 256]),
        ("b8.s1.h128.128+1024", _served(8), ["fixed", 1152, "plan", 640, 384, 256, 128]),
        ("b1.s1.h128.128+1024", _served(1), ["fixed", 1152, "plan", 640, 384, 256, 128]),
        ("b4.s1.h128.128+8192", _served(4, extra_k=8192), ["fixed", "plan", 1152, 640, 512, 256]),
        ("b128.s2.h128.bf16", _served(128, 2, layout="bf16"), [1152]),
        ("b64.s2.h128.2048.v3.2", _v32(64, 2), ["fixed", 2048, 1024, "plan"]),
    ]


def _v32(b: int, s_q: int) -> Any:
    """The published configuration of V3.2: one list of 2048 rows."""
    from tile_kernels.attention.decode.cases import _decode

    return _decode(b, s_q, 128, 2048, layout="v3.2", rows=200_000, invalid=(), sink="")


def main() -> None:
    """Prints the rows and writes them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    chosen = parser.parse_args()
    if not chosen.schedules:
        warmup.warmup(calls(), progress=False)
    machine, bandwidth = benchmark.machine(), timing.copy_bandwidth()
    content: dict[str, Any] = {"machine": machine, "copy_gb_per_s": bandwidth, "rows": []}
    path: Path = chosen.output / f"decode.{benchmark.slug(machine['device'])}.json"
    schedules = [Schedule()]
    if chosen.schedules:
        schedules = [Schedule(), Schedule(ahead=True), Schedule(slack=8), Schedule(True, 8)]
    device = torch.device("cuda")
    for label, make, splits in cases(chosen.schedules):
        arguments = make(device)
        for schedule in schedules:
            setattr(plan, "Schedule", lambda schedule=schedule: schedule)  # noqa: B010
            op._ATTEND._planned.clear()
            op.SPARSE_ATTENTION_DECODE.forget()
            for split in splits[:1] if chosen.schedules else splits:
                row = measure(label, arguments, split, bandwidth)
                row["schedule"] = [*schedule]
                content["rows"].append(row)
                path.write_text(json.dumps(content, indent=1) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
