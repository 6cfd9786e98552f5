"""Argument sets of `mhc_pre_apply_mix` and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tile_kernels.mhc import samples
from tile_kernels.mhc.samples import SPECIAL, Edit, constant, numbers, same, spread
from tile_kernels.runtime.cases import Arguments, Benchmark, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, edited


def _x() -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()


def _mix() -> torch.Tensor:
    return torch.tensor([[0.25], [0.5]])


@builder
def _forward(
    device: torch.device, *leading: int, m: int = 4, h: int = 32, **kinds: Any
) -> Arguments:
    return {
        "x": numbers((*leading, m, h), BF16, device, **kinds),
        "mix": numbers((*leading, m, 1), FP32, device, **kinds),
    }


_COMMON_REJECTS = [
    *samples.stream_rejects("x"),
    Reject("x", "strided", edited("x", spread)),
    Reject("mix", "bfloat16", edited("mix", lambda mix: mix.bfloat16())),
    Reject("mix", "two columns", edited("mix", lambda mix: torch.cat((mix, mix), -1))),
    Reject("mix", "without the last dimension", edited("mix", lambda mix: mix[..., 0])),
    Reject("mix", "fewer streams", edited("mix", lambda mix: mix[..., 1:, :].clone())),
    Reject("mix", "fewer tokens", edited("mix", lambda mix: mix[1:])),
    Reject("mix", "strided", edited("mix", spread)),
]

_MHC_PRE_APPLY_MIX = samples.StreamCases(
    small=[
        Sample("7x4x32", _forward(7)),
        Sample("3x5x4x32", _forward(3, 5)),
        *samples.row_samples(_forward),
    ],
    large=samples.large_samples(_forward),
    benchmarks=samples.row_benchmarks(_forward, goal_us=72.1),
    vectors=[
        Vector(
            "2x2",
            lambda: {"x": _x(), "mix": _mix()},
            lambda: torch.tensor([1.75, 2.5]).bfloat16(),
        )
    ],
    rejects=_COMMON_REJECTS,
)


@builder
def _backward(
    device: torch.device,
    *leading: int,
    m: int = 4,
    h: int = 32,
    added: bool = False,
    grad: Edit = same,
    **kinds: Any,
) -> Arguments:
    shape = (*leading, m, h)
    return {
        "grad_out": grad(numbers((*leading, h), BF16, device, **kinds)),
        **_forward(*leading, m=m, h=h, **kinds)(device),
        **({"grad_x": numbers(shape, BF16, device, **kinds)} if added else {}),
    }


_adding = functools.partial(_backward, added=True)


def _with_grad_x(edit: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda a: {**a, "grad_x": edit(torch.zeros_like(a["x"]))}


_MHC_PRE_APPLY_MIX_BWD = samples.StreamCases(
    small=[
        Sample("3x5x4x32", _backward(3, 5)),
        *samples.edge_samples(_backward),
        *samples.renamed("added", samples.edge_samples(_adding)),
        Sample("2x4x2112.added", _adding(2, h=2112)),
        Sample("special", _backward(9, h=64, **SPECIAL)),
        Sample("special.added", _adding(9, h=64, **SPECIAL)),
        Sample("constant", _backward(3, 2, grad=constant)),
        Sample("spread", _adding(3, 2, grad=spread)),
    ],
    large=[
        *samples.large_samples(_backward),
        *samples.renamed("added", samples.large_samples(_adding)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _backward(4096, h=7168), goal_us=135.0),
        Benchmark("4096x4x7168.added", _adding(4096, h=7168)),
    ],
    vectors=[
        Vector(
            "2x2",
            lambda: {"grad_out": torch.tensor([1.0, 2.0]).bfloat16(), "x": _x(), "mix": _mix()},
            lambda: (
                (
                    torch.tensor([[0.25, 0.5], [0.5, 1.0]]).bfloat16(),
                    torch.tensor([[5.0], [11.0]]),
                ),
                None,
            ),
        ),
        Vector(
            "2x2.added",
            lambda: {
                "grad_out": torch.tensor([1.0, 2.0]).bfloat16(), "x": _x(), "mix": _mix(),
                "grad_x": torch.tensor([[1.0, 1.0], [0.0, 256.0]]).bfloat16(),
            },
            lambda: (
                (
                    torch.tensor([[1.25, 1.5], [0.5, 256.0]]).bfloat16(),
                    torch.tensor([[5.0], [11.0]]),
                ),
                torch.tensor([[1.25, 1.5], [0.5, 256.0]]).bfloat16(),
            ),
        ),
    ],
    rejects=[
        *_COMMON_REJECTS,
        Reject("grad_out", "fewer columns", edited("grad_out", lambda g: g[..., 1:])),
        Reject("grad_out", "float32", edited("grad_out", lambda g: g.float())),
        Reject("grad_x", "float32", _with_grad_x(lambda g: g.float())),
        Reject("grad_x", "strided", _with_grad_x(spread)),
        Reject("grad_x", "fewer streams", _with_grad_x(lambda g: g[..., 1:, :].clone())),
        Reject("grad_x", "no tensor", _with_grad_x(lambda _: 1.0)),
        Reject("grad_x", "other device", _with_grad_x(lambda g: g.to("meta"))),
    ],
    compare=samples.streams_exact(rtol=1e-5, atol=1e-4),
)  # fmt: skip

CASES = {
    "mhc_pre_apply_mix": _MHC_PRE_APPLY_MIX,
    "mhc_pre_apply_mix_bwd": _MHC_PRE_APPLY_MIX_BWD,
}
