"""Argument sets of `group_count`, and what those of `aux_fi` share with them."""

from __future__ import annotations

import torch

from tile_kernels.moe.samples import outside
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, changed


@builder
def indices_and(
    device: torch.device, num_tokens: int, num_topk: int, num_groups: int, name: str, **more: int
) -> Arguments:
    """Indices from -2 to a little beyond the groups, with `more`, by the operator's names."""
    indices = torch.randint(-2, num_groups + 3, (num_tokens, num_topk), device=device)
    count = "num_groups" if name == "group_idx" else "num_experts"
    return {name: indices, count: num_groups, **more}


SHAPES = [(0, 8, 4), (1, 1, 1), (1, 8, 9), (130, 9, 32), (700, 8, 256), (40, 6, 1000)]
EXAMPLE = [[0, 1], [1, 2], [1, -1]]

_GROUP_COUNT = Cases(
    small=[Sample(f"{t}x{k}.{g}", indices_and(t, k, g, "group_idx")) for t, k, g in SHAPES],
    large=[Sample(f"34345x9.{g}", indices_and(34345, 9, g, "group_idx")) for g in (4, 32, 4096)],
    benchmarks=[
        Benchmark("32768x8.32", indices_and(32768, 8, 32, "group_idx"), goal_us=3.5),
        Benchmark("32768x8.256", indices_and(32768, 8, 256, "group_idx"), goal_us=4.0),
    ],
    vectors=[
        Vector(
            "by hand",
            lambda: {"group_idx": torch.tensor(EXAMPLE), "num_groups": 4},
            lambda: torch.tensor([1, 3, 1, 0], dtype=torch.int32),
        )
    ],
    bad_values=outside("group_idx"),
    rejects=[
        Reject("num_groups", "zero", changed(num_groups=0)),
        Reject("num_groups", "too many", changed(num_groups=8193)),
    ],
)

CASES = {"group_count": _GROUP_COUNT}
