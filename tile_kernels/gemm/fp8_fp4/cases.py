"""Argument sets of the products with e2m1 weights."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.gemm import samples
from tile_kernels.gemm.fp4_weights import prepare_fp4_weights
from tile_kernels.gemm.gemm_nt.cases import fp8 as dense
from tile_kernels.gemm.m_grouped.cases import fp8 as contiguous
from tile_kernels.gemm.masked.cases import BAD_SIZES, SIZE_REJECTS
from tile_kernels.gemm.masked.cases import fp8 as masked
from tile_kernels.gemm.samples import E4M3, PACKED, ROW_MAJOR
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
    with_value,
)

_FP32 = torch.float32


def e2m1(build: Build) -> Build:
    """The same arguments with weights in prepared e2m1."""

    def make(device: torch.device) -> Arguments:
        found = build(device)
        return {**found, "b": samples.fp4_weights(found["b"][0].shape, torch.device(device))}

    return make


def _weights(groups: tuple[int, ...]) -> Any:
    """-1.5 with scale 2 in row 3, channel 7, and 6 with scale `2**-10` in channel 8 of row 4.

    The second code shares the byte of channel 9, which is -0.
    """
    data = torch.zeros((*groups, 8, 64), dtype=torch.uint8)
    data[..., 3, 3], data[..., 4, 4] = 0xB0, 0x87
    sf = torch.full((*groups, 8, 4), 2.0**-40)  # of groups of zeros, which do not count
    sf[..., 3, 0], sf[..., 4, 0] = 2.0, 2.0**-10
    return tuple(prepare_fp4_weights((data.view(torch.int8), sf)))


def _rows(*shape: int) -> Any:
    """Channel 7 is 2, channel 8 is 1, with scale 0.5."""
    a = torch.zeros(*shape, 128)
    a[..., 7], a[..., 8] = 2, 1
    return a.to(E4M3), torch.full((*shape, 1), 0.5)


def _result(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """2 * -1.5 * 0.5 * 2 and 6 * 0.5 * 2**-10."""
    d = torch.zeros(*shape, 8, dtype=dtype)
    d[..., 3], d[..., 4] = -3, 3 * 2.0**-10
    return d


def _worked() -> Arguments:
    d = torch.full((2, 8), torch.nan)
    return {"a": _rows(2), "b": _weights(()), "d": d, "c": torch.arange(16.0).view(2, 8)}


def _expected() -> Any:
    d = torch.arange(16.0).view(2, 8) + _result(2, dtype=_FP32)
    return d, d


def _worked_contiguous() -> Arguments:
    layout = torch.full((128,), -1, dtype=torch.int32)
    layout[:2] = 1
    d = torch.full((128, 8), torch.nan, dtype=torch.bfloat16)
    return {"a": _rows(128), "b": _weights((2,)), "d": d, "grouped_layout": layout}


def _expected_contiguous() -> Any:
    d = _result(128)
    d[2:] = 0
    return d, d


def _worked_masked() -> Arguments:
    d = torch.full((1, 2, 8), torch.nan, dtype=torch.bfloat16)
    sizes = torch.ones(1, dtype=torch.int32)
    return {"a": _rows(1, 2), "b": _weights((1,)), "d": d, "masked_m": sizes, "expected_m": 1}


def _expected_masked() -> Any:
    d = _result(1, 2)
    d[0, 1] = torch.nan
    return d, d


def _part(index: int, change: Any) -> Any:
    return lambda b: (*b[:index], change(b[index]), *b[index + 1 :])


_REJECTS = [
    *(reject for reject in samples.PAIR_REJECTS if reject.argument == "a"),
    *samples.RESULT_REJECTS,
    *(
        Reject("b", label, edited("b", edit))
        for label, edit in (
            ("no tuple", lambda b: b[0]),
            ("four parts", lambda b: (*b, b[2])),
            ("no tensor", lambda b: (b[0], b[1], 1.0)),
            ("bfloat16", _part(0, lambda x: x.bfloat16())),
            ("other channels", _part(0, lambda x: x[..., :-64].contiguous())),
            ("strides", _part(0, lambda x: x.repeat_interleave(2, -1)[..., ::2])),
            ("odd columns", lambda b: (b[0][..., 1:, :].contiguous(), b[1][..., 1:], b[2])),
            ("int32 shifts", _part(1, lambda x: x.int())),
            ("fewer shifts", _part(1, lambda x: x[..., :-8].contiguous())),
            ("strides of shifts", _part(1, lambda x: x.mT.contiguous().mT)),
            ("float64 scales", _part(2, lambda x: x.double())),
            ("fewer scales", _part(2, lambda x: x[..., :-1].contiguous())),
            ("strides of scales", _part(2, lambda x: x.mT.contiguous().mT)),
        )
    ),
    Reject("recipe", "by block", changed(recipe=(1, 128, 128))),
    Reject("recipe_a", "by block", changed(recipe_a=(128, 128))),
    Reject("recipe_b", "by block", changed(recipe_b=(128, 128))),
]

CASES = {
    "fp8_fp4_gemm_nt": Cases(
        small=[
            Sample("132x320x256", e2m1(dense(132, 320, 256))),
            Sample("0x320x256", e2m1(dense(0, 320, 256))),
            Sample("1x320x256", e2m1(dense(1, 320, 256))),
            Sample("131x320x1280", e2m1(dense(131, 320, 1280))),
            Sample("c.2x8x0", e2m1(dense(2, 8, 0, add=True))),
            Sample("7x320x256.row-major", e2m1(dense(7, 320, 256, a_layout=ROW_MAJOR))),
            Sample("129x320x640.packed", e2m1(dense(129, 320, 640, a_layout=PACKED))),
            Sample("fp32.c.130x320x256", e2m1(dense(130, 320, 256, _FP32, add=True))),
            Sample("c.130x320x256", e2m1(dense(130, 320, 256, add=True))),
            Sample("strided.130x320x256", e2m1(dense(130, 320, 256, extra=64))),
            Sample("3000x512x128", e2m1(dense(3000, 512, 128))),
            Sample("fp32.3000x512x128", e2m1(dense(3000, 512, 128, _FP32))),
        ],
        large=[
            Sample("4097x2112x7168", e2m1(dense(4097, 2112, 7168))),
            Sample("1x4096x7168", e2m1(dense(1, 4096, 7168))),
            Sample("fp32.c.1000x576x16384", e2m1(dense(1000, 576, 16384, _FP32, add=True))),
        ],
        benchmarks=[
            Benchmark("4096x4096x7168", e2m1(dense(4096, 4096, 7168))),
            Benchmark("128x4096x7168", e2m1(dense(128, 4096, 7168))),
            Benchmark("1x4096x7168", e2m1(dense(1, 4096, 7168))),
        ],
        vectors=[Vector("two groups", _worked, _expected)],
        rejects=[
            *_REJECTS,
            Reject("c", "dtype", lambda a: {**a, "c": a["d"].double()}),
            Reject("c", "overlap", lambda a: {**a, "c": a["d"].view(a["d"].shape)}),
        ],
        compare=samples.compare,
    ),
    "m_grouped_fp8_fp4_gemm_nt_contiguous": Cases(
        small=[
            Sample("130,0,1,128.384x256", e2m1(contiguous([130, 0, 1, 128], 384, 256, spare=1))),
            Sample("no rows", e2m1(contiguous([0, 0], 384, 256))),
            Sample("no groups", e2m1(contiguous([], 384, 256, spare=1))),
            Sample("psum.one group", e2m1(contiguous([65], 384, 256, psum=True))),
            Sample(
                "psum.130,0,1,128", e2m1(contiguous([130, 0, 1, 128], 384, 256, spare=1, psum=True))
            ),
            Sample("row-major.64,0,3", e2m1(contiguous([64, 0, 3], 200, 256, a_layout=ROW_MAJOR))),
            Sample("packed.64,3", e2m1(contiguous([64, 3], 384, 640, a_layout=PACKED))),
        ],
        large=[
            Sample("700..1300.4096x7168", e2m1(contiguous([700, 1300, 0, 1, 900], 4096, 7168, 3))),
            Sample(
                "psum.32.4096x2048",
                e2m1(contiguous([7 * i for i in range(32)], 4096, 2048, 2, True)),
            ),
        ],
        benchmarks=[
            Benchmark("8x4096.4096x7168", e2m1(contiguous([4096] * 8, 4096, 7168))),
            Benchmark("32x128.4096x7168", e2m1(contiguous([128] * 32, 4096, 7168))),
        ],
        vectors=[Vector("two rows", _worked_contiguous, _expected_contiguous)],
        rejects=[
            *_REJECTS,
            Reject("a", "rows", edited("a", lambda x: (x[0][1:], x[1][1:].contiguous()))),
            Reject("grouped_layout", "int64", edited("grouped_layout", lambda x: x.long())),
            Reject("grouped_layout", "fewer", edited("grouped_layout", lambda x: x[1:])),
        ],
        bad_values=[
            Reject("grouped_layout", "past the end", with_value("grouped_layout", 4)),
            Reject("grouped_layout", "negative", with_value("grouped_layout", -2)),
        ],
        compare=samples.compare,
    ),
    "m_grouped_fp8_fp4_gemm_nt_masked": Cases(
        small=[
            Sample("20,0,152 of 152.320x256", e2m1(masked([20, 0, 152], 152, 320, 256))),
            Sample("large tiles", e2m1(masked([20, 0, 150], 150, 320, 256, expected_m=100))),
            Sample("no rows", e2m1(masked([0, 0], 0, 320, 256))),
            Sample("one row", e2m1(masked([1, 0, 1], 1, 320, 256, expected_m=1000))),
            Sample("cut", e2m1(masked([70, 66], 66, 320, 256))),
            Sample("none", e2m1(masked([0, 0], 66, 320, 256))),
            Sample("row-major", e2m1(masked([65, 3], 70, 320, 256, a_layout=ROW_MAJOR))),
            Sample("packed", e2m1(masked([65, 3], 70, 200, 1280, a_layout=PACKED))),
        ],
        large=[
            Sample("8.4096x7168", e2m1(masked([0, 1, 20, 64, 65, 192, 300, 512], 512, 4096, 7168))),
            Sample(
                "large tiles.8.4096x7168",
                e2m1(masked([0, 1, 20, 64, 65, 192, 300, 512], 512, 4096, 7168, 192)),
            ),
        ],
        benchmarks=[
            Benchmark("32x16 of 128.4096x7168", e2m1(masked([16] * 32, 128, 4096, 7168))),
            Benchmark("32x192 of 512.4096x7168", e2m1(masked([192] * 32, 512, 4096, 7168, 192))),
            Benchmark("6x20 of 128.7168x2048", e2m1(masked([20] * 6, 128, 7168, 2048))),
        ],
        vectors=[Vector("one row", _worked_masked, _expected_masked)],
        rejects=[
            *_REJECTS,
            *SIZE_REJECTS,
        ],
        bad_values=BAD_SIZES,
        compare=samples.compare_written,
    ),
}
