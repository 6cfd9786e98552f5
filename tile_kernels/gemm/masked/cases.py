"""Argument sets of the products of groups whose sizes are known on the device."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.gemm import samples
from tile_kernels.gemm.samples import E4M3, MN, PACKED, ROW_MAJOR
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

_BY_ROW = (1, 1, 128)


def fp8(
    sizes: list[int],
    max_m: int,
    n: int,
    k: int,
    expected_m: int = 20,
    recipe: tuple[int, int, int] | None = None,
    a_layout: str = MN,
) -> Build:
    """NaN in rows of `a` behind the sizes."""

    def make(device: torch.device) -> Arguments:
        groups = len(sizes)
        x = torch.randn(groups, max_m, k, device=device)
        for rows, size in zip(x, sizes):
            rows[size:] = torch.nan
        by_row = recipe == _BY_ROW
        found = {
            "a": samples.by_rows(x, a_layout),
            "b": samples.weights((groups, n, k), by_row, MN if by_row else ROW_MAJOR, device),
            "d": samples.empty((groups, max_m, n), torch.bfloat16, device),
            "masked_m": torch.tensor(sizes, dtype=torch.int32, device=device),
            "expected_m": expected_m,
        }
        return {**found, "recipe": recipe} if recipe else found

    return make


def _worked() -> Arguments:
    a, b = torch.zeros(1, 2, 128), torch.zeros(1, 8, 128)
    a[0, :, 7], b[0, 3, 7] = torch.tensor([2.0, 4.0]), 1.5
    return {
        "a": (a.to(E4M3), torch.full((1, 2, 1), 0.5)),
        "b": (b.to(E4M3), torch.full((1, 1, 1), 4.0)),
        "d": torch.full((1, 2, 8), torch.nan, dtype=torch.bfloat16),
        "masked_m": torch.ones(1, dtype=torch.int32), "expected_m": 1,
    }  # fmt: skip


def _expected() -> Any:
    """2 * 1.5 * 0.5 * 4 in the first row, nothing in the second."""
    d = torch.full((1, 2, 8), torch.nan, dtype=torch.bfloat16)
    d[0, 0] = torch.tensor([0, 0, 0, 6, 0, 0, 0, 0])
    return d, d


def bf16(sizes: list[int], max_m: int, n: int, k: int, expected_m: int = 20) -> Build:
    """NaN in rows of `a` behind the sizes."""

    def make(device: torch.device) -> Arguments:
        groups = len(sizes)
        x = torch.randn(groups, max_m, k, device=device).bfloat16()
        for rows, size in zip(x, sizes):
            rows[size:] = torch.nan
        return {
            "a": x, "b": torch.randn(groups, n, k, device=device).bfloat16(),
            "d": samples.empty((groups, max_m, n), torch.bfloat16, device),
            "masked_m": torch.tensor(sizes, dtype=torch.int32, device=device),
            "expected_m": expected_m,
        }  # fmt: skip

    return make


def _worked_bf16() -> Arguments:
    a, b = torch.zeros(1, 2, 64), torch.zeros(1, 8, 64)
    a[0, :, 7], b[0, 3, 7] = torch.tensor([4.0, 8.0]), 1.5
    return {**_worked(), "a": a.bfloat16(), "b": b.bfloat16()}


SIZE_REJECTS = [
    Reject("masked_m", "int64", edited("masked_m", lambda x: x.long())),
    Reject("masked_m", "fewer", edited("masked_m", lambda x: x[1:])),
    Reject("expected_m", "zero", changed(expected_m=0)),
]
BAD_SIZES = [
    Reject("masked_m", "past the end", with_value("masked_m", 153)),
    Reject("masked_m", "negative", with_value("masked_m", -1)),
]

CASES = {
    "m_grouped_fp8_gemm_nt_masked": Cases(
        small=[
            Sample("20,0,152 of 152.320x256", fp8([20, 0, 152], 152, 320, 256)),
            Sample("large tiles", fp8([20, 0, 150], 150, 320, 256, expected_m=100)),
            Sample("no rows", fp8([0, 0], 0, 320, 256)),
            Sample("one row", fp8([1, 0, 1], 1, 320, 256, expected_m=1000)),
            Sample("cut", fp8([70, 66], 66, 320, 256)),
            Sample("none", fp8([0, 0], 66, 320, 256)),
            Sample("row-major", fp8([65, 3], 70, 320, 256, a_layout=ROW_MAJOR)),
            Sample("packed", fp8([65, 3], 70, 320, 640, a_layout=PACKED)),
            Sample("by row", fp8([65, 3], 130, 200, 256, 128, recipe=_BY_ROW)),
        ],
        large=[
            Sample("8.4096x7168", fp8([0, 1, 20, 64, 65, 192, 300, 512], 512, 4096, 7168)),
            Sample(
                "large tiles.8.4096x7168",
                fp8([0, 1, 20, 64, 65, 192, 300, 512], 512, 4096, 7168, 192),
            ),
        ],
        benchmarks=[
            Benchmark("32x16 of 128.4096x7168", fp8([16] * 32, 128, 4096, 7168), goal_us=244.0),
            Benchmark("32x192 of 512.4096x7168", fp8([192] * 32, 512, 4096, 7168, 192)),
            Benchmark("6x20 of 128.7168x2048", fp8([20] * 6, 128, 7168, 2048)),
        ],
        vectors=[Vector("one row", _worked, _expected)],
        rejects=[
            *samples.PAIR_REJECTS,
            *samples.RESULT_REJECTS,
            *SIZE_REJECTS,
        ],
        bad_values=BAD_SIZES,
        compare=samples.compare_written,
    ),
    "m_grouped_bf16_gemm_nt_masked": Cases(
        small=[
            Sample("20,0,150 of 150.320x136", bf16([20, 0, 150], 150, 320, 136)),
            Sample("large tiles", bf16([20, 0, 150], 150, 320, 136, expected_m=100)),
            Sample("no rows", bf16([0, 0], 0, 320, 136)),
            Sample("one row", bf16([1, 0, 1], 1, 320, 136)),
        ],
        large=[Sample("8.4096x7168", bf16([0, 1, 20, 64, 65, 192, 300, 512], 512, 4096, 7168))],
        benchmarks=[Benchmark("32x16 of 128.4096x7168", bf16([16] * 32, 128, 4096, 7168))],
        vectors=[Vector("one row", _worked_bf16, _expected)],
        rejects=[
            *samples.RESULT_REJECTS,
            Reject("b", "other channels", edited("b", lambda x: x[..., :-8].contiguous())),
            *SIZE_REJECTS,
        ],
        bad_values=BAD_SIZES,
        compare=samples.compare_written,
    ),
}
