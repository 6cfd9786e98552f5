"""Argument sets of attention over windows and all entries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tile_kernels.attention.softmax_samples import (
    QUERY_REJECTS,
    SEQUENCE_BAD_VALUES,
    SEQUENCE_REJECTS,
    compare,
    queries,
    row_rejects,
    rows,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, NAN, builder, edited


@builder
def arguments(
    device: torch.device,
    bounds: tuple[int, ...],
    num_tokens: int,
    heads: int,
    *,
    ratio: int = 128,
    window: int = 128,
    num_entries: int | None = None,
    width: int = 512,
    sink: str = "",
    special: str = "",
    pad: int = 0,
    stats: bool = True,
) -> Arguments:
    """`num_entries` None: those of all tokens; `ratio` 0: windows alone.

    `special`: "nan" in an entry, and in the rows that no token sees.
    """
    found = queries(num_tokens, heads, width, sink, device, pad=pad)
    found["window_kv"] = rows(num_tokens, width, device, pad=pad)
    count = (num_tokens // max(ratio, 1)) if num_entries is None else num_entries
    found["entries"] = rows(count, width, device, pad=pad) if ratio else None
    found["cu_seqlens"] = torch.tensor(bounds, device=device).int()
    if special == "nan":
        found["window_kv"][: bounds[0]] = NAN
        found["window_kv"][bounds[-1] :] = NAN
        found["entries"][1, 77] = NAN
    return found | {"ratio": ratio, "window": window, "return_stats": stats}


def _worked() -> Arguments:
    """Row `n` is `n` in all channels, entry `n` is `4 + n`; head 1 prefers large rows."""
    q = torch.zeros(5, 2, 512)
    q[:, 1] = 1 / 512
    numbers = torch.arange(5.0)[:, None].expand(5, 512)
    return {
        "q": q.bfloat16(),
        "window_kv": numbers.bfloat16(),
        "entries": (numbers[:2] + 4).bfloat16(),
        "sm_scale": math.log(2.0),
        "cu_seqlens": torch.tensor([1, 4, 5], dtype=torch.int32),
        "ratio": 2,
        "window": 2,
        "sink": torch.tensor([0.0, -INF]),
        "return_stats": True,
    }


def _worked_results() -> tuple[Tensor, Tensor, Tensor]:
    """Token 0 is in no sequence; tokens 2 and 3 see entry 0; token 4 begins another sequence."""
    out = torch.tensor([[0, 0], [1 / 2, 1], [7 / 4, 74 / 22], [9 / 4, 96 / 28], [4 / 2, 4]])
    top = torch.tensor([[-INF, -INF], [0, 1], [0, 4], [0, 4], [0, 4]]) * math.log(2)
    lse = torch.tensor([[INF, INF], [1, 2], [3, 22], [3, 28], [1, 16]]).log()
    return out[..., None].expand(5, 2, 512).bfloat16(), top, lse


HCA_ATTENTION = Cases(
    small=[
        Sample("5x2", arguments((0, 3, 5), 5, 2, ratio=2, window=3, num_entries=4, sink="wild")),
        Sample("no tokens", arguments((0, 0), 0, 2, num_entries=3)),
        Sample("one token", arguments((0, 1), 1, 1, ratio=1, window=1, sink="normal")),
        Sample("no entries", arguments((0, 3), 3, 2, ratio=128)),
        Sample("windows alone.6x2", arguments((1, 4, 6), 6, 2, ratio=0, window=2)),
        Sample("wide window.3x2", arguments((0, 3), 3, 2, ratio=1, window=130, sink="normal")),
        Sample("without stats.2x3", arguments((0, 2), 2, 3, ratio=0, window=1, stats=False)),
        Sample("cluster.576.strided.3x65",
               arguments((0, 3), 3, 65, ratio=1, window=3, width=576, pad=8, sink="wild")),
        Sample("nan.9x2", arguments((2, 7), 9, 2, ratio=2, window=2, special="nan", sink="normal")),
        Sample("missing.6x2",
               arguments((0, 6), 6, 2, ratio=1, window=2, num_entries=3, sink="normal")),
    ],
    large=[
        *(Sample(f"{width}.{heads} heads",
                 arguments((0, 100, 101, 600), 600, heads, ratio=4, width=width, sink="wild"))
          for width in (512, 576) for heads in (3, 64, 128)),
        Sample("windows alone", arguments((7, 300, 990), 1000, 64, ratio=0, sink="normal")),
        Sample("window 1", arguments((0, 700), 700, 64, ratio=1, window=1)),
        Sample("window 200", arguments((0, 700), 700, 64, ratio=7, window=200, pad=8)),
        Sample("heavy", arguments((0, 2000, 5000), 5000, 16, ratio=128, sink="normal")),
        Sample("many tokens", arguments((0, 70000), 70000, 1, ratio=0, window=5)),
        Sample("many sequences",
               arguments(tuple(range(0, 1001, 2)), 1000, 16, ratio=1, window=3, sink="normal")),
    ],
    benchmarks=[
        Benchmark(  # 620 TFLOP/s
            "128 heads.up to 8192+128", arguments((0, 8192), 8192, 128, ratio=1), goal_us=14630.0
        ),
        Benchmark("128 heads.windows alone", arguments((0, 8192), 8192, 128, ratio=0)),
    ],
    vectors=[Vector("worked", _worked, _worked_results)],
    rejects=[
        *QUERY_REJECTS,
        *row_rejects("window_kv"),
        *row_rejects("entries"),
        *SEQUENCE_REJECTS,
        Reject("window_kv", "of other tokens", edited("window_kv", lambda x: x[1:])),
    ],
    bad_values=SEQUENCE_BAD_VALUES,
    compare=compare,
)  # fmt: skip

CASES = {"hca_attention": HCA_ATTENTION}
