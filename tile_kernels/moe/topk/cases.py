"""Argument sets of the expert gates."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, NAN, builder, changed, edited, normal, picked


@builder
def _scores(
    device: torch.device, num_tokens: int, num_experts: int, num_topk: int, skip: int = 0
) -> Arguments:
    """Contiguous scores whose first element is `skip` elements into their storage."""
    scores = normal(num_tokens, num_experts, device=device, skip=skip)
    return {"scores": scores, "num_topk": num_topk}


@builder
def _special(device: torch.device, num_tokens: int, num_experts: int, num_topk: int) -> Arguments:
    """Rows made of few distinct values: ties everywhere, NaN of both signs, infinities, zeros."""
    values = (NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0)
    scores = picked(num_tokens, num_experts, device=device, values=values)
    scores[0] = -INF  # nothing but ties
    return {"scores": scores, "num_topk": num_topk}


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
    (2, 66, 33),
    (1, 1500, 40),
    (1, 2048, 600),
    (1, 1024, 1024),
]
_SPECIAL = [
    (4, 16, 16),
    (5, 72, 6),
    (6, 256, 8),
    (3, 258, 32),
    (2, 70, 64),
    (2, 1100, 8),
    (3, 258, 64),
    (2, 1024, 300),
]
_GRID = [(72, 6), (32, 6), (64, 6), (96, 6), (16, 6), (36, 6), (108, 6), (128, 6), (144, 6)]

_TOPK_GATE = Cases(
    small=[
        *(_gate(_scores(*shape), *shape) for shape in _SHAPES),
        *(_gate(_special(*shape), *shape, note="special.") for shape in _SPECIAL),
        _gate(_scores(5, 64, 6, skip=1), 5, 64, 6, note="misaligned."),
        _gate(_scores(2, 1024, 8, skip=2), 2, 1024, 8, note="misaligned."),
    ],
    large=[
        *(_gate(_scores(t, e, k), t, e, k) for t in (4001, 8001) for e, k in (*_GRID, (256, 8))),
        _gate(_special(4001, 256, 8), 4001, 256, 8, note="special."),
        _gate(_scores(2001, 4096, 4096), 2001, 4096, 4096),
        *(_gate(_scores(2001, e, k), 2001, e, k) for e, k in ((4096, 64), (8192, 1024), (200, 60))),
        _gate(_special(2001, 4096, 64), 2001, 4096, 64, note="special."),
    ],
    benchmarks=[
        Benchmark("256.8", _scores(8192, 256, 8), goal_us=6.0),
        *(
            Benchmark(f"{e}.{k}", _scores(8192, e, k))
            for e, k in [(384, 8), (72, 6), (4096, 8), (4096, 64), (4096, 512), (4096, 2048)]
        ),
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
                "scores": torch.tensor([[1.0, NAN, 3.0, INF, -INF, -INF]]),
                "num_topk": 6,
            },
            lambda: torch.tensor([[1, 3, 2, 0, 4, 5]]),
        ),
    ],
    rejects=[
        Reject("num_topk", "zero", changed(num_topk=0)),
        Reject("num_topk", "too large", lambda a: {**a, "num_topk": a["scores"].shape[1] + 1}),
        Reject("num_topk", "a float", changed(num_topk=2.0)),
        Reject("scores", "no experts", lambda a: {"scores": a["scores"][:, :0], "num_topk": 1}),
        Reject("scores", "too many experts", edited("scores", lambda x: x.new_empty(1, 8193))),
        Reject("scores", "half precision", edited("scores", torch.Tensor.half)),
        Reject(
            "scores",
            "transposed",
            lambda a: {"scores": a["scores"].new_empty(9, 5).T, "num_topk": 1},
        ),
    ],
)


# ---- groups -------------------------------------------------------------------------------------


def _of_groups(scores: torch.Tensor, num_topk_sum: int, num_topk_groups: int) -> Arguments:
    return {"scores": scores, "num_topk_sum": num_topk_sum, "num_topk_groups": num_topk_groups}


@builder
def _grouped(
    device: torch.device,
    num_tokens: int,
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    *,
    special: bool = False,
) -> Arguments:
    """Scores by group; special ones are ties, NaN, infinities and zeros as for the gate."""
    build = (_special if special else _scores)(num_tokens, num_groups * group_size, 1)
    scores = build(device)["scores"].view(num_tokens, num_groups, group_size)
    return _of_groups(scores, num_topk_sum, num_topk_groups)


def _groups(*shape: int, special: bool = False) -> Sample:
    label = "special." if special else ""
    return Sample(label + "x".join(map(str, shape)), _grouped(*shape, special=special))


_PAIRS = torch.tensor([[[1.0, 5.0], [3.0, 3.0], [4.0, 1.0], [0.0, 7.0]]])
_TIES = torch.tensor([[[1.0, 1.0], [2.0, 0.0], [0.0, 2.0], [1.5, 0.5]]])

_TOPK_GROUP = Cases(
    small=[
        _groups(0, 8, 32, 2, 4),
        _groups(1, 1, 1, 1, 1),
        _groups(5, 4, 18, 1, 2),
        _groups(6, 8, 9, 2, 4),
        _groups(9, 8, 32, 2, 4),
        _groups(4, 12, 6, 2, 12),
        _groups(3, 16, 16, 1, 4),
        _groups(3, 33, 7, 2, 5),
        _groups(2, 64, 256, 2, 32),
        _groups(3, 3, 260, 2, 3),
        _groups(6, 8, 32, 2, 4, special=True),
        _groups(6, 40, 5, 2, 8, special=True),
    ],
    large=[
        _groups(t, g, 256 // g, s, k)
        for t in (4001, 8001)
        for g in (4, 8, 16)
        for s, k in ((1, 2), (2, 4))
    ],
    benchmarks=[Benchmark("8x32", _grouped(8192, 8, 32, 2, 4), goal_us=5.0)],
    vectors=[
        Vector("largest", lambda: _of_groups(_PAIRS, 1, 4), lambda: torch.tensor([[3, 0, 2, 1]])),
        Vector("sum of 2", lambda: _of_groups(_PAIRS, 2, 4), lambda: torch.tensor([[3, 0, 1, 2]])),
        Vector("all tie", lambda: _of_groups(_TIES, 2, 2), lambda: torch.tensor([[0, 1]])),
    ],
    rejects=[
        Reject("num_topk_sum", "three", changed(num_topk_sum=3)),
        Reject(
            "num_topk_sum",
            "above a group",
            lambda a: {**a, "scores": a["scores"][..., :1].clone(), "num_topk_sum": 2},
        ),
        Reject("num_topk_groups", "zero", changed(num_topk_groups=0)),
        Reject(
            "num_topk_groups",
            "too many",
            lambda a: {**a, "num_topk_groups": a["scores"].shape[1] + 1},
        ),
        Reject("scores", "too many groups", edited("scores", lambda x: x.new_empty(1, 65, 2))),
    ],
)

CASES = {"topk_gate": _TOPK_GATE, "topk_sum_and_topk_group_idx": _TOPK_GROUP}
