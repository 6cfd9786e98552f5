"""Argument sets of the casts in blocks of rows and channels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tile_kernels.quant.sample_flags import (
    COLUMN,
    LAYOUTS,
    PACKED,
    PACKED_ROW,
    ROUNDED,
    ROW,
    all_flags,
)
from tile_kernels.quant.samples import block_scales, hexed, placed, plain_cast
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import FP32, builder, changed

Block = tuple[int, int]


_plain = plain_cast("block_size")


@builder
def _given(device: torch.device, build: Build, extra: int = 0) -> Arguments:
    """With scales over a few magnitudes, for the same arguments."""
    arguments = build(device)
    (rows, width), block = arguments["x"].shape, arguments["block_size"]
    sf = block_scales(rows, width, block, device, (-20, 20), ROW)
    row_major = {"use_tma_aligned_col_major_sf": False, "use_packed_ue8m0": False}
    return {**arguments, **row_major, "sf": placed(sf, extra)}


_SHAPES = [(33, 576, (32, 32)), (130, 200, (128, 128)), (5, 130, (32, 128)), (129, 64, (128, 32))]
_OTHER = [(17, 160, (16, 16)), (65, 96, (64, 64)), (3, 1040, (16, 128))]

_SMALL = [
    Sample("40x96.e4m3.32x32", _plain(40, 96, "e4m3", (32, 32))),
    Sample("0x576.e4m3", _plain(0, 576, "e4m3", (128, 128))),
    Sample("0x64.e2m1.packed", _plain(0, 64, "e2m1", (32, 32), flags=PACKED)),
    Sample("1x576.e4m3.packed", _plain(1, 576, "e4m3", (32, 32), flags=PACKED)),
    Sample("1x64.e2m1", _plain(1, 64, "e2m1", (128, 128))),
    *(
        Sample(f"{t}x{h}.e4m3.{b[0]}x{b[1]}.{name}", _plain(t, h, "e4m3", b, flags=flags))
        for t, h, b in _SHAPES
        for name, flags in LAYOUTS.items()
    ),
    *(
        Sample(f"{t}x{h}.e2m1.{b[0]}x{b[1]}", _plain(t, h, "e2m1", b, flags=flags))
        for (t, h, b), flags in zip(_SHAPES, LAYOUTS.values())
    ),
    *(
        Sample(f"{t}x{h}.{fmt}.{b[0]}x{b[1]}.fp32", _plain(t, h, fmt, b, FP32, flags))
        for fmt in ("e4m3", "e2m1")
        for (t, h, b), flags in zip(_SHAPES + _OTHER, [PACKED, ROW, COLUMN, ROUNDED, *[ROW] * 3])
    ),
    Sample("130x200.e4m3.packed_row", _plain(130, 200, "e4m3", (32, 32), flags=PACKED_ROW)),
    Sample("5x1040.e2m1.packed_row", _plain(5, 1040, "e2m1", (16, 128), FP32, PACKED_ROW)),
    Sample("33x33.e4m3.odd", _plain(33, 33, "e4m3", (32, 32))),
    Sample("2x1.e4m3", _plain(2, 1, "e4m3", (16, 16), flags=PACKED)),
    Sample("special.e4m3", _plain(70, 160, "e4m3", (32, 32), special=True)),
    Sample("special.e4m3.packed", _plain(70, 160, "e4m3", (32, 32), FP32, PACKED, special=True)),
    Sample("special.e2m1", _plain(70, 160, "e2m1", (32, 32), special=True)),
    Sample("special.e2m1.fp32", _plain(70, 160, "e2m1", (32, 32), FP32, ROUNDED, special=True)),
    Sample("special.e2m1.rounded", _plain(70, 160, "e2m1", (32, 32), flags=ROUNDED, special=True)),
    Sample("strided.e4m3", _plain(35, 128, "e4m3", (32, 32), extra=128)),
    Sample("strided.odd.e4m3", _plain(35, 128, "e4m3", (32, 128), extra=3)),
    Sample("misaligned.e2m1", _plain(35, 128, "e2m1", (32, 32), shift=True)),
]  # fmt: skip


def _only(labels: str) -> list[Sample]:
    return [sample for sample in _SMALL if any(part in sample.label for part in labels.split())]


def _large(wrap: Callable[[Build], Build] = lambda build: build) -> list[Sample]:
    return [
        *(
            Sample(f"{t}x{h}.{f}.{b[0]}.{d}", wrap(_plain(t, h, f, b, getattr(torch, d), flags)))
            for t, h, flags in ((4001, 576, ROUNDED), (8001, 7168, ROW))
            for f in ("e4m3", "e2m1")
            for b in ((32, 32), (128, 128))
            for d in ("bfloat16", "float32")
        ),
        Sample("special.4001x2048", wrap(_plain(4001, 2048, "e4m3", (128, 128), special=True))),
    ]


def _benchmarks(wrap: Callable[[Build], Build], goals: tuple[float | None, ...]) -> list[Benchmark]:
    shapes: list[tuple[str, Block]] = [("e4m3", (128, 128)), ("e2m1", (32, 32))]
    return [
        Benchmark(
            f"{fmt}.{block[0]}", wrap(_plain(8192, 7168, fmt, block, flags=ROUNDED)), goal_us=goal
        )
        for (fmt, block), goal in zip(shapes, goals)
    ]


def _same(build: Build) -> Build:
    return build


# ---- the worked example: blocks of 2 x 2 become quarters of 16 x 16, zeros between ---------------


def _example() -> Arguments:
    x = torch.zeros(16, 32)
    x[:2, :2], x[:2, 16] = torch.tensor([[1.0, 2.0], [4.0, 5.0]]), torch.tensor([3.0, 6.0])
    return {"x": x, "fmt": "e4m3", "block_size": (16, 16), **all_flags(ROW)}


def _example_data() -> torch.Tensor:
    rows = [f"6B73{'00' * 14}76{'00' * 15}", f"7B7E{'00' * 14}7E{'00' * 15}", *["00" * 32] * 14]
    return hexed("/".join(rows), torch.float8_e4m3fn)


def _example_scales() -> torch.Tensor:
    return torch.tensor([[0.0111607146, 0.0133928573]])


def _saturating() -> Arguments:
    x = torch.zeros(1, 48)
    x[0, :2], x[0, 16:18], x[0, 32:34] = (
        torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1000.0]), torch.tensor([1.0, 1000.0])
    )  # fmt: skip
    sf = torch.tensor([[1.0, 1.0, 0.3]])
    return {"x": x, "fmt": "e4m3", "block_size": (16, 16), "sf": sf, **all_flags(ROW)}


def _saturated() -> torch.Tensor:
    zeros = "00" * 14
    return hexed(f"3840{zeros}447E{zeros}457E{zeros}", torch.float8_e4m3fn)


_AMAX_REJECTS = [
    Reject("use_packed_ue8m0", "unrounded", changed(use_packed_ue8m0=True)),
    Reject("amax_min", "0", changed(amax_min=0.0)),
]
_REJECTS = [
    Reject("fmt", "unknown", changed(fmt="e3m4")),
    Reject("fmt", "e5m6", changed(fmt="e5m6")),
    Reject("block_size", "48 rows", changed(block_size=(48, 32))),
    Reject("block_size", "1 channel", changed(block_size=(128, 1))),
    Reject("block_size", "an int", changed(block_size=32)),
    Reject("block_size", "three", changed(block_size=(32, 32, 32))),
    Reject("block_size", "a string inside", changed(block_size=(32, "32"))),
    Reject("round_sf", "an int", changed(round_sf=1)),
    Reject("x", "quantized", lambda a: {**a, "x": (a["x"], a["x"])}),
    Reject("x", "odd width", lambda a: {**a, "fmt": "e2m1", "x": a["x"][:, :95]}),
    Reject("x", "no channels", lambda a: {**a, "x": a["x"][:, :0]}),
    Reject("x", "columns apart", lambda a: {**a, "x": a["x"][:, ::2]}),
]

_PER_BLOCK_CAST = Cases(
    small=_SMALL,
    large=[
        *_large(),
        Sample("8001x7168.packed", _plain(8001, 7168, "e2m1", (32, 32), flags=PACKED)),
        Sample("300001x7168", _plain(300_001, 7168, "e4m3", (128, 128))),  # beyond 2^31 elements
    ],
    benchmarks=_benchmarks(_same, (44.0, 38.5)),
    vectors=[Vector("2x2", _example, lambda: (_example_data(), _example_scales()))],
    rejects=[*_REJECTS, *_AMAX_REJECTS],
)

_PER_BLOCK_SCALES = Cases(
    small=_only(
        "40x96.e4m3.32x32 0x576.e4m3 1x576.e4m3.packed 33x576.e4m3 packed_row fp32 special"
    ),
    large=_large(),
    benchmarks=_benchmarks(_same, (None, None)),
    vectors=[Vector("2x2", _example, _example_scales)],
    rejects=[*_REJECTS, *_AMAX_REJECTS],
)

_PER_BLOCK_GIVEN = Cases(
    small=[
        Sample("33x576.sf rows apart", _given(_plain(70, 576, "e4m3", (32, 32)), extra=3)),
        *(
            Sample(f"{sample.label}.given", _given(sample.make))
            for sample in _only("40x96 0x576.e4m3 1x64 33x576.e2m1 fp32 special strided")
        ),
    ],
    large=_large(_given),
    benchmarks=_benchmarks(_given, (None, None)),
    vectors=[
        Vector("saturating", _saturating, _saturated),
        Vector(
            "the scales of the cast",
            lambda: {**_example(), "sf": _example_scales()},
            # 1 / sf is not max / amax: the quotients of the example agree all the same.
            _example_data,
        ),
    ],
    rejects=[
        *_REJECTS,
        Reject("sf", "too few", lambda a: {**a, "sf": a["sf"][:1]}),
        Reject("sf", "packed", lambda a: {**a, "sf": a["sf"].int()}),
        Reject("use_packed_ue8m0", "packed", changed(use_packed_ue8m0=True)),
        Reject(
            "use_tma_aligned_col_major_sf",
            "in columns",
            changed(use_tma_aligned_col_major_sf=True),
        ),
    ],
)

CASES = {
    "per_block_cast": _PER_BLOCK_CAST,
    "per_block_cast_with_sf_only": _PER_BLOCK_SCALES,
    "per_block_cast_with_precomputed_sf": _PER_BLOCK_GIVEN,
}
