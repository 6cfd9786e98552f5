"""Argument sets of `expand_to_fused` and `expand_to_fused_with_sf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.moe.fused import dtype_names
from tile_kernels.moe.mappings import BENCHMARK, EXAMPLE, Mapping, mapping, masked, received, routed
from tile_kernels.moe.samples import fewer_tokens, int64, outside
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, builder, changed, edited, random_bits

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# ---- mappings -----------------------------------------------------------------------------------


@mapping
def _wild(num_tokens: int, num_topk: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Distinct positions in no order, some far out of range; signs that do not fit to them."""
    slots = torch.randperm(num_positions + 16)[: num_tokens * num_topk].int() - 8
    slots = slots.view(num_tokens, num_topk)
    slots[0, 0], slots[-1, -1] = 2**31 - 1, -(2**31)
    return slots, torch.randint(-1, 1, (num_positions,), dtype=torch.int32)


@mapping
def _far(num_positions: int) -> tuple[Tensor, Tensor]:
    """The first and the last of many positions."""
    last = num_positions - 1
    slots = torch.tensor([[last, 0, last - 8], [5, last - 3, -1], [last + 1, 31, 32]])
    return slots.int(), torch.zeros(num_positions, dtype=torch.int32)


@mapping
def _repeated(num_tokens: int, num_topk: int) -> tuple[Tensor, Tensor]:
    """Every slot of a token names the same position."""
    slots = torch.randperm(num_tokens).int()[:, None].repeat(1, num_topk)
    return slots, torch.zeros(num_tokens + 3, dtype=torch.int32)


# ---- values -------------------------------------------------------------------------------------


@builder
def _expand(
    device: torch.device, routing: Mapping, hidden: int, dtype: torch.dtype = BF16, skip: int = 0
) -> Arguments:
    mapped = routing.on(device, skip)
    num_tokens = mapped["token_topk_to_pos"].shape[0]
    return {"x": random_bits((num_tokens, hidden), dtype, device, skip), **mapped}


_DTYPES = [
    BF16, torch.float16, torch.float32, _E4M3, _E5M2, torch.int8, torch.uint8, torch.int16,
    torch.int32,
]  # fmt: skip

_EXPERTS = [0, 0, 0, -1, 2, 2, 2, -1, 3, -1, -1, -1]
_TOKENS = [3, 2, 0, -1, 3, 1, 0, -1, 2, -1, -1, -1]  # the token at each position


def _worked(num_positions: int = 12) -> dict[str, Tensor]:
    return {
        "token_topk_to_pos": torch.tensor(EXAMPLE, dtype=torch.int32),
        "pos_to_expert": torch.tensor(_EXPERTS[:num_positions], dtype=torch.int32),
    }


_MAPPING_REJECTS = [
    int64("token_topk_to_pos"),
    int64("pos_to_expert"),
    fewer_tokens("token_topk_to_pos"),
]

_EXPAND_TO_FUSED = Cases(
    small=[
        *(Sample(f"9x3x24.{dtype_names(d)}", _expand(routed(9, 3), 24, d)) for d in _DTYPES),
        Sample("0x4x8", _expand(masked(0, 4, 40), 8)),
        Sample("0x4x8.no-positions", _expand(masked(0, 4, 0), 8)),
        Sample("1x1x8", _expand(routed(1, 1, ranks=1), 8)),
        Sample("33x4x33", _expand(routed(33, 4), 33)),
        Sample("40x6x7.float32", _expand(routed(40, 6), 7, torch.float32)),
        Sample("65x9x1.uint8", _expand(routed(65, 9), 1, torch.uint8)),
        Sample("3x8x1032", _expand(routed(3, 8), 1032)),  # two parts
        Sample("9x4x0", _expand(routed(9, 4), 0)),
        Sample("5x40x16", _expand(routed(5, 40, 48), 16)),  # more slots than lanes
        Sample("40x4x24-misaligned", _expand(routed(40, 4), 24, skip=1)),
        Sample("masked.20x4x16", _expand(masked(20, 4, 100), 16)),
        Sample("one-expert.50x1x16", _expand(routed(50, 1, 1, ranks=1), 16)),
        Sample("wild.12x8x24", _expand(_wild(12, 8, 120), 24)),
        Sample("repeated.12x3x24", _expand(_repeated(12, 3), 24)),
        # Several tokens in a block, and all the blocks that fill.
        Sample("300x8x48", _expand(routed(300, 8, 9, 64, ranks=1), 48)),
        Sample("300x3x2055.uint8", _expand(routed(300, 3), 2055, torch.uint8)),  # two parts
        # More positions than the blocks can mark at a time.
        Sample("3x3x1.262155.uint8", _expand(_far(262155), 1, torch.uint8)),
    ],
    large=[
        *(
            Sample(f"{k}.{e}.{r}x{h}", _expand(received(4001, k, e, r, 16), h))
            for k, e, r in [(2, 9, 8), (8, 32, 8), (9, 4, 64)]
            for h in (576, 7168)
        ),
        Sample("over-2^31.uint8", _expand(routed(40000, 1, 8, 16, 1), 65536, torch.uint8)),
    ],
    benchmarks=[
        Benchmark("bf16", _expand(BENCHMARK, 7168), goal_us=204.5),
        Benchmark("bf16.64", _expand(routed(64, 8, 32, 16, 1), 7168)),
        Benchmark("bf16.576", _expand(BENCHMARK, 576)),
    ],
    vectors=[
        Vector(
            "worked",
            lambda: {"x": torch.arange(1.0, 9).view(4, 2), **_worked()},
            lambda: torch.tensor(
                [[2 * t + 1, 2 * t + 2] if t >= 0 else [0, 0] for t in _TOKENS],
                dtype=torch.float32,
            ),
        )
    ],
    bad_values=outside("token_topk_to_pos"),
    rejects=_MAPPING_REJECTS,
)


# ---- values with scales --------------------------------------------------------------------------


def _scales(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, layout: str
) -> Tensor:
    rows, cols = shape
    if layout == "columns":  # room for more tokens than there are
        return random_bits((cols, rows + 3), dtype, device)[:, :rows].T
    if layout == "strided":
        return random_bits((rows, cols + 5), dtype, device)[:, :cols]
    return random_bits(shape, dtype, device)


@builder
def _expand_with_sf(
    device: torch.device,
    routing: Mapping,
    hidden: int,
    group: int,
    sf_dtype: torch.dtype = torch.float32,
    column_major: bool = False,
    *,
    dtype: torch.dtype = _E4M3,
    layout: str = "rows",
) -> Arguments:
    """`hidden` counts values: int8 data has half as many bytes."""
    mapped = routing.on(device)
    num_tokens = mapped["token_topk_to_pos"].shape[0]
    num_scales = -(-hidden // group)
    if sf_dtype == torch.int32:
        num_scales = -(-num_scales // 4)
    width = hidden // 2 if dtype == torch.int8 else hidden
    return {
        "x": (
            random_bits((num_tokens, width), dtype, device),
            _scales((num_tokens, num_scales), sf_dtype, device, layout),
        ),
        "num_per_channels": group,
        **mapped,
        "use_tma_aligned_col_major_sf": column_major,
    }


_INT32 = torch.int32


def _worked_with_sf(num_positions: int, column_major: bool) -> Arguments:
    data = torch.arange(1, 5, dtype=torch.uint8)[:, None].repeat(1, 32)
    sf = torch.tensor([[0.5, 1.0], [2.0, 4.0], [8.0, 16.0], [32.0, 64.0]])
    return {
        "x": (data, sf),
        "num_per_channels": 16,
        **_worked(num_positions),
        "use_tma_aligned_col_major_sf": column_major,
    }


def _worked_scales(num_positions: int, column_major: bool) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(_TOKENS[:num_positions])
    data = (tokens + 1).to(torch.uint8)[:, None].repeat(1, 32)
    sf = torch.tensor(
        [[32, 64], [8, 16], [0.5, 1], [0, 0], [32, 64], [2, 4], [0.5, 1], [0, 0], [8, 16]]
        + [[0, 0]] * (num_positions - 9)
    )
    if column_major:
        sf = torch.nn.functional.pad(sf.T, (0, -num_positions % 4)).T[:num_positions]
    return data, sf


def _with_sf(index: int, change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments]:
    """An edit of the data (0) or of the scales (1)."""

    def edit(arguments: Arguments) -> Arguments:
        pair = list(arguments["x"])
        pair[index] = change(pair[index])
        return {**arguments, "x": tuple(pair)}

    return edit


_EXPAND_TO_FUSED_WITH_SF = Cases(
    small=[
        Sample("9x3x64.16", _expand_with_sf(routed(9, 3), 64, 16)),
        Sample("0x2x64.32", _expand_with_sf(masked(0, 2, 37), 64, 32, column_major=True)),
        Sample("1x1x32.32", _expand_with_sf(routed(1, 1, ranks=1), 32, 32)),
        Sample("9x4x96.32.ue8m0", _expand_with_sf(_wild(9, 4, 41), 96, 32, _INT32, True)),
        Sample("9x4x65.64.columns", _expand_with_sf(_wild(9, 4, 42), 65, 64, column_major=True)),
        Sample(
            "from-columns.33x6x256.128",
            _expand_with_sf(routed(33, 6), 256, 128, _INT32, True, layout="columns"),
        ),
        Sample(
            "from-columns.1x6x640.128",
            _expand_with_sf(routed(1, 6, 8), 640, 128, column_major=True, layout="columns"),
        ),
        Sample("strided.33x6x300.16", _expand_with_sf(routed(33, 6), 300, 16, layout="strided")),
        Sample("33x2x40.row", _expand_with_sf(routed(33, 2), 40, 40)),
        Sample(
            "e2m1.9x4x192.32.ue8m0",
            _expand_with_sf(routed(9, 4), 192, 32, _INT32, True, dtype=torch.int8),
        ),
        Sample("e2m1.9x4x96.row", _expand_with_sf(_wild(9, 4, 40), 96, 96, dtype=torch.int8)),
        Sample("bf16.9x4x96.32", _expand_with_sf(_wild(9, 4, 40), 96, 32, dtype=BF16)),
        Sample("300x8x576.32", _expand_with_sf(routed(300, 8, 9, 64, 1), 576, 32)),
        Sample(
            "300x2x4112.16.columns",  # two parts
            _expand_with_sf(routed(300, 2, 4, 2), 4112, 16, column_major=True),
        ),
        Sample("masked.20x4x32.32", _expand_with_sf(masked(20, 4, 50), 32, 32, _INT32, True)),
    ],
    large=[
        *(
            Sample(
                f"{k}.{e}.{r}x{h}.{g}.{dtype_names(sf)}",
                _expand_with_sf(received(4001, k, e, r, 16), h, g, sf, sf == _INT32),
            )
            for k, e, r in [(2, 9, 8), (8, 32, 8)]
            for h, g, sf in [(576, 32, torch.float32), (7168, 128, _INT32), (3072, 32, _INT32)]
        ),
        Sample(
            "over-2^31",
            _expand_with_sf(routed(40000, 1, 8, 16, 1), 65536, 128, layout="columns"),
        ),
    ],
    benchmarks=[
        Benchmark(
            "e4m3",
            _expand_with_sf(BENCHMARK, 7168, 128),
            goal_us=105.5,
        ),
        Benchmark(
            "e4m3.ue8m0",
            _expand_with_sf(BENCHMARK, 7168, 128, _INT32, True, layout="columns"),
        ),
    ],
    vectors=[
        Vector("rows", lambda: _worked_with_sf(12, False), lambda: _worked_scales(12, False)),
        Vector("columns", lambda: _worked_with_sf(11, True), lambda: _worked_scales(11, True)),
    ],
    bad_values=outside("token_topk_to_pos"),
    rejects=[
        *_MAPPING_REJECTS,
        Reject("x", "no tuple", edited("x", lambda x: x[0])),
        Reject("x", "a list", edited("x", list)),
        Reject("x", "three tensors", edited("x", lambda x: (*x, x[1]))),
        Reject("x_sf", "a scale too many", _with_sf(1, lambda sf: torch.cat([sf, sf], 1))),
        Reject("x_sf", "double", _with_sf(1, lambda sf: sf.double())),
        Reject("x", "None", _with_sf(1, lambda _: None)),
        Reject("x", "transposed", _with_sf(0, lambda x: x.T.contiguous().T)),
        Reject("x_sf", "other device", _with_sf(1, lambda sf: sf.to("meta"))),
        Reject("num_per_channels", "48", changed(num_per_channels=48)),
        Reject("num_per_channels", "zero", changed(num_per_channels=0)),
        Reject(
            "use_tma_aligned_col_major_sf",
            "packed in rows",
            lambda a: {
                **a,
                "x": (a["x"][0], a["x"][1][:, :1].int()),
                "use_tma_aligned_col_major_sf": False,
            },
        ),
        Reject("use_tma_aligned_col_major_sf", "an int", changed(use_tma_aligned_col_major_sf=1)),
    ],
)

CASES = {"expand_to_fused": _EXPAND_TO_FUSED, "expand_to_fused_with_sf": _EXPAND_TO_FUSED_WITH_SF}
