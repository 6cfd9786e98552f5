"""Argument sets of the product of weights."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, edited, normal


@builder
def weights(
    device: torch.device, streams: int, hidden: int, dtype: torch.dtype = BF16, skip: int = 0
) -> Arguments:
    """Both weights, `skip` elements into their storage."""
    return {
        name: normal(streams, hidden, device=device, dtype=dtype, skip=skip)
        for name in ("weight_hidden", "weight_embed")
    }


FUSED_WEIGHT = Cases(
    small=[
        Sample("3x80", weights(3, 80)),
        Sample("none", weights(0, 64)),
        Sample("one", weights(1, 1)),
        Sample("odd.5x77", weights(5, 77)),
        Sample("misaligned.4x512", weights(4, 512, skip=1)),
        Sample("float32.4x516", weights(4, 516, FP32)),
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
        Reject("weight_embed", "another dtype", edited("weight_embed", torch.Tensor.float)),
        Reject("weight_embed", "another shape", edited("weight_embed", lambda x: x[1:])),
    ],
)

CASES = {"fused_weight": FUSED_WEIGHT}
