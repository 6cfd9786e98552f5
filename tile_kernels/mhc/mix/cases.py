"""Argument sets of the mixes."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.mhc import samples
from tile_kernels.mhc.samples import LEADING, Edit, StreamCases, constant, numbers, same, spread
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import FP32, builder, changed, close_results, edited


def _parameters(count: int, kinds: int, device: torch.device, shift: bool) -> Arguments:
    return {
        "mhc_scale": numbers((kinds,), FP32, device),
        "mhc_base": numbers((count,), FP32, device, shift=shift),
    }


_PARAMETER_REJECTS = [
    Reject("mhc_scale", "another size", edited("mhc_scale", lambda s: s.new_ones(2))),
    Reject("mhc_scale", "a scalar", edited("mhc_scale", lambda s: s[0])),
    Reject("mhc_base", "shorter", edited("mhc_base", lambda b: b[1:].clone())),
    Reject("mhc_base", "strided", edited("mhc_base", spread)),
]

# ---- pre, post and comb -------------------------------------------------------------------------


@builder
def _split(
    device: torch.device,
    *leading: int,
    m: int = 4,
    post_mult: float = 2.0,
    factor: float = 1.0,
    special: bool = False,
    shift: bool = False,
) -> Arguments:
    count = m * (m + 2)
    mixes = numbers((*leading, count), FP32, device, special=special, shift=shift)
    return {
        "input_mixes": mixes.mul_(factor),
        **_parameters(count, 3, device, shift),
        "mhc_mult": m,
        "mhc_post_mult_value": post_mult,
        "mhc_pre_eps": 0.01,
    }


def _split_vector() -> Arguments:
    return {
        "input_mixes": torch.tensor([0.0, 1.0, -1.0, 2.0, 1.0, 2.0, 3.0, 4.0]),
        "mhc_scale": torch.tensor([1.0, 2.0, 0.5]),
        "mhc_base": torch.tensor([0.0, 0.5, 0.0, 0.0, 0.1, 0.0, 0.0, -1.0]),
    }


_MHC_PRE_SPLIT_MIXES = Cases(
    any_rank=True,
    small=[
        Sample("leading", _split(*LEADING)),
        *samples.mix_samples(_split, 45),
        Sample("0 mult", _split(5, post_mult=0.0)),
        Sample("far", _split(30, factor=100.0)),
        Sample("special", _split(30, special=True)),
    ],
    large=samples.large_mix_samples(_split, (2, 4096), (50_001,)),
    benchmarks=[Benchmark("4096x4", _split(4096), goal_us=2.2)],
    vectors=[
        Vector(
            "m=2",
            lambda: {
                **_split_vector(), "mhc_mult": 2, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 0.01,
            },
            lambda: (
                torch.tensor([[0.51], [0.8275744]]),
                torch.tensor([[0.2384058], [1.9640275]]),
                torch.tensor([[0.6, 1.0], [1.5, 1.0]]),
            ),
        )
    ],
    rejects=[
        Reject("mhc_mult", "zero", changed(mhc_mult=0)),
        Reject("mhc_mult", "nine", changed(mhc_mult=9)),
        Reject("input_mixes", "of another mhc_mult", changed(mhc_mult=3)),
        Reject("input_mixes", "strided", edited("input_mixes", spread)),
        Reject("mhc_post_mult_value", "text", changed(mhc_post_mult_value="2")),
        Reject("mhc_pre_eps", "None", changed(mhc_pre_eps=None)),
        *_PARAMETER_REJECTS,
    ],
    compare=close_results(rtol=1e-5, atol=1e-6),
)  # fmt: skip


@builder
def _split_backward(
    device: torch.device, *leading: int, m: int = 4, grad: Edit = same, **more: Any
) -> Arguments:
    given = _split(*leading, m=m, **more)(device)
    del given["mhc_mult"], given["mhc_pre_eps"]
    sizes = {"grad_pre": 1, "grad_post": 1, "grad_comb": m}
    return {
        **{name: grad(numbers((*leading, m, last), FP32, device)) for name, last in sizes.items()},
        **given,
    }


_MHC_PRE_SPLIT_MIXES_BWD = StreamCases(
    small=[
        Sample("3x5", _split_backward(3, 5)),
        *samples.mix_samples(_split_backward, 45),
        Sample("blocks", _split_backward(700)),
        Sample("0 mult", _split_backward(5, post_mult=0.0)),
        Sample("far", _split_backward(30, factor=100.0)),
        Sample("constant", _split_backward(5, grad=constant)),
        Sample("spread", _split_backward(5, grad=spread)),
    ],
    large=samples.large_mix_samples(_split_backward, (2, 4096), (100_001,)),
    benchmarks=[Benchmark("4096x4", _split_backward(4096))],
    vectors=[
        Vector(
            "m=2",
            lambda: {
                "grad_pre": torch.ones(2, 1), "grad_post": torch.ones(2, 1),
                "grad_comb": torch.ones(2, 2), **_split_vector(), "mhc_post_mult_value": 2.0,
            },
            lambda: (
                torch.tensor([0.25, 0.1491465, 0.4199743, 0.0706509, 0.5, 0.5, 0.5, 0.5]),
                torch.tensor([0.1491465, -0.1393362, 10.0]),
                torch.tensor([0.25, 0.1491465, 0.2099872, 0.0353255, 1.0, 1.0, 1.0, 1.0]),
            ),
        )
    ],
    rejects=[
        Reject("grad_pre", "without the last dimension", edited("grad_pre", lambda g: g[..., 0])),
        Reject("grad_comb", "fewer tokens", edited("grad_comb", lambda g: g[1:])),
        Reject("grad_comb", "9 streams", edited("grad_comb", lambda g: g.new_zeros(3, 5, 9, 9))),
        Reject("grad_comb", "not square", edited("grad_comb", lambda g: g[..., 1:, :])),
        Reject("input_mixes", "a mix less", edited("input_mixes", lambda x: x[..., 1:].clone())),
        Reject("mhc_post_mult_value", "text", changed(mhc_post_mult_value="2")),
        *_PARAMETER_REJECTS,
    ],
    compare=close_results(rtol=2e-5, atol=1e-4),
)  # fmt: skip


# ---- the head -----------------------------------------------------------------------------------


@builder
def _head(
    device: torch.device, *leading: int, m: int = 4, factor: float = 1.0, **kinds: bool
) -> Arguments:
    mix = numbers((*leading, m), FP32, device, **kinds)
    return {
        "input_mix": mix.mul_(factor),
        **_parameters(m, 1, device, kinds.get("shift", False)),
        "mhc_pre_eps": 0.01,
    }


def _head_vector() -> Arguments:
    return {
        "input_mix": torch.tensor([[0.0, 1.0]]),
        "mhc_scale": torch.tensor([2.0]),
        "mhc_base": torch.tensor([0.0, -2.0]),
    }


_MHC_HEAD_COMPUTE_MIX = StreamCases(
    small=[
        Sample("leading", _head(*LEADING)),
        *samples.mix_samples(_head, 300),
        Sample("far", _head(30, factor=100.0)),
        Sample("special", _head(30, special=True)),
    ],
    large=samples.large_mix_samples(_head, (2, 4096), (50_001,)),
    benchmarks=[Benchmark("4096x4", _head(4096))],
    vectors=[
        Vector(
            "m=2",
            lambda: {**_head_vector(), "mhc_pre_eps": 0.01},
            lambda: torch.tensor([[0.51, 0.51]]),
        )
    ],
    rejects=[
        Reject("input_mix", "strided", edited("input_mix", spread)),
        Reject("input_mix", "9 streams", edited("input_mix", lambda x: x.repeat(1, 1, 1, 1, 3))),
        Reject("input_mix", "no streams", edited("input_mix", lambda x: x[..., :0])),
        Reject("mhc_pre_eps", "None", changed(mhc_pre_eps=None)),
        *_PARAMETER_REJECTS,
    ],
    compare=close_results(rtol=1e-5, atol=1e-6),
)


@builder
def _head_backward(
    device: torch.device, *leading: int, m: int = 4, grad: Edit = same, **more: Any
) -> Arguments:
    given = _head(*leading, m=m, **more)(device)
    del given["mhc_pre_eps"]
    return {"grad_mix": grad(numbers((*leading, m), FP32, device)), **given}


_MHC_HEAD_COMPUTE_MIX_BWD = StreamCases(
    small=[
        Sample("3x5", _head_backward(3, 5)),
        *samples.mix_samples(_head_backward, 300),
        Sample("blocks", _head_backward(1500)),
        Sample("far", _head_backward(30, factor=100.0)),
        Sample("constant", _head_backward(5, grad=constant)),
        Sample("spread", _head_backward(5, grad=spread)),
    ],
    large=samples.large_mix_samples(_head_backward, (2, 4096), (100_001,)),
    benchmarks=[Benchmark("4096x4", _head_backward(4096))],
    vectors=[
        Vector(
            "m=2",
            lambda: {"grad_mix": torch.tensor([[1.0, 4.0]]), **_head_vector()},
            lambda: (
                torch.tensor([[0.5, 2.0]]),
                torch.tensor([1.0]),
                torch.tensor([0.25, 1.0]),
            ),
        )
    ],
    rejects=[
        *samples.grad_rejects("grad_mix"),
        *_PARAMETER_REJECTS,
    ],
    compare=close_results(rtol=2e-5, atol=1e-4),
)  # fmt: skip

CASES = {
    "mhc_pre_split_mixes": _MHC_PRE_SPLIT_MIXES,
    "mhc_pre_split_mixes_bwd": _MHC_PRE_SPLIT_MIXES_BWD,
    "mhc_head_compute_mix": _MHC_HEAD_COMPUTE_MIX,
    "mhc_head_compute_mix_bwd": _MHC_HEAD_COMPUTE_MIX_BWD,
}
