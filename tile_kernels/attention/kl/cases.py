"""Argument sets of the loss that trains the indexer."""

from __future__ import annotations

import math

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, NAN, builder, close_results, edited


@builder
def arguments(device: torch.device, num_tokens: int, k: int, special: bool = False) -> Arguments:
    """`special`: entries that are missing, targets of zero, NaN."""
    weights = torch.rand(num_tokens, k, device=device) ** 4
    logits = 3 * torch.randn(num_tokens, k, device=device)
    if special and device.type != "meta":
        weights[:, 1::5], logits[:, 1::5] = 0, -INF
        weights[:, 2::5] = 0
        weights[1::6], logits[2::6] = 0, -INF
        logits[3::6, 0], weights[4::6, 0] = NAN, NAN
    total = weights.sum(1, keepdim=True)
    return {"p": torch.where(total == 0, 0, weights / total), "logits": logits}


def _worked() -> Arguments:
    """Logits 0 and log 3 have weights 1/4 and 3/4."""
    return {
        "p": torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        "logits": torch.tensor([[0.0, math.log(3.0), -INF]]).repeat(3, 1),
    }


def _worked_results() -> tuple[torch.Tensor, torch.Tensor]:
    loss = torch.tensor([0.5 * math.log(2.0) + 0.5 * math.log(2 / 3), math.log(4 / 3), 0.0])
    return loss, torch.tensor([[-0.25, 0.25, 0.0], [0.25, -0.25, 0.0], [0.0, 0.0, 0.0]])


INDEXER_KL = Cases(
    small=[
        Sample("3x70", arguments(3, 70)),
        Sample("no tokens", arguments(0, 5)),
        Sample("no entries", arguments(3, 0)),
        Sample("one of one", arguments(1, 1)),
        Sample("special.7x300", arguments(7, 300, special=True)),
        Sample("special.7x1", arguments(7, 1, special=True)),
    ],
    large=[
        Sample("4001x512", arguments(4001, 512, special=True)),
        Sample("300x5000", arguments(300, 5000, special=True)),
        Sample("over 2**31", arguments(2**19 + 3, 4096)),
    ],
    benchmarks=[Benchmark("4096x1024", arguments(4096, 1024))],
    vectors=[Vector("worked", _worked, _worked_results)],
    rejects=[
        Reject("p", "bfloat16", edited("p", lambda x: x.bfloat16())),
        Reject("p", "strides", edited("p", lambda x: x.repeat(1, 2)[:, ::2])),
        Reject("logits", "fewer", edited("logits", lambda x: x[1:])),
        Reject("logits", "float64", edited("logits", lambda x: x.double())),
    ],
    compare=close_results(rtol=1e-4, atol=2e-6),
)

CASES = {"indexer_kl": INDEXER_KL}
