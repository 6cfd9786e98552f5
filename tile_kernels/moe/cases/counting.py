"""Argument sets of the counting operators."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import (
    Arguments,
    Benchmark,
    Build,
    Cases,
    Reject,
    Sample,
    Vector,
    changed,
    with_value,
)


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
    bad_values=[
        Reject("group_idx", "below -1", with_value("group_idx", -2)),
        Reject("group_idx", "too large", with_value("group_idx", 10_000)),
    ],
    rejects=[
        Reject("num_groups", "zero", changed(num_groups=0)),
        Reject("num_groups", "too many", changed(num_groups=8193)),
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
    bad_values=[
        Reject("topk_idx", "below -1", with_value("topk_idx", -2)),
        Reject("topk_idx", "too large", with_value("topk_idx", 10_000)),
    ],
    rejects=[
        Reject("num_experts", "zero", changed(num_experts=0)),
        Reject("num_aux_topk", "zero", changed(num_aux_topk=0)),
    ],
)
