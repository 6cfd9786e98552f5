"""Argument sets of the MoE operators."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector

_NAN, _INF = float("nan"), float("inf")


def _scores(num_tokens: int, num_experts: int, num_topk: int) -> Build:
    def make(device: torch.device) -> Arguments:
        scores = torch.randn(num_tokens, num_experts, device=device)
        return {"scores": scores, "num_topk": num_topk}

    return make


def _misaligned(num_tokens: int, num_experts: int, num_topk: int, skip: int) -> Build:
    """Contiguous scores whose first element is `skip` elements into their storage."""

    def make(device: torch.device) -> Arguments:
        flat = torch.randn(num_tokens * num_experts + skip, device=device)
        return {"scores": flat[skip:].view(num_tokens, num_experts), "num_topk": num_topk}

    return make


def _special(num_tokens: int, num_experts: int, num_topk: int) -> Build:
    """Rows made of few distinct values: ties everywhere, NaN of both signs, infinities, zeros."""

    def make(device: torch.device) -> Arguments:
        values = torch.tensor([_NAN, -_NAN, _INF, -_INF, 0.0, -0.0, 1.0, -1.0], device=device)
        picks = torch.randint(len(values), (num_tokens, num_experts), device=device)
        scores = values[picks]
        scores[0] = -_INF  # nothing but ties
        return {"scores": scores, "num_topk": num_topk}

    return make


def _gate(kind: Build, num_tokens: int, num_experts: int, num_topk: int, note: str = "") -> Sample:
    return Sample(f"{note}{num_tokens}x{num_experts}.top{num_topk}", kind)


_SHAPES = [
    (0, 256, 8),
    (1, 256, 8),
    (1, 1, 1),
    (5, 7, 7),
    (3, 33, 6),
    (4, 36, 6),
    (5, 72, 6),
    (9, 130, 32),
    (6, 258, 8),
    (3, 384, 8),
    (2, 512, 33),
    (2, 1024, 8),
    (3, 100, 100),
    (2, 1500, 6),
    (1, 4096, 8),
]
_SPECIAL = [(4, 16, 16), (5, 72, 6), (6, 256, 8), (3, 258, 32), (2, 70, 64), (2, 1100, 8)]
_GRID = [(72, 6), (32, 6), (64, 6), (96, 6), (16, 6), (36, 6), (108, 6), (128, 6), (144, 6)]

TOPK_GATE = Cases(
    small=[
        *(_gate(_scores(*shape), *shape) for shape in _SHAPES),
        *(_gate(_special(*shape), *shape, note="special.") for shape in _SPECIAL),
        _gate(_misaligned(5, 64, 6, skip=1), 5, 64, 6, note="misaligned."),
        _gate(_misaligned(2, 1024, 8, skip=2), 2, 1024, 8, note="misaligned."),
    ],
    large=[
        *(_gate(_scores(t, e, k), t, e, k) for t in (4001, 8001) for e, k in (*_GRID, (256, 8))),
        _gate(_special(4001, 256, 8), 4001, 256, 8, note="special."),
        _gate(_scores(2001, 4096, 4096), 2001, 4096, 4096),
    ],
    benchmarks=[
        Benchmark("256.8", _scores(8192, 256, 8), goal_us=6.0),
        Benchmark("384.8", _scores(8192, 384, 8)),
        Benchmark("72.6", _scores(8192, 72, 6)),
        Benchmark("4096.8", _scores(8192, 4096, 8)),
        Benchmark("4096.64", _scores(8192, 4096, 64)),
    ],
    vectors=[
        Vector(
            "ties and zeros",
            lambda: {
                "scores": torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0]]),
                "num_topk": 7,
            },
            lambda: torch.tensor([[1, 2, 4, 3, 0, 5, 6]]),
        ),
        Vector(
            "NaN first, -inf distinct",
            lambda: {
                "scores": torch.tensor([[1.0, _NAN, 3.0, _INF, -_INF, -_INF]]),
                "num_topk": 6,
            },
            lambda: torch.tensor([[1, 3, 2, 0, 4, 5]]),
        ),
    ],
    rejects=[
        Reject("num_topk", "zero", lambda a: {**a, "num_topk": 0}),
        Reject("num_topk", "too large", lambda a: {**a, "num_topk": a["scores"].shape[1] + 1}),
        Reject("num_topk", "a float", lambda a: {**a, "num_topk": 2.0}),
        Reject("scores", "no experts", lambda a: {"scores": a["scores"][:, :0], "num_topk": 1}),
        Reject(
            "scores", "too many experts", lambda a: {**a, "scores": a["scores"].new_empty(1, 8193)}
        ),
        Reject("scores", "half precision", lambda a: {**a, "scores": a["scores"].half()}),
        Reject(
            "scores",
            "transposed",
            lambda a: {"scores": a["scores"].new_empty(9, 5).T, "num_topk": 1},
        ),
    ],
)
