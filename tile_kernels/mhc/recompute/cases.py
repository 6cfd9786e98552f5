"""Argument sets of `mhc_multilayer_recompute`."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.mhc.samples import LEADING, StreamCases
from tile_kernels.runtime.cases import Arguments, Benchmark, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, changed, edited, misaligned


@builder
def _recompute(
    device: torch.device, reads: int, writes: int, *shape: int, shift: bool = False
) -> Arguments:
    """`shape` is the residual's."""
    *lead, m, h = shape

    def normal(count: int, *last: int, dtype: torch.dtype = FP32) -> Any:
        normals = (torch.randn(*lead, *last, device=device).to(dtype) for _ in range(count))
        return [misaligned(x) if shift else x for x in normals]

    return {
        "initial_residual": normal(1, m, h, dtype=BF16)[0],
        "pre_mix_list": normal(reads, m, 1),
        "layer_output_list": normal(writes, h, dtype=BF16),
        "post_mix_list": normal(writes, m, 1),
        "comb_mix_list": normal(writes, m, m),
        "layer_input_list": normal(reads, h, dtype=BF16),
        "residual_list": normal(writes, m, h, dtype=BF16),
    }


def _without(name: str) -> Any:
    """An edit that takes the last tensor from a list."""
    return edited(name, lambda tensors: tensors[:-1])


_MHC_MULTILAYER_RECOMPUTE = StreamCases(
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
        Benchmark("10.10.4096x4x4096", _recompute(10, 10, 4096, 4, 4096), goal_us=540.0),
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

CASES = {"mhc_multilayer_recompute": _MHC_MULTILAYER_RECOMPUTE}
