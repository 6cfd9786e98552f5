"""Argument sets of what follows a projection in parts."""

from __future__ import annotations

import torch

from tile_kernels.mhc.samples import MIX_REJECTS, compare_sums
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    builder,
    changed,
    close_results,
    edited,
    misaligned,
)


@builder
def _partials(
    device: torch.device, splits: int, num_tokens: int, groups: int, mixes: int
) -> Arguments:
    return {
        "mul": torch.randn(splits, num_tokens, groups, mixes, device=device),
        "sqrsum": torch.rand(splits, num_tokens, groups, device=device),
        "rms_group_size": 64,
        "eps": 1e-6,
    }


def _worked() -> Arguments:
    return {
        "mul": torch.tensor([[[[1.0, 2.0]]], [[[3.0, -1.0]]]]),
        "sqrsum": torch.tensor([[[4.0]], [[12.0]]]),
        "rms_group_size": 8,
        "eps": 1e-6,
    }


_SIZES = [(2, 5, 2, 24), (1, 0, 1, 24), (1, 1, 1, 1), (3, 33, 3, 7), (16, 9, 1, 24)]
_close = close_results(rtol=1e-5, atol=1e-6)
_NUMBERS = [
    Reject("rms_group_size", "zero", changed(rms_group_size=0)),
    Reject("eps", "negative", changed(eps=-1.0)),
    Reject("sqrsum", "fewer tokens", edited("sqrsum", lambda x: x[..., 1:].contiguous())),
]

_REDUCE = Cases(
    small=[Sample("x".join(map(str, sizes)), _partials(*sizes)) for sizes in _SIZES],
    large=[Sample("16x8001x1x24", _partials(16, 8001, 1, 24))],
    benchmarks=[Benchmark("16x4096x1x24", _partials(16, 4096, 1, 24))],
    vectors=[
        Vector(
            "two parts",
            _worked,
            lambda: (
                torch.tensor([[2.8284264, 0.7071066]]),
                torch.tensor([[[4.0, 1.0]]]),
                torch.tensor([[16.0]]),
            ),
        )
    ],
    rejects=[Reject("mul", "no splits", edited("mul", lambda x: x[:0])), *_NUMBERS],
    compare=_close,
)


@builder
def _backward(device: torch.device, num_tokens: int, groups: int, mixes: int) -> Arguments:
    return {
        "out_grad": torch.randn(num_tokens, mixes, device=device),
        "out_mul": torch.randn(num_tokens, groups, mixes, device=device),
        "sqrsum": torch.rand(num_tokens, groups, device=device),
        "rms_group_size": 64,
        "eps": 1e-6,
    }


_REDUCE_BACKWARD = Cases(
    small=[Sample("x".join(map(str, s)), _backward(*s)) for _, *s in _SIZES],
    large=[Sample("8001x1x24", _backward(8001, 1, 24))],
    benchmarks=[Benchmark("4096x1x24", _backward(4096, 1, 24))],
    vectors=[
        Vector(
            "one token",
            lambda: {
                "out_grad": torch.tensor([[1.0, 0.5]]),
                "out_mul": torch.tensor([[[4.0, 1.0]]]),
                "sqrsum": torch.tensor([[16.0]]),
                "rms_group_size": 8,
                "eps": 1e-6,
            },
            lambda: (torch.tensor([[[0.7071066, 0.3535533]]]), torch.tensor([[-0.0994368]])),
        )
    ],
    rejects=[
        Reject("out_grad", "fewer mixes", edited("out_grad", lambda x: x[:, 1:].contiguous())),
        *_NUMBERS,
    ],
    compare=close_results(rtol=1e-4, atol=1e-5),
)


@builder
def _pre(
    device: torch.device,
    splits: int,
    num_tokens: int,
    m: int,
    hidden: int,
    *,
    repeat: int = 4,
    eps: float = 1e-6,
    shift: bool = False,
) -> Arguments:
    count = m * (m + 2)
    residual = torch.randn(num_tokens, m, hidden, device=device).to(BF16)
    return {
        "gemm_out_mul": torch.randn(splits, num_tokens, count, device=device),
        "gemm_out_sqrsum": m * hidden / splits * (0.5 + torch.rand(splits, num_tokens)).to(device),
        "mhc_scale": torch.randn(3, device=device),
        "mhc_base": torch.randn(count, device=device),
        "residual": misaligned(residual) if shift else residual,
        "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-2,
        "mhc_sinkhorn_eps": eps,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": repeat,
    }


def _chain() -> Arguments:
    """Two splits of the worked projection, in rows of eight columns: six of each stream are 0."""
    residual = torch.zeros(1, 2, 8)
    residual[0, :, :2] = torch.tensor([[1.0, 2.0], [-1.0, 0.5]])
    fn = torch.tensor(
        [
            [0.1, 0.2, 0.3, 0.4], [0.5, -0.1, 0, 0.2], [1, 0, 0, 1], [0, 1, 1, 0],
            [0.2, 0.2, 0.2, 0.2], [-0.3, 0.1, 0.4, 0], [0, 0, 1, 1], [1, 1, 0, 0],
        ]
    )  # fmt: skip
    row = torch.tensor([[1.0, 2.0], [-1.0, 0.5]])
    # Of the worked example the mean is over four channels: a quarter of the sixteen here.
    return {
        "gemm_out_mul": torch.stack([row[i] @ fn[:, 2 * i : 2 * i + 2].T for i in (0, 1)])[:, None],
        "gemm_out_sqrsum": torch.tensor([[5.0], [1.25]]) * 4,
        "mhc_scale": torch.tensor([0.5, 1.0, 2.0]),
        "mhc_base": torch.tensor([0, 0.1, 0.2, 0.3, 0, 0.1, -0.1, 0]),
        "residual": residual.to(BF16),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 0.01,
        "mhc_sinkhorn_eps": 1e-6,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 2,
    }


def _chain_result() -> tuple[torch.Tensor, ...]:
    layer_input = torch.zeros(1, 8)
    layer_input[0, :2] = torch.tensor([-0.0247803, 1.390625])
    return (
        torch.tensor([[[1.6043676], [1.5005201]]]),
        torch.tensor([[[0.9945017, 0.1190258], [0.0054972, 0.8809734]]]),
        layer_input.to(BF16),
    )


_PRE = Cases(
    small=[
        Sample("3x5x2x40", _pre(3, 5, 2, 40)),
        Sample("none", _pre(2, 0, 4, 64)),
        Sample("one.1x1x1x8", _pre(1, 1, 1, 8)),
        Sample("16x3x4x1064", _pre(16, 3, 4, 1064)),
        Sample("many.2x270x2x24", _pre(2, 270, 2, 24)),
        Sample("7x3x8x72", _pre(7, 3, 8, 72)),
        Sample("no eps.2x5x4x64", _pre(2, 5, 4, 64, eps=0.0, repeat=1)),
        Sample("misaligned.2x5x4x64", _pre(2, 5, 4, 64, shift=True)),
    ],
    large=[Sample(f"16x{n}x4x7168", _pre(16, n, 4, 7168)) for n in (13, 4096)],
    benchmarks=[
        Benchmark("16x4096x4x7168", _pre(16, 4096, 4, 7168, repeat=10)),
        Benchmark("16x16x4x7168", _pre(16, 16, 4, 7168, repeat=10)),
    ],
    vectors=[Vector("chain", _chain, _chain_result)],
    rejects=[
        Reject("residual", "columns", edited("residual", lambda x: x[..., :4].contiguous())),
        Reject("gemm_out_mul", "a mix less", edited("gemm_out_mul", lambda x: x[..., 1:].clone())),
        Reject("gemm_out_mul", "no splits", edited("gemm_out_mul", lambda x: x[:0])),
        Reject("gemm_out_sqrsum", "a split less", edited("gemm_out_sqrsum", lambda x: x[1:])),
        *MIX_REJECTS,
    ],
    compare=compare_sums,
)

CASES = {
    "mhc_reduce_partials": _REDUCE,
    "mhc_reduce_partials_bwd": _REDUCE_BACKWARD,
    "mhc_pre_from_partials": _PRE,
}
