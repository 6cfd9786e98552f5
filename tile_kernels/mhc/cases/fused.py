"""Argument sets of the operators that take several steps."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.mhc.cases import BF16, LEADING, StreamCases
from tile_kernels.runtime.cases import (
    Arguments,
    Benchmark,
    Build,
    Reject,
    Sample,
    Vector,
    changed,
    close_results,
    edited,
    misaligned,
)


def _big_fuse(
    *shape: int, scale: float = 1e-2, eps: float = 1e-6, repeat: int = 10, shift: bool = False
) -> Build:
    m, h = shape[-2:]
    count = m * (m + 2)

    def make(device: torch.device) -> Arguments:
        residual = torch.randn(shape, device=device).to(BF16)
        return {
            "residual": misaligned(residual) if shift else residual,
            "fn": scale * torch.randn(count, m * h, device=device),
            "mhc_scale": torch.randn(3, device=device),
            "mhc_base": torch.randn(count, device=device),
            "rms_eps": 1e-6,
            "mhc_pre_eps": 1e-2,
            "mhc_sinkhorn_eps": eps,
            "mhc_post_mult_value": 2.0,
            "sinkhorn_repeat": repeat,
        }

    return make


# A step of bfloat16, and in float32 what the order of a sum makes.
_compare = close_results(rtol=1e-4, atol=1e-4, rtol_bfloat16=2**-7)


MHC_PRE_BIG_FUSE = StreamCases(
    small=[
        Sample("leading.2x40", _big_fuse(*LEADING, 2, 40)),
        Sample("none", _big_fuse(0, 4, 64)),
        Sample("one.1x1x8", _big_fuse(1, 1, 8)),
        *(Sample(f"7x{m}x72", _big_fuse(7, m, 72)) for m in range(1, 9)),
        Sample("wide.3x4x1064", _big_fuse(3, 4, 1064)),
        Sample("many.270x2x24", _big_fuse(270, 2, 24)),
        Sample("no eps.5x4x64", _big_fuse(5, 4, 64, eps=0.0, repeat=1)),
        Sample("misaligned.5x4x64", _big_fuse(5, 4, 64, shift=True)),
    ],
    large=[
        *(Sample(f"{n}x4x{h}", _big_fuse(n, 4, h)) for n in (13, 4096) for h in (1280, 7168)),
        Sample("1000x8x1288", _big_fuse(1000, 8, 1288)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _big_fuse(4096, 4, 7168, scale=1e-4), goal_us=110.0),
        Benchmark("16x4x7168", _big_fuse(16, 4, 7168, scale=1e-4)),
    ],
    vectors=[
        Vector(
            "weights of zero",
            lambda: {
                "residual": torch.tensor([1.0, 2.0, 3.0, 4.0] * 4).view(1, 2, 8).to(BF16),
                "fn": torch.zeros(8, 16),
                "mhc_scale": torch.ones(3),
                # ln 3 and 0: sigmoids of 3/4 and 1/2; and the logits of the Sinkhorn example
                "mhc_base": torch.tensor(
                    [1.0986123, 0.0, 0.0, 1.0986123, 0.0, 1.0986123, 0.0, 0.0]
                ),
                "rms_eps": 1e-6,
                "mhc_pre_eps": 0.0,
                "mhc_sinkhorn_eps": 1e-6,
                "mhc_post_mult_value": 2.0,
                "sinkhorn_repeat": 2,
            },
            lambda: (
                torch.tensor([[[1.0], [1.5]]]),
                torch.tensor([[[0.3636363, 0.6315780], [0.6363627, 0.3684211]]]),
                torch.tensor([1.25, 2.5, 3.75, 5.0] * 2)[None].to(BF16),
            ),
        )
    ],
    rejects=[
        Reject("residual", "columns", edited("residual", lambda x: x[..., :4].contiguous())),
        Reject("fn", "a row less", edited("fn", lambda x: x[1:])),
        Reject("mhc_scale", "two", edited("mhc_scale", lambda x: x[1:])),
        Reject("mhc_base", "one less", edited("mhc_base", lambda x: x[1:])),
        Reject("rms_eps", "words", changed(rms_eps="small")),
        Reject("mhc_pre_eps", "words", changed(mhc_pre_eps="small")),
        Reject("mhc_sinkhorn_eps", "negative", changed(mhc_sinkhorn_eps=-1e-6)),
        Reject("mhc_post_mult_value", "words", changed(mhc_post_mult_value="two")),
        Reject("sinkhorn_repeat", "none", changed(sinkhorn_repeat=0)),
        Reject("n_splits", "none", changed(n_splits=0)),
    ],
    compare=_compare,
)


MHC_PRE_FWD = StreamCases(
    small=[
        *(sample for sample in MHC_PRE_BIG_FUSE.small if not sample.label.startswith("7x")),
        *(Sample(f"7x{m}x72", _big_fuse(7, m, 72)) for m in (3, 4, 8)),
    ],
    large=MHC_PRE_BIG_FUSE.large,
    benchmarks=[Benchmark("4096x4x7168", _big_fuse(4096, 4, 7168, scale=1e-4))],
    vectors=[
        Vector(
            "weights of zero",
            MHC_PRE_BIG_FUSE.vectors[0].arguments,
            # s = 4 * 30; no product, so mixes of zero and logits that are the base
            lambda: (
                torch.tensor([1.25, 2.5, 3.75, 5.0] * 2)[None].to(BF16),
                *MHC_PRE_BIG_FUSE.vectors[0].expected()[:2],
                torch.tensor([[[0.75], [0.5]]]),
                torch.zeros(1, 8),
                torch.zeros(1, 8),
                torch.tensor([120.0]),
                torch.tensor([[[0.0, 1.0986123], [0.0, 0.0]]]),
            ),
        )
    ],
    rejects=[reject for reject in MHC_PRE_BIG_FUSE.rejects if reject.argument != "n_splits"],
    compare=_compare,
)


def _recompute(reads: int, writes: int, *shape: int, shift: bool = False) -> Build:
    """`shape` is the residual's."""
    *lead, m, h = shape

    def make(device: torch.device) -> Arguments:
        def normal(count: int, *last: int, dtype: torch.dtype = torch.float32) -> Any:
            made = (torch.randn(*lead, *last, device=device).to(dtype) for _ in range(count))
            return [misaligned(x) if shift else x for x in made]

        return {
            "initial_residual": normal(1, m, h, dtype=BF16)[0],
            "pre_mix_list": normal(reads, m, 1),
            "layer_output_list": normal(writes, h, dtype=BF16),
            "post_mix_list": normal(writes, m, 1),
            "comb_mix_list": normal(writes, m, m),
            "layer_input_list": normal(reads, h, dtype=BF16),
            "residual_list": normal(writes, m, h, dtype=BF16),
        }

    return make


def _without(name: str) -> Any:
    """An edit that takes the last tensor from a list."""
    return edited(name, lambda tensors: tensors[:-1])


MHC_MULTILAYER_RECOMPUTE = StreamCases(
    small=[
        Sample("3.3.leading.2x24", _recompute(3, 3, *LEADING, 2, 24)),
        Sample("none", _recompute(2, 2, 0, 4, 16)),
        Sample("1.0.one", _recompute(1, 0, 1, 1, 8)),
        Sample("1.1.5x4x72", _recompute(1, 1, 5, 4, 72)),
        Sample("3.2.4x3x40", _recompute(3, 2, 4, 3, 40)),
        Sample("10.10.2x4x16", _recompute(10, 10, 2, 4, 16)),
        Sample("11.10.2x4x16", _recompute(11, 10, 2, 4, 16)),
        Sample("23.23.2x2x8", _recompute(23, 23, 2, 2, 8)),
        Sample("2.2.3x8x264", _recompute(2, 2, 3, 8, 264)),
        Sample("2.2.300x1x8", _recompute(2, 2, 300, 1, 8)),
        Sample("misaligned.2.1.3x4x24", _recompute(2, 1, 3, 4, 24, shift=True)),
    ],
    large=[
        Sample(f"{a}.{b}.8192x4x{h}", _recompute(a, b, 8192, 4, h))
        for a, b, h in [(1, 1, 2560), (3, 2, 2560), (10, 9, 7168), (10, 10, 8192), (12, 12, 4096)]
    ],
    benchmarks=[
        Benchmark("10.10.4096x4x4096", _recompute(10, 10, 4096, 4, 4096), goal_us=545.0),
        Benchmark("10.9.8192x4x2560", _recompute(10, 9, 8192, 4, 2560)),
    ],
    vectors=[
        Vector(
            "one layer",
            lambda: {
                "initial_residual": torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]).to(BF16),
                "pre_mix_list": [torch.tensor([[[0.25], [0.5]]])],
                "layer_output_list": [torch.tensor([[10.0, 20.0]]).to(BF16)],
                "post_mix_list": [torch.tensor([[[1.0], [0.5]]])],
                "comb_mix_list": [torch.tensor([[[0.75, 0.25], [0.5, 0.5]]])],
                "layer_input_list": [torch.zeros(1, 2).to(BF16)],
                "residual_list": [torch.zeros(1, 2, 2).to(BF16)],
            },
            lambda: (
                None,
                [torch.tensor([[1.75, 2.5]]).to(BF16)],
                [torch.tensor([[[12.25, 23.5], [6.75, 12.5]]]).to(BF16)],
            ),
        )
    ],
    rejects=[
        Reject("pre_mix_list", "a tensor", lambda a: {**a, "pre_mix_list": a["pre_mix_list"][0]}),
        Reject("pre_mix_list", "empty", changed(
            pre_mix_list=[], layer_output_list=[], post_mix_list=[], comb_mix_list=[],
            layer_input_list=[], residual_list=[])),
        Reject("layer_output_list", "two less", edited("layer_output_list", lambda x: x[:-2])),
        Reject("post_mix_list", "one less", _without("post_mix_list")),
        Reject("comb_mix_list", "one less", _without("comb_mix_list")),
        Reject("layer_input_list", "one less", _without("layer_input_list")),
        Reject("residual_list", "one less", _without("residual_list")),
        Reject("residual_list", "shared", edited("residual_list", lambda x: [x[0], *x[:-1]])),
        Reject("comb_mix_list[1]", "bfloat16", edited(
            "comb_mix_list", lambda x: [x[0], x[1].to(BF16), *x[2:]])),
        Reject("layer_input_list[0]", "another shape", edited(
            "layer_input_list", lambda x: [x[0][..., 1:].contiguous(), *x[1:]])),
        Reject("initial_residual", "is written", lambda a: {
            **a, "residual_list": [a["initial_residual"], *a["residual_list"][1:]]}),
    ],
)  # fmt: skip
