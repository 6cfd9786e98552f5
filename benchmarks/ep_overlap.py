"""Expert parallelism beside computation: two processes that share one GPU.

    python -m benchmarks.ep_overlap [--json FILE] [--trace FILE] [--mps]

Rank 0 computes a chain of matrix products on its compute stream while both ranks dispatch and
combine on their communication streams. `compute_us`, `communication_us`: each alone; both in
sequence and beside each other: `sequential_us`, `overlapped_us`. All are medians of the wall time
from an idle GPU to an idle GPU, on rank 0. `hidden` is `sequential_us - overlapped_us` as a part of
the smaller of the two alone. `host_us` is what the calls take on the host while the products are
queued, and `computing_after` says whether the products were still running when the last one
returned.

`trace` is one step of rank 0 as the profiler saw it: `kernels_us` is the time in which kernels of
the communication stream ran, `beside_us` the part of it in which a product ran as well.

Without `--mps` the two processes take turns on the GPU, which takes time that ranks with a GPU each
do not need. With it, a daemon of CUDA's multi-process service is started for the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ep import NUM_EXPERTS, rounded, routing, run
from tile_kernels.ep import ElasticBuffer
from tile_kernels.testing import benchmark

TOKENS, HIDDEN, SIZE = 8192, 7168, 8192
FREE_SMS = 32  # that products of the kind "some" leave to others
ROUNDS, REPEATS = 4, 5  # dispatches and combines of a step, steps
MARGIN = 1.2  # the products take longer than communication alone by this factor
DEVICE = "cuda"
Spans = list[tuple[float, float]]


def union(spans: Sequence[tuple[float, float]]) -> Spans:
    """The same times as spans that do not overlap.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    """The length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def common(one: Spans, other: Spans) -> float:
    """The length of what two lists of such spans have in common.

    >>> common([(0, 4), (6, 9)], [(3, 7)])
    2
    """
    return sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in one
        for other_start, other_end in other
    )


def read_trace(file: Path) -> dict[str, Any]:
    """What a Chrome trace says; the compute stream is the one with the most work."""
    events = json.loads(file.read_text())["traceEvents"]
    kernels = [each for each in events if each.get("cat") == "kernel"]
    streams: dict[int, list[Any]] = {}
    for each in kernels:
        streams.setdefault(each["args"]["stream"], []).append(each)
    compute = max(streams, key=lambda stream: sum(each["dur"] for each in streams[stream]))
    spans = {
        stream: union([(each["ts"], each["ts"] + each["dur"]) for each in found])
        for stream, found in streams.items()
    }
    rest = union([span for stream, found in spans.items() if stream != compute for span in found])
    first = min(each["ts"] for each in kernels)
    sent = [each for each in kernels if each["name"].startswith("put_")]
    return {
        "products_us": length(spans[compute]),
        "blocks_of_a_product": math.prod(streams[compute][0]["args"]["grid"]),
        "kernels_us": length(rest),
        "beside_us": common(spans[compute], rest),
        "put_kernels_us": length(union([(each["ts"], each["ts"] + each["dur"]) for each in sent])),
        "put_beside_us": common(
            spans[compute], union([(each["ts"], each["ts"] + each["dur"]) for each in sent])
        ),
        "put_kernels": [
            {"name": each["name"][:24], "start_us": each["ts"] - first, "us": each["dur"]}
            for each in sorted(sent, key=lambda each: each["ts"])
        ],
    }  # fmt: skip


class Steps:
    """The steps of one rank, with the routing of one handle or with a new one in each."""

    def __init__(self, buffer: ElasticBuffer, is_new: bool, some: bool) -> None:
        self.buffer, self.is_new, self.some = buffer, is_new, some
        self.computes = buffer.rank_idx == 0
        self.topk_idx, _ = (each.to(DEVICE) for each in routing(TOKENS, buffer.rank_idx))
        self.x = torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
        self.a = torch.randn(SIZE, SIZE, device=DEVICE).bfloat16()
        self.bias = torch.zeros(SIZE, device=DEVICE).bfloat16()
        rows, _, _, self.handle, _ = self.dispatch({})
        self.y = rows.clone()
        self.total = buffer.combine(self.y, self.handle)[0]
        self.num_products = 1
        self.host_us: list[float] = []
        self.computing_after: list[bool] = []

    def dispatch(self, options: dict[str, Any]) -> Any:
        """One dispatch."""
        if self.is_new or not hasattr(self, "handle"):
            return self.buffer.dispatch(self.x, self.topk_idx, num_experts=NUM_EXPERTS, **options)
        return self.buffer.dispatch(self.x, handle=self.handle, **options)

    def compute(self) -> None:
        """The products, on the current stream of the rank that computes."""
        if self.computes:
            for _ in range(self.num_products):
                torch.addmm(self.bias, self.a, self.a)

    def communicate(self, options: dict[str, Any]) -> None:
        """The calls; the current stream waits for them in the end."""
        begin, events, kept = time.perf_counter(), [], []
        for _ in range(ROUNDS):
            rows, _, _, _, arrived = self.dispatch(options)
            total, _, returned = self.buffer.combine(self.y, self.handle, **options)
            kept += [rows, total]  # not freed before the end: that would order the streams
            events += [arrived, returned]
        self.host_us.append(1e6 * (time.perf_counter() - begin) / len(events))
        for event in events if options else []:
            event.current_stream_wait()
        self.kept = kept

    def sequential(self) -> None:
        """Products, then communication."""
        self.compute()
        self.communicate({})

    def overlapped(self) -> None:
        """Communication that begins when the products do."""
        ready = self.buffer.capture()
        self.compute()
        computed = torch.cuda.Event()
        computed.record()
        self.communicate(
            {
                "previous_event": ready, "async_with_compute_stream": True,
                "allocate_on_comm_stream": True,
            }
        )  # fmt: skip
        self.computing_after.append(not computed.query())

    def timed(self, step: Callable[[], Any]) -> float:
        """Wall time of a step that all ranks make."""
        times = []
        self.host_us.clear()
        for _ in range(1 + REPEATS):
            self.kept = []
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    def trace(self, file: Path) -> None:
        """Rank 0 writes a trace of an overlapped step; the first is for the profiler to start."""
        for _ in range(2):
            self.kept = []
            activities = [torch.profiler.ProfilerActivity.CUDA]
            profile = torch.profiler.profile(activities=activities)
            with profile if self.computes else contextlib.nullcontext():
                torch.cuda.synchronize()
                dist.barrier()
                self.overlapped()
                torch.cuda.synchronize()
        if self.computes:
            profile.export_chrome_trace(str(file))

    def measured(self, trace: Path) -> dict[str, Any]:
        """One row of the results."""
        if self.some:
            torch._C._set_sm_carveout_experimental(FREE_SMS)
        one_us = self.timed(self.compute)
        communication_us = self.timed(lambda: self.communicate({}))
        alone_host_us = statistics.median(self.host_us)
        self.num_products = max(2, math.ceil(MARGIN * communication_us / max(one_us, 1.0)))
        compute_us = self.timed(self.compute)
        sequential_us = self.timed(self.sequential)
        self.computing_after.clear()
        overlapped_us = self.timed(self.overlapped)
        host_us = statistics.median(self.host_us)
        if not all(torch.equal(each, self.total) for each in self.kept[1::2]):
            raise RuntimeError("results beside products differ")
        if not all(torch.equal(each, self.y) for each in self.kept[::2]):
            raise RuntimeError("rows that arrived beside products differ")
        still = sum(self.computing_after[1:]) / REPEATS
        self.trace(trace)
        torch._C._set_sm_carveout_experimental(None)
        self.kept = []
        return {
            "products": f"all but {FREE_SMS} SMs" if self.some else "all SMs",
            "routing": "new" if self.is_new else "of a handle",
            "num_products": self.num_products, "calls": 2 * ROUNDS, "compute_us": compute_us,
            "communication_us": communication_us, "sequential_us": sequential_us,
            "overlapped_us": overlapped_us,
            "hidden": (sequential_us - overlapped_us) / min(compute_us, communication_us),
            "host_us": host_us, "host_alone_us": alone_host_us, "computing_after": still,
            "trace": read_trace(trace) if self.computes else {},
        }  # fmt: skip


def rank(group: Any, trace: Path | None) -> list[dict[str, Any]]:
    """The measurements of one rank."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    num_bytes = 2 * (2 * ROUNDS + 2) * TOKENS * 2 * HIDDEN >> 21 << 21
    buffer = ElasticBuffer(
        group, num_bytes=num_bytes, num_max_tokens_per_rank=TOKENS, engine="symm"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for is_new in (False, True):
            for some in (False, True):
                file = Path(folder) / f"{is_new:d}{some:d}.json"
                rows.append(Steps(buffer, is_new, some).measured(file))
                if buffer.rank_idx == 0:
                    print(json.dumps(rounded(rows[-1])), flush=True)
        if trace is not None and buffer.rank_idx == 0:
            shutil.copy(Path(folder) / "01.json", trace)
    return rows


@contextlib.contextmanager
def service() -> Iterator[None]:
    """CUDA's multi-process service, as long as the block; an error if it does not work."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise RuntimeError("there is no nvidia-cuda-mps-control on this machine")
    with tempfile.TemporaryDirectory() as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **names}
        subprocess.run([control, "-d"], env=environment, check=True, timeout=20)
        try:
            probe = [sys.executable, "-c", "import torch; torch.zeros(1).cuda().cpu()"]
            found = subprocess.run(
                probe, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            if found.returncode:
                last = (found.stderr.strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(f"the multi-process service does not work here: {last}")
            os.environ.update(names)
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            subprocess.run(
                [control], input="quit\n", env=environment, text=True, timeout=30, check=False
            )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="the results; rows of the other mode are kept")
    parser.add_argument("--trace", type=Path, help="the Chrome trace of one step")
    parser.add_argument("--mps", action="store_true", help="use the multi-process service")
    arguments = parser.parse_args()
    with service() if arguments.mps else contextlib.nullcontext():
        found = run(2, lambda group: rank(group, arguments.trace))
    rows = [{"service": arguments.mps, **rounded(row)} for row in found]
    if arguments.json:
        if arguments.json.exists():
            earlier = json.loads(arguments.json.read_text())["rows"]
            rows = [row for row in earlier if row["service"] != arguments.mps] + rows
        # In a separate process: one that has initialized CUDA cannot be forked.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            machine = pool.apply(benchmark.machine)
        content = {"machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
