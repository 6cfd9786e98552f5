"""Argument sets of `mhc_pre_apply_mix` and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tile_kernels.mhc.samples import (
    BF16,
    FP32,
    SHAPES,
    SPECIAL,
    Edit,
    StreamCases,
    constant,
    numbers,
    same,
    spread,
    streams_exact,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Reject, Sample, Vector, edited


def _x() -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()


def _mix() -> torch.Tensor:
    return torch.tensor([[0.25], [0.5]])


def _forward(*leading: int, m: int = 4, h: int = 32, **kinds: Any) -> Build:
    def make(device: torch.device) -> Arguments:
        return {
            "x": numbers((*leading, m, h), BF16, device, **kinds),
            "mix": numbers((*leading, m, 1), FP32, device, **kinds),
        }

    return make


_COMMON_REJECTS = [
    Reject("x", "float32", edited("x", lambda x: x.float())),
    Reject("x", "strided", edited("x", spread)),
    Reject("x", "9 streams", edited("x", lambda x: x.repeat_interleave(3, -2))),
    Reject("x", "no streams", edited("x", lambda x: x[..., :0, :])),
    Reject("x", "no columns", edited("x", lambda x: x[..., :0])),
    Reject("mix", "bfloat16", edited("mix", lambda mix: mix.bfloat16())),
    Reject("mix", "two columns", edited("mix", lambda mix: torch.cat((mix, mix), -1))),
    Reject("mix", "without the last dimension", edited("mix", lambda mix: mix[..., 0])),
    Reject("mix", "fewer streams", edited("mix", lambda mix: mix[..., 1:, :].clone())),
    Reject("mix", "fewer tokens", edited("mix", lambda mix: mix[1:])),
    Reject("mix", "strided", edited("mix", spread)),
]

_MHC_PRE_APPLY_MIX = StreamCases(
    small=[
        Sample("7x4x32", _forward(7)),
        Sample("3x5x4x32", _forward(3, 5)),
        Sample("0", _forward(0)),
        Sample("1", _forward(1, h=8)),
        Sample("no leading", _forward(m=3, h=16)),
        *(Sample(f"{n}x{m}x{h}", _forward(n, m=m, h=h)) for n, m, h in SHAPES),
        Sample("2 parts", _forward(2, m=2, h=1096)),
        Sample("many", _forward(265, m=2, h=1048)),
        Sample("special", _forward(9, h=64, special=True)),
        Sample("misaligned", _forward(4, shift=True)),
    ],
    large=[
        *(
            Sample(f"{n}x{m}x{h}", _forward(*n, m=m, h=h))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7680)
        ),
        Sample("over 2^31", _forward(80_001, h=7168)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _forward(4096, h=7168), goal_us=72.1),
        Benchmark("64x4x7168", _forward(64, h=7168)),
    ],
    vectors=[
        Vector(
            "2x2",
            lambda: {"x": _x(), "mix": _mix()},
            lambda: torch.tensor([1.75, 2.5]).bfloat16(),
        )
    ],
    rejects=_COMMON_REJECTS,
)


def _backward(
    *leading: int,
    m: int = 4,
    h: int = 32,
    added: bool = False,
    grad: Edit = same,
    **kinds: Any,
) -> Build:
    def make(device: torch.device) -> Arguments:
        shape = (*leading, m, h)
        return {
            "grad_out": grad(numbers((*leading, h), BF16, device, **kinds)),
            **_forward(*leading, m=m, h=h, **kinds)(device),
            **({"grad_x": numbers(shape, BF16, device, **kinds)} if added else {}),
        }

    return make


def _with_grad_x(edit: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda a: {**a, "grad_x": edit(torch.zeros_like(a["x"]))}


_MHC_PRE_APPLY_MIX_BWD = StreamCases(
    small=[
        Sample("3x5x4x32", _backward(3, 5)),
        Sample("0", _backward(0)),
        Sample("0.added", _backward(0, added=True)),
        Sample("1", _backward(1, h=8)),
        Sample("no leading", _backward(m=3, h=16)),
        *(Sample(f"{n}x{m}x{h}", _backward(n, m=m, h=h)) for n, m, h in SHAPES),
        *(
            Sample(f"{n}x{m}x{h}.added", _backward(n, m=m, h=h, added=True))
            for n, m, h in [*SHAPES, (2, 4, 2112)]
        ),
        Sample("special", _backward(9, h=64, **SPECIAL)),
        Sample("special.added", _backward(9, h=64, **SPECIAL, added=True)),
        Sample("misaligned", _backward(4, shift=True)),
        Sample("misaligned.added", _backward(4, shift=True, added=True)),
        Sample("constant", _backward(3, 2, grad=constant)),
        Sample("spread", _backward(3, 2, grad=spread, added=True)),
    ],
    large=[
        *(
            Sample(f"{n}x{m}x{h}.{a}", _backward(*n, m=m, h=h, added=a))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7680)
            for a in (False, True)
        ),
        Sample("over 2^31", _backward(80_001, h=7168, added=True)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _backward(4096, h=7168), goal_us=135.0),
        Benchmark("4096x4x7168.added", _backward(4096, h=7168, added=True)),
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
    compare=streams_exact(rtol=1e-5, atol=1e-4),
)  # fmt: skip

CASES = {
    "mhc_pre_apply_mix": _MHC_PRE_APPLY_MIX,
    "mhc_pre_apply_mix_bwd": _MHC_PRE_APPLY_MIX_BWD,
}
