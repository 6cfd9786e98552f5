"""Argument sets of the cast without scales."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tile_kernels.quant.samples import hexed, numbers
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    builder,
    changed,
    close_results,
    edited,
    misaligned,
)

E4M3 = torch.float8_e4m3fn
_NAMES = {FP32: "fp32", BF16: "bf16", E4M3: "e4m3"}


@builder
def _cast(
    device: torch.device,
    *shape: int,
    source: torch.dtype = FP32,
    dtype: torch.dtype = BF16,
    special: bool = False,
    shift: bool = False,
    **more: Any,
) -> Arguments:
    rows = shape[0] if len(shape) > 1 else 1
    x = numbers(rows, shape[-1], FP32, device, special=special).view(shape).to(source)
    return {"x": misaligned(x) if shift else x, "dtype": dtype, **more}


_BITS: dict[str, dict[str, Any]] = {"hash": {}, "seed": {"seed": 2**40 + 1}}
_STOCHASTIC = [(FP32, BF16), (FP32, E4M3), (BF16, E4M3)]


def _vector(label: str, dtype: torch.dtype, codes: str, **more: Any) -> Vector:
    """Four values at the start and at index 7 of a row of hashes."""
    row = torch.zeros(32)
    row[:4] = row[28:] = torch.tensor([1.1, -0.3, 2.7, 0.05])
    return Vector(
        label,
        lambda: {"x": row, "dtype": dtype, "stochastic_rounding": True, **more},
        lambda: hexed(codes, torch.uint8).view(dtype)[0],
    )


_PLAIN_CAST = Cases(
    small=[
        *(
            Sample(f"5x99.{_NAMES[a]}.{_NAMES[b]}", _cast(5, 99, source=a, dtype=b))
            for a, b in itertools.product((FP32, BF16, E4M3), repeat=2)
        ),
        *(
            Sample(f"{_NAMES[a]}.{_NAMES[b]}.{name}",
                   _cast(3, 101, source=a, dtype=b, stochastic_rounding=True, **more))
            for a, b in _STOCHASTIC
            for name, more in _BITS.items()
        ),
        Sample("0x8", _cast(0, 8)),
        Sample("1", _cast(1)),
        Sample("special.e4m3", _cast(9, 37, dtype=E4M3, special=True)),
        Sample("special.seed.e4m3",
               _cast(9, 37, dtype=E4M3, special=True, stochastic_rounding=True, seed=1)),
        Sample("special.hash.bf16", _cast(9, 37, special=True, stochastic_rounding=True)),
        Sample("misaligned", _cast(4, 37, shift=True)),
        Sample("misaligned.seed", _cast(4, 37, shift=True, stochastic_rounding=True, seed=0)),
    ],
    large=[
        Sample("8001x7168.seed", _cast(8001, 7168, stochastic_rounding=True, seed=5)),
        Sample("300001x7168", _cast(300_001, 7168, source=BF16, dtype=E4M3)),
    ],
    benchmarks=[
        Benchmark("fp32.bf16", _cast(8192, 7168)),
        Benchmark("fp32.bf16.seed", _cast(8192, 7168, stochastic_rounding=True, seed=1)),
        Benchmark("fp32.bf16.hash", _cast(8192, 7168, stochastic_rounding=True)),
        Benchmark("bf16.e4m3", _cast(8192, 7168, source=BF16, dtype=E4M3)),
    ],
    vectors=[
        _vector("e4m3 by a hash", E4M3, "38AA4315" + "00" * 24 + "38A94315"),
        _vector(
            "bfloat16 by a hash", BF16, "8C3F9ABE2C404C3D" + "0000" * 24 + "8C3F99BE2D404D3D"
        ),
        Vector(
            "saturates",
            lambda: {"x": torch.tensor([449.0, -1e9, float("inf")]), "dtype": E4M3},
            lambda: torch.tensor([448.0, -448.0, 448.0]).to(E4M3),
        ),
    ],
    rejects=[
        Reject("x", "strided", edited("x", lambda x: x.T)),
        Reject("x", "float16", edited("x", lambda x: x.half())),
        Reject("dtype", "float16", changed(dtype=torch.float16)),
        Reject("dtype", "text", changed(dtype="bf16")),
        Reject("stochastic_rounding", "an int", changed(stochastic_rounding=1)),
        Reject("stochastic_rounding", "to float32",
               changed(stochastic_rounding=True, dtype=torch.float32)),
        Reject("seed", "alone", changed(seed=1)),
        Reject("seed", "a float", changed(seed=1.5, stochastic_rounding=True)),
    ],
    compare=close_results(rtol=0.0, atol=0.0),  # but NaN is NaN, whatever its bits
    any_rank=True,
)  # fmt: skip

CASES = {"plain_cast": _PLAIN_CAST}
