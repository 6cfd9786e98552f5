"""Argument sets of the casts along channels."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.casting import cast
from tile_kernels.quant.samples import (
    CLAMP_REJECTS,
    gates_and_values,
    hexed,
    numbers,
    placed,
    plain,
    strided,
    within_one_step,
    words,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, changed, with_value

_E4M3 = torch.float8_e4m3fn


def _plain(
    rows: int,
    width: int,
    group: int,
    dtype: torch.dtype = BF16,
    round_sf: bool = False,
    **how: Any,
) -> Build:
    return plain(rows, width, dtype, fmt="e4m3", num_per_tokens=group, round_sf=round_sf, **how)


# Around the edges of a tile: 128 rows; 128 channels, multiples of 8.
_SIZES = [
    (128, 128, 128), (129, 136, 128), (127, 120, 32), (31, 8, 32), (33, 200, 32), (160, 5, 128),
    (256, 130, 32), (100, 129, 128), (144, 264, 32), (2, 1, 32),
]  # fmt: skip
_HIDDEN = (576, 2048, 2560, 3072, 4096, 6144, 7168)


def _samples(**more: Any) -> list[Sample]:
    """The small samples of the casts of a plain `x`."""
    return [
        Sample("40x24.32", _plain(40, 24, 32, **more)),
        Sample("0x64.128", _plain(0, 64, 128, **more)),
        Sample("1x136.128", _plain(1, 136, 128, round_sf=True, **more)),
        *(
            Sample(
                f"{t}x{h}.{n}.{'rounded' if r else 'exact'}", _plain(t, h, n, round_sf=r, **more)
            )
            for (t, h, n), r in zip(_SIZES, [True, False] * len(_SIZES))
        ),
        Sample("float32", _plain(132, 136, 32, FP32, **more)),
        Sample("float32.odd", _plain(35, 33, 128, FP32, **more)),
        Sample("special", _plain(70, 40, 32, special=True, **more)),
        Sample("special.float32", _plain(70, 40, 128, FP32, special=True, **more)),
        Sample("special.rounded", _plain(130, 24, 128, special=True, round_sf=True, **more)),
        Sample("strided", _plain(48, 64, 32, extra=64, **more)),
        Sample("strided.odd", _plain(48, 64, 32, extra=3, **more)),
        Sample("misaligned", _plain(48, 64, 128, shift=True, **more)),
    ]


def _large(beyond: tuple[int, int]) -> list[Sample]:
    return [
        *(
            Sample(f"{t}x{h}.{n}.{r}", _plain(t, h, n, round_sf=r))
            for t in (4096, 8064)
            for h in _HIDDEN
            for n, r in ((32, False), (128, True))
        ),
        Sample("4001x577", _plain(4001, 577, 128)),
        Sample("float32.4001x2048", _plain(4001, 2048, 32, FP32)),
        Sample("special.4001x2048", _plain(4001, 2048, 128, special=True)),
        Sample("9000000x16", _plain(9_000_000, 16, 128)),  # beyond the blocks of a grid's axis
        Sample("{}x{}".format(*beyond), _plain(*beyond, 128)),  # beyond 2^31 elements
    ]


def _flag_rejects() -> list[Reject]:
    return [
        Reject("fmt", "e2m1", changed(fmt="e2m1")),
        Reject("num_per_tokens", "64", changed(num_per_tokens=64)),
        Reject("num_per_tokens", "a float", changed(num_per_tokens=32.0)),
        Reject("round_sf", "an int", changed(round_sf=1)),
        Reject("x", "float16", lambda a: {**a, "x": a["x"].half()}),
        Reject("x", "one dimension", lambda a: {**a, "x": a["x"][0]}),
        Reject("x", "columns", lambda a: {**a, "x": a["x"].T}),
        Reject("x", "no channels", lambda a: {**a, "x": a["x"][:, :0]}),
    ]


# Two rows of the worked examples, then zeros: the operators take 32 rows.
_PAIR = torch.tensor([[5.0, 6.0], [0.0, 0.0]])
_PAIR_SF = torch.tensor([[0.0111607146, 0.0133928573]])


def _vector(label: str, x: torch.Tensor, data: torch.Tensor, sf: torch.Tensor) -> Vector:
    arguments = {"x": x, "fmt": "e4m3", "num_per_tokens": 32, "round_sf": False}
    return Vector(label, lambda: arguments, lambda: (data, sf))


def _vectors(turned: bool) -> list[Vector]:
    worked = [
        ("padding", _PAIR, "7E7E/0000", _PAIR_SF),
        (
            "signs", torch.tensor([[1.0, 2.0], [3.0, -4.0]]), "7176/7EFE",
            torch.tensor([[0.0066964286, 0.0089285718]]),
        ),
        (
            "zeros", torch.tensor([[0.0, 1e-4], [-0.0, 3.0]]), "0008/807E",
            words([0x346FACAD, 0x3BDB6DB7]),
        ),
    ]  # fmt: skip
    found = []
    for label, x, codes, sf in worked:
        data = hexed(codes, _E4M3)
        turned_data = data.view(torch.uint8).T.contiguous().view(_E4M3)
        found.append(_vector(label, x, turned_data if turned else data, sf))
    return found


@builder
def _of_pair(device: torch.device, *sizes: int, **how: Any) -> Arguments:
    """A quantized `x` that is not gathered."""
    flags = {name: how.pop(name) for name in ("use_packed_ue8m0",) if name in how}
    arguments = _fused(*sizes, scales=True, **how)(device)
    del arguments["pos_to_token"]
    return {**arguments, **flags}


_EXPONENTS = torch.full((1, 2), 0x78787878, dtype=torch.int32).repeat(2, 1)


def _packed_vector() -> Arguments:
    """Eight blocks of 32 tokens with the same largest magnitude: scales of 2**-7."""
    x = torch.zeros(256, 2)
    x[::32] = 3.0
    return {"x": x, "fmt": "e4m3", "num_per_tokens": 32, "round_sf": True,
            "use_packed_ue8m0": True}  # fmt: skip


_PER_CHANNEL_CAST = Cases(
    small=[
        *_samples(),
        Sample("packed", _plain(150, 40, 32, round_sf=True, use_packed_ue8m0=True)),
        Sample("amax_min", _plain(40, 40, 32, amax_min=4.0)),
        Sample("pair", _of_pair(40, 136, 32, scale_columns=32)),
        Sample("pair.packed", _of_pair(140, 136, 128, round_sf=True, use_packed_ue8m0=True)),
    ],
    large=_large((300_001, 7168)),
    benchmarks=[Benchmark("8192x7168", _plain(8192, 7168, 128), goal_us=44.7)],
    vectors=[
        *_vectors(turned=False),
        Vector(
            "packed along tokens",
            _packed_vector,
            lambda: ((_packed_vector()["x"] * 128).to(_E4M3), _EXPONENTS),
        ),
    ],
    rejects=[
        *_flag_rejects(),
        Reject("use_packed_ue8m0", "unrounded", changed(use_packed_ue8m0=True)),
        Reject("num_per_channels", "64", changed(num_per_channels=64)),
        Reject("amax_min", "0", changed(amax_min=0.0)),
    ],
)

_PER_CHANNEL_CAST_AND_TRANSPOSE = Cases(
    small=_samples(),
    large=[
        *_large((300_016, 7168)),
        Sample("16x9000000", _plain(16, 9_000_000, 32)),  # the other axis of the grid
    ],
    benchmarks=[Benchmark("8192x7168", _plain(8192, 7168, 128), goal_us=44.7)],
    vectors=_vectors(turned=True),
    rejects=_flag_rejects(),
)


# ---- gathered -----------------------------------------------------------------------------------


@builder
def _fused(
    device: torch.device,
    rows: int,
    width: int,
    group: int,
    positions: int | None = None,
    *,
    scales: bool = False,
    padding: float = 0.3,
    extra: int = 0,
    columns: bool = False,
    dtype: torch.dtype = BF16,
    special: bool = False,
    round_sf: bool = False,
    scale_columns: int = 128,
    packed: bool = False,
) -> Arguments:
    """`positions` of random rows, some of them padding; without, the rows as they are."""
    plain = numbers(rows, width, dtype, device, special=special)
    x: Any = placed(plain, extra)
    if scales:
        data, sf = cast(plain, "e4m3", (1, scale_columns), None, None, packed, False, packed)
        if extra:
            data = strided(data.view(torch.uint8), extra).view(_E4M3)
        x = data, sf.T.contiguous().T if columns else strided(sf, 1) if extra else sf
    index = None
    if positions is not None:
        index = torch.randint(max(rows, 1), (positions,), device=device, dtype=torch.int32)
        index[torch.rand(positions, device=device) < padding] = -1
    return {
        "x": x,
        "fmt": "e4m3",
        "num_per_tokens": group,
        "round_sf": round_sf,
        "num_per_channels": scale_columns if scales else None,
        "pos_to_token": index,
    }


def worked_example(scales: bool) -> Arguments:
    """Rows 2, none, 0 and 1 of a small `x`, in blocks as far apart as the operator needs them."""
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]])
    return {
        "x": (x.to(_E4M3), torch.tensor([[0.5], [1.0], [3.0]])) if scales else x,
        "fmt": "e4m3",
        "num_per_tokens": 32,
        "round_sf": scales,
        "num_per_channels": 128 if scales else None,
        "pos_to_token": torch.tensor([2, *[-1] * 31, 0, 1], dtype=torch.int32),
    }


def worked_codes(first: str, *others: str) -> torch.Tensor:
    """The codes of that example from those of its rows."""
    return hexed("/".join([first, *["0000"] * 31, *others]), _E4M3)


_PER_CHANNEL_CAST_FUSED = Cases(
    small=[
        Sample("40x24.32", _fused(40, 24, 32, 50)),
        Sample("0x64", _fused(0, 64, 128, scales=True)),
        Sample("none of 5x64", _fused(5, 64, 128, 0)),
        Sample("1x72.1", _fused(1, 72, 128, 1, padding=0.0)),
        Sample("1x72.scales", _fused(1, 72, 32, scales=True)),
        Sample("no gather", _fused(130, 136, 128, round_sf=True)),
        Sample("scales.128", _fused(36, 128, 32, scales=True)),
        Sample("scales.32", _fused(40, 200, 32, 50, scales=True, scale_columns=32)),
        Sample("scales.packed", _fused(40, 328, 128, scales=True, scale_columns=32, packed=True)),
        Sample("scales.130x384", _fused(130, 384, 128, scales=True, round_sf=True)),
        Sample("scales.gather", _fused(30, 272, 32, 129, scales=True)),
        Sample("scales.odd", _fused(30, 131, 128, 40, scales=True)),
        Sample("scales.strided", _fused(34, 160, 32, scales=True, extra=16)),
        Sample("scales.columns", _fused(33, 320, 32, 70, scales=True, columns=True)),
        Sample("scales.special", _fused(40, 160, 32, 64, scales=True, special=True, dtype=FP32)),
        Sample("special", _fused(40, 24, 32, 64, special=True)),
        Sample("all padding", _fused(7, 24, 32, 70, padding=2.0)),
        Sample("padding of nothing", _fused(0, 24, 32, 70, padding=2.0)),
        Sample("padding of nothing.scales", _fused(0, 24, 32, 7, padding=2.0, scales=True)),
        Sample("strided", _fused(40, 64, 128, 40, extra=3)),
        Sample("float32", _fused(20, 132, 32, 140, dtype=FP32)),
    ],
    large=[
        *(
            Sample(
                f"{t}x{h}.{p}.{s}", _fused(t, h, 128, p, scales=s, round_sf=h % 256 == 0)
            )
            for t, p in ((4096, None), (8064, 24_576), (8064, 24_592))
            for h in (2048, 2560, 7168)
            for s in (False, True)
        ),
        Sample("4001x576", _fused(4001, 576, 32, 7001, scales=True)),
        Sample("4001x128", _fused(4001, 128, 128, 7001, scales=True)),
        Sample("300001x7168", _fused(4001, 7168, 128, 300_001, scales=True)),  # beyond 2^31
        Sample("of 300001x7168", _fused(300_001, 7168, 128, 4001)),
    ],
    benchmarks=[Benchmark("sf", _fused(8192, 7168, 128, scales=True), goal_us=31.0)],
    vectors=[
        # That with scales is elsewhere: PyTorch's check of operators has no float8 inputs.
        Vector(
            "gathered",
            lambda: worked_example(scales=False),
            lambda: (
                worked_codes("7E7E", "7176", "7EFE"),
                torch.tensor([[0.0111607146, 0.0133928573], [0.0066964286, 0.0089285718]]),
            ),
        ),
    ],
    rejects=[
        *_flag_rejects(),
        Reject("num_per_channels", "64", changed(num_per_channels=64)),
        Reject("amax_min", "0", changed(amax_min=0.0)),
        Reject("num_per_channels", "None", lambda a: {**_quantized(a), "num_per_channels": None}),
        Reject("x_sf", "too many", lambda a: {**_quantized(a), "x": (a["x"].to(_E4M3),
                                                                     torch.ones(40, 2))}),
        Reject("x_sf", "e4m3", lambda a: {**_quantized(a), "x": (a["x"].to(_E4M3),
                                                                torch.ones(40, 1).to(_E4M3))}),
        Reject("x", "a triple", lambda a: {**a, "x": (a["x"],) * 3}),
        Reject("x", "e4m3 without scales", lambda a: {**a, "x": a["x"].to(_E4M3)}),
        Reject("pos_to_token", "int64", lambda a: {**a, "pos_to_token": a["pos_to_token"].long()}),
        Reject("pos_to_token", "strided", lambda a: {**a, "pos_to_token": a["pos_to_token"][::2]}),
        Reject("pos_to_token", "2-D", lambda a: {**a, "pos_to_token": a["pos_to_token"][None]}),
    ],
    bad_values=[Reject("pos_to_token", "beyond the tokens", with_value("pos_to_token", 40, 3))],
)  # fmt: skip


_PER_CHANNEL_CAST_FUSED_AND_TRANSPOSE = Cases(
    small=[
        Sample("40x24.32", _fused(40, 24, 32, 50)),
        Sample("1x72.1", _fused(1, 72, 128, 1, padding=0.0)),
        Sample("none of 5x64", _fused(5, 64, 128, 0)),
        Sample("scales.0x64", _fused(0, 64, 128, scales=True)),
        Sample("scales.gather", _fused(30, 272, 32, 144, scales=True)),
        Sample("scales.odd", _fused(30, 131, 128, 40, scales=True)),
        Sample("scales.columns", _fused(33, 320, 32, 70, scales=True, columns=True)),
        Sample("scales.special", _fused(40, 160, 32, 64, scales=True, special=True, dtype=FP32)),
        Sample("special", _fused(40, 24, 32, 64, special=True)),
        Sample("padding of nothing", _fused(0, 24, 32, 70, padding=2.0)),
        Sample("strided", _fused(40, 64, 128, 48, extra=3)),
        Sample("float32", _fused(20, 132, 32, 140, dtype=FP32)),
    ],
    large=[
        *(
            Sample(f"{t}x{h}.{p}.{s}", _fused(t, h, 128, p, scales=s, round_sf=h % 256 == 0))
            for t, p in ((4096, None), (8064, 24_576), (8064, 24_592))
            for h in (2560, 7168)
            for s in (False, True)
        ),
        Sample("300016x7168", _fused(4001, 7168, 128, 300_016, scales=True)),  # beyond 2^31
    ],
    benchmarks=[
        Benchmark("bf16", _fused(4096, 4096, 128, 32_640)),
        Benchmark("sf", _fused(4096, 4096, 128, 32_640, scales=True)),
    ],
    vectors=[
        Vector(
            "gathered",
            lambda: worked_example(scales=False),
            lambda: (
                worked_codes("7E7E", "7176", "7EFE").view(torch.uint8).T.contiguous().view(_E4M3),
                torch.tensor([[0.0111607146, 0.0133928573], [0.0066964286, 0.0089285718]]),
            ),
        ),
    ],
    rejects=_PER_CHANNEL_CAST_FUSED.rejects,
    bad_values=_PER_CHANNEL_CAST_FUSED.bad_values,
)


def _quantized(arguments: Arguments) -> Arguments:
    return _fused(40, 24, 32, 50, scales=True)(arguments["x"].device)


# ---- of SwiGLU ----------------------------------------------------------------------------------


@builder
def _swiglu(
    device: torch.device,
    rows: int,
    width: int,
    group: int,
    dtype: torch.dtype = BF16,
    *,
    straight: bool = False,
    clamp: float | None = None,
    special: bool = False,
    round_sf: bool = False,
    extra: int = 0,
    shift: bool = False,
) -> Arguments:
    x = gates_and_values(rows, width, dtype, device, special)
    return {
        "x": placed(x, extra, shift),
        "fmt": "e4m3",
        "num_per_tokens": group,
        "round_sf": round_sf,
        "without_transpose": straight,
        "swiglu_clamp_value": clamp,
    }


def _swiglu_vector(label: str, straight: bool, data: str) -> Vector:
    arguments = {
        "x": torch.tensor([[1.0, 3.0], [2.0, 1.0]]).bfloat16(),
        "fmt": "e4m3",
        "num_per_tokens": 32,
        "round_sf": False,
        "without_transpose": straight,
        "swiglu_clamp_value": None,
    }
    return Vector(label, lambda: arguments, lambda: (hexed(data, _E4M3), words([0x3BA00000])))


_SWIGLU_AND_PER_CHANNEL_CAST = Cases(
    small=[
        Sample("40x24.32", _swiglu(40, 24, 32)),
        Sample("0x64", _swiglu(0, 64, 128)),
        Sample("0x64.straight", _swiglu(0, 64, 128, straight=True)),
        Sample("1x64", _swiglu(1, 64, 128, clamp=0.5)),
        *(
            Sample(f"{t}x{h}.{n}.{s}.{c}", _swiglu(t, h, n, straight=s, clamp=c, round_sf=n == 32))
            for t, h, n, s, c in [
                (128, 128, 128, False, None), (129, 136, 32, False, 0.5), (33, 5, 32, False, 10.0),
                (130, 131, 128, True, 0.5), (31, 200, 32, True, None), (144, 8, 32, True, 10.0),
            ]
        ),
        Sample("float32", _swiglu(36, 20, 32, FP32, clamp=2.0)),
        Sample("special", _swiglu(70, 24, 32, special=True)),
        Sample("special.clamped", _swiglu(70, 24, 32, special=True, clamp=3.0)),
        Sample("special.straight", _swiglu(40, 24, 128, FP32, special=True, straight=True)),
        Sample("clamp 0", _swiglu(40, 24, 128, clamp=0.0)),
        Sample("strided", _swiglu(48, 32, 32, extra=64)),
        Sample("strided.odd", _swiglu(48, 32, 32, extra=3, straight=True)),
        Sample("misaligned", _swiglu(48, 32, 128, shift=True)),
    ],
    large=[
        *(
            Sample(
                f"{t}x{h}.{n}.{s}.{c}", _swiglu(t, h, n, straight=s, clamp=c, round_sf=n == 32)
            )
            for t in (4096, 8064)
            for h in (576, 2560, 7168)
            for n in (32, 128)
            for s in (False, True)
            for c in (None, 10.0, 0.5)
        ),
        Sample("4001x577", _swiglu(4001, 577, 128)),
        Sample("special.4001x2048", _swiglu(4001, 2048, 32, special=True, clamp=3.0)),
        Sample("400016x4096", _swiglu(400_016, 4096, 128)),  # beyond 2^31 elements
    ],
    benchmarks=[Benchmark("t.128", _swiglu(8192, 4096, 128), goal_us=45.0)],
    vectors=[
        _swiglu_vector("transposed", False, "7E7B"),
        _swiglu_vector("straight", True, "7E/7B"),
    ],
    rejects=[
        *_flag_rejects(),
        Reject("x", "no halves", lambda a: {**a, "x": a["x"][:, :47]}),
        Reject("without_transpose", "an int", changed(without_transpose=1)),
        *CLAMP_REJECTS,
    ],
    compare=within_one_step,
)  # fmt: skip

CASES = {
    "per_channel_cast": _PER_CHANNEL_CAST,
    "per_channel_cast_and_transpose": _PER_CHANNEL_CAST_AND_TRANSPOSE,
    "per_channel_cast_fused": _PER_CHANNEL_CAST_FUSED,
    "per_channel_cast_fused_and_transpose": _PER_CHANNEL_CAST_FUSED_AND_TRANSPOSE,
    "swiglu_forward_and_per_channel_cast_and_transpose": _SWIGLU_AND_PER_CHANNEL_CAST,
}
