"""Argument sets of the n-gram windows."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, changed, edited, with_value

_INT32, _INT64 = torch.int32, torch.int64
_VOCABULARY = 40  # small, so that pads come up within texts


@builder
def _windows(
    device: torch.device,
    *shape: int,
    window: int = 3,
    dtype: torch.dtype = _INT64,
    documents: int = 0,
    starts: torch.dtype = _INT32,
    mapped: torch.dtype | None = None,
    pad_id: int = 0,
) -> Arguments:
    arguments: Arguments = {
        "token_ids": torch.randint(0, _VOCABULARY, shape, device=device).to(dtype),
        "max_ngram_size": window,
        "pad_id": pad_id,
    }
    count = arguments["token_ids"].numel()
    if documents:
        inner = torch.randint(0, count + 1, (documents - 1,), device=device).sort().values
        ends = torch.tensor([0, count], device=device)
        arguments["cu_seqlens"] = torch.cat((ends[:1], inner, ends[1:])).to(starts)
    if mapped is not None:
        ids = torch.randint(0, 9, (_VOCABULARY - 3,), device=device)  # some ids are outside
        arguments["token_map"] = ids.to(mapped)
    return arguments


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def _rows(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=_INT32)


NGRAM_WINDOWS = Cases(
    small=[
        Sample("texts.5x67", _windows(5, 67, documents=7, mapped=_INT32)),
        Sample("none", _windows(0)),
        Sample("no texts", _windows(0, 8, documents=1)),
        Sample("empty texts", _windows(3, 0)),
        Sample("one", _windows(1)),
        Sample("one of one", _windows(1, 1)),
        Sample("one column.130", _windows(130, window=1)),
        Sample("int32.129.2", _windows(129, window=2, dtype=_INT32)),
        Sample("wide.257.17", _windows(257, window=17, documents=20, starts=_INT64, pad_id=-1)),
        Sample("mapped.300", _windows(300, window=4, dtype=_INT32, mapped=_INT64)),
        Sample(
            "no map.12", lambda d: {**_windows(12)(d), "token_map": torch.empty(0, device=d).int()}
        ),
        Sample(
            "no starts.12",
            lambda d: {**_windows(12)(d), "cu_seqlens": torch.empty(0, device=d).int()},
        ),
    ],
    large=[
        Sample("8x8001", _windows(8, 8001, documents=300, mapped=_INT32)),
        Sample("1<<24", _windows(1 << 24, documents=10_000)),
    ],
    benchmarks=[Benchmark("8192", _windows(8192, documents=16, mapped=_INT32))],
    vectors=[
        Vector(
            "a pad ends a document",
            lambda: {"token_ids": _ids(5, 6, 0, 7, 8), "max_ngram_size": 3, "pad_id": 0},
            lambda: _rows([5, 0, 0], [6, 5, 0], [0, 0, 0], [7, 0, 0], [8, 7, 0]),
        ),
        Vector(
            "documents and a map",
            lambda: {
                "token_ids": _ids(0, 1, 2, 3),
                "max_ngram_size": 2,
                "pad_id": -1,
                "cu_seqlens": _ids(0, 2, 4),
                "token_map": _ids(7, 8, 9),
            },
            lambda: _rows([7, -1], [8, 7], [9, -1], [-1, -1]),
        ),
    ],
    rejects=[
        Reject("max_ngram_size", "none", changed(max_ngram_size=0)),
        Reject("max_ngram_size", "too long", changed(max_ngram_size=65)),
        Reject("pad_id", "64 bits", changed(pad_id=2**31)),
        Reject("token_ids", "bytes", edited("token_ids", torch.Tensor.byte)),
    ],
    bad_values=[
        Reject("cu_seqlens", "beyond the tokens", with_value("cu_seqlens", 10**6, -1)),
        Reject("cu_seqlens", "decreasing", with_value("cu_seqlens", 200, 0)),
        Reject("cu_seqlens", "negative", with_value("cu_seqlens", -1, 0)),
        Reject("token_ids", "beyond the map", with_value("token_ids", _VOCABULARY, 3)),
    ],
)

CASES = {"ngram_windows": NGRAM_WINDOWS}
