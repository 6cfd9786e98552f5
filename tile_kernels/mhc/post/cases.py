"""Argument sets of `mhc_post` and its gradients."""

from __future__ import annotations

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


def _forward(*leading: int, m: int = 4, h: int = 32, residual: Edit = same, **kinds: Any) -> Build:
    def make(device: torch.device) -> Arguments:
        return {
            "x": numbers((*leading, h), BF16, device, **kinds),
            "residual": residual(numbers((*leading, m, h), BF16, device, **kinds)),
            "post_layer_mix": numbers((*leading, m, 1), FP32, device, **kinds),
            "comb_res_mix": numbers((*leading, m, m), FP32, device, **kinds),
        }

    return make


def _vector() -> Arguments:
    return {
        "x": torch.tensor([10.0, 20.0]).bfloat16(),
        "residual": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16(),
        "post_layer_mix": torch.tensor([[1.0], [0.5]]),
        "comb_res_mix": torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
    }


_REJECTS = [
    Reject("residual", "float32", edited("residual", lambda r: r.float())),
    Reject("residual", "9 streams", edited("residual", lambda r: r.repeat_interleave(3, -2))),
    Reject("residual", "no columns", edited("residual", lambda r: r[..., :0])),
    Reject("residual", "one dimension", edited("residual", lambda r: r.flatten())),
    Reject("x", "fewer columns", edited("x", lambda x: x[..., 1:].clone())),
    Reject("x", "strided", edited("x", spread)),
    Reject(
        "post_layer_mix", "two columns", edited("post_layer_mix", lambda p: torch.cat((p, p), -1))
    ),
    Reject("post_layer_mix", "strided", edited("post_layer_mix", spread)),
    Reject("comb_res_mix", "one row", edited("comb_res_mix", lambda c: c[..., :1, :].clone())),
    Reject("comb_res_mix", "double", edited("comb_res_mix", lambda c: c.double())),
    Reject("comb_res_mix", "transposed", edited("comb_res_mix", lambda c: c.mT)),
]

_MHC_POST = StreamCases(
    small=[
        Sample("no leading", _forward()),
        Sample("0", _forward(0)),
        Sample("1", _forward(1, h=8)),
        Sample("2x3x4x32", _forward(2, 3)),
        *(Sample(f"{n}x{m}x{h}", _forward(n, m=m, h=h)) for n, m, h in SHAPES),
        Sample("2 parts", _forward(2, m=2, h=1096)),
        Sample("many", _forward(265, m=2, h=1048)),
        Sample("special", _forward(9, h=64, special=True)),
        Sample("misaligned", _forward(4, shift=True)),
        Sample("spread", _forward(4, residual=spread)),
    ],
    large=[
        *(
            Sample(f"{n}x{m}x{h}", _forward(*n, m=m, h=h))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7168)
        ),
        Sample("over 2^31", _forward(80_001, h=7168)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _forward(4096, h=7168), goal_us=128.8),
        Benchmark("64x4x7168", _forward(64, h=7168)),
    ],
    vectors=[
        Vector(
            "2x2", _vector, lambda: torch.tensor([[12.25, 23.5], [6.75, 12.5]]).bfloat16()
        )
    ],
    rejects=_REJECTS,
)  # fmt: skip


def _backward(
    *leading: int,
    m: int = 4,
    h: int = 32,
    residual: Edit = same,
    grad: Edit = same,
    **kinds: Any,
) -> Build:
    def make(device: torch.device) -> Arguments:
        return {
            **_forward(*leading, m=m, h=h, residual=residual, **kinds)(device),
            "d_o": grad(numbers((*leading, m, h), BF16, device, **kinds)),
        }

    return make


_MHC_POST_BWD = StreamCases(
    small=[
        Sample("2x3x4x32", _backward(2, 3)),
        Sample("0", _backward(0)),
        Sample("1", _backward(1, h=8)),
        Sample("no leading", _backward(m=3, h=16)),
        *(Sample(f"{n}x{m}x{h}", _backward(n, m=m, h=h)) for n, m, h in SHAPES),
        Sample("2x4x2112", _backward(2, h=2112)),
        Sample("special", _backward(9, h=64, **SPECIAL)),
        Sample("misaligned", _backward(4, shift=True)),
        Sample("constant", _backward(3, 2, grad=constant)),
        Sample("spread", _backward(3, residual=spread, grad=spread)),
    ],
    large=[
        *(
            Sample(f"{n}x{m}x{h}", _backward(*n, m=m, h=h))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7168)
        ),
        Sample("over 2^31", _backward(80_001, h=7168)),
    ],
    benchmarks=[Benchmark("4096x4x7168", _backward(4096, h=7168), goal_us=215.0)],
    vectors=[
        Vector(
            "2x2",
            lambda: {**_vector(), "d_o": torch.eye(2).bfloat16()},
            lambda: (
                torch.tensor([1.0, 0.5]).bfloat16(),
                torch.tensor([[0.75, 0.25], [0.5, 0.5]]).bfloat16(),
                torch.tensor([[10.0], [20.0]]),
                torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            ),
        )
    ],
    rejects=[
        Reject("d_o", "fewer streams", edited("d_o", lambda g: g[..., 1:, :])),
        Reject("d_o", "float32", edited("d_o", lambda g: g.float())),
        *_REJECTS,
    ],
    compare=streams_exact(rtol=1e-5, atol=1e-4),
)  # fmt: skip

CASES = {"mhc_post": _MHC_POST, "mhc_post_fwd": _MHC_POST, "mhc_post_bwd": _MHC_POST_BWD}
