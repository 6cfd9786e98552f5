"""Argument sets of the choice among logits."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, NAN, builder, changed, edited


def _values(kind: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Rows that are hard to choose from."""
    x = torch.randn(rows, columns, device=device)
    if kind == "ties":
        return (x * 2).round()
    if kind == "equal":
        return torch.full_like(x, -1.25)
    if kind == "one bucket":  # they differ in the lowest bits alone
        return (x.view(torch.int32) & 0xFF | 0x3F800000).view(torch.float32)
    if kind == "ascending":
        return x.sort(dim=1).values
    if kind == "descending":
        return x.sort(dim=1, descending=True).values
    if kind == "periodic":  # all of a sample at equal distances may be large
        large = torch.arange(columns, device=device) % max(columns // 256, 1) < 16
        return x + 10 * large
    if kind == "special":
        values = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-40, 3e38], device=device)
        return values[torch.randint(len(values), x.shape, device=device)]
    if kind == "mostly -inf":  # or NaN, which is the same
        least = torch.where(torch.rand_like(x) < 0.5, -INF, NAN)
        return torch.where(torch.rand_like(x) < 0.01, x, least)
    if kind == "all NaN":
        return torch.full_like(x, NAN)
    return x


@builder
def _rows(
    device: torch.device,
    rows: int,
    columns: int,
    k: int,
    kind: str = "",
    dtype: torch.dtype = torch.float32,
    end: str = "all",
    start: str = "",
    by_value: bool = False,
    stride: int | None = None,
    shift: int = 0,
) -> Arguments:
    """`end` and `start`: how the ranges lie; `stride` and `shift` of rows in their storage."""
    x = _values(kind, rows, columns, device).to(dtype)
    if stride is not None:
        storage = torch.zeros(rows * stride + shift, dtype=dtype, device=device)
        x = storage[shift:].view(rows, stride)[:, :columns].copy_(x)
    place = torch.arange(rows, device=device)
    ends = {
        "all": torch.full((rows,), columns, device=device),
        "causal": place * columns // max(rows - 1, 1),
        "wild": torch.where(place % 2 == 0, columns + 7 * place, -place),
        "wildest": torch.where(place % 2 == 0, 2**31 - 1, -(2**31)),
    }[end]
    arguments: Arguments = {"logits": x, "k": k, "end": ends.int(), "sorted": by_value}
    starts = {
        "some": ends // 3, "above": ends + 2, "negative": -place,
        "wildest": torch.where(place % 3 == 0, -(2**31), 2**31 - 1),
    }  # fmt: skip
    if start:
        arguments["start"] = starts[start].int()
    return arguments


KINDS = (
    "ties", "equal", "one bucket", "ascending", "descending", "special", "mostly -inf", "all NaN",
)  # fmt: skip


def _worked(k: int, by_value: bool) -> Any:
    def make() -> Arguments:
        return {
            "logits": torch.tensor([[0.5, 1.5, 3.0, 7.5], [-2.0, 0.5, 0.0, 2.0]]),
            "k": k,
            "end": torch.full((2,), 4, dtype=torch.int32),
            "sorted": by_value,
        }

    return make


INDEXER_TOPK = Cases(
    small=[
        Sample("5x300.7", _rows(5, 300, 7)),
        Sample("none", _rows(0, 64, 4)),
        Sample("no keys", _rows(3, 0, 4)),
        Sample("one of one", _rows(1, 1, 1)),
        *(Sample(f"{kind}.3x700.50", _rows(3, 700, 50, kind)) for kind in KINDS),
        Sample("sorted.3x300.1", _rows(3, 300, 1, "ties", by_value=True)),
        *(Sample(f"{kind}.sorted.2x300.70", _rows(2, 300, 70, kind, by_value=True))
          for kind in KINDS),
        # Lists that fill up: 20000 entries and more.
        *(Sample(f"long.{kind}.1x20000.1500", _rows(1, 20000, 1500, kind)) for kind in KINDS),
        Sample("long.periodic.1x16384.1500", _rows(1, 16384, 1500, "periodic")),
        Sample("long.2x9000.4096", _rows(2, 9000, 4096, "ties", by_value=True)),
        Sample("all of them.3x64.64", _rows(3, 64, 64, "ties")),
        Sample("more than there are.3x64.100", _rows(3, 64, 100, "special", by_value=True)),
        Sample("causal.9x130.40", _rows(9, 130, 40, end="causal")),
        Sample("ranges.9x130.40", _rows(9, 130, 40, end="causal", start="some")),
        Sample("empty ranges.4x130.40", _rows(4, 130, 40, end="causal", start="above")),
        Sample("wild.6x50.8", _rows(6, 50, 8, end="wild", start="negative", by_value=True)),
        Sample("wildest.9x50.8", _rows(9, 50, 8, end="wildest", start="wildest", by_value=True)),
        Sample("bfloat16.3x260.30", _rows(3, 260, 30, "ties", torch.bfloat16)),
        Sample("odd.3x131.30", _rows(3, 131, 30)),
        Sample("pairs.3x130.30", _rows(3, 130, 30, start="some")),
        Sample("strided.3x128.30", _rows(3, 128, 30, stride=136)),
        Sample("shifted.3x127.30", _rows(3, 127, 30, "", torch.bfloat16, stride=131, shift=3)),
    ],
    large=[
        *(Sample(f"{kind}.64x65536.2048", _rows(64, 65536, 2048, kind)) for kind in ("", *KINDS)),
        Sample("periodic.64x65536.2048", _rows(64, 65536, 2048, "periodic")),
        Sample("sorted.64x65536.2048", _rows(64, 65536, 2048, "ties", by_value=True)),
        Sample("causal.1000x5000.512", _rows(1000, 5000, 512, end="causal", start="some")),
        Sample("bfloat16.100x30001.1024", _rows(100, 30001, 1024, "ties", torch.bfloat16)),
        Sample("1x250000.2048", _rows(1, 250000, 2048)),
        Sample("over 2**31", _rows(8200, 2**18, 64, "one bucket", torch.bfloat16)),
    ],
    benchmarks=[
        Benchmark("4096x65536.2048", _rows(4096, 65536, 2048), goal_us=1000.0),
        Benchmark("sorted.4096x65536.2048", _rows(4096, 65536, 2048, by_value=True)),
        Benchmark("ascending.1024x65536.2048", _rows(1024, 65536, 2048, "ascending")),
        Benchmark("periodic.1024x65536.2048", _rows(1024, 65536, 2048, "periodic")),
        Benchmark("64x65536.512", _rows(64, 65536, 512)),
    ],
    vectors=[
        Vector("indices", _worked(2, False), lambda: torch.tensor([[2, 3], [1, 3]]).int()),
        Vector("by value", _worked(2, True), lambda: torch.tensor([[3, 2], [3, 1]]).int()),
        Vector(
            "too many", _worked(5, True),
            lambda: torch.tensor([[3, 2, 1, 0, -1], [3, 1, 2, 0, -1]]).int(),
        ),
    ],
    rejects=[
        Reject("logits", "overlap", edited("logits", lambda x: x.as_strided(x.shape, (1, 1)))),
        Reject("k", "zero", changed(k=0)),
        Reject("k", "too many", changed(k=4097)),
        Reject("end", "another size", edited("end", lambda x: x[1:])),
        Reject("start", "int64", changed(start=torch.zeros(5, dtype=torch.int64))),
        Reject("sorted", "a number", changed(sorted=1)),
    ],
)  # fmt: skip

CASES = {"indexer_topk": INDEXER_TOPK}
