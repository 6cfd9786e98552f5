"""Argument sets of `mhc_post` and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.mhc import samples
from tile_kernels.mhc.samples import SPECIAL, Edit, constant, numbers, same, spread
from tile_kernels.runtime.cases import Arguments, Benchmark, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, edited


@builder
def _forward(
    device: torch.device,
    *leading: int,
    m: int = 4,
    h: int = 32,
    residual: Edit = same,
    **kinds: Any,
) -> Arguments:
    return {
        "x": numbers((*leading, h), BF16, device, **kinds),
        "residual": residual(numbers((*leading, m, h), BF16, device, **kinds)),
        "post_layer_mix": numbers((*leading, m, 1), FP32, device, **kinds),
        "comb_res_mix": numbers((*leading, m, m), FP32, device, **kinds),
    }


def _vector() -> Arguments:
    return {
        "x": torch.tensor([10.0, 20.0]).bfloat16(),
        "residual": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16(),
        "post_layer_mix": torch.tensor([[1.0], [0.5]]),
        "comb_res_mix": torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
    }


_REJECTS = [
    *samples.stream_rejects("residual"),
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

_MHC_POST = samples.StreamCases(
    small=[
        Sample("4x32", _forward()),
        Sample("2x3x4x32", _forward(2, 3)),
        *samples.row_samples(_forward),
        Sample("spread", _forward(4, residual=spread)),
    ],
    large=samples.large_samples(_forward),
    benchmarks=samples.row_benchmarks(_forward, goal_us=128.8),
    vectors=[
        Vector(
            "2x2", _vector, lambda: torch.tensor([[12.25, 23.5], [6.75, 12.5]]).bfloat16()
        )
    ],
    rejects=_REJECTS,
)  # fmt: skip


@builder
def _backward(
    device: torch.device,
    *leading: int,
    m: int = 4,
    h: int = 32,
    residual: Edit = same,
    grad: Edit = same,
    **kinds: Any,
) -> Arguments:
    return {
        **_forward(*leading, m=m, h=h, residual=residual, **kinds)(device),
        "d_o": grad(numbers((*leading, m, h), BF16, device, **kinds)),
    }


_MHC_POST_BWD = samples.StreamCases(
    small=[
        Sample("2x3x4x32", _backward(2, 3)),
        *samples.edge_samples(_backward),
        Sample("2x4x2112", _backward(2, h=2112)),
        Sample("special", _backward(9, h=64, **SPECIAL)),
        Sample("constant", _backward(3, 2, grad=constant)),
        Sample("spread", _backward(3, residual=spread, grad=spread)),
    ],
    large=samples.large_samples(_backward),
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
    compare=samples.streams_exact(rtol=1e-5, atol=1e-4),
)  # fmt: skip

CASES = {"mhc_post": _MHC_POST, "mhc_post_fwd": _MHC_POST, "mhc_post_bwd": _MHC_POST_BWD}
