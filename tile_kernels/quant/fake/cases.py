"""Argument sets of fake quantization."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.samples import plain
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import changed, close_results


def _fake(
    rows: int,
    width: int,
    fmt: str,
    group: int,
    round_sf: bool = False,
    **how: Any,
) -> Build:
    return plain(rows, width, fmt=fmt, num_per_channels=group, round_sf=round_sf, **how)


def _row(round_sf: bool) -> Arguments:
    row = [1.0, -2.0, 3.0, 4.0, *[0.0] * 12]
    return {
        "x": torch.tensor([row]),
        "fmt": "e4m3",
        "num_per_channels": 16,
        "round_sf": round_sf,
    }


def _four(fmt: str, values: list[float], **more: Any) -> Vector:
    """Four values and 28 zeros in a group of 32."""
    row = torch.zeros(2, 1, 32)
    row[0, 0, :4], row[1, 0, :4] = torch.tensor([0.3, -0.7, 1.1, 6.1]), torch.tensor(values)
    label = ", ".join((fmt, *more))
    return Vector(
        f"four of 32, {label}",
        lambda: {"x": row[0], "fmt": fmt, "num_per_channels": 32, **more},
        lambda: row[1],
    )


_E4M3_ROW = [1.0, -2.0, 2.8571429253, 4.0, *[0.0] * 12]

_FAKE_CAST = Cases(
    small=[
        Sample("5x96.e4m3.32", _fake(5, 96, "e4m3", 32)),
        Sample("0x96.e4m3.32", _fake(0, 96, "e4m3", 32)),
        Sample("1x256.e2m1.128", _fake(1, 256, "e2m1", 128, round_sf=True)),
        Sample("3x131.e4m3.16", _fake(3, 131, "e4m3", 16, dtype=torch.float32)),
        Sample("3x130.e2m1.64", _fake(3, 130, "e2m1", 64, dtype=torch.float32)),
        Sample("rows.3x576.e4m3", _fake(3, 576, "e4m3", 576)),
        Sample("rows.2x1000.e2m1", _fake(2, 1000, "e2m1", 1000, round_sf=True)),
        Sample("rows.2x264.e5m6", _fake(2, 264, "e5m6", 264)),
        Sample("rows.2x40000.e4m3", _fake(2, 40000, "e4m3", 40000)),
        *(
            Sample(f"special.{fmt}", _fake(7, 160, fmt, group, dtype=torch.float32, special=True))
            for fmt, group in (("e4m3", 32), ("e2m1", 16), ("e5m6", 160))
        ),
        Sample("5x96.e4m3_sf", _fake(5, 96, "e2m1", 16, use_e4m3_sf=True)),
        Sample("5x200.global_sf", _fake(5, 200, "e4m3", 32, use_e4m3_sf=True, global_sf=0.3)),
        Sample("5x96.amax_min", _fake(5, 96, "e4m3", 32, amax_min=0.5)),
        Sample("strided", _fake(4, 128, "e4m3", 64, extra=5)),
        Sample("misaligned", _fake(4, 128, "e4m3", 64, shift=True)),
    ],
    large=[
        *(Sample(f"8001x7168.{f}", _fake(8001, 7168, f, 128)) for f in ("e4m3", "e2m1")),
        Sample("8001x7168.e5m6", _fake(8001, 7168, "e5m6", 7168)),
        Sample("300001x7168", _fake(300_001, 7168, "e4m3", 128)),  # beyond 2^31 elements
    ],
    benchmarks=[
        Benchmark("e4m3.128", _fake(8192, 7168, "e4m3", 128)),
        Benchmark("e2m1.32", _fake(8192, 7168, "e2m1", 32, round_sf=True)),
    ],
    vectors=[
        _four("e4m3", [0.29955357, -0.70803571, 1.0892857, 6.0999999]),
        _four("e4m3", [0.3125, -0.6875, 1.125, 6.0], round_sf=True),
        _four("e4m3", [0.30078125, -0.7109375, 1.09375, 6.125], use_e4m3_sf=True),
        _four("e2m1", [0.50833333, -0.50833333, 1.0166667, 6.0999999]),
        _four("e2m1", [0.0, -1.0, 1.0, 6.0], round_sf=True),
        _four("e2m1", [0.5, -0.5, 1.0, 6.0], use_e4m3_sf=True),
        Vector("e4m3", lambda: _row(False), lambda: torch.tensor([_E4M3_ROW])),
        Vector(
            "e4m3, rounded",
            lambda: _row(True),
            lambda: torch.tensor([[1.0, -2.0, 3.0, 4.0, *[0.0] * 12]]),
        ),
    ],
    rejects=[
        Reject("use_e4m3_sf", "rounded", changed(use_e4m3_sf=True, round_sf=True)),
        Reject("global_sf", "alone", changed(global_sf=2.0)),
        Reject("amax_min", "0", changed(amax_min=0.0)),
        Reject("fmt", "unknown", changed(fmt="e3m4")),
        Reject("num_per_channels", "48", changed(num_per_channels=48)),
        Reject("round_sf", "an int", changed(round_sf=1)),
        Reject("x", "odd width", lambda a: {**a, "fmt": "e2m1", "x": a["x"][:, :95]}),
    ],
    compare=close_results(rtol=0.0, atol=0.0),  # but NaN is NaN, whatever its bits
)

CASES = {"fake_cast": _FAKE_CAST}
