"""Argument sets of attention over chosen rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.softmax_samples import (
    QUERY_REJECTS,
    compare,
    queries,
    row_rejects,
    rows,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, NAN, builder, edited, with_value

TILE = 64  # rows that the kernel takes at a time


def _chosen(num_tokens: int, num_rows: int, k: int, device: torch.device) -> Tensor:
    """Distinct rows in ascending order, as a selection gives them, while there are enough."""
    if 0 < k <= num_rows:
        step = num_rows // k
        first = torch.arange(k, device=device) * step
        return (first + torch.randint(step, (num_tokens, k), device=device)).int()
    return torch.randint(max(num_rows, 1), (num_tokens, k), device=device).int()


def _with_invalid(indices: Tensor, num_rows: int) -> Tensor:
    """Some indices of no row, whole queries and whole tiles of them; nobody chooses row 0."""
    k = indices.shape[1]
    bad = torch.tensor(
        [-1, num_rows, num_rows + 1, 2**31 - 1, -(2**31)], dtype=torch.int32, device=indices.device
    )
    drawn = bad[torch.randint(len(bad), indices.shape, device=indices.device)]
    indices = torch.where(torch.rand(indices.shape, device=indices.device) < 0.3, drawn, indices)
    indices[indices == 0] = -1
    middle = k // TILE // 2 * TILE
    indices[1::7, :TILE] = -1
    indices[2::7, middle : middle + TILE] = num_rows
    indices[3::7, -TILE:] = 2**31 - 1
    indices[4::7] = -1
    indices[5::7] = indices[5::7, -1:]  # one row many times, or none
    return indices


@builder
def arguments(
    device: torch.device,
    num_tokens: int,
    heads: int,
    num_rows: int,
    k: int,
    *,
    width: int = 512,
    sink: str = "",
    lengths: bool = False,
    invalid: bool = False,
    special: str = "",
    pad: int = 0,
    loud: float = 1.0,
    stats: bool = True,
) -> Arguments:
    """`lengths`: random ones with 0. `invalid`: also indices of no row, lengths out of range, NaN
    in a row that nobody chose. `special`: "nan" in rows and heads, "overflow" of logits. `pad`:
    strides. `loud`: the size of queries."""
    found = queries(num_tokens, heads, width, sink, device, pad=pad, loud=loud)
    found["kv"] = rows(num_rows, width, device, pad=pad)
    indices = _chosen(num_tokens, num_rows, k, device)
    if invalid and num_tokens and k and device.type != "meta":
        indices = _with_invalid(indices, num_rows)
        found["kv"][:1] = NAN
    if pad:
        indices = torch.nn.functional.pad(indices, (0, pad), value=-7)[:, :k]
    found["indices"] = indices
    if lengths:
        beyond = 3 if invalid else 0
        drawn = torch.randint(-beyond, k + 1 + beyond, (num_tokens,), device=device)
        drawn[::5], drawn[1::5] = k, 0
        found["topk_length"] = drawn.int()
    if special == "nan":
        found["kv"][num_rows // 2, 500] = NAN
        found["q"][-1, -1, 3] = NAN
    if special == "overflow":  # an infinite logit of the first head; others do not see that channel
        found["q"][..., 0] = 0
        found["q"][0, 0, 0], found["kv"][num_rows // 2, 0] = 1e30, 1e20
    found["return_stats"] = stats
    return found


GRID = (
    (128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512),
    (95, 128), (153, 256), (114, 384), (32, 2048), (64, 8192),
)  # fmt: skip


def _grid() -> list[Sample]:
    """Sizes, in both widths and head counts; the kinds of sinks, lengths and indices in turn."""
    found = []
    for at, (num_rows, k) in enumerate(GRID):
        for step, num_tokens in enumerate((1, 62, 213)):
            for width in (512, 576):
                for heads in (64, 128):
                    sink = ("", "normal", "wild")[(at + step + width // 64 + heads // 64) % 3]
                    dirty = (at + step) % 2 == 1 or num_tokens == 213
                    label = f"{num_tokens}x{heads}x{width}.{k} of {num_rows}"
                    found.append(
                        Sample(
                            label + f".{sink}" * bool(sink) + ".invalid" * dirty,
                            arguments(
                                num_tokens, heads, num_rows, k, width=width, sink=sink,
                                lengths=dirty, invalid=dirty,
                            ),
                        )
                    )  # fmt: skip
    return found


def _worked() -> Arguments:
    """Two heads that are 0, one that prefers row 2; row `n` is `n` in all channels."""
    q = torch.zeros(4, 3, 512)
    q[:, 2] = 1 / 512
    return {
        "q": q.bfloat16(),
        "kv": torch.arange(4.0)[:, None].expand(4, 512).bfloat16(),
        "indices": torch.tensor(
            [[0, 2, -1], [-1, -1, -1], [1, 1, 3], [3, 2, 1]], dtype=torch.int32
        ),
        "sm_scale": math.log(2.0),
        "sink": torch.tensor([0.0, INF, -INF]),
        "topk_length": torch.tensor([3, 3, 2, 0], dtype=torch.int32),
        "return_stats": True,
    }


def _worked_results() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of head 2 are `row * log 2`, so its weights are powers of two."""
    out = torch.tensor([[2 / 3, 0, 8 / 5], [0, 0, 0], [2 / 3, 0, 1], [0, 0, 0]])
    top = torch.tensor([[0, 0, 2], [-INF] * 3, [0, 0, 1], [-INF] * 3]) * math.log(2)
    lse = torch.tensor([[2, 2, 5], [INF] * 3, [2, 2, 4], [INF] * 3]).log()
    return out[..., None].expand(4, 3, 512).bfloat16(), top, lse


def _benchmark(label: str, *sizes: int, goal: float, **how: Any) -> Benchmark:
    return Benchmark(label, arguments(*sizes, **how), goal_us=goal)


def _microseconds(num_tokens: int, heads: int, k: int, width: int, tflops: float) -> float:
    return round(2 * num_tokens * heads * k * (width + 512) / tflops / 1e6, 1)


SPARSE_ATTENTION = Cases(
    small=[
        Sample("3x2.70 of 90", arguments(3, 2, 90, 70, sink="wild", lengths=True)),
        Sample("no tokens", arguments(0, 2, 9, 5)),
        Sample("no rows", arguments(2, 3, 0, 5, sink="normal")),
        Sample("no indices", arguments(2, 3, 5, 0, sink="normal")),
        Sample("one of one", arguments(1, 1, 1, 1)),
        Sample("without stats.2x2.9 of 20", arguments(2, 2, 20, 9, stats=False)),
        Sample("two blocks.2x65.130 of 200", arguments(2, 65, 200, 130)),
        Sample("wild.7x2.260 of 300",
               arguments(7, 2, 300, 260, sink="wild", lengths=True, invalid=True)),
        Sample("tiles.6x4.320 of 300", arguments(6, 4, 300, 320, invalid=True)),
        Sample("576.strided.6x3.260 of 300",
               arguments(6, 3, 300, 260, width=576, pad=8, sink="wild", lengths=True,
                         invalid=True)),
        Sample("strided.2x3.63 of 70", arguments(2, 3, 70, 63, pad=8)),
        Sample("nan.3x2.200 of 240", arguments(3, 2, 240, 200, special="nan")),
        Sample("extreme.2x2.65 of 65", arguments(2, 2, 65, 65, special="overflow")),
        Sample("loud.2x2.400 of 500", arguments(2, 2, 500, 400, loud=30.0)),
    ],
    large=[
        *_grid(),
        *(Sample(f"k {k}", arguments(62, 64, 1700, k, sink="normal", lengths=True, invalid=True))
          for k in (1, 63, 64, 65, 640, 1152)),
        *(Sample(f"{heads} heads", arguments(33, heads, 900, 300, sink="normal"))
          for heads in (1, 5, 16, 96, 129, 200)),
        Sample("strided", arguments(62, 64, 900, 300, pad=16, lengths=True)),
        Sample("many tokens", arguments(70000, 1, 500, 70, sink="normal")),
        Sample("over 2**31", arguments(40, 64, 2**22 + 1000, 200, sink="normal")),
    ],
    benchmarks=[
        _benchmark(
            "128 heads.1024+128 of 16384", 4096, 128, 16384, 1152, sink="normal",
            goal=_microseconds(4096, 128, 1152, 512, 640),
        ),
        _benchmark(
            "64 heads.512+128 of 16384", 4096, 64, 16384, 640, sink="normal",
            goal=_microseconds(4096, 64, 640, 512, 580),
        ),
        _benchmark(
            "128 heads.576.2048 of 32768", 4096, 128, 32768, 2048, width=576,
            goal=_microseconds(4096, 128, 2048, 576, 640),
        ),
    ],
    vectors=[Vector("worked", _worked, _worked_results)],
    rejects=[
        *QUERY_REJECTS,
        *row_rejects("kv"),
        Reject("kv", "two heads", edited("kv", lambda x: x[:, None].repeat(1, 2, 1))),
        Reject("indices", "int64", edited("indices", lambda x: x.long())),
        Reject("indices", "of other queries", edited("indices", lambda x: x[1:])),
        Reject("topk_length", "int64", edited("topk_length", lambda x: x.long())),
        Reject("topk_length", "of other queries", edited("topk_length", lambda x: x[1:])),
    ],
    bad_values=[
        Reject("indices", "after the last row", with_value("indices", 90)),
        Reject("indices", "negative", with_value("indices", -2)),
        Reject("topk_length", "too long", with_value("topk_length", 71)),
        Reject("topk_length", "negative", with_value("topk_length", -1)),
    ],
    compare=compare,
)  # fmt: skip

CASES = {"sparse_attention": SPARSE_ATTENTION}
