"""Argument sets of the MoE operators."""

from __future__ import annotations

from collections.abc import Callable

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


# ---- groups -------------------------------------------------------------------------------------


def _grouped(
    num_tokens: int,
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    *,
    special: bool = False,
) -> Build:
    """Scores by group; special ones are ties, NaN, infinities and zeros as for the gate."""
    build = (_special if special else _scores)(num_tokens, num_groups * group_size, 1)

    def make(device: torch.device) -> Arguments:
        scores = build(device)["scores"].view(num_tokens, num_groups, group_size)
        return {
            "scores": scores,
            "num_topk_sum": num_topk_sum,
            "num_topk_groups": num_topk_groups,
        }

    return make


def _groups(*shape: int, special: bool = False) -> Sample:
    label = "special." if special else ""
    return Sample(label + "x".join(map(str, shape)), _grouped(*shape, special=special))


def _two_groups(rows: list[list[float]], num_topk_sum: int, num_topk_groups: int) -> Arguments:
    return {
        "scores": torch.tensor([rows]),
        "num_topk_sum": num_topk_sum,
        "num_topk_groups": num_topk_groups,
    }


_PAIRS = [[1.0, 5.0], [3.0, 3.0], [4.0, 1.0], [0.0, 7.0]]
_TIES = [[1.0, 1.0], [2.0, 0.0], [0.0, 2.0], [1.5, 0.5]]

TOPK_GROUP = Cases(
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
        Vector("largest", lambda: _two_groups(_PAIRS, 1, 4), lambda: torch.tensor([[3, 0, 2, 1]])),
        Vector("sum of 2", lambda: _two_groups(_PAIRS, 2, 4), lambda: torch.tensor([[3, 0, 1, 2]])),
        Vector("all tie", lambda: _two_groups(_TIES, 2, 2), lambda: torch.tensor([[0, 1]])),
    ],
    rejects=[
        Reject("num_topk_sum", "three", lambda a: {**a, "num_topk_sum": 3}),
        Reject(
            "num_topk_sum",
            "above a group",
            lambda a: {**a, "scores": a["scores"][..., :1].clone(), "num_topk_sum": 2},
        ),
        Reject("num_topk_groups", "zero", lambda a: {**a, "num_topk_groups": 0}),
        Reject(
            "num_topk_groups",
            "too many",
            lambda a: {**a, "num_topk_groups": a["scores"].shape[1] + 1},
        ),
        Reject(
            "scores", "too many groups", lambda a: {**a, "scores": a["scores"].new_empty(1, 65, 2)}
        ),
    ],
)

# ---- weights ------------------------------------------------------------------------------------


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

# ---- indices ------------------------------------------------------------------------------------


def _indices(
    num_tokens: int,
    num_topk: int,
    n: int = 256,
    num_ep_ranks: int = 8,
    tp_rank: int = 1,
    num_tp_ranks: int = 2,
    dtype: torch.dtype = torch.int64,
) -> Build:
    """Indices from -3 to a little beyond `n`."""

    def make(device: torch.device) -> Arguments:
        indices = torch.randint(-3, n + 9, (num_tokens, num_topk), dtype=dtype, device=device)
        return {
            "indices": indices,
            "n": n,
            "num_ep_ranks": num_ep_ranks,
            "tp_rank": tp_rank,
            "num_tp_ranks": num_tp_ranks,
        }

    return make


def _ranked(tp_rank: int) -> Arguments:
    return {
        "indices": torch.arange(-1, 24).view(5, 5),
        "n": 24,
        "num_ep_ranks": 6,
        "tp_rank": tp_rank,
        "num_tp_ranks": 2,
    }


def _with(**changes: int) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, **changes}


_NONE = [-1] * 4

MASK_INDICES_BY_TP = Cases(
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
        Reject("n", "fewer experts than ranks", _with(n=5)),
        Reject("num_ep_ranks", "zero", _with(num_ep_ranks=0)),
        Reject("num_tp_ranks", "zero", _with(num_tp_ranks=0)),
    ],
)


def _repeating(num_tokens: int, num_topk: int, num_groups: int) -> Build:
    """Few distinct groups, so that rows repeat them; -1 and worse among them."""

    def make(device: torch.device) -> Arguments:
        indices = torch.randint(-2, num_groups, (num_tokens, num_topk), device=device)
        return {"group_indices": indices, "num_groups": num_groups}

    return make


def _unique_vector(rows: list[list[int]]) -> Arguments:
    return {"group_indices": torch.tensor(rows), "num_groups": 128}


INPLACE_UNIQUE_GROUP_INDICES = Cases(
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
    rejects=[
        Reject("num_groups", "zero", _with(num_groups=0)),
        Reject(
            "group_indices",
            "65 columns",
            lambda a: {**a, "group_indices": torch.zeros(2, 65, dtype=torch.int64)},
        ),
    ],
)

# ---- counting -----------------------------------------------------------------------------------


def _counted(num_tokens: int, num_topk: int, num_groups: int, name: str, **more: int) -> Build:
    """Indices from -2 to a little beyond the groups, under the operator's own argument names."""

    def make(device: torch.device) -> Arguments:
        indices = torch.randint(-2, num_groups + 3, (num_tokens, num_topk), device=device)
        count = "num_groups" if name == "group_idx" else "num_experts"
        return {name: indices, count: num_groups, **more}

    return make


_COUNTED = [(0, 8, 4), (1, 1, 1), (1, 8, 9), (130, 9, 32), (700, 8, 256), (40, 6, 1000)]
_SMALL_COUNT = [[0, 1], [1, 2], [1, -1]]

GROUP_COUNT = Cases(
    small=[Sample(f"{t}x{k}.{g}", _counted(t, k, g, "group_idx")) for t, k, g in _COUNTED],
    large=[Sample(f"34345x9.{g}", _counted(34345, 9, g, "group_idx")) for g in (4, 32, 4096)],
    benchmarks=[Benchmark("32768x8.32", _counted(32768, 8, 32, "group_idx"), goal_us=3.5)],
    vectors=[
        Vector(
            "by hand",
            lambda: {"group_idx": torch.tensor(_SMALL_COUNT), "num_groups": 4},
            lambda: torch.tensor([1, 3, 1, 0], dtype=torch.int32),
        )
    ],
    rejects=[
        Reject("num_groups", "zero", _with(num_groups=0)),
        Reject("num_groups", "too many", _with(num_groups=8193)),
    ],
)

AUX_FI = Cases(
    small=[
        Sample(f"{t}x{k}.{e}", _counted(t, k, e, "topk_idx", num_aux_topk=3))
        for t, k, e in _COUNTED
    ],
    large=[
        Sample(f"34345x9.{e}", _counted(34345, 9, e, "topk_idx", num_aux_topk=9)) for e in (9, 256)
    ],
    benchmarks=[
        Benchmark("32768x8.32", _counted(32768, 8, 32, "topk_idx", num_aux_topk=8), goal_us=3.5)
    ],
    vectors=[
        Vector(
            "by hand",
            lambda: {
                "topk_idx": torch.tensor(_SMALL_COUNT),
                "num_experts": 4,
                "num_aux_topk": 2,
            },
            lambda: torch.tensor([2 / 3, 2.0, 2 / 3, 0.0]),
        )
    ],
    rejects=[
        Reject("num_experts", "zero", _with(num_experts=0)),
        Reject("num_aux_topk", "zero", _with(num_aux_topk=0)),
    ],
)
