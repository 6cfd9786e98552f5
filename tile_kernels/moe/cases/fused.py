"""Argument sets of the operators on the fused layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.runtime.cases import (
    Arguments,
    Benchmark,
    Build,
    Cases,
    Reject,
    Sample,
    Vector,
    changed,
    with_value,
)
from tile_kernels.torch.mapping import get_fused_mapping
from tile_kernels.transpose.cases import random_bits

_BF16, _E4M3, _E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
_INF, _NAN = float("inf"), float("nan")

# ---- mappings -----------------------------------------------------------------------------------
# A mapping is `(token_topk_to_pos, pos_to_expert)`, made on the CPU from a fixed seed: shapes must
# be known on the meta device, and depend on the data.

Mapping = tuple[Tensor, Tensor]
MakeMapping = Callable[[], Mapping]


def _mapping(topk_idx: Tensor, num_experts: int, alignment: int) -> Mapping:
    mapping = get_fused_mapping(topk_idx, num_experts, 0, alignment)
    return mapping[3], mapping[0]


def _seeded(make: MakeMapping) -> MakeMapping:
    """Made once, from a seed of its own."""

    @functools.cache
    def made() -> Mapping:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return made


def _routed(
    num_tokens: int, num_topk: int, num_experts: int = 4, alignment: int = 8, ranks: int = 2
) -> MakeMapping:
    """Tokens that choose among the experts of all ranks; those of the others are -1."""

    def make() -> Mapping:
        all_experts = max(num_experts * ranks, num_topk)
        chosen = torch.rand(num_tokens, all_experts).argsort(1)[:, :num_topk]
        return _mapping(chosen.masked_fill(chosen >= num_experts, -1), num_experts, alignment)

    return _seeded(make)


def _received(
    num_send_tokens: int, num_topk: int, num_experts: int, num_ep_ranks: int, alignment: int
) -> MakeMapping:
    """What one rank receives of `num_send_tokens` from each."""

    def make() -> Mapping:
        from tile_kernels.testing.generator import generate_topk_idx

        params = {
            "num_send_tokens": num_send_tokens,
            "num_topk": num_topk,
            "num_experts": num_experts,
            "num_ep_ranks": num_ep_ranks,
        }
        return _mapping(generate_topk_idx(params, device="cpu"), num_experts, alignment)

    return _seeded(make)


_BENCHMARK = _received(4096, 8, 32, 8, 128)


def _wild(num_tokens: int, num_topk: int, num_positions: int) -> MakeMapping:
    """Distinct positions in no order, some far out of range; signs that do not fit to them."""

    def make() -> Mapping:
        slots = torch.randperm(num_positions + 16)[: num_tokens * num_topk].int() - 8
        slots = slots.view(num_tokens, num_topk)
        slots[0, 0], slots[-1, -1] = 2**31 - 1, -(2**31)
        return slots, torch.randint(-1, 1, (num_positions,), dtype=torch.int32)

    return _seeded(make)


def _far(num_positions: int) -> MakeMapping:
    """The first and the last of many positions."""

    def make() -> Mapping:
        last = num_positions - 1
        slots = torch.tensor([[last, 0, last - 8], [5, last - 3, -1], [last + 1, 31, 32]])
        return slots.int(), torch.zeros(num_positions, dtype=torch.int32)

    return make


def _repeated(num_tokens: int, num_topk: int) -> MakeMapping:
    """Every slot of a token names the same position."""

    def make() -> Mapping:
        slots = torch.randperm(num_tokens).int()[:, None].repeat(1, num_topk)
        return slots, torch.zeros(num_tokens + 3, dtype=torch.int32)

    return _seeded(make)


def _masked(num_tokens: int, num_topk: int, num_positions: int) -> MakeMapping:
    """No slot names anything."""

    def make() -> Mapping:
        slots = torch.full((num_tokens, num_topk), -1, dtype=torch.int32)
        return slots, torch.zeros(num_positions, dtype=torch.int32)

    return make


def _placed(mapping: MakeMapping, device: torch.device, skip: int = 0) -> dict[str, Tensor]:
    """The mapping on a device, the slots `skip` elements into their storage."""
    slots, pos_to_expert = mapping()
    room = torch.empty(slots.numel() + skip, dtype=torch.int32, device=device)
    placed = room[skip:].view(slots.shape)
    if device.type != "meta":
        placed.copy_(slots)
    return {"token_topk_to_pos": placed, "pos_to_expert": pos_to_expert.to(device)}


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- expand -------------------------------------------------------------------------------------


def _bits(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, skip: int = 0
) -> Tensor:
    return random_bits((math.prod(shape) + skip,), dtype, device)[skip:].view(shape)


def _expand(mapping: MakeMapping, hidden: int, dtype: torch.dtype = _BF16, skip: int = 0) -> Build:
    def make(device: torch.device) -> Arguments:
        placed = _placed(mapping, device, skip)
        num_tokens = placed["token_topk_to_pos"].shape[0]
        return {"x": _bits((num_tokens, hidden), dtype, device, skip), **placed}

    return make


_DTYPES = [
    _BF16, torch.float16, torch.float32, _E4M3, _E5M2, torch.int8, torch.uint8, torch.int16,
    torch.int32,
]  # fmt: skip

# The worked example of the mapping: 4 experts, alignment 4, slots in descending order.
_SLOTS = [[2, 6], [5, -1], [1, 8], [4, 0]]
_EXPERTS = [0, 0, 0, -1, 2, 2, 2, -1, 3, -1, -1, -1]
_TOKENS = [3, 2, 0, -1, 3, 1, 0, -1, 2, -1, -1, -1]  # the token at each position


def _worked(num_positions: int = 12) -> dict[str, Tensor]:
    return {
        "token_topk_to_pos": torch.tensor(_SLOTS, dtype=torch.int32),
        "pos_to_expert": torch.tensor(_EXPERTS[:num_positions], dtype=torch.int32),
    }


def _int64(name: str) -> Reject:
    return Reject(name, "int64", lambda a: {**a, name: a[name].long()})


def _fewer_tokens(name: str) -> Reject:
    return Reject(name, "other tokens", lambda a: {**a, name: a[name][:-1]})


_MAPPING_REJECTS = [
    _int64("token_topk_to_pos"),
    _int64("pos_to_expert"),
    _fewer_tokens("token_topk_to_pos"),
]

_BAD_PLACES = [
    Reject("token_topk_to_pos", "below -1", with_value("token_topk_to_pos", -2)),
    Reject("token_topk_to_pos", "too large", with_value("token_topk_to_pos", 10_000)),
]

EXPAND_TO_FUSED = Cases(
    small=[
        *(Sample(f"9x3x24.{_words(d)}", _expand(_routed(9, 3), 24, d)) for d in _DTYPES),
        Sample("0x4x8", _expand(_masked(0, 4, 40), 8)),
        Sample("0x4x8.no-positions", _expand(_masked(0, 4, 0), 8)),
        Sample("1x1x8", _expand(_routed(1, 1, ranks=1), 8)),
        Sample("33x4x33", _expand(_routed(33, 4), 33)),
        Sample("40x6x7.float32", _expand(_routed(40, 6), 7, torch.float32)),
        Sample("65x9x1.uint8", _expand(_routed(65, 9), 1, torch.uint8)),
        Sample("3x8x1032", _expand(_routed(3, 8), 1032)),  # two parts
        Sample("9x4x0", _expand(_routed(9, 4), 0)),
        Sample("5x40x16", _expand(_routed(5, 40, 48), 16)),  # more slots than lanes
        Sample("40x4x24-misaligned", _expand(_routed(40, 4), 24, skip=1)),
        Sample("masked.20x4x16", _expand(_masked(20, 4, 100), 16)),
        Sample("one-expert.50x1x16", _expand(_routed(50, 1, 1, ranks=1), 16)),
        Sample("wild.12x8x24", _expand(_wild(12, 8, 120), 24)),
        Sample("repeated.12x3x24", _expand(_repeated(12, 3), 24)),
        # Several tokens in a block, and all the blocks that fill.
        Sample("300x8x48", _expand(_routed(300, 8, 9, 64, ranks=1), 48)),
        Sample("300x3x2055.uint8", _expand(_routed(300, 3), 2055, torch.uint8)),  # two parts
        # More positions than the blocks can mark at a time.
        Sample("3x3x1.262155.uint8", _expand(_far(262155), 1, torch.uint8)),
    ],
    large=[
        *(
            Sample(f"{k}.{e}.{r}x{h}", _expand(_received(4001, k, e, r, 16), h))
            for k, e, r in [(2, 9, 8), (8, 32, 8), (9, 4, 64)]
            for h in (576, 7168)
        ),
        Sample("over-2^31.uint8", _expand(_routed(40000, 1, 8, 16, 1), 65536, torch.uint8)),
    ],
    benchmarks=[
        Benchmark("bf16", _expand(_BENCHMARK, 7168), goal_us=204.5),
        Benchmark("bf16.64", _expand(_routed(64, 8, 32, 16, 1), 7168)),
        Benchmark("bf16.576", _expand(_BENCHMARK, 576)),
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
    bad_values=_BAD_PLACES,
    rejects=_MAPPING_REJECTS,
)


# ---- expand with scales -------------------------------------------------------------------------


def _scales(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, layout: str
) -> Tensor:
    rows, cols = shape
    if layout == "columns":  # room for more tokens than there are
        return random_bits((cols, rows + 3), dtype, device)[:, :rows].T
    if layout == "strided":
        return random_bits((rows, cols + 5), dtype, device)[:, :cols]
    return random_bits(shape, dtype, device)


def _expand_with_sf(
    mapping: MakeMapping,
    hidden: int,
    group: int,
    sf_dtype: torch.dtype = torch.float32,
    column_major: bool = False,
    *,
    dtype: torch.dtype = _E4M3,
    layout: str = "rows",
) -> Build:
    """`hidden` counts values: int8 data has half as many bytes."""

    def make(device: torch.device) -> Arguments:
        placed = _placed(mapping, device)
        num_tokens = placed["token_topk_to_pos"].shape[0]
        num_scales = -(-hidden // group)
        if sf_dtype == torch.int32:
            num_scales = -(-num_scales // 4)
        width = hidden // 2 if dtype == torch.int8 else hidden
        return {
            "x": (
                _bits((num_tokens, width), dtype, device),
                _scales((num_tokens, num_scales), sf_dtype, device, layout),
            ),
            "num_per_channels": group,
            **placed,
            "use_tma_aligned_col_major_sf": column_major,
        }

    return make


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


EXPAND_TO_FUSED_WITH_SF = Cases(
    small=[
        Sample("9x3x64.16", _expand_with_sf(_routed(9, 3), 64, 16)),
        Sample("0x2x64.32", _expand_with_sf(_masked(0, 2, 37), 64, 32, column_major=True)),
        Sample("1x1x32.32", _expand_with_sf(_routed(1, 1, ranks=1), 32, 32)),
        Sample("9x4x96.32.ue8m0", _expand_with_sf(_wild(9, 4, 41), 96, 32, _INT32, True)),
        Sample("9x4x65.64.columns", _expand_with_sf(_wild(9, 4, 42), 65, 64, column_major=True)),
        Sample(
            "from-columns.33x6x256.128",
            _expand_with_sf(_routed(33, 6), 256, 128, _INT32, True, layout="columns"),
        ),
        Sample(
            "from-columns.1x6x640.128",
            _expand_with_sf(_routed(1, 6, 8), 640, 128, column_major=True, layout="columns"),
        ),
        Sample("strided.33x6x300.16", _expand_with_sf(_routed(33, 6), 300, 16, layout="strided")),
        Sample("33x2x40.row", _expand_with_sf(_routed(33, 2), 40, 40)),
        Sample(
            "e2m1.9x4x192.32.ue8m0",
            _expand_with_sf(_routed(9, 4), 192, 32, _INT32, True, dtype=torch.int8),
        ),
        Sample("e2m1.9x4x96.row", _expand_with_sf(_wild(9, 4, 40), 96, 96, dtype=torch.int8)),
        Sample("bf16.9x4x96.32", _expand_with_sf(_wild(9, 4, 40), 96, 32, dtype=_BF16)),
        Sample("300x8x576.32", _expand_with_sf(_routed(300, 8, 9, 64, 1), 576, 32)),
        Sample(
            "300x2x4112.16.columns",  # two parts
            _expand_with_sf(_routed(300, 2, 4, 2), 4112, 16, column_major=True),
        ),
        Sample("masked.20x4x32.32", _expand_with_sf(_masked(20, 4, 50), 32, 32, _INT32, True)),
    ],
    large=[
        *(
            Sample(
                f"{k}.{e}.{r}x{h}.{g}.{_words(sf)}",
                _expand_with_sf(_received(4001, k, e, r, 16), h, g, sf, sf == _INT32),
            )
            for k, e, r in [(2, 9, 8), (8, 32, 8)]
            for h, g, sf in [(576, 32, torch.float32), (7168, 128, _INT32), (3072, 32, _INT32)]
        ),
        Sample(
            "over-2^31",
            _expand_with_sf(_routed(40000, 1, 8, 16, 1), 65536, 128, layout="columns"),
        ),
    ],
    benchmarks=[
        Benchmark(
            "e4m3",
            _expand_with_sf(_BENCHMARK, 7168, 128),
            goal_us=105.5,
        ),
        Benchmark(
            "e4m3.ue8m0",
            _expand_with_sf(_BENCHMARK, 7168, 128, _INT32, True, layout="columns"),
        ),
    ],
    vectors=[
        Vector("rows", lambda: _worked_with_sf(12, False), lambda: _worked_scales(12, False)),
        Vector("columns", lambda: _worked_with_sf(11, True), lambda: _worked_scales(11, True)),
    ],
    bad_values=_BAD_PLACES,
    rejects=[
        *_MAPPING_REJECTS,
        Reject("x", "no tuple", lambda a: {**a, "x": a["x"][0]}),
        Reject("x", "a list", lambda a: {**a, "x": list(a["x"])}),
        Reject("x", "three tensors", lambda a: {**a, "x": (*a["x"], a["x"][1])}),
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


# ---- reduce -------------------------------------------------------------------------------------


def _numbers(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, skip: int = 0
) -> Tensor:
    flat = torch.randn(math.prod(shape) + skip, device=device)
    return flat.to(dtype)[skip:].view(shape)


def _reduce(
    mapping: MakeMapping,
    hidden: int,
    dtype: torch.dtype = _BF16,
    *,
    weights: bool = True,
    x_sf: bool = False,
    sf: float | None = None,
    skip: int = 0,
    **more: Any,
) -> Build:
    """`more` are arguments as they are."""

    def make(device: torch.device) -> Arguments:
        placed = _placed(mapping, device)
        slots, num_positions = placed["token_topk_to_pos"], placed["pos_to_expert"].shape[0]
        x = _numbers((num_positions, hidden), dtype, device, skip)
        return {
            "x": (x, torch.randn(num_positions, device=device)) if x_sf else x,
            "topk_weights": torch.rand(slots.shape, device=device) if weights else None,
            "token_topk_to_pos": slots,
            **({} if sf is None else {"sf": torch.tensor([sf], device=device)}),
            **more,
        }

    return make


def _sized(mapping: MakeMapping) -> MakeMapping:
    """As many positions as slots, as the reference tests have it."""

    def made() -> Mapping:
        slots, pos_to_expert = mapping()
        return slots, pos_to_expert.new_zeros((slots.numel(),))

    return made


def _extreme(dtype: torch.dtype, **more: Any) -> Build:
    """Signed zeros, subnormals, overflow, infinities and NaN, at every place of the sum."""
    values = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 3e38, -3e38, 65504.0, 448.0, _INF, -_INF, _NAN]

    def make(device: torch.device) -> Arguments:
        x = torch.tensor(values, device=device).expand(13, 13).clone()
        x[:, 1::2] = x.T[:, 1::2]  # every pair of values in a column
        slots = torch.arange(52, dtype=torch.int32, device=device).view(13, 4) * 5 % 15 - 1
        weights = torch.tensor([1.0, -1.0, 1e-3, -0.0, 3e38, _INF, 0.0, 1e-45], device=device)
        return {
            "x": (x.to(dtype), x[:, 0].clone()),
            "topk_weights": weights.repeat(7)[:52].view(13, 4),
            "token_topk_to_pos": slots,
            **more,
        }

    return make


def _any_slots(num_tokens: int, num_topk: int, num_positions: int) -> MakeMapping:
    """Positions repeat, between tokens too, and lie out of range."""

    def make() -> Mapping:
        slots = torch.randint(-3, num_positions + 3, (num_tokens, num_topk), dtype=torch.int32)
        slots[0, 0], slots[-1, -1] = 2**31 - 1, -(2**31)
        return slots, torch.zeros(num_positions, dtype=torch.int32)

    return _seeded(make)


def _worked_reduce(**more: Any) -> Arguments:
    rows = torch.arange(12.0)[:, None] + torch.tensor([0.0, 0.5])
    weights = torch.tensor([[0.5, 0.25], [1.0, 9.0], [2.0, 1.0], [1.0, -1.0]])
    slots = torch.tensor(_SLOTS, dtype=torch.int32)
    return {"x": rows, "topk_weights": weights, "token_topk_to_pos": slots, **more}


def _worked_with_x_sf(**more: Any) -> Arguments:
    arguments = _worked_reduce(**more)
    return {**arguments, "x": (arguments["x"], torch.arange(12.0))}


def _no_x_sf(change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments]:
    """`x` becomes a tuple with edited scales."""
    return lambda a: {**a, "x": (a["x"], change(torch.ones(a["x"].shape[0])))}


REDUCE_FUSED = Cases(
    small=[
        Sample("33x4x24.bf16", _reduce(_routed(33, 4), 24)),
        Sample("0x2x8", _reduce(_masked(0, 2, 9), 8)),
        Sample("3x2x8.no-positions", _reduce(_masked(3, 2, 0), 8, sf=-1.0, fp8_format="e4m3")),
        Sample("1x1x8", _reduce(_routed(1, 1, 1, 1, 1), 8)),
        *(
            Sample(f"9x3x40.{_words(d)}", _reduce(_any_slots(9, 3, 30), 40, d))
            for d in (torch.float32, torch.float16, _E4M3)
        ),
        *(
            Sample(
                f"9x3x40.{_words(d)}.{_words(o)}",
                _reduce(_any_slots(9, 3, 30), 40, d, x_sf=True, out_dtype=o),
            )
            for d, o in [
                (_E4M3, _BF16),
                (_E5M2, torch.float16),
                (_E5M2, _E4M3),
                (_BF16, torch.float32),
                (torch.float32, _BF16),
            ]
        ),
        *(
            Sample(
                f"20x4x48.{_words(d)}.{w}{s}.e4m3",
                _reduce(
                    _routed(20, 4), 48, d, weights=w, x_sf=s, sf=-0.5 * s or None, fp8_format="e4m3"
                ),
            )
            for d in (torch.float32, _BF16)
            for w, s in [(False, True), (True, False), (True, True)]
        ),
        Sample("20x4x48.plain", _reduce(_routed(20, 4), 48, weights=False)),
        Sample("33x4x33", _reduce(_routed(33, 4), 33)),
        Sample("40x6x7.float32", _reduce(_any_slots(40, 6, 90), 7, torch.float32)),
        Sample("65x9x1.e4m3", _reduce(_any_slots(65, 9, 90), 1, _E4M3)),
        Sample("3x8x1032", _reduce(_any_slots(3, 8, 9), 1032)),  # two parts
        Sample("9x4x0", _reduce(_routed(9, 4), 0)),
        Sample("5x40x16", _reduce(_any_slots(5, 40, 60), 16, x_sf=True)),  # more slots than lanes
        Sample("40x4x24-misaligned", _reduce(_any_slots(40, 4, 90), 24, skip=1)),
        Sample("masked.20x4x16", _reduce(_masked(20, 4, 9), 16, sf=-1.0, fp8_format="e4m3")),
        Sample("extreme.float32", _extreme(torch.float32)),
        Sample("extreme.bf16", _extreme(_BF16)),
        Sample("extreme.fp16", _extreme(torch.float16)),
        Sample("extreme.fp16.float32", _extreme(torch.float16, out_dtype=torch.float32)),
        Sample("extreme.e5m2.bf16", _extreme(_E5M2, out_dtype=_BF16)),
        Sample("extreme.float32.e4m3", _extreme(torch.float32, fp8_format="e4m3")),
        # Several tokens in a block.
        Sample("300x8x72", _reduce(_any_slots(300, 8, 500), 72, x_sf=True)),
        Sample("300x2x1032.float32", _reduce(_any_slots(300, 2, 200), 1032, torch.float32)),
        Sample("300x2x1031", _reduce(_any_slots(300, 2, 100), 1031)),  # two parts
    ],
    large=[
        *(
            Sample(
                f"{k}.{e}.{r}x{h}.{_words(d)}.{w}{s}{f}",
                _reduce(
                    _sized(_received(4001, k, e, r, 1)),
                    h,
                    d,
                    weights=w,
                    x_sf=s,
                    fp8_format=f,
                    sf=-0.7 if f else None,
                ),
            )
            for k, e, r, h, d, w, s, f in [
                (2, 9, 8, 2048, torch.float32, True, True, ""),
                (6, 32, 8, 7168, _BF16, True, False, ""),
                (8, 32, 8, 3072, _BF16, False, True, "e4m3"),
                (9, 4, 64, 2560, torch.float32, True, True, "e4m3"),
                (8, 32, 8, 4096, _E4M3, True, True, ""),
            ]
        ),
        Sample(
            "over-2^31.e4m3", _reduce(_any_slots(1000, 8, 40000), 65536, _E4M3, out_dtype=_BF16)
        ),
    ],
    benchmarks=[
        Benchmark("bf16", _reduce(_BENCHMARK, 7168), goal_us=186.2),
        Benchmark(
            "e4m3.bf16",
            _reduce(_BENCHMARK, 7168, _E4M3, x_sf=True, out_dtype=_BF16),
        ),
        Benchmark("bf16.64", _reduce(_routed(64, 8, 32, 16, 1), 7168)),
        Benchmark("bf16.8-valid", _reduce(_routed(4096, 8, 32, 16, 1), 7168)),
    ],
    vectors=[
        Vector(
            "no weights",
            lambda: _worked_reduce(topk_weights=None),
            lambda: torch.tensor([[8, 9], [5, 5.5], [9, 10], [4, 5]]),
        ),
        Vector(
            "weights",
            _worked_reduce,
            lambda: torch.tensor([[2.5, 2.875], [5, 5.5], [10, 11.5], [4, 4]]),
        ),
        Vector(
            "weights, scales",
            _worked_with_x_sf,
            lambda: torch.tensor([[11, 12.25], [25, 27.5], [66, 71], [16, 18]]),
        ),
        Vector(
            "weights, scales, e4m3",
            lambda: _worked_with_x_sf(fp8_format="e4m3", sf=torch.tensor([-0.5])),
            lambda: torch.tensor([[-5.5, -6], [-12, -14], [-32, -36], [-8, -9]]).to(_E4M3),
        ),
    ],
    bad_values=_BAD_PLACES,
    rejects=[
        _int64("token_topk_to_pos"),
        _fewer_tokens("topk_weights"),
        Reject("x", "integers", lambda a: {**a, "x": a["x"].int()}),
        Reject("x", "three tensors", lambda a: {**a, "x": (a["x"],) * 3}),
        Reject("x_sf", "too few", _no_x_sf(lambda sf: sf[:-1])),
        Reject("x", "None", _no_x_sf(lambda _: None)),
        Reject("x_sf", "double", _no_x_sf(lambda sf: sf.double())),
        Reject("x_sf", "strided", _no_x_sf(lambda sf: sf.repeat(2)[::2])),
        Reject("topk_weights", "half", lambda a: {**a, "topk_weights": a["topk_weights"].half()}),
        Reject("fp8_format", "e5m2", changed(fp8_format="e5m2")),
        Reject("fp8_format", "None", changed(fp8_format=None)),
        Reject("out_dtype", "e5m2", changed(out_dtype=_E5M2)),
        Reject("out_dtype", "int32", changed(out_dtype=torch.int32)),
        Reject("out_dtype", "two answers", changed(out_dtype=_BF16, fp8_format="e4m3")),
        Reject("out_dtype", "e5m2 left open", lambda a: {**a, "x": a["x"].to(_E5M2)}),
        Reject("sf", "without float8", changed(sf=torch.ones(1))),
        Reject("sf", "two", changed(sf=torch.ones(2), fp8_format="e4m3")),
    ],
)
