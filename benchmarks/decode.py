"""Times of attention while decoding, over batches, splits and schedules.

    python benchmarks/decode.py [--schedules] [--json FILE]

A row has the time of a call inside a CUDA graph of ten calls (median of several replays), TFLOP/s
by `2 b s_q h (k + extra) (d + 512)`, and `copy_us`: an estimate, the bytes of a call at 85 % of the
copy bandwidth of an H200 (4.28 TB/s). The file names machine, versions and date.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tile_kernels.attention import decode_plan, sparse_attention_decode
from tile_kernels.attention.decode import op, plan
from tile_kernels.attention.decode.cases import _served
from tile_kernels.attention.softmax_plan import Schedule
from tile_kernels.testing import benchmark

COPY_BYTES_PER_US = 4.28e6  # of an H200; not measured by this script
CALLS, REPLAYS = 10, 12


def graph_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call, from replays of a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return sorted(times[2:])[len(times[2:]) // 2]


def measure(name: str, arguments: dict[str, Any], splits: Any) -> dict[str, Any]:
    """One row."""
    given = {**arguments, "splits": splits} if splits != "plan" else dict(arguments)
    if splits == "plan":
        names = ("topk_length", "extra_indices", "extra_topk_length")
        lists = {x: given.get(x) for x in names}
        given["plan"] = decode_plan(given["q"], given["indices"], **lists)
    cost = op.cost(**arguments)
    us = graph_us(lambda: sparse_attention_decode(**given))
    return {
        "case": name, "splits": splits, "us": round(us, 2),
        "tflops": round(cost.flops / us / 1e6, 1),
        "copy_us": round(cost.bytes / COPY_BYTES_PER_US / 0.85, 2),
    }  # fmt: skip


def cases(schedules: bool) -> list[tuple[str, Any, list[Any]]]:
    """Label, arguments and splits."""
    large = [
        ("b128.s2.h128.128+1024", _served(128, 2), [1152, "plan", 640, 384]),
        ("b64.s1.h64.128+512", _served(64, heads=64, extra_k=512), [640, "plan", 384]),
    ]
    if schedules:
        return large[:1]
    return [
        *large,
        ("b32.s1.h128.128+1024", _served(32), [1152, "plan", 640, 384, 256]),
        ("b8.s1.h128.128+1024", _served(8), [1152, "plan", 640, 384, 256, 128]),
        ("b1.s1.h128.128+1024", _served(1), [1152, "plan", 640, 384, 256, 128]),
        ("b4.s1.h128.128+8192", _served(4, extra_k=8192), ["plan", 1152, 512, 256]),
        ("b128.s2.h128.bf16", _served(128, 2, layout="bf16"), [1152]),
        ("b64.s2.h128.2048.v3.2", _v32(64, 2), [2048, "plan"]),
    ]


def _v32(b: int, s_q: int) -> Any:
    """The published configuration of V3.2: one list of 2048 rows."""
    from tile_kernels.attention.decode.cases import _decode

    return _decode(b, s_q, 128, 2048, layout="v3.2", rows=200_000, invalid=(), sink="")


def main() -> None:
    """Prints the rows, and writes them to a file if one is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", action="store_true")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    rows = []
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
                row = measure(label, arguments, split)
                row["schedule"] = [*schedule]
                rows.append(row)
                print(row, flush=True)
    if chosen.json:
        found = {"machine": benchmark.machine(), "rows": rows}
        Path(chosen.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
