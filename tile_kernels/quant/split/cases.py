"""Argument sets of `split_to_bf16`."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, builder, changed, edited, normal, random_bits


@builder
def _values(
    device: torch.device,
    rows: int,
    columns: int,
    parts: tuple[int, ...] = (0, 1, 2),
    skip: int = 0,
) -> Arguments:
    return {"x": normal(rows, columns, device=device, skip=skip), "parts": parts}


@builder
def _any_bits(device: torch.device, rows: int, columns: int) -> Arguments:
    """Every exponent, infinities included; NaN, whose bits differ by device, become 1."""
    x = random_bits((rows, columns), torch.float32, device)
    return {"x": x.masked_fill_(x.isnan(), 1.0), "parts": (0, 1, 2)}


SPLIT_TO_BF16 = Cases(
    small=[
        Sample("5x64.gradient", _values(5, 64, (2, 0, 1, 0))),
        Sample("none", _values(0, 8)),
        Sample("no columns", _values(3, 0)),
        Sample("one", _values(1, 1)),
        Sample("odd.7x77", _values(7, 77, (0,))),
        Sample("misaligned.9x32", _values(9, 32, (0, 0, 1, 2), skip=1)),
        Sample("bits.64x100", _any_bits(64, 100)),
    ],
    large=[
        Sample("8001x256", _values(8001, 256, (2, 0, 1, 0))),
        Sample("1x458752", _values(1, 64 * 7168, (2, 1, 0, 0))),
    ],
    benchmarks=[
        Benchmark("8192x256", _values(8192, 256, (2, 0, 1, 0))),
        Benchmark("1x1835008", _values(1, 256 * 7168, (2, 1, 0, 0))),
    ],
    vectors=[
        Vector(
            "exact",
            lambda: {
                "x": torch.tensor([[1 + 2**-9 + 2**-20, INF, -3.4e38, -(2.0**-133)]]),
                "parts": (0, 2, 1),
            },
            lambda: torch.tensor(
                [[1.0, INF, -INF, -(2.0**-133), 2**-20, 0, 0, 0, 2**-9, 0, 0, 0]]
            ).bfloat16(),
        )
    ],
    rejects=[
        Reject("x", "half", edited("x", torch.Tensor.half)),
        Reject("parts", "a level beyond", changed(parts=(0, 3))),
        Reject("parts", "none", changed(parts=())),
    ],
)

CASES = {"split_to_bf16": SPLIT_TO_BF16}
