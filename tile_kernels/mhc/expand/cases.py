"""Argument sets of `expand_to_mhc` and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.mhc.samples import BF16, LEADING, SHAPES, Edit, constant, numbers, same, spread
from tile_kernels.runtime.cases import (
    Arguments,
    Benchmark,
    Build,
    Cases,
    Reject,
    Sample,
    Vector,
    changed,
    edited,
)


def _forward(*leading: int, m: int, h: int, **kinds: Any) -> Build:
    def make(device: torch.device) -> Arguments:
        hidden = numbers((*leading, h), BF16, device, **kinds)
        return {"hidden": hidden, "mhc_mult": m}

    return make


_EXPAND_TO_MHC = Cases(
    any_rank=True,
    small=[
        Sample("leading", _forward(*LEADING, m=4, h=16)),
        Sample("0", _forward(0, m=4, h=16)),
        Sample("2x0", _forward(2, 0, m=2, h=16)),
        Sample("1", _forward(1, m=4, h=1)),
        Sample("no leading", _forward(m=3, h=16)),
        *(Sample(f"{n}x{m}x{h}", _forward(n, m=m, h=h)) for n, m, h in SHAPES),
        Sample("2 parts", _forward(2, m=2, h=1096)),
        Sample("many", _forward(270, m=2, h=520)),
        Sample("many odd", _forward(265, m=3, h=1047)),
        Sample("special", _forward(5, m=4, h=64, special=True)),
        Sample("misaligned", _forward(4, m=4, h=32, shift=True)),
    ],
    large=[
        *(
            Sample(f"{n}x{m}x{h}", _forward(*n, m=m, h=h))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7168)
        ),
        Sample("over 2^31", _forward(80_001, m=4, h=7168)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _forward(4096, m=4, h=7168), goal_us=73.8),
        Benchmark("64x4x7168", _forward(64, m=4, h=7168)),
    ],
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


def _backward(*leading: int, m: int, h: int, grad: Edit = same, **kinds: Any) -> Build:
    def make(device: torch.device) -> Arguments:
        return {"grad_out": grad(numbers((*leading, m, h), BF16, device, **kinds))}

    return make


_EXPAND_TO_MHC_BWD = Cases(
    any_rank=True,
    small=[
        Sample("leading", _backward(*LEADING, m=4, h=16)),
        Sample("0", _backward(0, m=4, h=16)),
        Sample("1", _backward(1, m=4, h=8)),
        Sample("no leading", _backward(m=3, h=16)),
        *(Sample(f"{n}x{m}x{h}", _backward(n, m=m, h=h)) for n, m, h in SHAPES),
        Sample("2 parts", _backward(2, m=2, h=1096)),
        Sample("many", _backward(265, m=2, h=1048)),
        Sample("special", _backward(5, m=4, h=64, special=True)),
        Sample("misaligned", _backward(4, m=4, h=32, shift=True)),
        Sample("constant", _backward(4, m=4, h=32, grad=constant)),
        Sample("spread", _backward(4, m=4, h=32, grad=spread)),
    ],
    large=[
        *(
            Sample(f"{n}x{m}x{h}", _backward(*n, m=m, h=h))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7168)
        ),
        Sample("over 2^31", _backward(80_001, m=4, h=7168)),
    ],
    benchmarks=[Benchmark("4096x4x7168", _backward(4096, m=4, h=7168), goal_us=73.8)],
    vectors=[
        Vector(
            "2x3",
            lambda: {"grad_out": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).bfloat16()},
            lambda: torch.tensor([5.0, 7.0, 9.0]).bfloat16(),
        )
    ],
    rejects=[
        Reject("grad_out", "float32", edited("grad_out", lambda x: x.float())),
        Reject("grad_out", "9 streams", edited("grad_out", lambda x: x.repeat_interleave(3, -2))),
        Reject("grad_out", "no streams", edited("grad_out", lambda x: x[..., :0, :])),
        Reject("grad_out", "no columns", edited("grad_out", lambda x: x[..., :0])),
        Reject("grad_out", "one dimension", edited("grad_out", lambda x: x.flatten())),
    ],
)

CASES = {"expand_to_mhc": _EXPAND_TO_MHC, "expand_to_mhc_bwd": _EXPAND_TO_MHC_BWD}
