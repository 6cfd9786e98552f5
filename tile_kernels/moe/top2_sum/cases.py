"""Argument sets of `top2_sum_gate`."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.moe.samples import GATE_REJECTS, SCORING, SPECIAL_LOGITS, physical_map
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, builder, changed, close_results, normal, picked


@builder
def _gate(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: str = "sigmoid",
    *,
    groups: tuple[int, int] = (0, 0),
    shared: int = 0,
    extra: int | None = None,
    masked: int = 0,
    fixed: bool = False,
    unmapped: bool = True,
    special: bool = False,
    skip: int = 0,
    ranks: tuple[int, int, int, int] = (0, 4, 0, 2),
) -> Arguments:
    """`groups` is (kept, all); `extra` physical experts come with a map; the last tokens masked."""
    logits = normal(num_tokens, num_experts, device=device, skip=skip)
    if special and num_tokens:
        logits = picked(num_tokens, num_experts, device=device, values=SPECIAL_LOGITS)
        logits[0] = -INF
    arguments: Arguments = {
        "logits": logits,
        "bias": torch.randn(num_experts, device=device),
        "num_topk": num_topk,
        "num_topk_groups": groups[0],
        "num_groups": groups[1],
        "use_shared_as_routed": shared > 0,
        "num_shared_experts": shared,
        "routed_scaling_factor": 1.5,
        "ep_rank": ranks[0],
        "num_ep_ranks": ranks[1],
        "tp_rank": ranks[2],
        "num_tp_ranks": ranks[3],
        "scoring_func": scoring_func,
    }
    if masked:
        arguments["mask"] = torch.arange(num_tokens, device=device) < num_tokens - masked
    if extra is not None:
        arguments.update(physical_map(num_experts + shared, extra, device))
    if unmapped:
        choice = torch.randint(num_experts, (num_tokens, num_topk), device=device)
        arguments["unmapped_topk_idx"] = choice
    if fixed:
        arguments["fix_routing_mask"] = torch.arange(num_tokens, device=device) % 3 != 0
    return arguments


def _bad_values(device: torch.device) -> Arguments:
    """Fixed choices outside the experts, experts without replicas or with too many."""
    arguments = _gate(7, 16, 4, fixed=True, extra=3, ranks=(3, 2, 0, 1))(device)
    if device.type == "meta":
        return arguments
    arguments["unmapped_topk_idx"] = torch.randint(-3, 20, (7, 4), device=device)
    arguments["logical_count"] = torch.arange(16, dtype=torch.int32, device=device) - 4
    return arguments


def _replicas(arguments: Arguments) -> Arguments:
    return {**arguments, **physical_map(16, 3, arguments["logits"].device)}


def _count(arguments: Arguments, count: int) -> Arguments:
    device = arguments["logits"].device
    return {"logical_count": torch.full((16,), count, dtype=torch.int32, device=device)}


def _row_strided(device: torch.device) -> Arguments:
    arguments = _gate(9, 64, 6, fixed=True)(device)
    arguments["unmapped_topk_idx"] = torch.randint(64, (9, 11), device=device)[:, 2:8]
    return arguments


_CONFIGS = [  # groups kept and all, experts, shared, top-k
    (0, 0, 72, 1, 6),
    (0, 0, 32, 2, 6),
    (0, 0, 96, 2, 6),
    (0, 0, 16, 2, 6),
    (0, 0, 36, 2, 6),
    (0, 0, 108, 2, 6),
    (0, 0, 144, 2, 6),
    (8, 8, 256, 2, 8),
    (4, 8, 256, 2, 8),
]


def _large(kept: int, groups: int, experts: int, shared: int, topk: int, scoring: str) -> Sample:
    build = _gate(
        8001, experts, topk, scoring, groups=(kept, groups), shared=shared, extra=32, masked=10,
        fixed=experts == 256, ranks=(0, 4, 1, 2),
    )  # fmt: skip
    return Sample(f"8001x{experts}.{kept}of{groups}.top{topk}.{scoring}", build)


# ---- worked examples ----------------------------------------------------------------------------

_ROW = [0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -2.0, 3.0]
_HILL = [1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0]


def _example(row: list[float], scoring: str, groups: tuple[int, int] = (0, 0)) -> Arguments:
    bias = torch.zeros(8)
    bias[7] = -0.25
    arguments = _gate(1, 8, 2, scoring, groups=groups)(torch.device("cpu"))
    return {**arguments, "logits": torch.tensor([row]), "bias": bias}


def _mapped_example(tp_rank: int) -> Arguments:
    physical = torch.arange(9, dtype=torch.int32)[:, None].repeat(1, 5)
    physical[7, 1], physical[2, 1], physical[2, 2] = 9, 10, 11
    count = torch.ones(9, dtype=torch.int32)
    count[7], count[2] = 2, 3
    return {
        **_example(_ROW, "sigmoid"),
        "logits": torch.tensor([_ROW, [0.0] * 8, _HILL, [0.0] * 8]),
        "use_shared_as_routed": True,
        "num_shared_experts": 1,
        "ep_rank": 1,
        "tp_rank": tp_rank,
        "mask": torch.tensor([True, True, True, False]),
        "fix_routing_mask": torch.tensor([False, True, False, False]),
        "to_physical_map": physical,
        "logical_count": count,
        "unmapped_topk_idx": torch.tensor([[0, 0], [2, 7], [0, 0], [0, 0]]),
    }


def _result(idx: Any, weights: Any, unmapped: Any) -> Any:
    return (torch.tensor(idx), torch.tensor(weights)), torch.tensor(unmapped)


def _vector(
    label: str, arguments: Arguments, idx: list[int], weights: list[float], unmapped: list[int]
) -> Vector:
    return Vector(label, lambda: dict(arguments), lambda: _result([idx], [weights], [unmapped]))


_MAPPED = {0: [[-1, 1, 5], [2, 4, 5], [-1, -1, 5]], 1: [[4, -1, -1], [-1, -1, -1], [0, 1, -1]]}
_MAPPED_WEIGHTS = [[0.8196736, 0.6803263, 1.0], [0.75, 0.75, 1.0], [0.75, 0.75, 1.0], [0.0] * 3]
_MAPPED_CHOICE = [[2, 1], [2, 7], [3, 4], [-1, -1]]


def _mapped_vector(rank: int) -> Vector:
    idx = [*_MAPPED[rank], [-1, -1, -1]]
    return Vector(
        f"map, mask, fixed, shared, rank {rank}",
        lambda: _mapped_example(rank),
        lambda: _result(idx, _MAPPED_WEIGHTS, _MAPPED_CHOICE),
    )


_TOP2_SUM_GATE = Cases(
    small=[
        Sample("5x16.top4", _gate(5, 16, 4)),
        Sample("0x64.top6", _gate(0, 64, 6)),
        Sample("0x64.4of8", _gate(0, 64, 6, groups=(4, 8))),
        Sample("1x256.top8", _gate(1, 256, 8)),
        Sample("1x1.top1", _gate(1, 1, 1, ranks=(0, 1, 0, 1), unmapped=False)),
        *(Sample(f"9x72.top6.{s}", _gate(9, 72, 6, s, masked=2)) for s in SCORING),
        *(Sample(f"6x256.4of8.{s}", _gate(6, 256, 8, s, groups=(4, 8))) for s in SCORING),
        *(
            Sample(f"5x64.shared.{s}", _gate(5, 64, 6, s, shared=2, extra=6, masked=1, fixed=True))
            for s in SCORING
        ),
        Sample("5x7.top7", _gate(5, 7, 7, "softmax", ranks=(0, 1, 0, 1))),
        Sample("3x37.top32", _gate(3, 37, 32, "softmax", unmapped=False)),
        Sample("4x45.3of9", _gate(4, 45, 6, groups=(3, 9))),
        Sample("4x12.4of12", _gate(4, 12, 4, groups=(4, 12))),  # groups of one
        Sample("3x96.2of32", _gate(3, 96, 5, groups=(2, 32))),
        Sample("3x528.4of33", _gate(3, 528, 8, "softmax", groups=(4, 33), fixed=True, masked=1)),
        Sample("2x1024.2of4", _gate(2, 1024, 8, groups=(2, 4), shared=1, extra=1)),
        Sample("2x1100.top32", _gate(2, 1100, 32, "sqrtsoftplus", unmapped=False)),
        Sample("special.9x72", _gate(9, 72, 6, special=True)),
        Sample("special.9x64.softmax", _gate(9, 64, 6, "softmax", special=True)),
        Sample("special.7x256.4of8", _gate(7, 256, 8, "sqrtsoftplus", groups=(4, 8), special=True)),
        Sample("special.3x600.1of3", _gate(3, 600, 6, groups=(1, 3), special=True)),
        Sample("misaligned.5x64", _gate(5, 64, 6, skip=1)),
        Sample("row-strided", _row_strided),
        Sample("bad-values", _bad_values),
    ],
    large=[
        *(_large(*config, scoring) for config in _CONFIGS for scoring in SCORING),
        Sample("replicas.100001x64", _gate(100_001, 64, 4, extra=40, ranks=(5, 4, 1, 2))),
        Sample("257x16384.32of64", _gate(257, 16384, 32, groups=(32, 64))),
    ],
    benchmarks=[
        Benchmark(
            "sigmoid.8g4.256.8",
            _gate(8192, 256, 8, groups=(4, 8), unmapped=False, ranks=(0, 1, 0, 1)),
            goal_us=7.5,
        ),
        Benchmark(
            "sqrtsoftplus.0g.256.6",
            _gate(8192, 256, 6, "sqrtsoftplus", unmapped=False, ranks=(0, 1, 0, 1)),
            goal_us=7.5,
        ),
        Benchmark(
            "softmax.0g.128.6.t32",
            _gate(32, 128, 6, "softmax", unmapped=False, ranks=(0, 1, 0, 1)),
            goal_us=3.0,
        ),
        Benchmark(
            "softmax.0g.128.6.full",
            _gate(36, 128, 6, "softmax", extra=32, shared=2, masked=4, ranks=(0, 4, 1, 2)),
        ),
    ],
    vectors=[
        _vector("sigmoid", _example(_ROW, "sigmoid"), [-1, 1], [0.8196736, 0.6803263], [2, 1]),
        _vector(
            "sqrtsoftplus", _example(_ROW, "SqrtSoftplus"), [-1, -1], [0.8173183, 0.6826817], [7, 2]
        ),
        _vector("softmax", _example(_ROW, "softmax"), [-1, -1], [1.0965878, 0.4034121], [7, 2]),
        _vector(
            "4 groups keep 2",
            _example(_ROW, "sigmoid", (2, 4)),
            [1, 2],
            [0.8101761, 0.6898239],
            [1, 4],
        ),
        _vector("4 groups keep 1", _example(_ROW, "sigmoid", (1, 4)), [2, 3], [0.75, 0.75], [4, 5]),
        _vector("ties", _example(_HILL, "sigmoid"), [-1, 2], [0.75, 0.75], [3, 4]),
        *(
            _vector(f"zeros, {s}", _example([0.0] * 8, s), [0, 1], [0.75, 0.75], [0, 1])
            for s in SCORING
        ),
        _mapped_vector(0),
        _mapped_vector(1),
    ],
    bad_values=[
        Reject("unmapped_topk_idx", "not an expert", lambda a: _bad_values(a["logits"].device)),
        Reject("logical_count", "none", lambda a: {**_replicas(a), **_count(a, 0)}),
        Reject("logical_count", "beyond the map", lambda a: {**_replicas(a), **_count(a, 9)}),
        Reject(
            "to_physical_map",
            "no such expert",
            lambda a: {**_replicas(a), "to_physical_map": torch.full((16, 4), 99).int()},
        ),
    ],
    rejects=[
        Reject("num_topk", "zero", changed(num_topk=0)),
        Reject("num_topk", "too many", changed(num_topk=17)),
        Reject("num_topk", "33", lambda a: {**_gate(2, 64, 6)(a["logits"].device), "num_topk": 33}),
        Reject("num_topk_groups", "above groups", changed(num_groups=4, num_topk_groups=5)),
        Reject("num_topk_groups", "zero", changed(num_groups=4)),
        Reject("num_groups", "does not divide", changed(num_groups=5, num_topk_groups=2)),
        Reject("num_groups", "too many", changed(num_groups=128, num_topk_groups=2)),
        Reject("num_topk", "more than groups have", changed(num_groups=8, num_topk_groups=1)),
        *GATE_REJECTS,
        Reject("scoring_func", "not a string", changed(scoring_func=1)),
        Reject("num_ep_ranks", "zero", changed(num_ep_ranks=0)),
        Reject("use_shared_as_routed", "an int", changed(use_shared_as_routed=1)),
        Reject(
            "to_physical_map", "needed", changed(use_shared_as_routed=True, num_shared_experts=1)
        ),
        Reject("mask", "not bool", changed(mask=torch.ones(5))),
        Reject("mask", "a list", changed(mask=[True] * 5)),
        Reject(
            "to_physical_map",
            "too few columns",
            lambda a: {
                **a,
                **physical_map(19, 1, a["logits"].device),
                "use_shared_as_routed": True,
                "num_shared_experts": 3,
            },
        ),
        Reject(
            "fix_routing_mask",
            "no choice",
            changed(fix_routing_mask=torch.ones(5, dtype=torch.bool), unmapped_topk_idx=None),
        ),
    ],
    compare=close_results(rtol=1e-5, atol=1e-8),
)

CASES = {"top2_sum_gate": _TOP2_SUM_GATE}
