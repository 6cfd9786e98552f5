"""Argument sets of the lists of rows that queries attend to."""

from __future__ import annotations

import torch

from tile_kernels.attention.indexer_reference import indexer_ranges
from tile_kernels.attention.softmax_samples import SEQUENCE_BAD_VALUES, SEQUENCE_REJECTS
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, changed, edited


@builder
def _lists(
    device: torch.device,
    bounds: tuple[int, ...],
    num_tokens: int,
    k: int | None,
    *,
    window: int = 128,
    ratio: int = 4,
    offset: int | None = None,
    wild: bool = False,
    pad: int = 0,
) -> Arguments:
    """`k` None: windows alone; `wild`: also entries that a query may not see, and any number."""
    found: Arguments = {"selected": None, "cu_seqlens": torch.tensor(bounds, device=device).int()}
    if k is not None:
        selected = torch.full((num_tokens, k + pad), -1, dtype=torch.int32, device=device)
        if device.type != "meta":
            start, end = indexer_ranges(found["cu_seqlens"], ratio, num_tokens)
            place = torch.arange(k + pad, device=device, dtype=torch.int32)
            step = ((end - start)[:, None] // max(k, 1)).clamp(min=1)
            selected = start[:, None] + place * step
            selected = torch.where(selected < end[:, None], selected, -1)
            if wild:
                other = torch.randint(-(2**31), 2**31, selected.shape, device=device).int()
                near = torch.randint(-2, num_tokens, selected.shape, device=device).int()
                drawn = torch.rand(selected.shape, device=device)
                selected = torch.where(drawn < 0.2, other, selected)
                selected = torch.where(drawn > 0.7, near, selected)
        found["selected"] = selected[:, :k]
    found |= {"window": window, "ratio": ratio}
    if k is None:
        found["num_tokens"] = num_tokens
    if offset is not None:
        found["entry_offset"] = offset
    return found


def _worked() -> Arguments:
    return {
        "selected": torch.tensor(
            [[-1, -1], [-1, 0], [0, -1], [0, 1], [2, -1], [2, 0], [0, 2]], dtype=torch.int32
        ),
        "cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32),
        "window": 2,
        "ratio": 2,
        "entry_offset": 10,
    }


def _worked_results() -> tuple[torch.Tensor, torch.Tensor]:
    """Entry 2 is of the second sequence, complete at token 5; token 6 is in no sequence."""
    indices = [
        [0, -1, -1, -1], [0, 1, 10, -1], [1, 2, 10, -1], [2, 3, 10, 11],
        [4, -1, -1, -1], [4, 5, 12, -1], [-1, -1, -1, -1],
    ]  # fmt: skip
    lengths = torch.tensor([1, 3, 3, 4, 1, 3, 0], dtype=torch.int32)
    return torch.tensor(indices, dtype=torch.int32), lengths


ATTENTION_INDICES = Cases(
    small=[
        Sample("9.5", _lists((0, 7, 9), 9, 5, window=3, ratio=2)),
        Sample("no tokens", _lists((0, 0), 0, 5, window=3)),
        Sample("one token", _lists((0, 1), 1, 3, window=4, ratio=1)),
        Sample("windows alone.30", _lists((0, 12, 30), 30, None, window=8, ratio=0)),
        Sample("nothing selected.5", _lists((0, 5), 5, 0, window=2)),
        Sample("around.40.20", _lists((3, 3, 20, 36), 40, 20, window=7, ratio=3)),
        Sample("wild.50.40", _lists((0, 9, 50), 50, 40, window=5, ratio=2, wild=True, offset=99)),
        Sample("wild.20.300", _lists((0, 20), 20, 300, window=33, ratio=1, wild=True)),
        Sample("strided.wild.12.70", _lists((2, 12), 12, 70, window=6, wild=True, pad=3)),
        Sample("sequences.100.8",
               _lists((0, *range(2, 101, 2)), 100, 8, window=3, ratio=1, wild=True)),
    ],
    large=[
        Sample("4096.512", _lists((0, 1000, 1001, 4096), 4096, 512)),
        Sample("wild.4001.1024", _lists((5, 2000, 3990), 4001, 1024, wild=True)),
        Sample("70000.33", _lists((0, 70000), 70000, 33, ratio=128, wild=True)),
        Sample("many sequences",
               _lists(tuple(range(0, 6001, 3)), 6000, 64, ratio=1, wild=True)),
        Sample("windows alone", _lists((0, 50, 9000), 9000, None, ratio=0)),
    ],
    benchmarks=[
        Benchmark("4096.512+128", _lists((0, 4096), 4096, 512)),
        Benchmark("4096.1024+128", _lists((0, 4096), 4096, 1024)),
    ],
    vectors=[Vector("worked", _worked, _worked_results)],
    rejects=[
        *SEQUENCE_REJECTS,
        Reject("selected", "int64", edited("selected", lambda x: x.long())),
        Reject("num_tokens", "negative", changed(selected=None, num_tokens=-1)),
        Reject("num_tokens", "missing", changed(selected=None)),
        Reject("selected", "of other tokens", changed(num_tokens=3)),
        Reject("entry_offset", "negative", changed(entry_offset=-1)),
        Reject("entry_offset", "too large", changed(entry_offset=2**31)),
    ],
    bad_values=SEQUENCE_BAD_VALUES,
)  # fmt: skip

CASES = {"attention_indices": ATTENTION_INDICES}
