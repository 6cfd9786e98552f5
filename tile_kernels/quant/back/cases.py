"""Argument sets of the casts back from quantized data."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant import scales
from tile_kernels.quant.sample_flags import COLUMN, LAYOUTS, PACKED, PACKED_ROW, ROW, Flags
from tile_kernels.quant.samples import (
    QUANTIZED_REJECTS,
    block_scales,
    codes,
    hexed,
    placed,
    with_sf,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import NAN, assert_equal_results, builder, changed

Block = tuple[int, int]


def _compare(result: Any, expected: Any) -> None:
    """Equal bits, but any NaN equals any: machines differ in their signs."""
    if isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor):
        result, expected = (t.masked_fill(t.isnan(), NAN) for t in (result, expected))
    assert_equal_results(result, expected)


@builder
def _back(
    device: torch.device,
    rows: int,
    width: int,
    fmt: str,
    block: Block,
    out: str = "bf16",
    flags: Flags = ROW,
    *,
    extra: int = 0,
    shift: bool = False,
    sf_extra: int = 0,
    e4m3: bool = False,
    **more: Any,
) -> Arguments:
    data = placed(codes(rows, width, fmt, device), extra, shift)
    if e4m3:
        sf = block_scales(rows, width, block, device, (-8, 8), ROW).to(torch.float8_e4m3fn)
        sf = scales.lay_out_e4m3_sf(sf, bool(flags))
    else:
        sf = block_scales(rows, width, block, device, (-140, 120), flags)
    return {
        **more,
        "x": (data, placed(sf, sf_extra)),
        "fmt": out,
        "x_block_size": block,
        **({"x_special_fmt": "e5m6"} if fmt == "e5m6" else {}),
    }


@builder
def _by_token(device: torch.device, build: Build) -> Arguments:
    arguments = build(device)
    block = arguments.pop("x_block_size")
    return {**arguments, "num_per_channels": block[1]}


_SHAPES = [(33, 576, (1, 128)), (130, 200, (128, 128)), (5, 64, (2, 16)), (35, 96, (32, 1))]

_SMALL = [
    Sample("5x96.e4m3.1x32", _back(5, 96, "e4m3", (1, 32))),
    Sample("0x576.e4m3", _back(0, 576, "e4m3", (1, 128))),
    Sample("0x64.e2m1.packed", _back(0, 64, "e2m1", (32, 32), flags=PACKED)),
    Sample("1x576.e4m3", _back(1, 576, "e4m3", (1, 576))),
    Sample("1x24.e5m6", _back(1, 24, "e5m6", (1, 24), "fp32", PACKED)),
    *(
        Sample(f"{t}x{h}.e4m3.{b[0]}x{b[1]}.{name}", _back(t, h, "e4m3", b, flags=flags))
        for t, h, b in _SHAPES
        for name, flags in LAYOUTS.items()
    ),
    *(
        Sample(f"{t}x{h}.{f}.{b[0]}x{b[1]}.{o}", _back(t, h, f, b, o, flags))
        for f in ("e2m1", "e5m6")
        for o in ("bf16", "fp32")
        for (t, h, b), flags in zip(_SHAPES, LAYOUTS.values())
    ),
    Sample("9x33.e4m3.odd", _back(9, 33, "e4m3", (2, 7), "fp32")),
    Sample("9x33.e4m3.odd.packed", _back(9, 33, "e4m3", (3, 5), flags=PACKED)),
    Sample("3x1.e4m3", _back(3, 1, "e4m3", (1, 1))),
    Sample("9x100.e4m3.128x1.fp32", _back(9, 100, "e4m3", (128, 1), "fp32")),
    Sample("9x100.e2m1.4x1.columns", _back(9, 100, "e2m1", (4, 1), "fp32", COLUMN)),
    Sample("strided.e4m3", _back(6, 128, "e4m3", (1, 64), extra=64)),
    Sample("strided.odd.e4m3", _back(6, 128, "e4m3", (1, 64), extra=3)),
    Sample("strided.e5m6", _back(6, 64, "e5m6", (1, 64), extra=4)),
    Sample("misaligned.e2m1", _back(6, 128, "e2m1", (1, 32), shift=True)),
    Sample("sf.strided.e4m3", _back(6, 128, "e4m3", (1, 16), sf_extra=3)),
    Sample("sf.strided.128x1", _back(6, 128, "e4m3", (128, 1), sf_extra=3)),
    Sample("rows.e4m3", _back(300, 8, "e4m3", (1, 8))),
    Sample("5x96.packed_row", _back(5, 96, "e4m3", (1, 16), flags=PACKED_ROW)),
    Sample("5x96.e4m3_sf", _back(5, 96, "e2m1", (1, 16), e4m3=True)),
    Sample("5x96.e4m3_sf.column", _back(5, 96, "e4m3", (1, 32), flags=COLUMN, e4m3=True)),
    Sample("5x96.global_sf", _back(5, 96, "e2m1", (1, 16), "fp32", e4m3=True, global_sf=0.013)),
]  # fmt: skip

_SMALL_BY_TOKEN = (  # those with blocks of one row
    "5x96.e4m3.1x32", "0x576.e4m3", "1x576.e4m3", "1x24.e5m6", "3x1.e4m3", "strided.e4m3",
    "misaligned.e2m1", "rows.e4m3", "33x576.e4m3.1x128.packed", "33x576.e2m1.1x128.fp32",
    "5x96.e4m3_sf", "5x96.global_sf",
)  # fmt: skip


def _big(rows: int, width: int, fmt: str, block: Block, out: str, flags: Flags) -> Sample:
    label = f"{rows}x{width}.{fmt}.{block[0]}x{block[1]}.{out}.{len(flags)}"
    return Sample(label, _back(rows, width, fmt, block, out, flags))


_LARGE_BY_TOKEN = [
    _big(t, h, f, (1, n), o, flags)
    for t, h, n, flags in ((4001, 576, 128, ROW), (8001, 7168, 128, PACKED), (801, 2560, 2560, ROW))
    for f in ("e4m3", "e2m1")
    for o in ("bf16", "fp32")
]  # fmt: skip
_LARGE = [
    *(
        _big(t, h, "e4m3", b, o, ROW)
        for t, h in ((4001, 576), (8001, 7168))
        for b in ((128, 1), (128, 128))
        for o in ("bf16", "fp32")
    ),
    _big(8001, 7168, "e5m6", (1, 7168), "bf16", PACKED),
    _big(4001, 3072, "e5m6", (1, 3072), "fp32", ROW),
    _big(300_001, 7168, "e4m3", (128, 128), "bf16", ROW),  # beyond 2^31 elements
]


def _e2m1_example() -> Arguments:
    x = hexed("10325476/98BADCFE", torch.int8), torch.tensor([[1.0], [2.0]])
    return {"x": x, "fmt": "bf16", "x_block_size": (1, 8)}


def _e5m6_example() -> Arguments:
    x = hexed("68000F6C040040078007F682", torch.uint8), torch.tensor([[2.0**-13]])
    return {"x": x, "fmt": "fp32", "x_block_size": (1, 8), "x_special_fmt": "e5m6"}


def _packed_example() -> Arguments:
    """Scales `2**(t + g)`; all values are 1."""
    x = torch.full((3, 5), 0x22, dtype=torch.int8)
    buffer = torch.tensor(
        [[0x8281807F, 0x83828180, 0x84838281, 0], [0x83, 0x84, 0x85, 0]], dtype=torch.int64
    )
    return {"x": (x, buffer.to(torch.int32).T[:3]), "fmt": "bf16", "x_block_size": (1, 2)}


_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VECTORS = [
    Vector(
        "e2m1",
        _e2m1_example,
        lambda: torch.stack([_MAGNITUDES, -2.0 * _MAGNITUDES]).bfloat16(),
    ),
    Vector(
        "e5m6",
        _e5m6_example,
        lambda: torch.tensor([[0.5, -1.0, 0.25, 2.0, 0.0, 0.0010070800781, -3.0, 4.0]]),
    ),
    Vector(
        "packed",
        _packed_example,
        lambda: torch.tensor(
            [[2.0 ** (t + c // 2) for c in range(10)] for t in range(3)]
        ).bfloat16(),
    ),
]

_REJECTS = [
    Reject("fmt", "unknown", changed(fmt="bfloat16")),
    Reject("x_special_fmt", "unknown", changed(x_special_fmt="e4m3")),
    *QUANTIZED_REJECTS,
    Reject("x", "not e5m6", changed(x_special_fmt="e5m6")),
    Reject("x_sf", "too many", with_sf(lambda sf: sf.repeat(2, 1))),
    Reject("x_sf", "int64", with_sf(lambda sf: sf.long())),
    Reject("x", "ten bytes of e5m6", lambda a: _e5m6(a, torch.zeros(2, 10, dtype=torch.uint8))),
    Reject(
        "x", "e5m6 off by a byte",
        lambda a: _e5m6(a, torch.zeros(25, dtype=torch.uint8)[1:].view(2, 12)),
    ),
]  # fmt: skip


def _e5m6(arguments: Arguments, data: torch.Tensor) -> Arguments:
    return {**arguments, "x": (data, torch.ones(2, 1)), "x_special_fmt": "e5m6"}


_CAST_BACK = Cases(
    small=_SMALL,
    large=_LARGE,
    benchmarks=[
        Benchmark("e4m3.bf16", _back(8192, 7168, "e4m3", (1, 128)), goal_us=44.3),
        Benchmark("128x128", _back(8192, 7168, "e4m3", (128, 128)), goal_us=44.5),
        Benchmark("e5m6", _back(8192, 7168, "e5m6", (1, 7168)), goal_us=51.1),
        Benchmark("128x1", _back(8192, 7168, "e4m3", (128, 1))),
    ],
    vectors=_VECTORS,
    rejects=[
        *_REJECTS,
        Reject("x_block_size", "zero", changed(x_block_size=(0, 32))),
        Reject("x_block_size", "one", changed(x_block_size=(32,))),
    ],
    compare=_compare,
)

_PER_TOKEN_CAST_BACK = Cases(
    small=[
        Sample(sample.label, _by_token(sample.make))
        for sample in _SMALL
        if sample.label in _SMALL_BY_TOKEN
    ],
    large=[Sample(sample.label, _by_token(sample.make)) for sample in _LARGE_BY_TOKEN],
    benchmarks=[
        Benchmark("e4m3.bf16", _by_token(_back(8192, 7168, "e4m3", (1, 128))), goal_us=44.3),
        Benchmark("e2m1.bf16", _by_token(_back(8192, 7168, "e2m1", (1, 128)))),
    ],
    vectors=[
        Vector(
            vector.label,
            lambda vector=vector: _by_token(lambda _: vector.arguments())(torch.device("cpu")),  # type: ignore[misc]
            vector.expected,
        )
        for vector in _VECTORS
    ],
    rejects=[*_REJECTS, Reject("num_per_channels", "zero", changed(num_per_channels=0))],
    compare=_compare,
)

CASES = {"cast_back": _CAST_BACK, "per_token_cast_back": _PER_TOKEN_CAST_BACK}
