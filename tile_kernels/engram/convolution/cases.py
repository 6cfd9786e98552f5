"""Argument sets of the convolution."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.engram.convolution import reference
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    INF,
    NAN,
    builder,
    changed,
    close_results,
    edited,
    normal,
)


@builder
def _convolution(
    device: torch.device,
    num_tokens: int,
    streams: int,
    hidden: int,
    taps: int = 4,
    dilation: int = 3,
    *,
    dtype: torch.dtype = FP32,
    residual: bool = True,
    document: int = 0,
    special: bool = False,
    skip: int = 0,
) -> Arguments:
    """With `document`, a text has so many tokens; with `skip`, rows start off a vector."""
    shape = (num_tokens, streams, hidden)
    y = normal(*shape, device=device, dtype=BF16, skip=skip)
    if special:
        y[0], y[1, 0, 3], y[2, 0, 1] = 0, NAN, INF
    token = torch.arange(num_tokens, device=device, dtype=torch.int32)
    starts = token - token % document if document else torch.zeros_like(token)
    return {
        "y": y,
        "norm_weight": 1 + 0.1 * normal(streams, hidden, device=device, dtype=dtype),
        "taps": normal(taps, streams, hidden, device=device, dtype=dtype),
        "starts": starts,
        "dilation": dilation,
        "eps": 1e-6,
        **({"residual": normal(*shape, device=device, dtype=BF16)} if residual else {}),
    }


@builder
def _backward(device: torch.device, *sizes: int, **options: Any) -> Arguments:
    arguments = _convolution(*sizes, **options)(device)
    residual = arguments.pop("residual", None)
    _, rstd = reference.engram_convolution_fwd(**arguments)
    del arguments["eps"]
    y = arguments.pop("y")
    grad = normal(*y.shape, device=device, dtype=BF16)
    saved = {"grad_out": grad, "y": y, "rstd": rstd}
    return {**saved, **arguments, "add_grad": residual is not None}


def _small(build: Any) -> list[Sample]:
    return [
        Sample("7x2x272", build(7, 2, 272)),
        Sample("none", build(0, 4, 64)),
        Sample("one.1x1x8", build(1, 1, 8)),
        Sample("chunks.101x2x40", build(101, 2, 40)),
        Sample("documents.50x1x64", build(50, 1, 64, document=7)),
        Sample("two taps.40x3x24", build(40, 3, 24, 2, 1, residual=False)),
        Sample("one tap.5x2x64", build(5, 2, 64, 1, 2)),
        Sample("eight taps.20x1x16", build(20, 1, 16, 8, 2)),
        Sample("bfloat16.9x2x1032", build(9, 2, 1032, dtype=BF16)),
        Sample("special.12x2x72", build(12, 2, 72, special=True)),
        Sample("misaligned.6x3x80", build(6, 3, 80, skip=1)),
    ]


def _large(build: Any) -> list[Sample]:
    return [
        Sample("4001x4x7168", build(4001, 4, 7168, dtype=BF16, document=1000)),
        Sample("513x8x1288", build(513, 8, 1288)),
    ]


def _benchmarks(build: Any) -> list[Benchmark]:
    return [Benchmark("4096x4x7168", build(4096, 4, 7168, dtype=BF16))]


def _worked() -> Arguments:
    """Rows of equal numbers, so that every norm is 1 or -1."""
    ones = torch.ones(3, 1, 8).bfloat16()
    return {
        "y": ones * torch.tensor([2.0, -4.0, 1.0]).bfloat16()[:, None, None],
        "norm_weight": torch.ones(1, 8),
        "taps": torch.tensor([1.0, 2.0])[:, None, None].expand(2, 1, 8).contiguous(),
        "starts": torch.zeros(3, dtype=torch.int32),
        "dilation": 1,
        "eps": 0.0,
    }


def _worked_bwd() -> Arguments:
    """Taps of one and zero: only the token itself counts, of which every norm is 1."""
    arguments = {**_worked(), "taps": torch.tensor([1.0, 0.0])[:, None, None].repeat(1, 1, 8)}
    del arguments["eps"]
    ones = torch.ones(3, 1, 8).bfloat16()
    return {**arguments, "grad_out": ones, "y": ones, "rstd": torch.ones(3, 1)}


# The slope of SiLU at 1: the row's gradient is equal in all channels, which a norm takes away.
_SLOPE = 0.9276705118714869
_SILU_1, _SILU_M1 = 0.7310585786300049, -0.2689414213699951
_rejects = [
    Reject("y", "another rank", edited("y", lambda x: x[0])),
    Reject("norm_weight", "another shape", edited("norm_weight", lambda x: x[:, 8:].contiguous())),
    Reject("taps", "another dtype", edited("taps", torch.Tensor.half)),
    Reject("starts", "int64", edited("starts", torch.Tensor.long)),
    Reject("dilation", "zero", changed(dilation=0)),
]
# A step of bfloat16; in float32 what the order of a sum makes.
_compare = close_results(rtol=1e-3, atol=1e-3, rtol_bfloat16=2**-6)

CASES = {
    "engram_convolution_fwd": Cases(
        small=_small(_convolution),
        large=_large(_convolution),
        benchmarks=_benchmarks(_convolution),
        vectors=[
            Vector(
                "two taps",
                _worked,
                lambda: (
                    torch.tensor([_SILU_1, _SILU_1, _SILU_M1])[:, None, None]
                    .expand(3, 1, 8)
                    .bfloat16(),
                    torch.tensor([[0.5], [0.25], [1.0]]),
                ),
            )
        ],
        rejects=[*_rejects, Reject("eps", "negative", changed(eps=-1.0))],
        compare=_compare,
    ),
    "engram_convolution_bwd": Cases(
        small=_small(_backward),
        large=_large(_backward),
        benchmarks=_benchmarks(_backward),
        vectors=[
            Vector(
                "one tap that counts",
                _worked_bwd,
                lambda: (
                    torch.zeros(3, 1, 8).bfloat16(),
                    _SLOPE * torch.tensor([3.0, 2.0, 3.0])[None, :, None, None].repeat(1, 1, 1, 8),
                ),
            )
        ],
        rejects=[*_rejects, Reject("rstd", "another shape", edited("rstd", lambda x: x[:, :0]))],
        compare=_compare,
    ),
}
