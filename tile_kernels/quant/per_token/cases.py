"""Argument sets of the casts along rows."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.sample_flags import (
    COLUMN,
    LAYOUTS,
    PACKED,
    PACKED_ROW,
    ROUNDED,
    ROW,
    Flags,
    all_flags,
)
from tile_kernels.quant.samples import block_scales, hexed, numbers, plain_cast, quantized, words
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, changed

_E4M3 = torch.float8_e4m3fn


_plain = plain_cast("num_per_channels")


@builder
def _requantized(
    device: torch.device,
    rows: int,
    width: int,
    source: str,
    block: tuple[int, int],
    fmt: str,
    group: int,
    flags: Flags,
) -> Arguments:
    return {
        "x": quantized(rows, width, source, block, device, flags),
        "fmt": fmt,
        "num_per_channels": group,
        "x_block_size": block,
        **all_flags(flags),
    }


_ROW = [1.0, -2.0, 3.0, 4.0, 0.5, 0.0, -0.0, 7.0]
# The worked examples have small groups; the operators take groups of 16: zeros between.
_WIDE = [*_ROW[:4], *[0.0] * 12, *_ROW[4:], *[0.0] * 12]


def _vector(label: str, fmt: str, round_sf: bool, data: str, sf: torch.Tensor) -> Vector:
    return Vector(
        label,
        lambda: {"x": torch.tensor([_WIDE]), "fmt": fmt, "num_per_channels": 16,
                 **all_flags({"round_sf": round_sf})},
        lambda: (hexed(data, _E4M3 if fmt == "e4m3" else torch.int8), sf),
    )  # fmt: skip


def _e5m6_arguments(round_sf: bool) -> Arguments:
    x = torch.tensor([[0.5, -1.0, 0.25, 2.0, 0.0, 0.001, -3.0, 4.0]])
    return {"x": x, "fmt": "e5m6", "num_per_channels": 8, **all_flags({"round_sf": round_sf})}


# A row whose scale in e4m3 is its factor.
_NVFP4 = [0, 0.3, -0.7, 1.1, 2.4, -3.3, 4.9, 6, -6, 0.1, 0.25, -0.25, 5, 2.5, 1.75, -1.25]


def _nvfp4_vector(factor: float, fmt: str, sf: str, data: str, **more: Any) -> Vector:
    dtype = _E4M3 if fmt == "e4m3" else torch.int8
    return Vector(
        f"{fmt} times {factor}, scales in e4m3",
        lambda: {
            "x": torch.tensor([_NVFP4]) * factor, "fmt": fmt, "num_per_channels": 16,
            "use_e4m3_sf": True, **more,
        },
        lambda: (hexed(data, dtype), hexed(sf, _E4M3)),
    )  # fmt: skip


def _hashed_vector(fmt: str, data: str) -> Vector:
    """Columns 0 to 3 and 28 to 31 hold the same four values, times a scale of 1."""
    row = torch.zeros(1, 32)
    row[0, :4] = row[0, 28:] = torch.tensor([1.1, -0.3, 2.7, 0.05])
    # A scale of 1: amax_min is the format's largest value.
    amax_min = 448.0 if fmt == "e4m3" else 6.0
    return Vector(
        f"{fmt}, rounded by a hash",
        lambda: {
            "x": row, "fmt": fmt, "num_per_channels": 32, "amax_min": amax_min,
            "stochastic_cast": True,
        },
        lambda: (hexed(data, _E4M3 if fmt == "e4m3" else torch.int8), torch.ones(1, 1)),
    )  # fmt: skip


_Z12, _Z6 = "00" * 12, "00" * 6
_ROWS = [(3, 576, "e4m3"), (5, 1000, "e2m1"), (2, 7168, "e5m6"), (3, 24, "e5m6")]
_SHAPES = [(5, 576, 128), (3, 128, 16), (4, 200, 64), (7, 1056, 32), (2, 33, 16), (1, 7168, 128)]

_PER_TOKEN_CAST = Cases(
    small=[
        Sample("5x96.e4m3.32", _plain(5, 96, "e4m3", 32)),
        Sample("0x576.e4m3.128", _plain(0, 576, "e4m3", 128)),
        Sample("0x64.e2m1.packed", _plain(0, 64, "e2m1", 32, flags=PACKED)),
        Sample("1x256.e4m3.128", _plain(1, 256, "e4m3", 128, flags=PACKED)),
        *(
            Sample(f"{t}x{h}.e4m3.{g}.{name}", _plain(t, h, "e4m3", g, flags=flags))
            for t, h, g in _SHAPES
            for name, flags in LAYOUTS.items()
        ),
        *(
            Sample(f"{t}x{h}.e2m1.{g}.{name}", _plain(t, h + h % 2, "e2m1", g, FP32, flags=flags))
            for t, h, g in _SHAPES[:4]
            for name, flags in LAYOUTS.items()
        ),
        *(
            Sample(f"rows.{t}x{h}.{fmt}.{name}", _plain(t, h, fmt, h, flags=flags))
            for t, h, fmt in _ROWS
            for name, flags in LAYOUTS.items()
        ),
        Sample("rows.2x40000.e4m3", _plain(2, 40000, "e4m3", 40000)),
        *(  # beyond the registers
            Sample(f"rows.2x{h}.{fmt}", _plain(2, h, fmt, h))
            for h, fmt in [(70001, "e4m3"), (65544, "e5m6"), (65568, "e5m6")]
        ),
        Sample("rows.3x1.e4m3", _plain(3, 1, "e4m3", 1)),
        Sample("7x1056.e4m3.128.packed_row", _plain(7, 1056, "e4m3", 128, flags=PACKED_ROW)),
        Sample("5x200.e2m1.16.packed_row", _plain(5, 200, "e2m1", 16, flags=PACKED_ROW)),
        Sample("rows.3x576.e4m3.packed_row", _plain(3, 576, "e4m3", 576, flags=PACKED_ROW)),
        Sample("5x200.e2m1.16.e4m3_sf", _plain(5, 200, "e2m1", 16, use_e4m3_sf=True)),
        Sample("0x64.e2m1.16.e4m3_sf", _plain(0, 64, "e2m1", 16, use_e4m3_sf=True)),
        Sample("19x576.e4m3.128.e4m3_sf",
               _plain(19, 576, "e4m3", 128, FP32, flags=COLUMN, use_e4m3_sf=True)),
        Sample("5x96.e2m1.16.global_sf",
               _plain(5, 96, "e2m1", 16, use_e4m3_sf=True, global_sf=0.013)),
        Sample("special.e4m3_sf", _plain(9, 160, "e2m1", 16, special=True, use_e4m3_sf=True)),
        Sample("5x96.amax_min", _plain(5, 96, "e4m3", 32, flags=PACKED, amax_min=8.0)),
        Sample("5x200.e4m3.32.hash", _plain(5, 200, "e4m3", 32, FP32, stochastic_cast=True)),
        Sample("3x130.e2m1.16.hash",
               _plain(3, 130, "e2m1", 16, flags=PACKED, stochastic_cast=True)),
        Sample("5x200.e4m3.64.seed", _plain(5, 200, "e4m3", 64, stochastic_cast=True, seed=-7)),
        Sample("3x1056.e2m1.16.seed",
               _plain(3, 1056, "e2m1", 16, stochastic_cast=True, seed=2**40, use_e4m3_sf=True)),
        Sample("special.hash.e4m3",
               _plain(9, 160, "e4m3", 32, FP32, special=True, stochastic_cast=True)),
        Sample("special.seed.e2m1",
               _plain(9, 160, "e2m1", 32, FP32, special=True, stochastic_cast=True, seed=3)),
        Sample("special.e4m3", _plain(9, 160, "e4m3", 32, special=True)),
        Sample("special.packed", _plain(9, 160, "e4m3", 32, FP32, special=True, flags=PACKED)),
        Sample("special.e2m1", _plain(9, 160, "e2m1", 16, FP32, special=True)),
        Sample("bf16.7x1056.e2m1.32", _plain(7, 1056, "e2m1", 32, flags=PACKED)),
        Sample("bf16.5x136.e2m1.16", _plain(5, 136, "e2m1", 16, flags=ROUNDED)),
        Sample("bf16.special.e2m1", _plain(9, 160, "e2m1", 32, special=True, flags=ROUNDED)),
        Sample("special.e5m6", _plain(9, 160, "e5m6", 160, FP32, special=True)),
        Sample("strided.e4m3", _plain(5, 128, "e4m3", 64, extra=128)),
        Sample("strided.odd.e4m3", _plain(5, 128, "e4m3", 64, extra=3)),
        Sample("misaligned.e2m1", _plain(4, 128, "e2m1", 32, shift=True)),
        *(
            Sample(f"again.rows.{s}.{f}.3x{h}", _requantized(3, h, s, b, f, h, flags))
            for s, f, h, b, flags in (
                ("e4m3", "e4m3", 256, (1, 128), {}),
                ("e2m1", "e4m3", 320, (32, 32), COLUMN),
                ("e4m3", "e2m1", 1056, (1, 32), ROUNDED),
                ("e4m3", "e4m3", 33000, (1, 128), {}),  # which does not stay in registers
            )
        ),
        *(
            Sample(f"again.{s}.{f}.{b[0]}x{b[1]}.{n}", _requantized(37, 320, s, b, f, g, flags))
            for s, f, b, g in [
                ("e4m3", "e4m3", (1, 32), 128),
                ("e2m1", "e4m3", (32, 32), 32),
                ("e4m3", "e2m1", (128, 128), 32),
                ("e2m1", "e2m1", (1, 8), 16),
            ]
            for n, flags in LAYOUTS.items()
        ),
    ],
    large=[
        *(
            Sample(f"{t}x{h}.{f}.{g}.{d}", _plain(t, h, f, g, getattr(torch, d), flags=PACKED))
            for t, h in ((4001, 576), (8001, 7168))
            for f in ("e4m3", "e2m1")
            for g in (32, 128, h)
            for d in ("bfloat16", "float32")
        ),
        Sample("special.4001x2048", _plain(4001, 2048, "e4m3", 128, special=True)),
        Sample("again.4001x2048", _requantized(4001, 2048, "e2m1", (32, 32), "e4m3", 128, PACKED)),
        Sample("e5m6.8001x7168", _plain(8001, 7168, "e5m6", 7168, flags=COLUMN)),
        Sample("300001x7168", _plain(300_001, 7168, "e4m3", 128)),  # beyond 2^31 elements
    ],
    benchmarks=[
        Benchmark("e4m3.128", _plain(8192, 7168, "e4m3", 128), goal_us=44.7),
        Benchmark("e4m3.128.ue8m0", _plain(8192, 7168, "e4m3", 128, flags=PACKED), goal_us=44.4),
        Benchmark("e2m1.32.ue8m0", _plain(8192, 7168, "e2m1", 32, flags=PACKED), goal_us=38.5),
        Benchmark("e4m3.row", _plain(8192, 7168, "e4m3", 7168), goal_us=43.1),
        Benchmark("e4m3.128.small", _plain(128, 7168, "e4m3", 128), goal_us=2.6),
        Benchmark("e5m6", _plain(8192, 7168, "e5m6", 7168), goal_us=51.6),
        Benchmark("nvfp4", _plain(8192, 7168, "e2m1", 16, use_e4m3_sf=True)),
        Benchmark("e4m3.128.seed", _plain(8192, 7168, "e4m3", 128, stochastic_cast=True, seed=1)),
        Benchmark("e4m3.128.hash", _plain(8192, 7168, "e4m3", 128, stochastic_cast=True)),
    ],
    vectors=[
        _nvfp4_vector(1.0, "e2m1", "38", "1029D4760F8046A4"),
        _nvfp4_vector(0.013, "e2m1", "07", "1029D4760F8046A3"),
        _nvfp4_vector(1e-4, "e2m1", "01", "0008801109800180"),
        _nvfp4_vector(100.0, "e2m1", "6C", "1029D5770F9157B4"),
        _nvfp4_vector(448.0, "e2m1", "7E", "1029D4760F8046A4"),
        _nvfp4_vector(3000.0, "e2m1", "7E", "407EF7771FB377F7"),
        _nvfp4_vector(0.0, "e2m1", "01", "0008800008800080"),  # zeros keep their sign
        _nvfp4_vector(6.5 * 16, "e2m1", "38", "1029D4760F8046A4", global_sf=104.0),
        _nvfp4_vector(
            1.0, "e4m3", "07", "005BE56A73F77B7E" + "FE4F59D97B7370EB"
        ),
        _nvfp4_vector(0.1, "e4m3", "01", "0057E1666FF3787A" + "FA4A55D578706BE8"),
        _hashed_vector("e4m3", "38AA4315" + "00" * 24 + "38A94315"),
        _hashed_vector("e2m1", "9205" + "00" * 12 + "8205"),
        _vector(
            "e4m3", "e4m3", False, f"6EF67A7E{_Z12}6000807E{_Z12}", words([0x3C124925, 0x3C800000])
        ),
        _vector(
            "e4m3, rounded", "e4m3", True, f"68F07478{_Z12}6000807E{_Z12}",
            torch.tensor([[2.0**-6, 2.0**-6]]),
        ),
        _vector(
            "e2m1, rounded", "e2m1", True, f"C265{_Z6}0068{_Z6}", torch.tensor([[1.0, 2.0]])
        ),
        _vector("e2m1", "e2m1", False, f"D376{_Z6}0178{_Z6}", words([0x3F2AAAAB, 0x3F955555])),
        Vector(
            "e5m6",
            lambda: _e5m6_arguments(False),
            lambda: (hexed("6B3FFF6F04007FF7BFF7F9C1", torch.uint8), words([0x38810204])),
        ),
        Vector(
            "e5m6, rounded",
            lambda: _e5m6_arguments(True),
            lambda: (hexed("68000F6C040040078007F682", torch.uint8), torch.tensor([[2.0**-13]])),
        ),
    ],
    rejects=[
        Reject("fmt", "unknown", changed(fmt="e3m4")),
        Reject("num_per_channels", "48", changed(num_per_channels=48)),
        Reject("num_per_channels", "not the row", changed(fmt="e5m6")),
        Reject("use_packed_ue8m0", "unrounded", changed(use_packed_ue8m0=True)),
        Reject("use_e4m3_sf", "an int", changed(use_e4m3_sf=1)),
        Reject("use_e4m3_sf", "rounded", changed(use_e4m3_sf=True, round_sf=True)),
        Reject("use_e4m3_sf", "a row", changed(use_e4m3_sf=True, num_per_channels=96)),
        Reject("global_sf", "alone", changed(global_sf=2.0)),
        Reject("global_sf", "two", changed(use_e4m3_sf=True, global_sf=torch.ones(2))),
        Reject("amax_min", "0", changed(amax_min=0.0)),
        Reject("amax_min", "subnormal scale", changed(amax_min=1e-37)),
        Reject("amax_min", "NaN", changed(amax_min=float("nan"))),
        Reject("amax_min", "text", changed(amax_min="1")),
        Reject("seed", "alone", changed(seed=1)),
        Reject("seed", "too large", changed(seed=2**64, stochastic_cast=True)),
        Reject("seed", "a float", changed(seed=1.0, stochastic_cast=True)),
        Reject("seed", "int32", changed(seed=torch.ones(1).int(), stochastic_cast=True)),
        Reject("stochastic_cast", "an int", changed(stochastic_cast=1)),
        Reject("stochastic_cast", "a row", changed(stochastic_cast=True, num_per_channels=96)),
        Reject("round_sf", "an int", changed(round_sf=1)),
        Reject("x_block_size", "plain x", changed(x_block_size=(1, 32))),
        Reject("x_block_size", "one number", changed(x_block_size=(1,))),
        Reject("out", "a tensor", lambda a: {**a, "out": a["x"]}),
        Reject("x_block_size", "missing", lambda a: {**_again(a), "x_block_size": None}),
        Reject("x_sf", "too small", lambda a: {**_again(a), "x_block_size": (1, 16)}),
        Reject("x", "a triple", lambda a: {**a, "x": (a["x"],) * 3}),
        Reject("x", "odd width", lambda a: {**a, "fmt": "e2m1", "x": a["x"][:, :95]}),
        Reject("x", "no channels", lambda a: {**a, "x": a["x"][:, :0], "num_per_channels": 16}),
    ],
)  # fmt: skip


def _again(arguments: Arguments) -> dict[str, Any]:
    return _requantized(5, 96, "e4m3", (1, 32), "e4m3", 32, {})(arguments["x"].device)


# ---- scales alone, data by given scales ---------------------------------------------------------

_VARIANT_SHAPES = [
    (5, 96, "e4m3", 32),
    (0, 96, "e4m3", 32),
    (1, 256, "e4m3", 128),
    (3, 130, "e2m1", 16),
    (7, 1056, "e2m1", 64),
    (2, 33, "e4m3", 16),
]
_VARIANT_REJECTS = [
    Reject("fmt", "e5m6", changed(fmt="e5m6")),
    Reject("num_per_channels", "the row", changed(num_per_channels=96)),
    Reject("x_block_size", "given", changed(x_block_size=[1, 32])),
    Reject("x", "odd width", lambda a: {**a, "fmt": "e2m1", "x": a["x"][:, :95]}),
    Reject("x", "no channels", lambda a: {**a, "x": a["x"][:, :0]}),
]

_PER_TOKEN_SCALES = Cases(
    small=[
        *(
            Sample(f"{t}x{h}.{f}.{g}.{name}", _plain(t, h, f, g, flags=flags))
            for t, h, f, g in _VARIANT_SHAPES
            for name, flags in LAYOUTS.items()
        ),
        Sample("5x96.packed_row", _plain(5, 96, "e4m3", 16, flags=PACKED_ROW)),
        Sample("5x96.e4m3_sf", _plain(5, 96, "e2m1", 16, use_e4m3_sf=True, global_sf=0.25)),
        Sample("5x96.amax_min", _plain(5, 96, "e4m3", 32, amax_min=2.0)),
    ],
    large=[Sample("8001x7168.e2m1", _plain(8001, 7168, "e2m1", 32, flags=PACKED))],
    benchmarks=[Benchmark("e4m3.128", _plain(8192, 7168, "e4m3", 128))],
    vectors=[
        Vector(
            "e4m3",
            lambda: {"x": torch.tensor([_WIDE]), "fmt": "e4m3", "num_per_channels": 16,
                     **all_flags({})},
            lambda: words([0x3C124925, 0x3C800000]),
        )
    ],
    rejects=[
        *_VARIANT_REJECTS,
        Reject("use_packed_ue8m0", "alone", changed(use_packed_ue8m0=True)),
        Reject("global_sf", "alone", changed(global_sf=2.0)),
        Reject("amax_min", "0", changed(amax_min=0.0)),
    ],
)  # fmt: skip


@builder
def _given(
    device: torch.device,
    rows: int,
    width: int,
    fmt: str,
    group: int,
    *,
    special: bool = False,
    e4m3: bool = False,
    **more: Any,
) -> Arguments:
    x = numbers(rows, width, BF16, device, special=special)
    sf = block_scales(rows, width, (1, group), device, (-5, 5) if e4m3 else (-20, 20), ROW)
    sf = sf.to(_E4M3) if e4m3 else sf
    return {"x": x, "fmt": fmt, "num_per_channels": group, "sf": sf, **more}


_X, _Z14 = [1.0, 2.0, 3.0, 1000.0, *[0.0] * 12], "00" * 14


def _given_vector(label: str, fmt: str, x: list[float], sf: list[float], data: str) -> Vector:
    dtype = _E4M3 if fmt == "e4m3" else torch.int8
    return Vector(
        label,
        lambda: {
            "x": torch.tensor([x]),
            "fmt": fmt,
            "num_per_channels": 16,
            "sf": torch.tensor([sf]),
        },
        lambda: hexed(data, dtype),
    )


_PER_TOKEN_GIVEN = Cases(
    small=[
        *(Sample(f"{t}x{h}.{f}.{g}", _given(t, h, f, g)) for t, h, f, g in _VARIANT_SHAPES),
        Sample("5x96.e4m3_sf", _given(5, 96, "e2m1", 16, e4m3=True, use_e4m3_sf=True)),
        Sample("5x96.global_sf",
               _given(5, 96, "e4m3", 32, e4m3=True, use_e4m3_sf=True, global_sf=3.0)),
        Sample("special", _given(7, 160, "e4m3", 32, special=True)),
        Sample("special.e2m1", _given(7, 160, "e2m1", 32, special=True)),
    ],
    large=[Sample("8001x7168.e4m3", _given(8001, 7168, "e4m3", 128))],
    benchmarks=[Benchmark("e4m3.128", _given(8192, 7168, "e4m3", 128))],
    vectors=[
        _given_vector("sf 1", "e4m3", _X, [1.0], f"3840447E{_Z12}"),
        _given_vector("sf 0.3", "e4m3", _X, [0.3], f"454D527E{_Z12}"),
        _given_vector(
            "e2m1", "e2m1", [1.0, 2.0, *[0.0] * 14, 3.0, 1000.0, *[0.0] * 14], [1.0, 100.0],
            f"42{_Z6}00" + f"70{_Z6}00",
        ),
    ],
    rejects=[
        *_VARIANT_REJECTS,
        Reject("sf", "too few", lambda a: {**a, "sf": a["sf"][:, :1]}),
        Reject("sf", "e4m3 alone", lambda a: {**a, "sf": a["sf"].to(_E4M3)}),
        Reject("sf", "float32", changed(use_e4m3_sf=True)),
        Reject("use_tma_aligned_col_major_sf", "set", changed(use_tma_aligned_col_major_sf=True)),
        Reject("use_packed_ue8m0", "set", changed(use_packed_ue8m0=True)),
    ],
)  # fmt: skip

CASES = {
    "per_token_cast": _PER_TOKEN_CAST,
    "per_token_cast_with_sf_only": _PER_TOKEN_SCALES,
    "per_token_cast_with_precomputed_sf": _PER_TOKEN_GIVEN,
}
