"""Argument sets of the dense products."""

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
)

_BY_ROW = (1, 1, 128)


def fp8(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    add: bool = False,
    recipe: tuple[int, int, int] | None = None,
    a_layout: str = MN,
    b_layout: str | None = None,
    extra: int = 0,
) -> Build:
    """`extra`: by how many elements rows of `a` and `d` are longer in memory."""

    def make(device: torch.device) -> Arguments:
        a, a_sf = samples.by_rows(torch.randn(m, k, device=device), a_layout)
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, extra)).view(E4M3)[:, :k]
        by_row = recipe == _BY_ROW
        layout = b_layout or (MN if by_row else ROW_MAJOR)
        b = samples.weights((n, k), by_row, layout, device)
        d = samples.empty((m, n + extra), dtype, device)[:, :n]
        found = {"a": (a, a_sf), "b": b, "d": d}
        if add:
            wide = torch.randn(m, n + extra, device=device) * k**0.5
            found["c"] = wide.to(dtype)[:, :n]
        return {**found, "recipe": recipe} if recipe else found

    return make


def _worked() -> Arguments:
    """Row 1 of `a` is 2 in channel 3 and 1 in channel 130, with scales 0.5 and 4."""
    a, b = torch.zeros(2, 256), torch.zeros(8, 256)
    a[1, 3], a[1, 130], b[5, 3], b[5, 130] = 2, 1, 3, -1.5
    a_sf, b_sf = torch.tensor([[1, 1], [0.5, 4]]), torch.tensor([[2.0, 0.25]])
    return {
        "a": (a.to(E4M3), a_sf), "b": (b.to(E4M3), b_sf), "d": torch.full((2, 8), torch.nan),
        "c": torch.arange(16.0).view(2, 8),
    }  # fmt: skip


def _expected() -> Any:
    """2 * 3 * 0.5 * 2 + 1 * -1.5 * 4 * 0.25 = 4.5 on top of c[1, 5] = 13."""
    d = torch.arange(16.0).view(2, 8)
    d[1, 5] += 4.5
    return d, d


_FP32 = torch.float32


def bf16(
    m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, add: bool = False, extra: int = 0
) -> Build:
    """`extra`: by how many elements rows of `a` and `d` are longer in memory."""

    def make(device: torch.device) -> Arguments:
        a = torch.randn(m, k + extra, device=device).bfloat16()[:, :k]
        b = torch.randn(n, k, device=device).bfloat16()
        found = {"a": a, "b": b, "d": samples.empty((m, n + extra), dtype, device)[:, :n]}
        if add:
            found["c"] = torch.randn(m, n + extra, device=device).mul(k**0.5).to(dtype)[:, :n]
        return found

    return make


def _worked_bf16() -> Arguments:
    a, b = torch.zeros(2, 72), torch.zeros(8, 72)
    a[1, 3], a[1, 70], b[5, 3], b[5, 70] = 2, 1, 3, -1.5
    return {
        "a": a.bfloat16(), "b": b.bfloat16(), "d": torch.full((2, 8), torch.nan),
        "c": torch.arange(16.0).view(2, 8),
    }  # fmt: skip


CASES = {
    "fp8_gemm_nt": Cases(
        small=[
            Sample("132x320x256", fp8(132, 320, 256)),
            Sample("0x320x256", fp8(0, 320, 256)),
            Sample("1x320x256", fp8(1, 320, 256)),
            Sample("131x320x256", fp8(131, 320, 256)),
            Sample("2x8x0", fp8(2, 8, 0)),
            Sample("c.2x8x0", fp8(2, 8, 0, add=True)),
            Sample("7x320x256.row-major", fp8(7, 320, 256, a_layout=ROW_MAJOR)),
            Sample("129x320x256.packed", fp8(129, 320, 256, a_layout=PACKED, b_layout=PACKED)),
            Sample("65x320x256.transposed", fp8(65, 320, 256, b_layout=TRANSPOSED)),
            Sample("fp32.130x320x256", fp8(130, 320, 256, _FP32)),
            Sample("fp32.c.130x320x256", fp8(130, 320, 256, _FP32, add=True)),
            Sample("c.130x320x256", fp8(130, 320, 256, add=True)),
            Sample("by row.130x200x256", fp8(130, 200, 256, recipe=_BY_ROW)),
            Sample(
                "by row.packed.66x200x640",
                fp8(66, 200, 640, _FP32, recipe=_BY_ROW, a_layout=PACKED, b_layout=PACKED),
            ),
            Sample(
                "by row.row-major.66x200x640",
                fp8(66, 200, 640, recipe=_BY_ROW, a_layout=ROW_MAJOR, b_layout=ROW_MAJOR),
            ),
            Sample("strided.130x320x256", fp8(130, 320, 256, extra=64)),
            Sample("3000x512x128", fp8(3000, 512, 128)),
        ],
        large=[
            Sample("4097x2112x7168", fp8(4097, 2112, 7168)),
            Sample("1x4096x7168", fp8(1, 4096, 7168)),
            Sample("fp32.c.1000x576x16384", fp8(1000, 576, 16384, _FP32, add=True)),
            Sample("by row.4096x7168x2048", fp8(4096, 7168, 2048, _FP32, recipe=_BY_ROW)),
        ],
        benchmarks=[
            Benchmark("4096x4096x7168", fp8(4096, 4096, 7168), goal_us=179.0),
            Benchmark("4096x7168x2048", fp8(4096, 7168, 2048), goal_us=98.0),
            Benchmark("fp32.c.4096x4096x7168", fp8(4096, 4096, 7168, _FP32, add=True)),
            Benchmark("128x4096x7168", fp8(128, 4096, 7168)),
            Benchmark("1x4096x7168", fp8(1, 4096, 7168)),
        ],
        vectors=[Vector("two channels", _worked, _expected)],
        rejects=[
            *samples.PAIR_REJECTS,
            *samples.RESULT_REJECTS,
            Reject("c", "dtype", lambda a: {**a, "c": a["d"].double()}),
            Reject("c", "shape", lambda a: {**a, "c": a["d"][1:]}),
            Reject("c", "overlap", lambda a: {**a, "c": a["d"].view(a["d"].shape)}),
            Reject("recipe", "unknown", changed(recipe=(1, 128, 64))),
            Reject("recipe_b", "unknown", changed(recipe_b=(64, 128))),
            Reject("b", "odd columns", edited("b", lambda x: (x[0][:-1], x[1]))),
        ],
        compare=samples.compare,
    ),
    "bf16_gemm_nt": Cases(
        small=[
            Sample("132x320x136", bf16(132, 320, 136)),
            Sample("0x320x136", bf16(0, 320, 136)),
            Sample("1x320x136", bf16(1, 320, 136)),
            Sample("2x8x0", bf16(2, 8, 0)),
            Sample("fp32.c.130x320x136", bf16(130, 320, 136, _FP32, add=True)),
            Sample("c.130x320x136", bf16(130, 320, 136, add=True)),
            Sample("strided.65x320x136", bf16(65, 320, 136, extra=8)),
            Sample("3000x512x64", bf16(3000, 512, 64)),
        ],
        large=[
            Sample("4097x2112x7168", bf16(4097, 2112, 7168)),
            Sample("fp32.c.1000x576x16384", bf16(1000, 576, 16384, _FP32, add=True)),
        ],
        benchmarks=[
            Benchmark("4096x4096x7168", bf16(4096, 4096, 7168), goal_us=301.0),
            Benchmark("fp32.c.4096x4096x7168", bf16(4096, 4096, 7168, _FP32, add=True)),
        ],
        vectors=[
            Vector(
                "two channels",
                _worked_bf16,
                lambda: (_expected()[0], _expected()[0]),  # 2 * 3 - 1.5 = 4.5 again
            )
        ],
        rejects=[
            *samples.RESULT_REJECTS,
            Reject("b", "other channels", edited("b", lambda x: x[..., :-8].contiguous())),
            Reject("a", "channels", edited("a", lambda x: x[:, :-1])),
            Reject("c", "dtype", lambda a: {**a, "c": a["d"].double()}),
        ],
        compare=samples.compare,
    ),
}
