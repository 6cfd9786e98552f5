"""Argument sets of the indexer's target."""

from __future__ import annotations

import math
from typing import Any

import torch

from tile_kernels.attention.softmax_samples import QUERY_REJECTS, row_rejects
from tile_kernels.attention.sparse import cases as sparse_cases
from tile_kernels.attention.sparse import reference as sparse_reference
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import changed, close_results, edited, with_value


def arguments(*sizes: int, normalize: bool = True, **how: Any) -> Build:
    """Arguments of `sparse_attention`, see there, with a window of which `lse_full` has a third."""
    forward = sparse_cases.arguments(*sizes, **how)

    def make(device: torch.device) -> Arguments:
        given = forward(device)
        found = {name: given[name] for name in ("q", "kv", "indices", "sm_scale")}
        lse = given["q"].new_empty(given["q"].shape[:2], dtype=torch.float32)
        if device.type != "meta":
            lse = sparse_reference.attended(*found.values())[2] + math.log(1.5)
        return found | {"lse_full": lse, "normalize": normalize}

    return make


def _worked() -> Arguments:
    """Two heads: one without a preference, one for which row `n` weighs `2**n`."""
    q, kv = torch.zeros(2, 2, 512), torch.zeros(3, 512)
    q[:, 1, 0], kv[:, 0] = 1.0, torch.arange(3.0)
    return {
        "q": q.bfloat16(), "kv": kv.bfloat16(), "sm_scale": math.log(2.0),
        "indices": torch.tensor([[0, 2, -1], [-1, -1, -1]], dtype=torch.int32),
        "lse_full": torch.tensor([[4.0, 8.0], [math.inf, math.inf]]).log(),
    }  # fmt: skip


def _worked_target() -> torch.Tensor:
    """1/4 + 1/8 and 1/4 + 4/8: a third and two thirds."""
    return torch.tensor([[1 / 3, 2 / 3, 0.0], [0.0, 0.0, 0.0]])


ATTENTION_TARGET = Cases(
    small=[
        Sample("3x2.70 of 90", arguments(3, 2, 90, 70)),
        Sample("no tokens", arguments(0, 2, 9, 5)),
        Sample("no rows", arguments(2, 3, 0, 5)),
        Sample("no indices", arguments(2, 3, 5, 0)),
        Sample("one of one", arguments(1, 1, 1, 1)),
        Sample("128 columns.2x65.130 of 200", arguments(2, 65, 200, 130)),
        Sample("two passes.1x130.70 of 90", arguments(1, 130, 90, 70)),
        Sample("sums.2x3.64 of 90", arguments(2, 3, 90, 64, normalize=False)),
        Sample("576.strided.6x3.130 of 150",
               arguments(6, 3, 150, 130, width=576, pad=8, invalid=True)),
        Sample("nan.3x2.65 of 80", arguments(3, 2, 80, 65, special="nan")),
    ],
    large=[
        *(Sample(f"62x{heads}x{width}.{k} of 2000",
                 arguments(62, heads, 2000, k, width=width, invalid=True))
          for heads, width, k in (
              (64, 512, 512), (128, 512, 1024), (128, 576, 300), (200, 512, 65),
          )),
        Sample("many tokens", arguments(70000, 1, 500, 70)),
        Sample("over 2**31", arguments(40, 64, 2**22 + 1000, 200)),
    ],
    benchmarks=[
        Benchmark("128 heads.1024 of 16384", arguments(4096, 128, 16384, 1024)),
        Benchmark("64 heads.512 of 16384", arguments(4096, 64, 16384, 512)),
    ],
    vectors=[Vector("worked", _worked, _worked_target)],
    rejects=[
        *(each for each in QUERY_REJECTS if each.argument != "sink"),
        *row_rejects("kv"),
        Reject("indices", "int64", edited("indices", lambda x: x.long())),
        Reject("lse_full", "of other heads", edited("lse_full", lambda x: x[:, 1:])),
        Reject("normalize", "a number", changed(normalize=2)),
    ],
    bad_values=[Reject("indices", "after the last row", with_value("indices", 90))],
    compare=close_results(rtol=1e-3, atol=1e-6),
)  # fmt: skip

CASES = {"attention_target": ATTENTION_TARGET}
