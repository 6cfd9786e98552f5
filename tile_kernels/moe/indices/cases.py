"""Argument sets of the index operators."""

from __future__ import annotations

import torch

from tile_kernels.moe.samples import outside
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, changed


@builder
def _indices(
    device: torch.device,
    num_tokens: int,
    num_topk: int,
    n: int = 256,
    num_ep_ranks: int = 8,
    tp_rank: int = 1,
    num_tp_ranks: int = 2,
    dtype: torch.dtype = torch.int64,
) -> Arguments:
    """Indices from -3 to a little beyond `n`."""
    indices = torch.randint(-3, n + 9, (num_tokens, num_topk), dtype=dtype, device=device)
    return {
        "indices": indices,
        "n": n,
        "num_ep_ranks": num_ep_ranks,
        "tp_rank": tp_rank,
        "num_tp_ranks": num_tp_ranks,
    }


def _ranked(tp_rank: int) -> Arguments:
    return {
        "indices": torch.arange(-1, 24).view(5, 5),
        "n": 24,
        "num_ep_ranks": 6,
        "tp_rank": tp_rank,
        "num_tp_ranks": 2,
    }


_NONE = [-1] * 4

_MASK_INDICES_BY_TP = Cases(
    small=[
        *(
            Sample(f"{t}x{k}", _indices(t, k))
            for t, k in [(0, 8), (1, 1), (1, 8), (43, 3), (128, 2), (129, 6)]
        ),
        Sample("33x6.int32", _indices(33, 6, dtype=torch.int32)),
        Sample("9x7.int32.odd", _indices(9, 7, n=72, num_ep_ranks=5, dtype=torch.int32)),
        Sample("rank-out-of-range", _indices(20, 4, tp_rank=7)),
        Sample("one-rank", _indices(20, 4, num_ep_ranks=1, tp_rank=0, num_tp_ranks=1)),
    ],
    large=[Sample(f"{t}x8", _indices(t, 8, tp_rank=0, num_tp_ranks=4)) for t in (4001, 34345)],
    benchmarks=[Benchmark("32768x8", _indices(32768, 8), goal_us=2.6)],
    vectors=[
        Vector(
            "rank 0",
            lambda: _ranked(0),
            lambda: torch.tensor(
                [-1, 0, 1, 2, 3, *_NONE, 4, 5, 6, 7, *_NONE, 8, 9, 10, 11, *_NONE]
            ).view(5, 5),
        ),
        Vector(
            "rank 1",
            lambda: _ranked(1),
            lambda: torch.tensor(
                [-1, *_NONE, 0, 1, 2, 3, *_NONE, 4, 5, 6, 7, *_NONE, 8, 9, 10, 11]
            ).view(5, 5),
        ),
    ],
    rejects=[
        Reject("n", "fewer experts than ranks", changed(n=5)),
        Reject("num_ep_ranks", "zero", changed(num_ep_ranks=0)),
        Reject("num_tp_ranks", "zero", changed(num_tp_ranks=0)),
    ],
)


@builder
def _repeating(device: torch.device, num_tokens: int, num_topk: int, num_groups: int) -> Arguments:
    """Few distinct groups, so that rows repeat them; -1 and worse among them."""
    indices = torch.randint(-2, num_groups, (num_tokens, num_topk), device=device)
    return {"group_indices": indices, "num_groups": num_groups}


def _unique_vector(rows: list[list[int]]) -> Arguments:
    return {"group_indices": torch.tensor(rows), "num_groups": 128}


_INPLACE_UNIQUE_GROUP_INDICES = Cases(
    small=[
        Sample(f"{t}x{k}.{g}", _repeating(t, k, g))
        for t, k, g in [(0, 8, 8), (1, 1, 4), (1, 8, 8), (129, 6, 8), (43, 9, 72), (9, 64, 200)]
    ],
    large=[Sample(f"34345x{k}", _repeating(34345, k, 16)) for k in (2, 6, 8, 9)],
    benchmarks=[Benchmark("32768x8", _repeating(32768, 8, 8), goal_us=2.6)],
    vectors=[
        Vector(
            "repeats",
            lambda: _unique_vector(
                [[3, 1, 3, -1, 1, 3], [0, 0, 0, 0, 0, 0], [-1, -1, 5, -1, 5, 70]]
            ),
            lambda: (
                None,
                torch.tensor(
                    [[3, 1, -1, -1, -1, -1], [0, -1, -1, -1, -1, -1], [-1, -1, 5, -1, -1, 70]]
                ),
            ),
        )
    ],
    bad_values=outside("group_indices"),
    rejects=[
        Reject("num_groups", "zero", changed(num_groups=0)),
        Reject(
            "group_indices",
            "65 columns",
            changed(group_indices=torch.zeros(2, 65, dtype=torch.int64)),
        ),
    ],
)

CASES = {
    "mask_indices_by_tp": _MASK_INDICES_BY_TP,
    "inplace_unique_group_indices": _INPLACE_UNIQUE_GROUP_INDICES,
}
