"""Argument sets of the weight operators."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector

_INF = float("inf")


def _weights(num_tokens: int, num_topk: int, skip: int = 0) -> Build:
    def make(device: torch.device) -> Arguments:
        flat = torch.rand(num_tokens * num_topk + skip, device=device)
        return {"topk_weights": flat[skip:].view(num_tokens, num_topk)}

    return make


def _extreme_weights(device: torch.device) -> Arguments:
    """Cancellation, denormals, overflow; nothing that gives NaN, whose bits differ by device."""
    rows = [[0.0, 0.0, 1.0], [1e30, 1e-30, -1e30], [1e-38, 1e-44, 3e-39], [3e38] * 3]
    return {"topk_weights": torch.tensor(rows, device=device)}


NORMALIZE_WEIGHT = Cases(
    small=[
        *(
            Sample(f"{t}x{k}", _weights(t, k))
            for t, k in [(0, 8), (1, 8), (1, 1), (127, 6), (129, 8), (130, 9), (33, 64), (5, 65)]
        ),
        Sample("long.3x200", _weights(3, 200)),
        Sample("misaligned.40x8", _weights(40, 8, skip=1)),
        Sample("extreme", _extreme_weights),
    ],
    large=[Sample(f"{t}x{k}", _weights(t, k)) for t in (4001, 34345) for k in (2, 6, 8, 9)],
    benchmarks=[Benchmark("32768x8", _weights(32768, 8), goal_us=2.2)],
    vectors=[
        Vector(
            "exact",
            lambda: {"topk_weights": torch.tensor([[1.0, 2.0, 3.0, 2.0]])},
            lambda: (torch.tensor([8.0]), torch.tensor([[0.125, 0.25, 0.375, 0.25]])),
        ),
        Vector(
            "sum of one",
            lambda: {"topk_weights": torch.tensor([[0.1, 0.2, 0.3, 0.4]])},
            lambda: (torch.tensor([1.0]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])),
        ),
        Vector(
            "zeros, cancellation",
            lambda: {"topk_weights": torch.tensor([[0.0, 0.0], [1.0, -1.0]])},
            lambda: (torch.tensor([1e-20, 0.0]), torch.tensor([[0.0, 0.0], [_INF, -_INF]])),
        ),
    ],
    rejects=[
        Reject("topk_weights", "no columns", lambda a: {"topk_weights": a["topk_weights"][:, :0]}),
        Reject(
            "topk_weights", "half precision", lambda a: {"topk_weights": a["topk_weights"].half()}
        ),
    ],
)
