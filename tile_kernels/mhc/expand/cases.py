"""Argument sets of `expand_to_mhc` and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.mhc import samples
from tile_kernels.mhc.samples import LEADING, Edit, constant, numbers, same, spread
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, builder, changed, edited


@builder
def _forward(
    device: torch.device, *leading: int, m: int = 4, h: int = 32, **kinds: Any
) -> Arguments:
    hidden = numbers((*leading, h), BF16, device, **kinds)
    return {"hidden": hidden, "mhc_mult": m}


_EXPAND_TO_MHC = Cases(
    any_rank=True,
    small=[
        Sample("leading", _forward(*LEADING, h=16)),
        Sample("2x0", _forward(2, 0, m=2, h=16)),
        *samples.row_samples(_forward),
        Sample("many odd", _forward(265, m=3, h=1047)),
    ],
    large=samples.large_samples(_forward),
    benchmarks=samples.row_benchmarks(_forward, goal_us=73.8),
    vectors=[
        Vector(
            "2x3",
            lambda: {"hidden": torch.tensor([0.0, 1.0, 2.0]).bfloat16(), "mhc_mult": 2},
            lambda: torch.tensor([[0.0, 1.0, 2.0]] * 2).bfloat16(),
        )
    ],
    rejects=[
        Reject("mhc_mult", "zero", changed(mhc_mult=0)),
        Reject("mhc_mult", "nine", changed(mhc_mult=9)),
        Reject("hidden", "float32", edited("hidden", lambda x: x.float())),
        Reject("hidden", "strided", edited("hidden", spread)),
        Reject("hidden", "no columns", edited("hidden", lambda x: x[..., :0])),
        Reject("hidden", "a scalar", edited("hidden", lambda x: x.flatten()[0])),
    ],
)


@builder
def _backward(
    device: torch.device, *leading: int, m: int = 4, h: int = 32, grad: Edit = same, **kinds: Any
) -> Arguments:
    return {"grad_out": grad(numbers((*leading, m, h), BF16, device, **kinds))}


_EXPAND_TO_MHC_BWD = Cases(
    any_rank=True,
    small=[
        Sample("leading", _backward(*LEADING, h=16)),
        *samples.row_samples(_backward),
        Sample("constant", _backward(4, grad=constant)),
        Sample("spread", _backward(4, grad=spread)),
    ],
    large=samples.large_samples(_backward),
    benchmarks=[Benchmark("4096x4x7168", _backward(4096, h=7168), goal_us=73.8)],
    vectors=[
        Vector(
            "2x3",
            lambda: {"grad_out": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).bfloat16()},
            lambda: torch.tensor([5.0, 7.0, 9.0]).bfloat16(),
        )
    ],
    rejects=samples.stream_rejects("grad_out"),
)

CASES = {"expand_to_mhc": _EXPAND_TO_MHC, "expand_to_mhc_bwd": _EXPAND_TO_MHC_BWD}
