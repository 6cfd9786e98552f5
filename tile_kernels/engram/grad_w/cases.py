"""Argument sets of the sums of partial gradients."""

from __future__ import annotations

import torch

from tile_kernels.engram.weight.cases import weights
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, close_results, edited, normal


@builder
def _partial(
    device: torch.device,
    parts: int,
    streams: int,
    hidden: int,
    dtype: torch.dtype = BF16,
    skip: int = 0,
) -> Arguments:
    return {
        "grad_w_partial": normal(parts, streams, hidden, device=device, skip=skip),
        **weights(streams, hidden, dtype)(device),
        "grad_weight_hidden": torch.randn(streams, hidden, device=device),
        "grad_weight_embed": torch.randn(streams, hidden, device=device),
    }


GRAD_W_REDUCE = Cases(
    small=[
        Sample("5.2x136", _partial(5, 2, 136)),
        Sample("none", _partial(4, 0, 64)),
        Sample("no parts", _partial(0, 2, 64)),
        Sample("one", _partial(1, 1, 8)),
        Sample("odd.17.3x77", _partial(17, 3, 77)),
        Sample("many.300.1x40", _partial(300, 1, 40)),
        Sample("float32.133.2x72", _partial(133, 2, 72, FP32)),
        Sample("misaligned.8.1x256", _partial(8, 1, 256, skip=1)),
    ],
    large=[Sample(f"132.4x{h}", _partial(132, 4, h)) for h in (2048, 2560, 7168)],
    benchmarks=[Benchmark("132.4x7168", _partial(132, 4, 7168), goal_us=5.5)],
    vectors=[
        Vector(
            "four parts",
            lambda: {
                "grad_w_partial": torch.tensor(
                    [[[1.0, 2.0]], [[3.0, -1.0]], [[0.5, 0.5]], [[0.0, 1.0]]]
                ),
                "weight_hidden": torch.tensor([[2.0, 1.0]]).bfloat16(),
                "weight_embed": torch.tensor([[0.5, 4.0]]).bfloat16(),
                "grad_weight_hidden": torch.tensor([[10.0, 10.0]]),
                "grad_weight_embed": torch.tensor([[0.0, 0.0]]),
            },
            lambda: (None, torch.tensor([[12.25, 20.0]]), torch.tensor([[9.0, 2.5]])),
        )
    ],
    rejects=[
        Reject(
            "grad_w_partial",
            "another shape",
            edited("grad_w_partial", lambda x: x[:, 1:].contiguous()),
        ),
        Reject(
            "grad_weight_hidden", "bfloat16", edited("grad_weight_hidden", torch.Tensor.bfloat16)
        ),
        Reject("grad_weight_embed", "another shape", edited("grad_weight_embed", lambda x: x[1:])),
    ],
    compare=close_results(rtol=1e-5, atol=1e-4),
)

CASES = {"grad_w_reduce": GRAD_W_REDUCE}
