"""Argument sets of the Sinkhorn normalization."""

from __future__ import annotations

import math
from typing import Any

import torch

from tile_kernels.mhc import samples
from tile_kernels.mhc.samples import LEADING, Edit, constant, numbers, same, spread
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import FP32, INF, NAN, builder, changed, close_results, edited


@builder
def _forward(
    device: torch.device,
    *leading: int,
    m: int = 4,
    repeat: int = 10,
    eps: float = 1e-6,
    factor: float = 1.0,
    layout: Edit = same,
    **kinds: Any,
) -> Arguments:
    x = numbers((*leading, m, m), FP32, device, **kinds)
    return {"x": layout(x.mul_(factor)), "repeat": repeat, "eps": eps}


def _logits() -> torch.Tensor:
    return torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])


def _vector(repeat: int, *rows: list[float]) -> Vector:
    return Vector(
        f"repeat {repeat}",
        lambda: {"x": _logits(), "repeat": repeat, "eps": 1e-6},
        lambda: torch.tensor(rows),
    )


_REJECTS = [
    Reject("repeat", "zero", changed(repeat=0)),
    Reject("repeat", "huge", changed(repeat=2**31)),
    Reject("eps", "negative", changed(eps=-1e-6)),
    Reject("eps", "NaN", changed(eps=NAN)),
    Reject("eps", "infinite", changed(eps=INF)),
    Reject("eps", "text", changed(eps="1e-6")),
    Reject("x", "double", edited("x", lambda x: x.double())),
    Reject("x", "not square", edited("x", lambda x: x[..., 1:])),
    Reject("x", "size 9", edited("x", lambda x: x.new_zeros((2, 9, 9)))),
    Reject("x", "size 0", edited("x", lambda x: x[..., :0, :0])),
    Reject("x", "one dimension", edited("x", lambda x: x.flatten())),
]

_SINKHORN_NORMALIZE = Cases(
    any_rank=True,
    small=[
        Sample("leading", _forward(*LEADING)),
        *samples.mix_samples(_forward, 33),
        *(Sample(f"5.repeat {r}", _forward(5, m=3, repeat=r)) for r in (1, 2, 45)),
        Sample("no eps", _forward(9, m=5, repeat=3, eps=0.0)),
        Sample("large eps", _forward(9, repeat=3, eps=2.0)),
        Sample("far", _forward(40, factor=40.0)),
        Sample("far.no eps", _forward(40, m=6, repeat=3, factor=20.0, eps=0.0)),
        Sample("special", _forward(9, special=True)),
        Sample("transposed", _forward(5, layout=lambda x: x.mT)),
        Sample("spread", _forward(5, layout=spread)),
    ],
    large=[
        *samples.large_mix_samples(_forward, (1, 1), (2, 4096), (100_003,)),
        Sample("over 2^31", _forward(33_600_001, m=8, repeat=1)),
    ],
    benchmarks=[
        Benchmark("4096x4", _forward(4096), goal_us=4.5),
        Benchmark("4096x4.20", _forward(4096, repeat=20)),
    ],
    vectors=[
        _vector(1, [0.3333333, 0.5999994], [0.6666653, 0.3999998]),
        _vector(2, [0.3636363, 0.6315780], [0.6363627, 0.3684211]),
        _vector(10, [0.3660253, 0.6339737], [0.6339737, 0.3660254]),
    ],
    rejects=_REJECTS,
    compare=close_results(rtol=1e-5, atol=1e-7),
)


@builder
def _backward(
    device: torch.device, *leading: int, m: int = 4, grad: Edit = same, **more: Any
) -> Arguments:
    forward = _forward(*leading, m=m, **more)(device)
    return {"grad_out": grad(numbers((*leading, m, m), FP32, device)), **forward}


_SINKHORN_NORMALIZE_BWD = Cases(
    any_rank=True,
    small=[
        Sample("2x3", _backward(2, 3)),
        *samples.mix_samples(_backward, 33),
        *(
            Sample(f"5.repeat {r}", _backward(5, m=3, repeat=r))
            for r in (1, 2, 20, 21, 22, 45)  # up to three times what is kept
        ),
        Sample("no eps", _backward(9, m=5, repeat=3, eps=0.0)),
        Sample("large eps", _backward(9, repeat=3, eps=2.0)),
        Sample("constant", _backward(5, grad=constant)),
        Sample("transposed", _backward(5, grad=lambda g: g.mT, layout=lambda x: x.mT)),
        Sample("spread", _backward(5, grad=spread, layout=spread)),
    ],
    large=[
        *samples.large_mix_samples(_backward, (1, 1), (2, 4096), (100_003,)),
        Sample("100003x4.45", _backward(100_003, repeat=45)),
        Sample("over 2^31", _backward(33_600_001, m=8, repeat=1)),
    ],
    benchmarks=[
        Benchmark("4096x4", _backward(4096), goal_us=6.0),
        Benchmark("4096x4.20", _backward(4096, repeat=20)),
    ],
    vectors=[
        Vector(
            "repeat 2",
            lambda: {
                "grad_out": torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "x": _logits(), "repeat": 2,
                "eps": 1e-6,
            },
            lambda: torch.tensor([[0.1239665, -0.1239665], [-0.1198343, 0.1198343]]),
        )
    ],
    rejects=[
        *_REJECTS,
        *samples.grad_rejects("grad_out"),
    ],
    compare=close_results(rtol=1e-5, atol=1e-5),
)  # fmt: skip

CASES = {
    "sinkhorn_normalize": _SINKHORN_NORMALIZE,
    "sinkhorn_normalize_bwd": _SINKHORN_NORMALIZE_BWD,
}
