"""Argument sets of the sums over groups of rows."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.gemm import samples
from tile_kernels.gemm.samples import E4M3, ROW_MAJOR
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


def fp8(
    sizes: list[int],
    m: int,
    n: int,
    add: bool = False,
    dtype: torch.dtype = torch.float32,
    spare: int = 0,
    ks: bool = False,
    transposed: bool = False,
) -> Build:
    """`spare` rows behind the last group are NaN; `transposed`: scales as DeepGEMM has them."""

    def make(device: torch.device) -> Arguments:
        rows = sum(sizes) + spare

        def operand(size: int) -> Any:
            x = torch.randn(size, rows, device=device)
            x[:, sum(sizes) :] = torch.nan
            data, sf = samples.by_rows(x, ROW_MAJOR)
            sf = sf.T.contiguous()
            return data, sf.T if transposed else sf

        found = {
            "grouped_layout": torch.tensor(sizes, dtype=torch.int32, device=device),
            "a": operand(m), "b": operand(n), "ks": sizes if ks else None,
            "d": samples.empty((len(sizes), m, n), dtype, device),
        }  # fmt: skip
        if add:
            found["c"] = torch.randn(len(sizes), m, n, device=device) * 20
        return found

    return make


def _flat(build: Build) -> Build:
    """Data of one dimension, one matrix for each group."""

    def make(device: torch.device) -> Arguments:
        found = build(device)
        for name in ("a", "b"):
            data, sf = found[name]
            parts = data.view(torch.uint8).split(found["ks"], dim=1)
            found[name] = torch.cat([part.flatten() for part in parts]).view(E4M3), sf
        return found

    return make


def _worked() -> Arguments:
    """Group 0 has no rows; group 1 has 2 * 3 in row 5, with scales 0.5 and 4."""
    a, b = torch.zeros(4, 128), torch.zeros(8, 128)
    a[1, 5], b[2, 5] = 2, 3
    return {
        "a": (a.to(E4M3), torch.full((1, 4), 0.5)), "b": (b.to(E4M3), torch.full((1, 8), 4.0)),
        "d": torch.full((2, 4, 8), torch.nan), "ks": None,
        "grouped_layout": torch.tensor([0, 128], dtype=torch.int32), "c": torch.ones(2, 4, 8),
    }  # fmt: skip


def _expected() -> Any:
    d = torch.ones(2, 4, 8)
    d[1, 1, 2] += 12
    return d, d


_BF16 = torch.bfloat16


def bf16(
    sizes: list[int], m: int, n: int, add: bool = False, dtype: torch.dtype = torch.float32
) -> Build:
    """Groups of `sizes` rows."""

    def make(device: torch.device) -> Arguments:
        found = {
            "grouped_layout": torch.tensor(sizes, dtype=torch.int32, device=device),
            "a": torch.randn(sum(sizes), m, device=device).bfloat16(),
            "b": torch.randn(sum(sizes), n, device=device).bfloat16(), "ks": None,
            "d": samples.empty((len(sizes), m, n), dtype, device),
        }  # fmt: skip
        if add:
            found["c"] = torch.randn(len(sizes), m, n, device=device) * 20
        return found

    return make


def _worked_bf16() -> Arguments:
    a, b = torch.zeros(128, 4), torch.zeros(128, 8)
    a[5, 1], b[5, 2] = 4, 3
    return {**_worked(), "a": a.bfloat16(), "b": b.bfloat16()}


CASES = {
    "k_grouped_fp8_gemm_nt_contiguous": Cases(
        small=[
            Sample("128,0,384,128.192x320", fp8([128, 0, 384, 128], 192, 320, spare=128)),
            Sample("c.128,0,384,128.192x320", fp8([128, 0, 384, 128], 192, 320, add=True)),
            Sample("bf16.128,0,384,128.192x320", fp8([128, 0, 384, 128], 192, 320, dtype=_BF16)),
            Sample("one group", fp8([640], 192, 320)),
            Sample("no rows", fp8([0, 0], 192, 320)),
            Sample("c.no rows", fp8([0, 0], 192, 320, add=True)),
            Sample("no groups", fp8([], 192, 320, spare=128)),
            Sample("ks.128,256", fp8([128, 256], 192, 320, ks=True)),
            Sample("transposed.128,256", fp8([128, 256], 192, 320, transposed=True)),
            Sample("flat.128,0,256", _flat(fp8([128, 0, 256], 192, 320, ks=True))),
        ],
        large=[
            Sample("2048,0,8192.4096x7168", fp8([2048, 0, 8192], 4096, 7168, add=True, spare=256)),
            Sample("bf16.16x1024.576x1536", fp8([1024] * 16, 576, 1536, dtype=_BF16)),
        ],
        benchmarks=[
            Benchmark("c.4x8192.4096x7168", fp8([8192] * 4, 4096, 7168, add=True)),
            Benchmark("c.8x4096.7168x2048", fp8([4096] * 8, 7168, 2048, add=True)),
            Benchmark("16x2048.4096x7168", fp8([2048] * 16, 4096, 7168)),
        ],
        vectors=[Vector("one product", _worked, _expected)],
        rejects=[
            *(
                reject
                for reject in samples.PAIR_REJECTS
                if reject.label not in ("channels", "strides of scales")
            ),
            Reject("a", "channels", edited("a", lambda x: (x[0][:, :-64].contiguous(), x[1]))),
            *samples.RESULT_REJECTS,
            Reject("c", "shape", lambda a: {**a, "c": a["d"][1:]}),
            Reject(
                "d",
                "bfloat16 with c",
                lambda a: {**a, "d": a["d"].bfloat16(), "c": a["d"].bfloat16()},
            ),
            Reject("grouped_layout", "int64", edited("grouped_layout", lambda x: x.long())),
            Reject("grouped_layout", "fewer", edited("grouped_layout", lambda x: x[1:])),
            Reject("ks", "a number", changed(ks=3)),
            Reject("recipe", "unknown", changed(recipe=(1, 128, 128))),
            Reject("a", "flat without ks", edited("a", lambda x: (x[0].view(-1), x[1]))),
        ],
        bad_values=[
            Reject("grouped_layout", "not a multiple", with_value("grouped_layout", 100, 0)),
            Reject("grouped_layout", "too many", with_value("grouped_layout", 384, 0)),
        ],
        compare=samples.compare,
    ),
    "k_grouped_bf16_gemm_tn_contiguous": Cases(
        small=[
            Sample("128,0,384,128.192x320", bf16([128, 0, 384, 128], 192, 320)),
            Sample("c.128,0,384,128.192x320", bf16([128, 0, 384, 128], 192, 320, add=True)),
            Sample("bf16.128,0,256.192x320", bf16([128, 0, 256], 192, 320, dtype=_BF16)),
            Sample("one group", bf16([640], 192, 320)),
            Sample("c.no rows", bf16([0, 0], 192, 320, add=True)),
        ],
        large=[Sample("2048,0,8192.4096x7168", bf16([2048, 0, 8192], 4096, 7168, add=True))],
        benchmarks=[Benchmark("c.4x8192.4096x7168", bf16([8192] * 4, 4096, 7168, add=True))],
        vectors=[Vector("one product", _worked_bf16, _expected)],
        rejects=[
            *samples.RESULT_REJECTS,
            Reject("b", "other rows", edited("b", lambda x: x[1:])),
            Reject("grouped_layout", "fewer", edited("grouped_layout", lambda x: x[1:])),
            Reject("ks", "a number", changed(ks=3)),
        ],
        bad_values=[
            Reject("grouped_layout", "not a multiple", with_value("grouped_layout", 100, 0)),
        ],
        compare=samples.compare,
    ),
}
