"""Argument sets of the selection of keys."""

from __future__ import annotations

import functools

import torch

from tile_kernels.attention.logits.cases import (
    BF16,
    E2M1,
    E4M3,
    OPERAND_REJECTS,
    arguments,
    each_format,
    worked,
)
from tile_kernels.runtime.cases import Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import changed

_selection = functools.partial(arguments, exact=True)


INDEXER_SELECT = Cases(
    small=[
        Sample("5x300.20", _selection(5, 300, topk=20)),
        Sample("no queries", _selection(0, 130, topk=20)),
        Sample("no keys", _selection(5, 0, topk=20)),
        Sample("one of one", _selection(1, 1, topk=20)),
        *each_format("3x150.20.64x128", 3, 150, 64, 128, topk=20),
        Sample("long.2x3000.20", _selection(2, 3000, topk=20)),
        Sample("long.2x3000.900", _selection(2, 3000, topk=900)),
        Sample("bf16.1x200.4096", _selection(1, 200, 64, 128, BF16, topk=4096)),  # small tiles
        Sample("causal.19x400.20", _selection(19, 400, ranges="causal", topk=20)),
        Sample("window.9x700.20", _selection(9, 700, ranges="window", topk=20)),
        Sample("wild.e2m1.20x140.20", _selection(20, 140, 4, 32, E2M1, "wild", topk=20)),
        Sample("nan.5x70.20", _selection(5, 70, nan=True, topk=20)),
        Sample("far.3x1100.20", _selection(3, 1100, 4, 128, E2M1, exponents="far", topk=20)),
        Sample("shifted.3x40.20", _selection(3, 40, shift=True, topk=20)),
        Sample("many.66x300.20", _selection(66, 300, 4, 128, E2M1, "causal", topk=20)),
        Sample("many.far.66x200.20", _selection(66, 200, 4, 32, E2M1, exponents="far", topk=20)),
    ],
    large=[
        *each_format("500x5000.512", 500, 5000, 64, 128, ranges="causal", topk=512),
        *each_format("100x30000.2048", 100, 30000, 64, 128, topk=2048),
        Sample("301x9001.1000.33x256", _selection(301, 9001, 33, 256, E2M1, "window", topk=1000)),
        Sample("7x250000.4096.128x64", _selection(7, 250000, 128, 64, topk=4096)),
        Sample("one block.600x70000.64", _selection(600, 70000, topk=64)),
        Sample("far.300x3000.100", _selection(300, 3000, 4, 128, E2M1, exponents="far", topk=100)),
    ],
    benchmarks=[
        # 1.02 times the goal of the logits alone.
        Benchmark(
            "4096x65536.2048.64x128", arguments(4096, 65536, 64, 128, topk=2048), goal_us=3876.0
        ),
        Benchmark(
            "e2m1.4096x65536.2048.64x128", arguments(4096, 65536, 64, 128, E2M1, topk=2048)
        ),
        Benchmark(
            "causal.4096x16384.512.64x128",
            arguments(4096, 16384, 64, 128, ranges="causal", topk=512),
        ),
        Benchmark("4x65536.2048.64x128", arguments(4, 65536, 64, 128, topk=2048), goal_us=30.0),
    ],
    vectors=[
        Vector("two", worked(E4M3, topk=2), lambda: torch.tensor([[2, 3], [1, 3]]).int()),
    ],
    rejects=[
        *OPERAND_REJECTS,
        Reject("topk", "none", changed(topk=0)),
        Reject("topk", "too many", changed(topk=4097)),
    ],
)  # fmt: skip

CASES = {"indexer_select": INDEXER_SELECT}
