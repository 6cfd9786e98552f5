"""Argument sets of the steps of the table optimizer."""

from __future__ import annotations

import math

import torch

from tile_kernels.engram.sinkhorn.plan import PARTS
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    builder,
    changed,
    close_results,
    edited,
    normal,
)


@builder
def _momentum(
    device: torch.device,
    *shape: int,
    grad: torch.dtype = FP32,
    buffer: torch.dtype = FP32,
    nesterov: bool = True,
    skip: int = 0,
) -> Arguments:
    return {
        "grad": normal(*shape, device=device, dtype=grad, skip=skip),
        "momentum_buffer": normal(*shape, device=device, dtype=buffer),
        "beta1": 0.9,
        "nesterov": nesterov,
    }


def _worked_momentum(buffer: torch.dtype) -> Arguments:
    return {
        "grad": torch.tensor([1.0, -2.0, 0.5, 4.0]),
        "momentum_buffer": torch.tensor([0.5, 1.0, -1.0, 2.0]).to(buffer),
        "beta1": 0.9,
    }


_AHEAD = [0.595, 0.43, -0.715, 2.38]

_MOMENTUM = Cases(
    small=[
        Sample("5x8", _momentum(5, 8)),
        Sample("none", _momentum(0, 8)),
        Sample("one", _momentum(1)),
        Sample("bf16.3x7x11", _momentum(3, 7, 11, grad=BF16, buffer=BF16)),
        Sample("mixed.200", _momentum(200, grad=BF16, nesterov=False)),
        Sample("misaligned.64", _momentum(64, skip=1)),
    ],
    large=[
        Sample("8001x512", _momentum(8001, 512, grad=BF16)),
    ],
    benchmarks=[Benchmark("262144x512", _momentum(262144, 512, grad=BF16))],
    vectors=[
        Vector(
            "float32",
            lambda: _worked_momentum(FP32),
            lambda: (torch.tensor(_AHEAD), torch.tensor([0.55, 0.7, -0.85, 2.2])),
        ),
        Vector(
            "bfloat16",
            lambda: _worked_momentum(BF16),
            lambda: (
                torch.tensor(_AHEAD),
                torch.tensor([0.55078125, 0.69921875, -0.8515625, 2.203125]).to(BF16),
            ),
        ),
    ],
    rejects=[
        Reject("grad", "half", edited("grad", torch.Tensor.half)),
        Reject("momentum_buffer", "short", edited("momentum_buffer", lambda x: x[1:])),
        Reject("beta1", "above 1", changed(beta1=1.5)),
        Reject("beta1", "words", changed(beta1="most")),
        Reject("nesterov", "an int", changed(nesterov=1)),
    ],
    compare=close_results(rtol=1e-6, atol=0.0),
)


@builder
def _step(
    device: torch.device, rows: int, columns: int, *, eps: float = 1e-20, skip: int = 0
) -> Arguments:
    """Every fifth row is zeros."""
    matrix = normal(rows, columns, device=device, skip=skip)
    matrix[::5] = 0
    return {
        "matrix": matrix,
        "row_scale": 0.5 + torch.rand(rows, device=device),
        "col_scale": 0.5 + torch.rand(columns, device=device),
        "eps": eps,
    }


def _worked() -> Arguments:
    return {
        "matrix": torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.0, 0.0]]),
        "row_scale": torch.ones(3),
        "col_scale": torch.tensor([1.0, 0.5]),
        "eps": 1e-20,
    }


def _worked_step() -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Row `i` of three is in part `(i + 1) * 512 // 3` of 512, counted back by one."""
    partial = torch.zeros(PARTS, 2)
    partial[math.ceil(PARTS / 3) - 1] = torch.tensor([0.5, 0.5])
    partial[math.ceil(2 * PARTS / 3) - 1] = torch.tensor([9 / 13, 4 / 13])
    norms = torch.tensor([1.4142135, 3.6055512, 0.0])
    return (norms, partial), torch.tensor([0.7071068, 0.2773501, 1.0])


_ROW_REJECTS = [
    Reject("matrix", "bf16", edited("matrix", torch.Tensor.bfloat16)),
    Reject("matrix", "too wide", lambda a: {**a, "matrix": torch.zeros(7, 2052)}),
    Reject("row_scale", "short", edited("row_scale", lambda x: x[1:])),
    Reject("col_scale", "short", edited("col_scale", lambda x: x[1:])),
    Reject("eps", "negative", changed(eps=-1.0)),
]
_close = close_results(rtol=1e-5, atol=1e-6)

_STEP = Cases(
    small=[
        Sample("7x40", _step(7, 40)),
        Sample("none", _step(0, 8)),
        Sample("one", _step(1, 1)),
        Sample("600x130", _step(600, 130, eps=1e-3)),
        Sample("9x2048", _step(9, 2048)),
        Sample("misaligned.6x64", _step(6, 64, skip=1)),
    ],
    large=[Sample("80001x512", _step(80001, 512)), Sample("4001x2048", _step(4001, 2048))],
    benchmarks=[Benchmark("262144x512", _step(262144, 512))],
    vectors=[Vector("three rows", _worked, _worked_step)],
    rejects=_ROW_REJECTS,
    compare=_close,
)


@builder
def _reduce(device: torch.device, parts: int, columns: int) -> Arguments:
    return {
        "col_sumsq_partial": torch.rand(parts, columns, device=device),
        "col_sumsq": torch.rand(columns, device=device),
    }


_REDUCE = Cases(
    small=[Sample(f"{p}x{c}", _reduce(p, c)) for p, c in [(5, 40), (0, 8), (1, 1), (512, 33)]],
    large=[Sample("512x2048", _reduce(512, 2048))],
    benchmarks=[Benchmark("512x512", _reduce(512, 512))],
    vectors=[
        Vector(
            "two parts",
            lambda: {
                "col_sumsq_partial": torch.tensor([[0.5, 0.5], [9 / 13, 4 / 13]]),
                "col_sumsq": torch.zeros(2),
            },
            lambda: (None, torch.tensor([1.1923077, 0.8076923])),
        )
    ],
    rejects=[Reject("col_sumsq", "short", edited("col_sumsq", lambda x: x[1:]))],
    compare=close_results(rtol=1e-6, atol=0.0),
)


@builder
def _finalize(device: torch.device, rows: int, columns: int, skip: int = 0) -> Arguments:
    return {**_step(rows, columns, skip=skip)(device), "alpha": columns**0.5}


_FINALIZE = Cases(
    small=[
        Sample("7x40", _finalize(7, 40)),
        Sample("none", _finalize(0, 8)),
        Sample("one", _finalize(1, 1)),
        Sample("9x2048", _finalize(9, 2048)),
        Sample("misaligned.6x64", _finalize(6, 64, skip=1)),
    ],
    large=[Sample("80001x512", _finalize(80001, 512))],
    benchmarks=[Benchmark("262144x512", _finalize(262144, 512))],
    vectors=[
        Vector(
            "three rows",
            lambda: {
                **_worked(),
                "row_scale": torch.tensor([0.7071068, 0.2773501, 1.0]),
                "alpha": 2**0.5,
            },
            lambda: torch.tensor([[1.0, 1.0], [1.1766968, -0.7844645], [0.0, 0.0]]),
        )
    ],
    rejects=[*_ROW_REJECTS, Reject("alpha", "infinite", changed(alpha=torch.inf))],
    compare=_close,
)

CASES = {
    "engram_sinkhorn_momentum_update": _MOMENTUM,
    "engram_sinkhorn_step": _STEP,
    "engram_sinkhorn_step_reduce": _REDUCE,
    "engram_sinkhorn_finalize": _FINALIZE,
}
