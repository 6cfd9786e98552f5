"""Times of attention over chosen rows: forward, backward and decode, in TFLOP/s.

    python -m benchmarks.sparse_attention [WORD ...] [--output FOLDER]

Only cases whose names contain a word are measured, all without words. A row has the time of the
kernels of one call (median of 20, `tile_kernels.testing.timing`, the L2 cache as the call before
left it), the products' FLOPs, and TFLOP/s. With `d` channels, of which 512 are values, `pairs`
of a query and a key, and `h` heads, the FLOPs are `2 h pairs (d + 512)` forward and in decoding,
and `2 h pairs (3 d + 1024)` backward. Decoding also has the time inside a CUDA graph of ten calls,
which counts the gaps between kernels, and the time of a copy of its bytes at 85 % of the copy
bandwidth that is measured in the same run.

Without a GPU sizes are tiny, and times are those of the references.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tile_kernels.attention.attention_bwd.cases import hca_arguments, sparse_arguments
from tile_kernels.attention.decode.cases import _served
from tile_kernels.attention.hca import cases as hca
from tile_kernels.attention.sparse import cases as sparse
from tile_kernels.runtime import registry, warmup
from tile_kernels.runtime.cases import Build
from tile_kernels.testing import benchmark, timing

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CALLS, REPLAYS = 10, 12  # of a CUDA graph
COPY_SHARE = 0.85


class Case(NamedTuple):
    """An operator, its arguments, and the TFLOP/s that it is to reach."""

    op: str
    build: Build
    goal: float | None = None


def forward_cases(tokens: int, unit: int, heads: int) -> dict[str, Case]:
    """Attention of prompts; `unit` divides row counts by 1024 and makes them smaller."""
    rows = sparse.arguments
    goals = {128: 640.0, 64: 580.0}

    def case(num_heads: int, chosen: int, of: int, **how: Any) -> Case:
        given = rows(tokens, num_heads * heads // 128 or 1, of * unit, chosen * unit, **how)
        return Case("attention.sparse_attention", given, goals[num_heads])

    return {
        "forward.128 heads.1024 of 16384": case(128, 16, 256, sink="normal"),
        "forward.128 heads.1152 of 16384": case(128, 18, 256, sink="normal"),
        "forward.64 heads.640 of 16384": case(64, 10, 256, sink="normal"),
        "forward.128 heads.576.2048 of 32768": case(128, 32, 512, width=576),
        "forward.hca.128 heads.up to 8192+128": Case(
            "attention.hca_attention",
            hca.arguments((0, 128 * unit), 128 * unit, heads, ratio=1, sink="normal"),
            620.0,
        ),
    }


def backward_cases(tokens: int, unit: int, heads: int) -> dict[str, Case]:
    """Gradients."""

    def case(num_heads: int, chosen: int, of: int, **how: Any) -> Case:
        given = sparse_arguments(
            tokens, num_heads * heads // 128 or 1, of * unit, chosen * unit, **how
        )
        return Case("attention.sparse_attention_bwd", given, 250.0)

    return {
        "backward.64 heads.2048 of 8192": case(64, 32, 128),
        "backward.64 heads.576.2048 of 8192": case(64, 32, 128, width=576),
        "backward.128 heads.1152 of 16384": case(128, 18, 256, sink="normal"),
        "backward.64 heads.640 of 16384": case(64, 10, 256, sink="normal"),
        "backward.hca.128 heads.8192 tokens": Case(
            "attention.hca_attention_bwd",
            hca_arguments((0, 128 * unit), 128 * unit, heads, sink="normal"),
        ),
    }


def decode_cases(most: int, unit: int, heads: int) -> dict[str, Case]:
    """Decoding with the operator's own splits; the window and the entries of a served model."""

    def case(batch: int, queries: int = 1, goal: float | None = None, **how: Any) -> Case:
        sizes = {"heads": heads, "extra_k": 16 * unit, **how}
        return Case(
            "attention.sparse_attention_decode", _served(min(batch, most), queries, **sizes), goal
        )

    return {
        "decode.b128.s2.128 heads.128+1024": case(128, 2, 400.0),
        "decode.b32.s1.128 heads.128+1024": case(32),
        "decode.b8.s1.128 heads.128+1024": case(8),
        "decode.b1.s1.128 heads.128+1024": case(1),
        "decode.b64.s1.64 heads.128+512": case(64, heads=max(1, heads // 2), extra_k=8 * unit),
        "decode.b4.s1.128 heads.128+8192": case(4, extra_k=128 * unit),
    }


def cases(small: bool = not CUDA) -> dict[str, Case]:
    """All cases by name, or those of a machine without a GPU."""
    sizes = (3, 1, 2) if small else (4096, 64, 128)
    decode = decode_cases(2 if small else 128, *sizes[1:])
    return {**forward_cases(*sizes), **backward_cases(*sizes), **decode}


def graph_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call, from replays of a CUDA graph of several."""
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


def measure(name: str, case: Case, bandwidth: float | None) -> dict[str, Any]:
    """One row of the file."""
    operator = registry.get(case.op)
    torch.manual_seed(0)
    given = case.build(DEVICE)
    cost = operator.cost(**given)

    def call() -> Any:
        return operator.function(**given)

    row: dict[str, Any] = {"case": name, "op": case.op, "goal_tflops": case.goal}
    if CUDA:
        found = timing.time_device(call, flush_bytes=0)
        row |= {"us": round(found.us, 2), "min_us": round(found.min_us, 2), "method": found.method}
        if case.op.endswith("decode"):
            row["graph_us"] = round(graph_us(call), 2)
            row["copy_us"] = round(cost.bytes / (bandwidth or 1) / 1e3 / COPY_SHARE, 2)
    else:
        row |= {"us": round(timing.time_host(call, calls=1), 2), "method": "host"}
    row["gflop"] = round(cost.flops / 1e9, 3)
    row["tflops"] = round(cost.flops / row["us"] / 1e6, 1)
    return row


def markdown(content: dict[str, Any]) -> list[str]:
    """The table of a results file."""
    lines = ["| case | us | TFLOP/s | goal |", "|---|---|---|---|"]
    for row in content["rows"]:
        goal = "" if row["goal_tflops"] is None else f"{row['goal_tflops']:.0f}"
        lines.append(f"| {row['case']} | {row['us']:.1f} | {row['tflops']:.0f} | {goal} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measures, prints a table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    chosen = {
        name: case
        for name, case in cases().items()
        if not options.words or any(word in name for word in options.words)
    }
    if not chosen:
        parser.error(f"no case contains {' or '.join(options.words)}; cases: {', '.join(cases())}")
    if CUDA:  # all kernels at once, in parallel
        meta = torch.device("meta")
        warmup.warmup([(case.op, case.build(meta)) for case in chosen.values()], progress=False)
    bandwidth = timing.copy_bandwidth() if CUDA else None
    machine = benchmark.machine()
    content: dict[str, Any] = {"machine": machine, "copy_gb_per_s": bandwidth, "rows": []}
    path: Path = options.output / f"sparse_attention.{benchmark.slug(machine['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, case in chosen.items():
        content["rows"].append(measure(name, case, bandwidth))
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(content["rows"][-1], flush=True)
        if CUDA:
            torch.cuda.empty_cache()
    print("\n".join(markdown(content)))
    return path


if __name__ == "__main__":
    print(main())
