"""Compares a few samples of operators with their references on a GPU, one line each.

    python tools/gpu_smoke.py --compile [--part 0/3]   compiles what the samples need, without GPU
    python tools/gpu_smoke.py [--only WORD ...]        runs them, twice and from a CUDA graph

A quick look at a new machine, or at a change of the runtime; the tests have every sample. The
operators are chosen for what their launches need: descriptors, clusters, several kernels, strides,
tensors that are None, scalars, more than 48 KiB of shared memory.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tile_kernels.runtime import registry, warmup
from tile_kernels.runtime.cases import moved, tensors_in
from tile_kernels.runtime.device import described
from tile_kernels.runtime.operator import Operator

OPERATORS = (
    "moe.topk_gate", "quant.per_token_cast", "transpose.transpose", "moe.get_fused_mapping",
    "gemm.fp8_gemm_nt", "gemm.bf16_gemm_nt", "gemm.m_grouped_fp8_gemm_nt_contiguous",
    "mhc.sinkhorn_normalize", "mhc.mhc_post_fwd", "moe.group_count", "attention.indexer_topk",
    "quant.swiglu_forward", "attention.indexer_select",
)  # fmt: skip
SYNCHRONISING = ("moe.get_fused_mapping",)  # unless told otherwise: not for graphs
MOST = 2  # samples of an operator, with different kernels


def samples(op: Operator) -> list[Any]:
    """The first samples with values and with kernels that no sample before them has."""
    found, known = [], set()
    for sample in op.cases.small:
        arguments = sample.build("meta")
        if not all(size for x in tensors_in(arguments) for size in x.shape):
            continue
        needed = set(warmup.compilations([(op.name, arguments)], described()))
        if needed and not needed <= known:
            found.append(sample)
            known |= needed
        if len(found) == MOST:
            break
    return found


def bits(value: Any) -> list[bytes]:
    """Of every tensor of a result, for comparisons of runs."""
    tensors = tensors_in(moved(value, "cpu"))
    flat = [torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().flatten()) for x in tensors]
    return [bytes(x.view(torch.uint8).tolist()) for x in flat]


def check(op: Operator, sample: Any) -> None:
    """Raises unless kernel, second run and graph agree with the reference."""

    def arguments(device: str) -> dict[str, Any]:
        torch.manual_seed(0)
        found: dict[str, Any] = moved(sample.build("cpu"), device)
        return found

    expected = op.outcome(op.public_reference, arguments("cpu"))
    first = op.outcome(op.function, arguments("cuda"))
    op.cases.compare(moved(first, "cpu"), expected)
    if bits(op.outcome(op.function, arguments("cuda"))) != bits(first):
        raise AssertionError("two runs differ")
    if op.name in SYNCHRONISING:
        return
    values = arguments("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.outcome(op.function, values)
    graph.replay()
    torch.cuda.synchronize()
    if bits(captured) != bits(first):
        raise AssertionError("the replay of a graph differs")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--part", default="0/1", help="with --compile: which of how many parts")
    parser.add_argument(
        "--only", nargs="*", default=[], help="operators whose name has one of these"
    )
    options = parser.parse_args()
    chosen = [
        name for name in OPERATORS if not options.only or any(w in name for w in options.only)
    ]
    part, parts = map(int, options.part.split("/"))
    failed = 0
    for number, name in enumerate(chosen):
        op = registry.get(name)
        if options.compile and number % parts != part:
            continue
        for sample in samples(op):
            label = f"{name} {sample.label}"
            try:
                if options.compile:
                    calls = [(name, sample.build("meta"))]
                    warmup.warmup(calls, arch=described().arch, jobs=1, progress=False)
                else:
                    check(op, sample)
                print(f"PASS {label}", flush=True)
            except Exception as error:  # one line for each, whatever it is
                failed += 1
                print(f"FAIL {label}: {str(error)[:300]}", flush=True)
                traceback.print_exc(limit=-2)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
