"""Argument sets of RMS norm."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.back.reference import per_token_cast_back
from tile_kernels.quant.norm.reference import mega_moe_rows
from tile_kernels.quant.sample_flags import COLUMN, LAYOUTS, PACKED, PACKED_ROW, ROUNDED, Flags
from tile_kernels.quant.samples import hexed, placed
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    NAN,
    assert_equal_results,
    builder,
    changed,
    close_results,
    edited,
    with_some,
)
from tile_kernels.utils import align, ceil_div

_LAYOUTS = {**LAYOUTS, "packed_row": PACKED_ROW}


def _numbers(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, special: bool = False
) -> torch.Tensor:
    x = torch.randn(shape, device=device)
    if special:
        x[: shape[0] // 2] = with_some(x[: shape[0] // 2], share=2 / shape[-1])
        x[-1] = 0.0
    return x.to(dtype)


def _weight(width: int, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor | None:
    return None if dtype is None else (1 + torch.randn(width, device=device) / 4).to(dtype)


@builder
def _norm(
    device: torch.device,
    *shape: int,
    dtype: torch.dtype = BF16,
    weight: torch.dtype | None = BF16,
    residual: bool = False,
    special: bool = False,
    extra: int = 0,
    shift: bool = False,
    **others: Any,
) -> Arguments:
    x = _numbers(shape, dtype, device, special)
    added = _numbers(shape, dtype, device) if residual else None
    return {
        "x": placed(x, extra, shift),
        "weight": _weight(shape[-1], weight, device),
        "eps": 1e-6,
        "residual": added,
        **others,
    }


def _transposed(*shape: int, **how: Any) -> Any:
    """Batches that lie between each other: their rows are not evenly spaced."""
    build = _norm(*shape, **how)

    def make(device: torch.device) -> Arguments:
        arguments = build(device)
        x = arguments["x"]
        return {**arguments, "x": x.transpose(0, 1).contiguous().transpose(0, 1)}

    return make


_X = [[1.0, 2.0, -2.0, 0.5]]
_W = [1.0, 0.5, 2.0, 1.0]


def _vector_arguments(**changes: Any) -> Arguments:
    given: Arguments = {
        "x": torch.tensor(_X).bfloat16(),
        "weight": torch.tensor(_W).bfloat16(),
        "eps": 1e-6,
        "residual": None,
        "out_scale": 1.0,
        "with_rstd": True,
    }
    return {**given, **changes}


def _without_buffers(*results: torch.Tensor) -> Any:
    return results, None, None


def _into(*names: str, strided: bool = False, **how: Any) -> Any:
    """With buffers of these names for results that are like `x`."""
    build = _norm(5, 96, residual=True, **how)

    def make(device: torch.device) -> Arguments:
        arguments = build(device)
        for name in names:
            shape, dtype = arguments["x"].shape, arguments["x"].dtype
            buffer = torch.ones(5, 100, dtype=dtype, device=device)[:, :96]
            arguments[name] = buffer if strided else buffer.contiguous().view(shape)
        if "fmt" in how:
            data = torch.ones(5, 96, device=device).to(torch.float8_e4m3fn)
            arguments["out"] = (data, torch.ones(5, 3, device=device))
        return arguments

    return make


_REJECTS = [
    Reject("x", "too wide", lambda a: {**a, "x": torch.zeros(2, 16385)}),
    Reject("x", "no channels", edited("x", lambda x: x[:, :0])),
    Reject("x", "one dimension", edited("x", lambda x: x[0])),
    Reject("weight", "too short", edited("weight", lambda w: w[:-1])),
    Reject("weight", "float16", edited("weight", lambda w: w.half())),
    Reject("eps", "negative", changed(eps=-1.0)),
    Reject("out_scale", "NaN", changed(out_scale=NAN)),
    Reject("residual", "dtype", edited("residual", lambda r: r.double())),
    Reject("residual", "rows", edited("residual", lambda r: r[:-1])),
    Reject("residual_out", "without residual", lambda a: {**a, "residual": None,
                                                         "residual_out": a["x"].clone()}),
    Reject("with_rstd", "an int", changed(with_rstd=1)),
]  # fmt: skip

_NORM = Cases(
    small=[
        Sample("5x96", _norm(5, 96, residual=True)),
        Sample("0x96", _norm(0, 96, residual=True)),
        Sample("1x256", _norm(1, 256, with_rstd=True)),
        Sample("3x7168", _norm(3, 7168, residual=True, weight=FP32)),
        Sample("buffers", _into("out", "residual_out")),
        Sample("strided.buffer", _into("out", strided=True)),
        Sample("2x1032.fp32", _norm(2, 1032, dtype=FP32, weight=FP32, residual=True)),
        Sample("3x33.odd", _norm(3, 33, residual=True)),
        Sample("2x1031.odd", _norm(2, 1031, weight=None, out_scale=0.3)),
        Sample("2x16384", _norm(2, 16384)),
        Sample("2x16384.fp32", _norm(2, 16384, dtype=FP32, residual=True, weight=None)),
        Sample("9x130.fp32", _norm(9, 130, dtype=FP32, weight=BF16, with_rstd=True)),
        Sample("3x5x192", _norm(3, 5, 192, residual=True, with_rstd=True)),
        Sample("between.3x5x192", _transposed(3, 5, 192)),
        Sample("strided", _norm(4, 128, extra=24)),
        Sample("strided.odd", _norm(4, 1160, extra=3)),
        Sample("misaligned", _norm(4, 128, shift=True, residual=True)),
        Sample("special", _norm(8, 160, special=True, residual=True)),
        Sample("special.wide", _norm(8, 1160, special=True, weight=None)),
        Sample("special.fp32", _norm(8, 160, special=True, dtype=FP32, weight=FP32)),
    ],
    large=[
        Sample("8001x7168", _norm(8001, 7168, residual=True, with_rstd=True)),
        Sample("4001x2048.fp32", _norm(4001, 2048, dtype=FP32, weight=FP32)),
        Sample("300000x128", _norm(300_000, 128)),
        Sample("300001x7168", _norm(300_001, 7168)),  # beyond 2^31 elements
    ],
    benchmarks=[
        # 92 % of the copy bandwidth.
        Benchmark("8192x7168", _norm(8192, 7168), goal_us=60.0),
        Benchmark("8192x7168.residual", _norm(8192, 7168, residual=True), goal_us=119.9),
        Benchmark("8192x7168.fp32", _norm(8192, 7168, dtype=FP32, weight=FP32)),
        Benchmark("8192x4096", _norm(8192, 4096)),
        Benchmark("8192x16384", _norm(8192, 16384)),
        Benchmark("524288x128", _norm(524_288, 128)),
        Benchmark("128x7168.residual", _norm(128, 7168, residual=True)),
    ],
    vectors=[
        Vector(
            "residual",
            lambda: _vector_arguments(
                residual=torch.tensor([[0.01, 1.0, 0.0, 0.5]]).bfloat16()
            ),
            lambda: _without_buffers(
                torch.tensor([[0.51953125, 0.7734375, -2.0625, 0.515625]]).bfloat16(),
                torch.tensor([0.51612794]),
                torch.tensor([[1.0078125, 3.0, -2.0, 1.0]]).bfloat16(),
            ),
        ),
        Vector(
            "no weight, a factor, a row of zeros",
            lambda: _vector_arguments(
                x=torch.tensor([*_X, [0.0] * 4]).bfloat16(), weight=None, out_scale=0.5
            ),
            lambda: _without_buffers(
                torch.tensor([[0.328125, 0.65625, -0.65625, 0.1640625], [0.0] * 4]).bfloat16(),
                torch.tensor([0.65759581, 999.99994]),
                torch.tensor([*_X, [0.0] * 4]).bfloat16(),
            ),
        ),
    ],
    rejects=_REJECTS,
    # The order of sums is the kernel's: rstd may be a few float32 steps off, bfloat16 one step.
    compare=close_results(rtol=2e-6, atol=1e-7, rtol_bfloat16=8e-3),
    any_rank=True,
)  # fmt: skip


# ---- with a cast --------------------------------------------------------------------------------


def _cast(*shape: int, fmt: str = "e4m3", group: int = 32, flags: Flags, **how: Any) -> Any:
    options: dict[str, Any] = {**flags, **how}
    return _norm(*shape, fmt=fmt, num_per_channels=group, **options)


def _mega(rows: int, width: int, block_m: int) -> Any:
    """With the buffer of a fused MoE kernel, full of ones."""
    build = _cast(rows, width, flags=ROUNDED)

    def make(device: torch.device) -> Arguments:
        words = ceil_div(rows, block_m) * align(block_m, 128)
        buffer = torch.ones(width // 128, words, dtype=torch.int32, device=device)
        return {**build(device), "mega_moe_sf": buffer, "mega_moe_block_m": block_m}

    return make


_close = close_results(rtol=2e-6, atol=1e-7, rtol_bfloat16=8e-3)


def _compare(result: Any, expected: Any) -> None:
    """Scales and codes by the values that they stand for, where a step of the norm shows.

    Layouts count to the bit, the rest as in `norm_forward`. That codes are those of the norm's own
    result, bit for bit, is a test by itself.
    """
    data, sf, *rest = _flat_results(result)
    other, other_sf, *others = _flat_results(expected)
    laid_out = [
        [(t.dtype, t.shape, t.numel() and t.stride()) for t in pair]
        for pair in ((data, sf), (other, other_sf))
    ]
    assert_equal_results(*laid_out)
    _close(tuple(rest), tuple(others))
    if data.numel():
        width = data.shape[-1] * (2 if data.dtype == torch.int8 else 1)
        group = next(n for n in (16, 32, 64, 128) if _has_groups(sf, width, n))
        values, known = (_values(*pair, group) for pair in ((data, sf), (other, other_sf)))
        assert_equal_results(values.isnan(), known.isnan())
        largest = known.nan_to_num().abs().amax(-1, keepdim=True)
        step = 0.13 if data.dtype != torch.int8 else 0.35
        differ = (values - known).nan_to_num().abs()
        off = differ > step * known.nan_to_num().abs() + largest / 6
        if off.any() or (differ > 1e-5 * largest).float().mean() > 0.05:
            raise AssertionError(f"{int(off.sum())} values differ by more than a step")


def _flat_results(result: Any) -> list[Any]:
    """Data, scales and the rest, of the public function or of the operator behind it."""
    if not isinstance(result[0], tuple):
        return list(result)
    if not isinstance(result[0][0], tuple):
        return [*result[0], *result[1:]]
    ((data, sf), *others), _, *written = result  # what the buffers `out` get is the first result
    return [data, sf, *others, *written]


def _has_groups(sf: torch.Tensor, width: int, group: int) -> bool:
    groups = ceil_div(width, group)
    return sf.shape[-1] == (ceil_div(groups, 4) if sf.dtype == torch.int32 else groups)


def _values(data: torch.Tensor, sf: torch.Tensor, group: int) -> torch.Tensor:
    if data.dim() == 2:
        return per_token_cast_back((data, sf), "fp32", group)
    pairs = zip(data.unbind(0), sf.unbind(0))
    return torch.stack([per_token_cast_back(pair, "fp32", group) for pair in pairs])


def _row_vector() -> Arguments:
    x = ((torch.arange(32) - 15.5) / 4)[None].bfloat16()
    return {"x": x, "weight": None, "eps": 1e-6, "fmt": "e4m3", "num_per_channels": 32,
            "round_sf": True, "with_rstd": True, "with_out_bf16": True}  # fmt: skip


_RSTD = 0.43322426


def _row_expected() -> Any:
    x = ((torch.arange(32) - 15.5) / 4)[None]
    y = (x * _RSTD).bfloat16()
    codes = (y.float() * 256).to(torch.float8_e4m3fn)
    codes[0, :4] = hexed("FDFDFCFB", torch.float8_e4m3fn)[0]
    codes[0, -2:] = hexed("7D7D", torch.float8_e4m3fn)[0]
    y[0, :4] = torch.tensor([-1.6796875, -1.5703125, -1.4609375, -1.3515625])
    result = (codes, torch.tensor([[2.0**-8]])), y, torch.tensor([_RSTD]), x.bfloat16()
    return result, None, None, None, None


def _mega_vector() -> Arguments:
    x = torch.ones(193, 128)
    x[1] = 3.0
    return {"x": x, "weight": torch.tensor([1.0] * 32 + [2.0] * 32 + [4.0] * 32 + [8.0] * 32),
            "eps": 0.0, "fmt": "e4m3", "num_per_channels": 32, "round_sf": True,
            "mega_moe_sf": torch.full((1, 512), 7, dtype=torch.int32),
            "mega_moe_block_m": 192}  # fmt: skip


def _mega_expected() -> Any:
    """Scales 2**-8, 2**-7, 2**-6, 2**-5: exponents 119 to 122."""
    sf = torch.tensor([2.0**-8, 2.0**-7, 2.0**-6, 2.0**-5]).expand(193, 4).contiguous()
    data = torch.full((193, 128), 256.0).to(torch.float8_e4m3fn)
    words = torch.full((1, 512), 7, dtype=torch.int32)
    words[0, mega_moe_rows(193, 192)] = 0x7A797877
    return ((data, sf), None, None, _mega_vector()["x"]), None, None, None, words


_CAST = Cases(
    small=[
        Sample("5x96", _cast(5, 96, flags=ROUNDED, residual=True)),
        Sample("0x96", _cast(0, 96, flags=COLUMN)),
        Sample("0x3x96", _cast(0, 3, 96, flags=COLUMN)),
        Sample("1x256", _cast(1, 256, flags=PACKED, with_rstd=True)),
        *(
            Sample(f"5x200.{name}", _cast(5, 200, group=16, flags=flags))
            for name, flags in _LAYOUTS.items()
        ),
        *(
            Sample(f"3x1184.{name}", _cast(3, 1184, group=128, flags=flags, with_out_bf16=True))
            for name, flags in _LAYOUTS.items()
        ),
        *(
            Sample(f"2x5x192.{name}", _cast(2, 5, 192, flags=flags, weight=FP32, with_rstd=True))
            for name, flags in _LAYOUTS.items()
        ),
        Sample("2x7168.e2m1", _cast(2, 7168, fmt="e2m1", group=64, flags=PACKED, residual=True)),
        Sample("3x130.e2m1", _cast(3, 130, fmt="e2m1", group=16, flags={}, dtype=FP32)),
        Sample("2x1032.fp32", _cast(2, 1032, flags={}, dtype=FP32, with_out_bf16=True)),
        Sample("2x33.odd", _cast(2, 33, flags=PACKED_ROW, weight=None, out_scale=0.5)),
        Sample("strided", _cast(4, 128, flags={}, extra=24)),
        Sample("5x96.amax_min", _cast(5, 96, flags=ROUNDED, amax_min=8.0)),
        Sample("misaligned", _cast(4, 128, flags={}, shift=True)),
        Sample("special", _cast(8, 160, flags=PACKED, special=True)),
        Sample("buffers", _into("out_bf16", "residual_out", fmt="e4m3", num_per_channels=32,
                                 with_out_bf16=True)),
        Sample("mega.200x128", _mega(200, 128, 192)),
        Sample("mega.3x1152", _mega(3, 1152, 16)),
    ],
    large=[
        Sample("8001x7168", _cast(8001, 7168, flags=PACKED, residual=True, with_out_bf16=True)),
        Sample("4001x2048.e2m1", _cast(4001, 2048, fmt="e2m1", flags=PACKED_ROW)),
        Sample("mega.4001x7168", _mega(4001, 7168, 192)),
        Sample("300001x7168", _cast(300_001, 7168, flags={})),  # beyond 2^31 elements
    ],
    benchmarks=[
        # 92 % of the copy bandwidth.
        Benchmark("8192x7168.32", _cast(8192, 7168, flags={}), goal_us=46.9),
        Benchmark("8192x7168.128", _cast(8192, 7168, group=128, flags={}), goal_us=45.5),
        Benchmark("8192x7168.32.ue8m0", _cast(8192, 7168, flags=PACKED), goal_us=45.5),
        Benchmark("8192x7168.32.ue8m0.residual", _cast(8192, 7168, flags=PACKED, residual=True),
                  goal_us=105.4),
        Benchmark("8192x7168.128.residual", _cast(8192, 7168, group=128, flags={}, residual=True),
                  goal_us=105.4),
        Benchmark("8192x7168.e2m1", _cast(8192, 7168, fmt="e2m1", flags=PACKED)),
        Benchmark("128x7168.residual", _cast(128, 7168, flags=PACKED, residual=True)),
    ],
    vectors=[
        Vector("32 channels", _row_vector, _row_expected),
        Vector("mega-MoE", _mega_vector, _mega_expected),
    ],
    rejects=[
        *_REJECTS,
        Reject("fmt", "e5m6", changed(fmt="e5m6")),
        Reject("amax_min", "0", changed(amax_min=0.0)),
        Reject("num_per_channels", "48", changed(num_per_channels=48)),
        Reject("use_packed_ue8m0", "unrounded", changed(use_packed_ue8m0=True, round_sf=False)),
        Reject("out", "a tensor", lambda a: {**a, "out": a["x"]}),
        Reject("out_bf16", "not asked for", lambda a: {**a, "out_bf16": a["x"]}),
        Reject("mega_moe_sf", "alone", lambda a: {**a, "mega_moe_sf": a["x"].int()}),
        Reject("mega_moe_block_m", "alone", changed(mega_moe_block_m=64)),
        Reject("mega_moe_sf", "96 channels",
               lambda a: {**a, "mega_moe_sf": a["x"].int(), "mega_moe_block_m": 64}),
        Reject("mega_moe_sf", "too few rows", lambda _: _mega_short()),
        Reject("x", "odd width", lambda a: {**a, "fmt": "e2m1", "x": a["x"][:, :95],
                                            "residual": None, "weight": None}),
    ],
    compare=_compare,
    any_rank=True,
)  # fmt: skip


def _mega_short() -> Arguments:
    arguments = _mega(5, 128, 16)(torch.device("cpu"))
    return {**arguments, "mega_moe_sf": arguments["mega_moe_sf"][:, :127].contiguous()}


# ---- backward -----------------------------------------------------------------------------------


@builder
def _gradients(
    device: torch.device,
    *shape: int,
    dtype: torch.dtype = BF16,
    weight: torch.dtype | None = BF16,
    residual: bool = False,
    special: bool = False,
    extra: int = 0,
    shift: bool = False,
    old: torch.dtype | None = None,
    **others: Any,
) -> Arguments:
    x = _numbers(shape, dtype, device, special)
    arguments = {
        "out_grad": placed(_numbers(shape, dtype, device), extra, shift),
        "x": placed(x, extra, shift),
        "weight": _weight(shape[-1], weight, device),
        "rstd": torch.rsqrt(x.float().square().mean(-1) + 1e-6),
        "residual_out_grad": _numbers(shape, dtype, device) if residual else None,
        **others,
    }
    if old is not None:
        arguments["weight_grad"] = torch.randn(shape[-1], device=device).to(old)
    return arguments


def _backward_vector(**changes: Any) -> Arguments:
    x = torch.tensor([*_X, [0.0] * 4])
    return {"out_grad": torch.tensor([[1.0, -1.0, 0.5, 2.0], [1.0, 0.0, 0.0, 0.0]]), "x": x,
            "weight": torch.tensor(_W), "rstd": torch.tensor([0.65759581, 999.99994]),
            **changes}  # fmt: skip


_BACKWARD = Cases(
    small=[
        Sample("5x96", _gradients(5, 96, residual=True, old=BF16)),
        Sample("0x96", _gradients(0, 96, residual=True)),
        Sample("0x96.old", _gradients(0, 96, old=FP32)),
        Sample("1x256", _gradients(1, 256)),
        Sample("5x7168", _gradients(5, 7168, residual=True, weight=FP32)),
        Sample("3x7168", _gradients(3, 7168)),
        Sample("2x1032.fp32", _gradients(2, 1032, dtype=FP32, weight=FP32, old=FP32)),
        Sample("3x33.odd", _gradients(3, 33, residual=True)),
        Sample("3x1031.odd", _gradients(3, 1031, weight=None, out_scale=0.3)),
        Sample("2x16384.fp32", _gradients(2, 16384, dtype=FP32, residual=True, weight=FP32)),
        Sample("270x72", _gradients(270, 72, out_scale=0.5)),
        Sample("530x40", _gradients(530, 40, dtype=FP32, weight=FP32)),
        Sample("3x5x192", _gradients(3, 5, 192, residual=True)),
        Sample("strided", _gradients(4, 1160, extra=24)),
        Sample("misaligned", _gradients(4, 1160, shift=True)),
        Sample("special", _gradients(8, 160, special=True)),
        Sample("special.wide", _gradients(8, 1160, special=True, dtype=FP32, weight=FP32)),
    ],
    large=[
        Sample("8001x7168", _gradients(8001, 7168, residual=True)),
        Sample("4001x2048.fp32", _gradients(4001, 2048, dtype=FP32, weight=FP32, old=FP32)),
        Sample("300000x128", _gradients(300_000, 128)),
    ],
    benchmarks=[
        # 88 % of the copy bandwidth.
        Benchmark("8192x7168", _gradients(8192, 7168), goal_us=94.1),
        Benchmark("8192x7168.residual", _gradients(8192, 7168, residual=True), goal_us=125.4),
        Benchmark("8192x4096", _gradients(8192, 4096)),
        Benchmark("8192x7168.fp32", _gradients(8192, 7168, dtype=FP32, weight=FP32)),
        Benchmark("524288x128", _gradients(524_288, 128)),
    ],
    vectors=[
        Vector(
            "two rows",
            _backward_vector,
            lambda: (
                (
                    torch.tensor([[0.7286872, -0.1866151, 0.5154130, 1.3507373],
                                  [999.99994, 0.0, 0.0, 0.0]]),
                    torch.tensor([0.6575958, -1.3151916, -0.6575958, 0.6575958]),
                ),
                None,
            ),
        ),
        Vector(
            "residual and a factor",
            lambda: _backward_vector(
                residual_out_grad=torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0]]),
                out_scale=0.3,
            ),
            lambda: (
                (
                    torch.tensor([[0.3186062, 0.1440155, 0.4546239, 0.8052212],
                                  [300.0, 0.0, 0.0, 1.0]]),
                    torch.tensor([0.1972788, -0.3945575, -0.1972788, 0.1972788]),
                ),
                None,
            ),
        ),
    ],
    rejects=[
        Reject("x", "too wide", lambda a: {**a, "x": torch.zeros(2, 16385)}),
        Reject("rstd", "too few", edited("rstd", lambda r: r[:-1])),
        Reject("out_grad", "dtype", edited("out_grad", lambda g: g.float())),
        Reject("weight_grad", "without weight", changed(weight=None)),
        Reject("weight_grad", "too short", edited("weight_grad", lambda g: g[:-1])),
    ],
    # Sums over tokens and channels are in the kernel's order.
    compare=close_results(rtol=2e-5, atol=2e-5, rtol_bfloat16=1.6e-2),
    any_rank=True,
)  # fmt: skip

CASES = {
    "norm_forward": _NORM,
    "norm_forward_and_per_token_cast": _CAST,
    "norm_backward": _BACKWARD,
}
