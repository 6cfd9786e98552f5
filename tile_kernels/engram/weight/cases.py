"""Argument sets of the product of weights."""

from __future__ import annotations

import torch

from tile_kernels.engram.samples import normal
from tile_kernels.runtime.cases import (
    Arguments,
    Benchmark,
    Build,
    Cases,
    Reject,
    Sample,
    Vector,
    changed,
)

_BF16, _FP32 = torch.bfloat16, torch.float32


def weights(streams: int, hidden: int, dtype: torch.dtype = _BF16, skip: int = 0) -> Build:
    """Both weights, `skip` elements into their storage."""

    def make(device: torch.device) -> Arguments:
        return {
            name: normal(streams, hidden, device=device, skip=skip).to(dtype)
            for name in ("weight_hidden", "weight_embed")
        }

    return make


FUSED_WEIGHT = Cases(
    small=[
        Sample("3x80", weights(3, 80)),
        Sample("none", weights(0, 64)),
        Sample("one", weights(1, 1)),
        Sample("odd.5x77", weights(5, 77)),
        Sample("misaligned.4x512", weights(4, 512, skip=1)),
        Sample("float32.4x516", weights(4, 516, _FP32)),
    ],
    large=[Sample(f"4x{h}", weights(4, h)) for h in (2048, 7168)],
    benchmarks=[Benchmark("4x7168", weights(4, 7168))],
    vectors=[
        Vector(
            "exact",
            lambda: {
                "weight_hidden": torch.tensor([[1.5, -2.0]]).bfloat16(),
                "weight_embed": torch.tensor([[-2.25, 0.5]]).bfloat16(),
            },
            lambda: torch.tensor([[-3.375, -1.0]]),
        )
    ],
    rejects=[
        Reject("weight_embed", "another dtype", lambda a: changed(
            weight_embed=a["weight_embed"].float())(a)),
        Reject("weight_embed", "another shape", lambda a: changed(
            weight_embed=a["weight_embed"][1:])(a)),
    ],
)  # fmt: skip

CASES = {"fused_weight": FUSED_WEIGHT}
