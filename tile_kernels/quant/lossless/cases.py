"""Argument sets of the cast without loss."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.sample_flags import (
    COLUMN,
    LAYOUTS,
    PACKED,
    PACKED_ROW,
    ROW,
    Flags,
    all_flags,
)
from tile_kernels.quant.samples import QUANTIZED_REJECTS, codes, hexed, placed
from tile_kernels.quant.scales import lay_out_sf, num_blocks
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, changed

Block = tuple[int, int]


@builder
def _up(
    device: torch.device,
    rows: int,
    width: int,
    block: Block,
    out_block: Block,
    in_flags: Flags = ROW,
    flags: Flags = ROW,
    *,
    exponents: tuple[int, int] = (100, 111),
    **placing: Any,
) -> Arguments:
    """Random codes, `placed`, and scales with biased exponents in a range."""
    data = placed(codes(rows, width, "e2m1", device), **placing)
    low, high = exponents
    shape = num_blocks((rows, width), block)
    e = torch.randint(low, high + 1, shape, dtype=torch.int32, device=device)
    given = all_flags(in_flags)
    layout = given["use_tma_aligned_col_major_sf"], given["use_packed_ue8m0"]
    sf = lay_out_sf((e << 23).view(torch.float32), *layout)
    return {
        "x": (data, sf),
        "fmt": "e4m3",
        "x_block_size": block,
        "out_block_size": out_block,
        **all_flags(flags),
    }


_SHAPES: list[tuple[int, int, Block, Block]] = [
    (33, 576, (1, 32), (1, 128)),
    (40, 224, (1, 32), (32, 32)),
    (130, 160, (1, 32), (128, 128)),
    (5, 100, (2, 4), (4, 16)),
]

_EXAMPLE = "E712E730/270855F3"


def _example(block: Block) -> Arguments:
    x = hexed(_EXAMPLE, torch.int8), torch.tensor([[1.0, 0.125], [8.0, 1.0]])
    return {
        "x": x,
        "fmt": "e4m3",
        "x_block_size": (1, 4),
        "out_block_size": block,
        **all_flags(ROW),
    }


def _far(arguments: Arguments) -> Arguments:
    """A scale that is 2**-12 of its neighbour."""
    data, sf = arguments["x"]
    sf = torch.full_like(sf, 1.0)
    sf[0, 1] = 2.0**-12
    return {**arguments, "x": (data, sf)}


_PER_BLOCK_CAST_LOSSLESS = Cases(
    small=[
        Sample("40x96.32x32", _up(40, 96, (1, 32), (32, 32))),
        Sample("0x576", _up(0, 576, (1, 32), (128, 128))),
        Sample("1x64.packed", _up(1, 64, (1, 32), (1, 64), PACKED, PACKED)),
        *(
            Sample(f"{t}x{h}.{b[0]}x{b[1]}.{o[0]}x{o[1]}.{n}.{m}", _up(t, h, b, o, f, g))
            for t, h, b, o in _SHAPES
            for (n, f), (m, g) in zip(LAYOUTS.items(), [*list(LAYOUTS.items())[1:], ("row", ROW)])
        ),
        Sample("300x40.300x8", _up(300, 40, (100, 8), (300, 8))),
        Sample("20x34.odd", _up(20, 34, (3, 2), (6, 2), flags=PACKED)),
        Sample("40x200.packed_row", _up(40, 200, (1, 8), (32, 32), PACKED, PACKED_ROW)),
        Sample("3x6.1x2", _up(3, 6, (1, 2), (1, 2))),
        Sample("9x4200.4096", _up(9, 4200, (1, 512), (2, 4096), flags=COLUMN)),
        Sample("4200x8.rows", _up(4200, 8, (1, 8), (8192, 8))),  # beyond the registers
        Sample("far.1x32", _up(40, 192, (1, 32), (32, 64), exponents=(60, 110))),
        Sample("far.1x2", _up(9, 30, (1, 2), (4, 8), exponents=(60, 110))),
        Sample("zero", _up(40, 192, (1, 32), (32, 64), exponents=(0, 9))),
        Sample("zero.packed", _up(40, 192, (1, 32), (1, 64), PACKED, PACKED, exponents=(0, 2))),
        Sample("largest", _up(40, 192, (1, 32), (32, 64), exponents=(244, 255))),
        Sample("strided", _up(35, 128, (1, 32), (32, 128), extra=64)),
        Sample("strided.odd", _up(35, 128, (1, 32), (32, 128), extra=3)),
        Sample("misaligned", _up(35, 128, (1, 32), (32, 32), shift=True)),
    ],
    large=[
        *(
            Sample(f"{t}x{h}.{o[0]}x{o[1]}.{n}", _up(t, h, (1, 32), o, f, g))
            for t, h in ((4001, 576), (8001, 7168))
            for o in ((1, 128), (32, 32), (128, 128))
            for n, f, g in (("row", ROW, PACKED), ("packed", PACKED, ROW))
        ),
        Sample("300001x7168", _up(300_001, 7168, (1, 32), (128, 128))),  # beyond 2^31 elements
    ],
    benchmarks=[
        Benchmark("1x32.128x128", _up(8192, 7168, (1, 32), (128, 128)), goal_us=25.0),
        Benchmark("1x32.1x128", _up(8192, 7168, (1, 32), (1, 128))),
        Benchmark("1x32.32x32.packed", _up(8192, 7168, (1, 32), (32, 32), PACKED, PACKED)),
    ],
    vectors=[
        Vector(
            "2x8",
            lambda: _example((2, 8)),
            lambda: (
                hexed("64E050484CC8003C/7C6880005C5C54E4", torch.float8_e4m3fn),
                torch.tensor([[0.125]]),
            ),
        ),
        Vector(
            "1x8",
            lambda: _example((1, 8)),
            lambda: (
                # The second row by the rule: the scale is that of the whole, 1/8.
                hexed("7CF8686064E00054/7C6880005C5C54E4", torch.float8_e4m3fn),
                torch.tensor([[1 / 64], [1 / 8]]),
            ),
        ),
    ],
    rejects=[
        Reject("fmt", "e2m1", changed(fmt="e2m1")),
        *QUANTIZED_REJECTS,
        Reject("x_block_size", "one", changed(x_block_size=(1,))),
        Reject("out_block_size", "no multiple", changed(out_block_size=(32, 16))),
        Reject("out_block_size", "96 channels", changed(out_block_size=(32, 96))),
        Reject("out_block_size", "too wide", changed(out_block_size=(32, 8192))),
        Reject("round_sf", "an int", changed(round_sf=1)),
    ],
    bad_values=[Reject("x_sf", "far apart", lambda a: _far({**a, "out_block_size": (32, 64)}))],
)

CASES = {"per_block_cast_lossless": _PER_BLOCK_CAST_LOSSLESS}
