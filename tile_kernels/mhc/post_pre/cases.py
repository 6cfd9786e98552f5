"""Argument sets of `mhc_post_pre` and of its form with a cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tile_kernels.mhc.post_pre.plan import FEW_TOKENS
from tile_kernels.mhc.samples import LEADING, MIX_REJECTS, StreamCases, compare_sums
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    assert_equal_results,
    builder,
    changed,
    edited,
    misaligned,
)


@builder
def _arguments(
    device: torch.device,
    *shape: int,
    scale: float = 1e-2,
    weight: torch.dtype | None = None,
    shift: bool = False,
    eps: float = 1e-6,
    **more: Any,
) -> Arguments:
    """`shape` is the residual's; `more` for the form with a cast."""
    *leading, m, h = shape
    count = m * (m + 2)
    x, residual = (torch.randn(size, device=device).to(BF16) for size in ((*leading, h), shape))
    arguments = {
        "x": misaligned(x) if shift else x,
        "residual": misaligned(residual) if shift else residual,
        "post_layer_mix": torch.rand(*leading, m, 1, device=device),
        "comb_res_mix": torch.rand(*leading, m, m, device=device) / m,
        "fn": scale * torch.randn(count, m * h, device=device),
        "mhc_scale": torch.randn(3, device=device),
        "mhc_base": torch.randn(count, device=device),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-2,
        "mhc_sinkhorn_eps": eps,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 3,
        **more,
    }
    if weight is not None:
        arguments["norm_weight"] = (1 + 0.1 * torch.randn(h, device=device)).to(weight)
        arguments["norm_eps"] = 1e-6
    return arguments


_MANY = FEW_TOKENS + 1


def _small(build: Callable[..., Build]) -> list[Sample]:
    return [
        Sample("leading.2x40", build(*LEADING, 2, 40)),
        Sample("none", build(0, 4, 64)),
        Sample("one.1x1x16", build(1, 1, 16)),
        Sample("one token", build(2, 64)),
        *(Sample(f"7x{m}x72", build(7, m, 72)) for m in (1, 3, 4, 8)),
        Sample("few.70x2x256", build(70, 2, 256)),
        # Columns that are whole leaves of the projection: written and projected at once.
        Sample(f"at once.{_MANY}x1x256", build(_MANY, 1, 256)),
        Sample(f"at once.{_MANY + 1}x2x256", build(_MANY + 1, 2, 256, weight=BF16)),
        Sample(f"at once.{_MANY}x4x256", build(_MANY, 4, 256, weight=FP32)),
        Sample("norm.5x2x1064", build(5, 2, 1064, weight=FP32)),
        Sample("norm.9x4x264", build(9, 4, 264, weight=BF16)),
        Sample("no eps.5x4x64", build(5, 4, 64, eps=0.0)),
        Sample("misaligned.5x4x256", build(5, 4, 256, shift=True)),
    ]


def _large(build: Callable[..., Build]) -> list[Sample]:
    return [
        *(
            Sample(f"{n}x4x{h}", build(n, 4, h, weight=FP32))
            for n in (13, 512, 4096)
            for h in (1280, 2560, 7168)
        ),
        Sample("1000x8x1288", build(1000, 8, 1288)),
        Sample("2049x2x4096", build(2049, 2, 4096)),
    ]


_PLAIN: dict[str, Any] = {"scale": 1e-4}
_NORMED: dict[str, Any] = {"scale": 1e-4, "weight": BF16}


def _vector(**more: Any) -> Arguments:
    """Mixes of the next sublayer as in the vector of `mhc_pre_big_fuse`."""
    return {
        "x": torch.full((1, 16), 2.0).to(BF16),
        "residual": torch.tensor([[[1.0], [3.0]]]).expand(1, 2, 16).contiguous().to(BF16),
        "post_layer_mix": torch.tensor([[[1.0], [0.5]]]),
        "comb_res_mix": torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]),
        "fn": torch.zeros(8, 32),
        "mhc_scale": torch.ones(3),
        # ln 3 and 0: sigmoids of 3/4 and 1/2
        "mhc_base": torch.tensor([1.0986123, 0.0, 0.0, 1.0986123, 0.0, 1.0986123, 0.0, 0.0]),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 0.0,
        "mhc_sinkhorn_eps": 1e-6,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 2,
        **more,
    }


_POST = torch.tensor([[[1.0], [1.5]]])
_COMB = torch.tensor([[[0.3636363, 0.6315780], [0.6363627, 0.3684211]]])
# 2 + 0.75 + 1.5 and 1 + 0.25 + 1.5
_WRITTEN = torch.tensor([[[4.25], [2.75]]]).expand(1, 2, 16)
_READ = 0.75 * 4.25 + 0.5 * 2.75  # 4.5625

_REJECTS = [
    Reject("x", "fewer columns", edited("x", lambda x: x[..., 8:].contiguous())),
    Reject("residual", "columns", edited("residual", lambda x: x[..., :4].contiguous())),
    Reject("post_layer_mix", "double", edited("post_layer_mix", lambda p: p.double())),
    Reject("comb_res_mix", "transposed", edited("comb_res_mix", lambda c: c.mT)),
    Reject("fn", "a row less", edited("fn", lambda x: x[1:])),
    *MIX_REJECTS,
    Reject("norm_weight", "half", changed(norm_weight=torch.ones(40).half())),
    Reject("norm_eps", "negative", changed(norm_eps=-1.0)),
]

_MHC_POST_PRE = StreamCases(
    small=_small(_arguments),
    large=_large(_arguments),
    benchmarks=[
        Benchmark("4096x4x7168", _arguments(4096, 4, 7168, **_PLAIN), goal_us=215.0),
        Benchmark("norm.4096x4x7168", _arguments(4096, 4, 7168, **_NORMED), goal_us=215.0),
        Benchmark("64x4x7168", _arguments(64, 4, 7168, **_NORMED)),
    ],
    vectors=[
        Vector(
            "weights of zero",
            _vector,
            lambda: (
                _WRITTEN.to(BF16), _POST, _COMB, torch.full((1, 16), _READ).to(BF16),
            ),
        ),
        Vector(
            "normed",
            lambda: _vector(norm_weight=torch.full((16,), 0.5), norm_eps=0.0),
            lambda: (_WRITTEN.to(BF16), _POST, _COMB, torch.full((1, 16), 0.5).to(BF16)),
        ),
    ],
    rejects=_REJECTS,
    compare=compare_sums,
)  # fmt: skip


def _flat(results: Any) -> Any:
    """Without the pair of codes and scales, which the operator below the public function lacks."""
    return (*results[:-1], *results[-1]) if isinstance(results[-1], tuple) else results


def _codes_close(result: Any, expected: Any) -> None:
    """The layer input is a step of bfloat16 apart, so that codes are a step of e4m3 apart."""
    *results, data, sf = _flat(result)
    *wanted, data_wanted, sf_wanted = _flat(expected)
    compare_sums(tuple(results), tuple(wanted))
    assert_equal_results((data.shape, data.dtype), (data_wanted.shape, data_wanted.dtype))
    torch.testing.assert_close(sf, sf_wanted, rtol=2**-7, atol=0)
    got, want = (
        x.float() * s.repeat_interleave(-(-x.shape[-1] // s.shape[-1]), -1)[..., : x.shape[-1]]
        for x, s in ((data, sf), (data_wanted, sf_wanted))
    )
    torch.testing.assert_close(got, want, rtol=2**-3 + 2**-6, atol=2**-6)


_CAST = StreamCases(
    small=[
        Sample("leading.2x48", _arguments(*LEADING, 2, 48, num_per_channels=16)),
        Sample("none", _arguments(0, 4, 64)),
        Sample("one.1x1x16", _arguments(1, 1, 16, num_per_channels=16)),
        Sample("one token", _arguments(2, 128)),
        *(
            Sample(f"{group}.5x2x{h}", _arguments(5, 2, h, weight=BF16, num_per_channels=group))
            for group, h in ((16, 96), (32, 1088), (64, 320), (128, 1280))
        ),
        Sample("few.70x4x256", _arguments(70, 4, 256, weight=FP32)),
        Sample(f"at once.{_MANY}x2x256", _arguments(_MANY, 2, 256, weight=FP32)),
        Sample("rounded.5x3x256", _arguments(5, 3, 256, weight=FP32, round_sf=True)),
        Sample("misaligned.5x2x64", _arguments(5, 2, 64, shift=True, num_per_channels=64)),
    ],
    large=_large(_arguments),
    benchmarks=[Benchmark("4096x4x7168", _arguments(4096, 4, 7168, **_NORMED), goal_us=215.0)],
    vectors=[
        Vector(
            "normed",
            lambda: _vector(
                norm_weight=torch.full((16,), 0.5), norm_eps=0.0, num_per_channels=16
            ),
            lambda: (
                _WRITTEN.to(BF16), _POST, _COMB,
                (
                    torch.full((1, 16), 448.0).to(torch.float8_e4m3fn),
                    torch.tensor([[0.5 / 448]]),
                ),
            ),
        )
    ],
    rejects=[
        *_REJECTS,
        Reject("num_per_channels", "48", changed(num_per_channels=48)),
        Reject("round_sf", "a number", changed(round_sf=1)),
        Reject("amax_min", "zero", changed(amax_min=0.0)),
    ],
    compare=_codes_close,
)  # fmt: skip

CASES = {"mhc_post_pre": _MHC_POST_PRE, "mhc_post_pre_and_per_token_cast": _CAST}
