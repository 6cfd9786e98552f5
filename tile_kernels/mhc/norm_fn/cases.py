"""Argument sets of the projection to mixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tile_kernels.mhc.norm_fn import reference
from tile_kernels.mhc.samples import LEADING, compare_sums
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, builder, changed, close_results, edited, misaligned

_EPS = 1e-6


@builder
def _forward(
    device: torch.device,
    *shape: int,
    mixes: int | None = None,
    scale: float = 1e-2,
    shift: bool = False,
    special: bool = False,
) -> Arguments:
    """`shape` is the residual's; the mixes of a sublayer, unless told otherwise."""
    m, h = shape[-2:]
    residual = torch.randn(shape, device=device).to(BF16)
    count = m * (m + 2) if mixes is None else mixes
    fn = scale * torch.randn(count, m * h, device=device)
    if special:
        residual.view(-1, h)[0, 3] = float("nan")
        residual[2] = 0
    if shift:
        residual, fn = misaligned(residual), misaligned(fn)
    return {"residual": residual, "fn": fn, "eps": _EPS}


@builder
def _backward(
    device: torch.device, *shape: int, adding: bool = False, expanded: bool = False, **how: Any
) -> Arguments:
    arguments = _forward(*shape, **how)(device)
    mixes, mul, s = reference.mhc_norm_fn_fwd(**arguments)
    grad = torch.randn(mixes.shape, device=device)
    arguments = {
        "grad_mixes": grad[..., :1].expand(mixes.shape) if expanded else grad,
        **arguments, "mul": mul, "s": s,
    }  # fmt: skip
    if adding:
        arguments["grad_residual"] = torch.randn(shape, device=device).to(BF16)
    return arguments


_SHAPES = [(1, 1, 8), (5, 2, 40), (3, 3, 64), (2, 3, 5, 72), (70, 2, 136), (2, 8, 104), (3, 6, 24)]


def _small(build: Callable[..., Build]) -> list[Sample]:
    """What both directions have."""
    return [
        Sample("leading.2x72", build(*LEADING, 2, 72)),
        Sample("one of one", build(1, 1, 8, mixes=1)),
        Sample("none", build(0, 4, 64)),
        *(Sample("x".join(map(str, shape)), build(*shape)) for shape in _SHAPES),
        Sample("one token", build(4, 16)),
        Sample("head.67x4x32", build(67, 4, 32, mixes=4)),
        *(Sample(f"many.3x2x80.{j}", build(3, 2, 80, mixes=j)) for j in (96, 112, 128)),
        Sample("misaligned.5x2x48", build(5, 2, 48, shift=True)),
    ]


def _large(build: Callable[..., Build]) -> list[Sample]:
    return [
        *(Sample(f"{n}x4x{h}", build(n, 4, h)) for n in (13, 512, 4096) for h in (1280, 7168)),
        Sample("1000x8x1288", build(1000, 8, 1288)),
        Sample("over 2**31", build(2**17, 4, 4104)),
    ]


def _vector() -> Arguments:
    return {
        "residual": torch.tensor([1.0, 2.0, 3.0, 4.0] * 4).view(1, 2, 8).to(BF16),
        "fn": torch.stack((torch.eye(16)[0], torch.full((16,), 0.5))),
        "eps": 0.0,
    }


_MHC_NORM_FN_FWD = Cases(
    any_rank=True,
    small=[
        *_small(_forward),
        Sample("special.4x2x64", _forward(4, 2, 64, special=True)),
        Sample("two tiles.260x1x128", _forward(260, 1, 128)),
    ],
    large=[
        *_large(_forward),
        Sample("8192x4x2560", _forward(8192, 4, 2560)),
        Sample("over 2**31 mixes", _forward(2**24 + 3, 1, 8, mixes=128)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _forward(4096, 4, 7168, scale=1e-4), goal_us=64.0),
        Benchmark("4096x4x2560", _forward(4096, 4, 2560, scale=1e-4)),
        Benchmark("16x4x7168", _forward(16, 4, 7168, scale=1e-4)),
    ],
    vectors=[
        Vector(
            "one token",
            _vector,
            # s = 4 * 30, r = sqrt(16 / 120) = 0.3651484
            lambda: (
                torch.tensor([[0.3651484, 7.3029674]]),
                torch.tensor([[1.0, 20.0]]),
                torch.tensor([120.0]),
            ),
        )
    ],
    rejects=[
        Reject("residual", "columns", edited("residual", lambda x: x[..., :4].contiguous())),
        Reject("fn", "another size", edited("fn", lambda x: x[:, 8:].contiguous())),
        Reject("fn", "no rows", edited("fn", lambda x: x[:0])),
        Reject("fn", "bfloat16", edited("fn", lambda x: x.to(BF16))),
        Reject("eps", "words", changed(eps="small")),
    ],
    compare=compare_sums,
)

_MHC_NORM_FN_BWD = Cases(
    any_rank=True,
    small=[
        *_small(_backward),
        Sample("many.3x2x80.64", _backward(3, 2, 80, mixes=64)),
        Sample("expanded.5x2x48", _backward(5, 2, 48, expanded=True)),
        Sample("adding.66x2x72", _backward(66, 2, 72, adding=True)),
        Sample("several tiles.330x1x136", _backward(330, 1, 136)),
    ],
    large=[
        *_large(_backward),
        Sample("adding.4096x4x7168", _backward(4096, 4, 7168, adding=True)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _backward(4096, 4, 7168, scale=1e-4), goal_us=130.0),
        Benchmark("adding.4096x4x7168", _backward(4096, 4, 7168, scale=1e-4, adding=True)),
        Benchmark("4096x4x2560", _backward(4096, 4, 2560, scale=1e-4)),
    ],
    vectors=[
        Vector(
            "one token",
            lambda: {
                "grad_mixes": torch.tensor([[1.0, 0.0]]),
                **_vector(),
                "mul": torch.tensor([[1.0, 20.0]]),
                "s": torch.tensor([120.0]),
            },
            # r = 0.3651484, in TF32 0.3652344; gs = -r / 240; and no gradient was added to
            lambda: (
                (
                    torch.tensor(
                        [0.3652344 - 0.0030429, -0.0060858, -0.0091287, -0.0121716]
                        + [-0.0030429, -0.0060858, -0.0091287, -0.0121716] * 3
                    )
                    .view(1, 2, 8)
                    .to(BF16),
                    torch.stack(
                        (0.3652344 * torch.tensor([1.0, 2.0, 3.0, 4.0] * 4), torch.zeros(16))
                    ),
                ),
                None,
            ),
        )
    ],
    rejects=[
        Reject("grad_mixes", "another shape", edited("grad_mixes", lambda x: x[..., 1:])),
        Reject("mul", "another shape", edited("mul", lambda x: x[..., 1:].contiguous())),
        Reject("s", "another shape", edited("s", lambda x: x[..., 1:].contiguous())),
        Reject("s", "bfloat16", edited("s", lambda x: x.to(BF16))),
    ],
    compare=close_results(rtol=1e-4, atol=2e-5, rtol_bfloat16=2**-7),
)

CASES = {"mhc_norm_fn_fwd": _MHC_NORM_FN_FWD, "mhc_norm_fn_bwd": _MHC_NORM_FN_BWD}
