"""Argument sets of the products of groups of rows."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.gemm import samples
from tile_kernels.gemm.samples import E4M3, MN, PACKED, ROW_MAJOR, TRANSPOSED
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
    counts: list[int],
    n: int,
    k: int,
    spare: int = 0,
    psum: bool = False,
    recipe: tuple[int, int, int] | None = None,
    a_layout: str = MN,
    b_layout: str | None = None,
    order: list[int] | None = None,
) -> Build:
    """Groups of `counts` rows; NaN in the padding of `a`. `order`: of groups in memory."""

    def make(device: torch.device) -> Arguments:
        layout, ends = samples.rows_of_groups(counts, spare)
        if order is not None:
            layout = torch.where(layout >= 0, torch.tensor(order)[layout.clamp(min=0)], -1).int()
        x = torch.randn(layout.numel(), k, device=device)
        x[layout < 0] = torch.nan
        by_row = recipe == _BY_ROW
        shape = (len(counts), n, k)
        b = samples.weights(shape, by_row, b_layout or (MN if by_row else ROW_MAJOR), device)
        found = {
            "grouped_layout": (ends if psum else layout).to(device),
            "a": samples.by_rows(x, a_layout), "b": b,
            "d": samples.empty((layout.numel(), n), torch.bfloat16, device),
        }  # fmt: skip
        found = {**found, "use_psum_layout": True} if psum else found
        return {**found, "recipe": recipe} if recipe else found

    return make


def random_bits(groups: int, rows: int, n: int, k: int) -> Build:
    """Codes below 2 of any bits, made without more memory than they need."""

    def make(device: torch.device) -> Arguments:
        layout, _ = samples.rows_of_groups([rows] * groups)
        a, b = (
            (torch.randint(256, size, dtype=torch.uint8, device=device) & 0xBF).view(E4M3)
            for size in ((layout.numel(), k), (groups, n, k))
        )
        a_sf = torch.rand(layout.numel(), k // 128, device=device) + 0.5
        b_sf = torch.rand(groups, -(-n // 128), k // 128, device=device) + 0.5
        d = samples.empty((layout.numel(), n), torch.bfloat16, device)
        return {"grouped_layout": layout.to(device), "a": (a, a_sf), "b": (b, b_sf), "d": d}

    return make


def _worked() -> Arguments:
    """One row of group 1 among padding; its channel 7 is 2 with scale 0.5."""
    a, b = torch.zeros(128, 128), torch.zeros(2, 8, 128)
    a[0, 7], b[1, 3, 7], b[0, 3, 7] = 2, 1.5, 100
    layout = torch.full((128,), -1, dtype=torch.int32)
    layout[0] = 1
    a_sf, b_sf = torch.full((128, 1), 0.5), torch.tensor([1.0, 4.0]).view(2, 1, 1)
    return {
        "a": (a.to(E4M3), a_sf), "b": (b.to(E4M3), b_sf), "grouped_layout": layout,
        "d": torch.full((128, 8), torch.nan, dtype=torch.bfloat16),
    }  # fmt: skip


def _expected() -> Any:
    """2 * 1.5 * 0.5 * 4."""
    d = torch.zeros(128, 8, dtype=torch.bfloat16)
    d[0, 3] = 6
    return d, d


def bf16(counts: list[int], n: int, k: int, spare: int = 0, psum: bool = False) -> Build:
    """Groups of `counts` rows; NaN in the padding of `a`."""

    def make(device: torch.device) -> Arguments:
        layout, ends = samples.rows_of_groups(counts, spare)
        x = torch.randn(layout.numel(), k, device=device).bfloat16()
        x[layout < 0] = torch.nan
        found = {
            "grouped_layout": (ends if psum else layout).to(device), "a": x,
            "b": torch.randn(len(counts), n, k, device=device).bfloat16(),
            "d": samples.empty((layout.numel(), n), torch.bfloat16, device),
        }  # fmt: skip
        return {**found, "use_psum_layout": True} if psum else found

    return make


def _worked_bf16() -> Arguments:
    a, b = torch.zeros(128, 64), torch.zeros(2, 8, 64)
    a[0, 7], b[1, 3, 7], b[0, 3, 7] = 4, 1.5, 100
    return {**_worked(), "a": a.bfloat16(), "b": b.bfloat16()}


CASES = {
    "m_grouped_fp8_gemm_nt_contiguous": Cases(
        small=[
            Sample("130,0,1,128.384x256", fp8([130, 0, 1, 128], 384, 256, spare=1)),
            Sample("no rows", fp8([0, 0], 384, 256)),
            Sample("no groups", fp8([], 384, 256, spare=1)),
            Sample("psum.one group", fp8([65], 384, 256, psum=True)),
            Sample("psum.130,0,1,128", fp8([130, 0, 1, 128], 384, 256, spare=1, psum=True)),
            Sample("order.127,129,63", fp8([127, 129, 63], 200, 256, order=[2, 0, 1])),
            Sample("row-major.64,0,3", fp8([64, 0, 3], 384, 256, a_layout=ROW_MAJOR)),
            Sample("packed.64,3", fp8([64, 3], 384, 256, a_layout=PACKED, b_layout=PACKED)),
            Sample("transposed.64,3", fp8([64, 3], 384, 256, b_layout=TRANSPOSED)),
            Sample("by row.129,3", fp8([129, 3], 200, 640, recipe=_BY_ROW)),
            Sample(
                "by row.row-major.9,3",
                fp8([9, 3], 200, 256, recipe=_BY_ROW, a_layout=ROW_MAJOR, b_layout=ROW_MAJOR),
            ),
        ],
        large=[
            Sample("700..1300.4096x7168", fp8([700, 1300, 0, 1000, 1, 900], 4096, 7168, 3)),
            Sample("psum.32.4096x2048", fp8([7 * i for i in range(32)], 4096, 2048, 2, True)),
            Sample("over-2^31.256x4096x7168", random_bits(256, 128, 4096, 7168)),
        ],
        benchmarks=[
            Benchmark("8x4096.4096x7168", fp8([4096] * 8, 4096, 7168), goal_us=1421.0),
            Benchmark("8x4096.7168x2048", fp8([4096] * 8, 7168, 2048), goal_us=746.0),
            Benchmark("32x512.4096x7168", fp8([512] * 32, 4096, 7168), goal_us=755.0),
            Benchmark("32x128.4096x7168", fp8([128] * 32, 4096, 7168), goal_us=300.0),
        ],
        vectors=[Vector("one row", _worked, _expected)],
        rejects=[
            *samples.PAIR_REJECTS,
            *samples.RESULT_REJECTS,
            Reject("a", "rows", edited("a", lambda x: (x[0][:-1], x[1]))),
            Reject("grouped_layout", "int64", edited("grouped_layout", lambda x: x.long())),
            Reject("grouped_layout", "fewer", edited("grouped_layout", lambda x: x[1:])),
            Reject("recipe", "unknown", changed(recipe=(1, 128, 64))),
            Reject("use_psum_layout", "an int", changed(use_psum_layout=1)),
        ],
        bad_values=[
            Reject("grouped_layout", "past the end", with_value("grouped_layout", 4, 0)),
            Reject("grouped_layout", "negative", with_value("grouped_layout", -2)),
            Reject("grouped_layout", "two groups", with_value("grouped_layout", 3, 5)),
        ],
        compare=samples.compare,
    ),
    "m_grouped_bf16_gemm_nt_contiguous": Cases(
        small=[
            Sample("130,0,1,128.384x136", bf16([130, 0, 1, 128], 384, 136, spare=1)),
            Sample("no rows", bf16([0, 0], 384, 136)),
            Sample("no groups", bf16([], 384, 136, spare=1)),
            Sample("psum.one group", bf16([65], 384, 136, psum=True)),
            Sample("psum.130,0,1,128", bf16([130, 0, 1, 128], 384, 136, spare=1, psum=True)),
        ],
        large=[Sample("700..1300.4096x7168", bf16([700, 1300, 0, 1000, 1, 900], 4096, 7168, 3))],
        benchmarks=[Benchmark("8x4096.4096x7168", bf16([4096] * 8, 4096, 7168), goal_us=2537.0)],
        vectors=[Vector("one row", _worked_bf16, _expected)],
        rejects=[
            *samples.RESULT_REJECTS,
            Reject("b", "other channels", edited("b", lambda x: x[..., :-8].contiguous())),
            Reject("a", "rows", edited("a", lambda x: x[:-1])),
            Reject("grouped_layout", "int64", edited("grouped_layout", lambda x: x.long())),
        ],
        bad_values=[
            Reject("grouped_layout", "past the end", with_value("grouped_layout", 4, 0)),
        ],
        compare=samples.compare,
    ),
}
