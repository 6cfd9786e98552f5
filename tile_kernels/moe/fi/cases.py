"""Argument sets of `aux_fi`."""

from __future__ import annotations

import torch

from tile_kernels.moe.count.cases import EXAMPLE, SHAPES, indices_and
from tile_kernels.moe.samples import outside
from tile_kernels.runtime.cases import Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import changed

_AUX_FI = Cases(
    small=[
        Sample(f"{t}x{k}.{e}", indices_and(t, k, e, "topk_idx", num_aux_topk=3))
        for t, k, e in SHAPES
    ],
    large=[
        Sample(f"34345x9.{e}", indices_and(34345, 9, e, "topk_idx", num_aux_topk=9))
        for e in (9, 256)
    ],
    benchmarks=[
        Benchmark("32768x8.32", indices_and(32768, 8, 32, "topk_idx", num_aux_topk=8), goal_us=3.5),
        Benchmark(
            "32768x8.256", indices_and(32768, 8, 256, "topk_idx", num_aux_topk=8), goal_us=4.0
        ),
    ],
    vectors=[
        Vector(
            "by hand",
            lambda: {
                "topk_idx": torch.tensor(EXAMPLE),
                "num_experts": 4,
                "num_aux_topk": 2,
            },
            lambda: torch.tensor([2 / 3, 2.0, 2 / 3, 0.0]),
        )
    ],
    bad_values=outside("topk_idx"),
    rejects=[
        Reject("num_experts", "zero", changed(num_experts=0)),
        Reject("num_aux_topk", "zero", changed(num_aux_topk=0)),
    ],
)

CASES = {"aux_fi": _AUX_FI}
