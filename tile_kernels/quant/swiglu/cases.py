"""Argument sets of SwiGLU and its gradient with casts along rows."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.casting import cast
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
from tile_kernels.quant.samples import (
    CLAMP_REJECTS,
    gates_and_values,
    hexed,
    numbers,
    placed,
    with_data,
    with_sf,
    within_one_step,
)
from tile_kernels.quant.swiglu import reference
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    assert_equal_results,
    builder,
    changed,
    close_results,
    edited,
    with_value,
)

_E4M3, _FP32, _INT32 = torch.float8_e4m3fn, torch.float32, torch.int32


def _maps(rows: int, num_tokens: int, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to random weights and back; about an eighth of the rows are padding."""
    slots = num_tokens * num_topk
    places = torch.randperm(slots)[:rows]
    index = torch.full((rows,), -1, dtype=_INT32)
    index[torch.randperm(rows)[: places.numel()]] = places.to(_INT32)
    index.masked_fill_(torch.rand(rows) < 0.125, -1)
    inverse = torch.full((slots,), -1, dtype=_INT32)
    mapped = index >= 0
    inverse[index[mapped].long()] = torch.arange(rows, dtype=_INT32)[mapped]
    return index, inverse.view(num_tokens, num_topk)


# ---- forward ------------------------------------------------------------------------------------


@builder
def _forward(
    device: torch.device,
    rows: int,
    hidden: int,
    group: int,
    dtype: torch.dtype = BF16,
    *,
    weighted: bool = False,
    padded: bool = False,
    clamp: float | None = None,
    counted: bool = False,
    bound: float | None = None,
    special: bool = False,
    extra: int = 0,
    shift: bool = False,
    flags: Flags = ROW,
    kind: str = "",
    factor: float | None = None,
    counters: int = 3,
) -> Arguments:
    """`kind` as in `_of_rows`: rows have their weights, then."""
    x = placed(gates_and_values(rows, hidden, dtype, device, special), extra, shift)
    num_tokens = rows + 2
    if kind:
        return {
            "x": x,
            "fmt": "e4m3",
            "num_per_channels": group,
            **all_flags(flags),
            **_of_rows(rows, kind, weighted, device),
            "routed_scaling_factor": factor,
            "swiglu_clamp_value": clamp,
            "clamped_count": torch.arange(counters).to(device) if counted else None,
        }
    return {
        "x": x,
        "fmt": "e4m3",
        "num_per_channels": group,
        **all_flags(flags),
        "pos_to_token_topk": _maps(rows, num_tokens, 2)[0].to(device) if weighted else None,
        "topk_weights": torch.randn(num_tokens, 2).to(device) if weighted else None,
        "pos_to_expert": (
            torch.randint(-2, 5, (rows,), dtype=_INT32).to(device) if padded else None
        ),
        "swiglu_clamp_value": clamp,
        "clamped_count": torch.tensor([5, 2**40, 0]).to(device) if counted else None,
        "sf_clamp_min": bound,
    }


_X = [[1.0, -2.0, 12.0, 3.0], [0.0, 5.0, -0.25, -20.0]]


def _vector_arguments(**changes: Any) -> Arguments:
    return {
        "x": torch.tensor(_X),
        "fmt": "e4m3",
        "num_per_channels": 2,
        **all_flags(ROUNDED),
        **changes,
    }


def _cast_vector() -> Arguments:
    """A row that exists and one that does not."""
    left = (torch.arange(64) - 31.5) / 8
    right = torch.tensor([1.0] * 32 + [-2.0] * 32)
    return {
        "x": torch.cat((left, right)).repeat(2, 1),
        "fmt": "e4m3",
        "num_per_channels": 32,
        "round_sf": True,
        "psum_num_tokens_per_expert": torch.tensor([1], dtype=_INT32),
    }


def _cast_result() -> Any:
    """Known are the first three and the last two codes, and the scales."""
    data, _ = reference.swiglu_forward_and_per_token_cast(**_cast_vector())
    codes = data.view(torch.uint8)
    codes[0, :3] = torch.tensor([0xEA, 0xEB, 0xEC])
    codes[0, -2:] = 0xF7
    codes[1] = 0
    return (data, torch.tensor([[2.0**-10, 2.0**-5], [0.0, 0.0]])), None


def _short(x: torch.Tensor) -> torch.Tensor:
    return x[:-1]


_SHAPES = [(5, 576, 128), (3, 256, 16), (4, 200, 64), (6, 1056, 32), (2, 33, 16)]
_ROW_SHAPES = [(5, 576), (3, 1000), (2, 33)]
_ALL: dict[str, Any] = {"weighted": True, "padded": True}

_SWIGLU_FORWARD_AND_CAST = Cases(
    small=[
        Sample("6x96.32.all", _forward(6, 96, 32, **_ALL, clamp=2.0, counted=True)),
        Sample("0x128", _forward(0, 128, 128)),
        Sample("0x128.all", _forward(0, 128, 128, **_ALL, clamp=1.0, counted=True, flags=PACKED)),
        Sample("0x64.ranges", _forward(0, 64, 32, weighted=True, kind="ranges")),
        Sample("1x256", _forward(1, 256, 128)),
        *(
            Sample(f"{t}x{h}.{g}.{name}", _forward(t, h, g, flags=flags, clamp=4.0, **_ALL))
            for t, h, g in _SHAPES
            for name, flags in LAYOUTS.items()
        ),
        *(
            Sample(f"rows.{t}x{h}.{name}", _forward(t, h, h, flags=flags, clamp=4.0, **_ALL))
            for t, h in _ROW_SHAPES
            for name, flags in LAYOUTS.items()
        ),
        Sample("5x320.64.packed_row", _forward(5, 320, 64, padded=True, flags=PACKED_ROW)),
        Sample("rows.3x320.packed_row", _forward(3, 320, 320, flags=PACKED_ROW, **_ALL)),
        Sample("plain.5x640", _forward(5, 640, 128)),
        Sample("plain.rows", _forward(5, 640, 640)),
        Sample("weighted", _forward(5, 128, 128, weighted=True, flags=PACKED)),
        Sample("ranges.unweighted", _forward(13, 64, 32, kind="ranges", flags=PACKED)),
        Sample(
            "ranges",
            _forward(
                13, 96, 32, weighted=True, kind="ranges", factor=2.5, clamp=1.0, counted=True,
                counters=4,
            ),
        ),
        Sample("ranges.rows", _forward(13, 96, 96, weighted=True, kind="ranges", flags=COLUMN)),
        Sample("row weights", _forward(5, 128, 64, weighted=True, kind="all", factor=0.5)),
        Sample("padded", _forward(9, 128, 64, padded=True, flags=PACKED)),
        Sample("rows.2x20000", _forward(2, 20000, 20000, clamp=1.0)),
        Sample("rows.3x70000", _forward(3, 70_000, 70_000, clamp=1.0, counted=True, **_ALL)),
        Sample("counted", _forward(9, 1056, 128, clamp=0.5, counted=True, flags=PACKED, **_ALL)),
        Sample("counted.rows", _forward(9, 576, 576, clamp=0.5, counted=True, padded=True)),
        Sample("counted.0", _forward(3, 40, 16, clamp=0.0, counted=True)),
        Sample("counted.blocks", _forward(4300, 33, 16, _FP32, clamp=4.0, counted=True)),
        Sample("bound", _forward(4, 64, 32, bound=100.0)),
        Sample("bound.least", _forward(4, 64, 32, padded=True, bound=2.0**-119, flags=PACKED)),
        Sample("float32", _forward(4, 320, 128, _FP32, clamp=3.0, weighted=True)),
        Sample("special", _forward(9, 160, 32, special=True)),
        Sample("special.packed", _forward(9, 160, 32, _FP32, special=True, flags=PACKED, **_ALL)),
        Sample("special.clamped", _forward(9, 160, 160, special=True, clamp=3.0, counted=True)),
        Sample("strided", _forward(5, 128, 64, extra=64)),
        Sample("strided.odd", _forward(5, 128, 64, extra=3)),
        Sample("misaligned", _forward(4, 128, 32, shift=True)),
    ],
    large=[
        *(
            Sample(
                f"{t}x{h}.{g}.{c}.{name}",
                _forward(t, h, g, clamp=c, flags=flags, padded=True, weighted=name != "packed"),
            )
            for t, h in ((27008, 1024), (13000, 3584))
            for g in (128, h)
            for c in (None, 10.0, 0.5)
            for name, flags in (("rounded", ROUNDED), ("packed", PACKED))
        ),
        Sample("counted", _forward(27008, 2048, 128, clamp=0.5, counted=True, **_ALL)),
        Sample("counted.rows", _forward(4001, 2048, 2048, clamp=0.5, counted=True, **_ALL)),
        Sample("special.4001x2048", _forward(4001, 2048, 128, special=True, flags=COLUMN)),
        Sample("270001x4096", _forward(270_001, 4096, 128)),  # beyond 2^31 elements
    ],
    benchmarks=[
        Benchmark("128", _forward(8192, 4096, 128), goal_us=42.4),
        Benchmark("128.small", _forward(64, 4096, 128), goal_us=2.3),
        Benchmark(
            "128.counted", _forward(8192, 4096, 128, clamp=10.0, counted=True, flags=PACKED, **_ALL)
        ),
        Benchmark("rows", _forward(8192, 4096, 4096)),
        Benchmark("128.ranges", _forward(8192, 4096, 128, weighted=True, kind="filled")),
    ],
    vectors=[
        Vector("ranges", _cast_vector, _cast_result),
        Vector(
            "weighted",
            lambda: _vector_arguments(
                topk_weights=torch.tensor([[0.5, 2.0]]),
                pos_to_token_topk=torch.tensor([1, -1], dtype=_INT32),
            ),
            lambda: ((hexed("79DB/8080", _E4M3), torch.tensor([[2.0**-4], [2.0**-22]])), None),
        ),
        Vector(
            # 7.3105859756, -0.7152175307 and -0.0, -49.6653556824
            "counted",
            lambda: _vector_arguments(
                swiglu_clamp_value=10.0, clamped_count=torch.tensor([100, 0, 0])
            ),
            lambda: (
                (
                    torch.tensor([[240.0, -22.0], [-0.0, -400.0]]).to(_E4M3),
                    torch.tensor([[2.0**-5], [2.0**-3]]),
                ),
                torch.tensor([100, 1, 1]),
            ),
        ),
    ],
    rejects=[
        Reject("fmt", "e2m1", changed(fmt="e2m1")),
        Reject("num_per_channels", "48", changed(num_per_channels=48)),
        Reject("use_packed_ue8m0", "unrounded", changed(use_packed_ue8m0=True)),
        Reject("round_sf", "an int", changed(round_sf=1)),
        Reject("x", "odd width", lambda a: {**a, "x": a["x"][:, :191]}),
        Reject("x", "no channels", lambda a: {**a, "x": a["x"][:, :0]}),
        Reject("topk_weights", "missing", changed(topk_weights=None)),
        Reject("pos_to_token_topk", "short", edited("pos_to_token_topk", _short)),
        Reject("pos_to_expert", "short", edited("pos_to_expert", _short)),
        Reject("pos_to_expert", "with ranges", changed(
            psum_num_tokens_per_expert=torch.tensor([3], dtype=_INT32)
        )),
        Reject("topk_weights", "too few rows", changed(
            topk_weights=torch.ones(5), pos_to_token_topk=None
        )),
        Reject("pos_to_token_topk", "with weights of rows", changed(topk_weights=torch.ones(6))),
        Reject("routed_scaling_factor", "without weights", changed(
            topk_weights=None, pos_to_token_topk=None, routed_scaling_factor=2.0
        )),
        Reject("alignment", "zero", changed(alignment=0)),
        Reject("fill_padding", "an int", changed(fill_padding=1)),
        *CLAMP_REJECTS,
        Reject("clamped_count", "without a clamp", changed(swiglu_clamp_value=None)),
        Reject("clamped_count", "short", edited("clamped_count", lambda x: x[:2])),
        Reject("sf_clamp_min", "zero", changed(sf_clamp_min=0.0)),
        Reject("sf_clamp_min", "negative", changed(sf_clamp_min=-1.0)),
        Reject("sf_clamp_min", "tiny", changed(sf_clamp_min=1e-37)),
        Reject("sf_clamp_min", "NaN", changed(sf_clamp_min=torch.nan)),
        Reject("sf_clamp_min", "infinite", changed(sf_clamp_min=torch.inf)),
        Reject("sf_clamp_min", "text", changed(sf_clamp_min="1")),
    ],
    bad_values=[
        Reject("pos_to_token_topk", "too large", with_value("pos_to_token_topk", 16, 1)),
        Reject("pos_to_token_topk", "below -1", with_value("pos_to_token_topk", -2, 1)),
    ],
    compare=within_one_step,
)  # fmt: skip


# ---- backward -----------------------------------------------------------------------------------


@builder
def _backward(
    device: torch.device,
    rows: int,
    hidden: int,
    group: int,
    num_tokens: int = 5,
    num_topk: int = 2,
    *,
    round_sf: bool = False,
    clamp: float | None = None,
    special: bool = False,
    shift: bool = False,
    leading: bool = False,
    kind: str = "",
    flags: Flags = ROW,
    factor: float | None = None,
    recompute: bool = True,
    weighted: bool = True,
) -> Arguments:
    """`kind` as in `_of_rows`: rows have their weights, then."""
    x = torch.randn(rows, 2 * hidden, device=device)
    grad = torch.randn(rows, hidden, device=device)
    if special:
        x = numbers(rows, 2 * hidden, _FP32, device, special=True)
        grad = numbers(rows, hidden, _FP32, device, special=True)
    data, sf = cast(x, "e4m3", (1, group))
    if special:
        data = torch.where(x.isnan(), torch.nan, data.float()).to(_E4M3)
    grad = grad.bfloat16()
    data = placed(data.view(torch.uint8), shift=shift).view(_E4M3)
    sf, grad = (placed(x, shift=shift) for x in (sf, grad))
    index, inverse = (m.to(device) for m in _maps(rows, num_tokens, num_topk))
    if leading:
        data, sf, grad = (t.unflatten(0, (-1, 2)) for t in (data, sf, grad))
    if kind:
        rows_of = _of_rows(rows, kind, weighted, device)
        return {
            "x": (data, sf),
            "grad_out": grad,
            "weight": rows_of.pop("topk_weights"),
            "pos_to_token_topk": None,
            "token_topk_to_pos": None,
            "num_per_channels": group,
            **rows_of,
            **all_flags(flags),
            "routed_scaling_factor": factor,
            "swiglu_clamp_value": clamp,
            "do_recompute": recompute,
        }
    return {
        "x": (data, sf),
        "grad_out": grad,
        "weight": torch.rand(num_tokens, num_topk).to(device),
        "pos_to_token_topk": index,
        "token_topk_to_pos": inverse,
        "num_per_channels": group,
        "round_sf": round_sf,
        "swiglu_clamp_value": clamp,
    }


_close_sums = close_results(rtol=1e-4, atol=1e-4)


def _compare_backward(result: Any, expected: Any) -> None:
    """`weight_grad`, a sum in another order, to a tolerance."""
    _close_sums(result[3], expected[3])
    within_one_step(result[:3], expected[:3])


def _wide(*rows: list[float]) -> torch.Tensor:
    """Rows of 4 channels, in rows of 32 that end with zeros."""
    return torch.tensor([[*row, *[0.0] * 28] for row in rows])


def _backward_vector(clamp: float | None) -> Arguments:
    left = _wide([1.0, -2.0, 12.0, 0.0], [2.0, 0.5, 0.0, 0.0], [0.0] * 4)
    right = _wide([3.0, 1.0, -0.5, 20.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4)
    return {
        "x": (torch.cat((left, right), 1).to(_E4M3), torch.ones(3, 2)),
        "grad_out": _wide(*[[1.0, 2.0, -1.0, 0.5]] * 3).bfloat16(),
        "weight": torch.tensor([[0.5, 2.0], [1.0, 3.0]]),
        "pos_to_token_topk": torch.tensor([1, 2, -1], dtype=_INT32),
        "token_topk_to_pos": torch.tensor([[-1, 0], [1, -1]], dtype=_INT32),
        "num_per_channels": 32,
        "round_sf": True,
        "swiglu_clamp_value": clamp,
    }


def _backward_result() -> Any:
    """Of the worked example without a clamp; the second row by the formulas in exact arithmetic."""
    out = _wide([4.375, -0.4765625, -12.0, 0.0], [1.7578125, 0.310546875, 0.0, 0.0], [0.0] * 4)
    left = _wide(
        [5.5660233, -0.3631370, 1.0000682, 10.0], [1.0907842, 1.4799224, -0.0, 0.0],
        [0.0, 0.0, -0.0, 0.0],
    )  # fmt: skip
    right = _wide(
        [1.4621172, -0.9536234, -23.9998512, 0.0], [1.7615942, 0.6224593, -0.0, 0.0],
        [0.0, 0.0, -0.0, 0.0],
    )  # fmt: skip
    codes_left = _wide(
        [176.0, -12.0, 32.0, 320.0], [288.0, 384.0, -0.0, 0.0], [0.0, 0.0, -0.0, 0.0]
    )
    codes_right = _wide([24.0, -15.0, -384.0, 0.0], [224.0, 80.0, -0.0, 0.0], [0.0, 0.0, -0.0, 0.0])
    scales = torch.tensor([[2.0**-5, 2.0**-4], [2.0**-8, 2.0**-7], [2.0**-22, 2.0**-22]])
    return (
        out.bfloat16(),
        (torch.cat((codes_left, codes_right), 1).to(_E4M3), scales),
        torch.cat((left, right), 1).bfloat16(),
        torch.tensor([[0.0, 7.7163267], [2.3840535, 0.0]]),
    )


def _narrow_halves(arguments: Arguments) -> Arguments:
    data, sf = arguments["x"]
    return {**arguments, "x": (data[:, :192].clone(), sf[:, :2]), "num_per_channels": 128}


_SWIGLU_BACKWARD_AND_CAST = Cases(
    small=[
        Sample("6x128.32", _backward(6, 128, 32, round_sf=True, clamp=1.0)),
        Sample("0x64", _backward(0, 64, 32)),
        *(Sample(f"0x64.{kind}", _backward(0, 64, 32, kind=kind)) for kind in ("ranges", "all")),
        Sample("1x32", _backward(1, 32, 32, 1, 1)),
        *(
            Sample(f"{t}x{h}.{g}.{c}", _backward(t, h, g, round_sf=c is None, clamp=c))
            for t, h, g in ((5, 384, 128), (3, 1056, 32), (2, 2560, 128), (4, 32, 32))
            for c in (None, 0.5)
        ),
        Sample("7x7168", _backward(2, 7168, 128, clamp=10.0)),
        Sample("no weights", _backward(3, 64, 32, 0, 2)),
        *(
            Sample(
                f"ranges.{name}",
                _backward(13, 192, 32, kind="ranges", factor=2.5, clamp=1.0, flags=flags),
            )
            for name, flags in LAYOUTS.items()
        ),
        Sample("packed_row", _backward(5, 96, 32, kind="ranges", clamp=1.0, flags=PACKED_ROW)),
        Sample("ranges.128", _backward(14, 384, 128, kind="ranges", flags=PACKED)),
        Sample(
            "all.unweighted",
            _backward(5, 64, 32, kind="all", weighted=False, recompute=False, leading=False),
        ),
        Sample("row weights", _backward(6, 64, 32, kind="all", factor=0.5, leading=True)),
        Sample("more weights", _backward(3, 64, 32, 130, 3)),
        Sample("leading", _backward(4, 64, 32, leading=True)),
        Sample("special", _backward(9, 160, 32, 9, 2, special=True)),
        Sample("special.clamped", _backward(9, 128, 128, 9, 2, special=True, clamp=3.0)),
        Sample("misaligned", _backward(4, 128, 32, shift=True)),
    ],
    large=[
        *(
            Sample(
                f"{t}x{h}.{g}.{r}.{c}", _backward(t, h, g, t // 4, 6, round_sf=r, clamp=c)
            )
            for t, h in ((26304, 2048), (9088, 7168))
            for g in (32, 128)
            for r, c in ((False, None), (True, 10.0), (True, 0.5))
        ),
        # Beyond 2^31 elements, of which the reference needs about 100 GiB at a time.
        Sample("262401x4096", _backward(262_401, 4096, 128, 65_601, 6)),
    ],
    benchmarks=[
        Benchmark("128", _backward(26_320, 4096, 128, 17_600, 6), goal_us=340.0),
        Benchmark("32.clamped", _backward(26_320, 4096, 32, 17_600, 6, clamp=0.5)),
        Benchmark(
            "128.ranges",
            _backward(26_304, 2048, 128, kind="filled", flags=PACKED, recompute=False),
        ),
    ],
    vectors=[Vector("H=32", lambda: _backward_vector(None), _backward_result)],
    rejects=[
        Reject("x", "no tuple", lambda a: {**a, "x": a["x"][0]}),
        Reject("x", "three tensors", lambda a: {**a, "x": (*a["x"], a["x"][1])}),
        Reject("x", "bfloat16", with_data(lambda data: data.bfloat16())),
        Reject("x", "odd", with_data(lambda data: data[:, :255].clone())),
        Reject("x_sf", "too few", with_sf(lambda sf: sf[:, :-1].clone())),
        Reject("x_sf", "double", with_sf(lambda sf: sf.double())),
        Reject("num_per_channels", "64", changed(num_per_channels=64)),
        Reject("num_per_channels", "no divisor", _narrow_halves),
        Reject("grad_out", "float32", lambda a: {**a, "grad_out": a["grad_out"].float()}),
        Reject("pos_to_token_topk", "short", edited("pos_to_token_topk", _short)),
        Reject("token_topk_to_pos", "short", edited("token_topk_to_pos", _short)),
        Reject("round_sf", "an int", changed(round_sf=1)),
        *CLAMP_REJECTS,
    ],
    bad_values=[
        Reject("pos_to_token_topk", "too large", with_value("pos_to_token_topk", 10, 1)),
        Reject("pos_to_token_topk", "below -1", with_value("pos_to_token_topk", -2, 1)),
        Reject("token_topk_to_pos", "too large", with_value("token_topk_to_pos", 6, 1)),
        Reject("token_topk_to_pos", "below -1", with_value("token_topk_to_pos", -2, 1)),
        Reject("token_topk_to_pos", "no inverse", edited("token_topk_to_pos", lambda m: m.flip(0))),
        *(
            Reject(name, "names nothing", edited(name, lambda m: torch.full_like(m, -1)))
            for name in ("pos_to_token_topk", "token_topk_to_pos")
        ),
    ],
    compare=_compare_backward,
)  # fmt: skip

# ---- without a cast -----------------------------------------------------------------------------


def _compare_plain(result: Any, expected: Any) -> None:
    """As `within_one_step`, with float32 of CPUs to the digits of the worked examples."""
    tensors = result if isinstance(result, tuple) else (result,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(tensors, wanted, strict=True):
        if other is None:
            assert_equal_results(one, other)
        elif other.dtype == _FP32 and not one.is_cuda:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, equal_nan=True)
        else:
            within_one_step(one, other)


def _compare_plain_backward(result: Any, expected: Any) -> None:
    """`weight_grad`, a sum in another order, to a tolerance: it is 1-D, or has two choices."""
    is_sum = [each.dtype == _FP32 and (each.dim() == 1 or each.shape[1] == 2) for each in expected]
    for one, other, close in zip(result, expected, is_sum, strict=True):
        (_close_sums if close else _compare_plain)(one, other)


def _of_rows(rows: int, kind: str, weighted: bool, device: torch.device) -> Arguments:
    """Which rows exist, and their weights. With ranges, six experts, the third without rows."""
    arguments: Arguments = {}
    if kind == "indexed":
        num_tokens = rows + 2
        index, inverse = (m.to(device) for m in _maps(rows, num_tokens, 2))
        arguments |= {"pos_to_token_topk": index, "token_topk_to_pos": inverse}
        return {**arguments, "topk_weights": torch.randn(num_tokens, 2).to(device)}
    if kind == "ranges":
        alignment, ends, end = 4, [], 0
        for count in (rows // 4, 1, 0, rows // 3, 2, 1):
            ends.append(-(-end // alignment) * alignment + count)
            end = ends[-1]
        arguments["psum_num_tokens_per_expert"] = torch.tensor(ends, dtype=_INT32, device=device)
        arguments["alignment"] = alignment
    if kind == "filled":  # 64 experts that share all rows, an eighth of them padding
        starts = torch.arange(0, rows, -(-rows // (64 * 128)) * 128)
        ends_of = torch.minimum(starts + (starts[1] - starts[0]) * 7 // 8, torch.tensor(rows))
        arguments["psum_num_tokens_per_expert"] = ends_of.to(_INT32).to(device)
    return {**arguments, "topk_weights": torch.randn(rows).to(device) if weighted else None}


@builder
def _plain(
    device: torch.device,
    rows: int,
    hidden: int,
    kind: str = "all",
    *,
    weighted: bool = True,
    dtype: torch.dtype = BF16,
    fmt: str = "bf16",
    factor: float | None = None,
    clamp: float | None = None,
    counters: int = 0,
    special: bool = False,
    extra: int = 0,
    shift: bool = False,
) -> Arguments:
    x = placed(gates_and_values(rows, hidden, dtype, device, special), extra, shift)
    arguments = _of_rows(rows, kind, weighted, device)
    arguments.pop("token_topk_to_pos", None)
    return {
        "x": x,
        "fmt": fmt,
        **arguments,
        "routed_scaling_factor": factor,
        "clamp_value": clamp,
        "clamped_count": torch.arange(counters).to(device) if counters else None,
    }


@builder
def _plain_backward(
    device: torch.device,
    rows: int,
    hidden: int,
    kind: str = "all",
    *,
    weighted: bool = True,
    recompute: bool = True,
    dtype: torch.dtype = BF16,
    fmt: str = "bf16",
    factor: float | None = None,
    clamp: float | None = None,
    special: bool = False,
    shift: bool = False,
) -> Arguments:
    x = placed(gates_and_values(rows, hidden, dtype, device, special), shift=shift)
    grad = placed(numbers(rows, hidden, dtype, device, special=special), shift=shift)
    return {
        "x": x,
        "act_x_grad": grad,
        "fmt": fmt,
        **_of_rows(rows, kind, weighted, device),
        "routed_scaling_factor": factor,
        "clamp_value": clamp,
        "do_recompute": recompute,
    }


_PLAIN_X = [
    [1.0, -2.0, 3.0, 0.5], [0.5, 8.0, -9.0, 1.0], [0.0] * 4, [0.0] * 4, [2.0, 1.0, 1.0, 1.0],
]  # fmt: skip


def _plain_vector(**changes: Any) -> Arguments:
    return {
        "x": torch.tensor(_PLAIN_X),
        "fmt": "fp32",
        "psum_num_tokens_per_expert": torch.tensor([2, 4, 5], dtype=_INT32),
        "topk_weights": torch.tensor([0.5, 2.0, 0.0, 0.0, 1.0]),
        "alignment": 4,
        **changes,
    }


def _plain_gradient_vector(**changes: Any) -> Arguments:
    grad = torch.tensor([[1.0, 1.0], [0.5, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]])
    return _plain_vector(act_x_grad=grad, **changes)


_WITH_FACTOR: dict[str, Any] = {"routed_scaling_factor": 2.5, "clamp_value": 1.5}
_ACTIVATIONS = [
    [1.0965879, -0.0596015], [-5.6021342, 15.9946346], [0.0] * 2, [0.0] * 2, [1.7615941, 0.7310586],
]  # fmt: skip
_CLAMPED_ACTIVATIONS = [
    [1.3707349, -0.1490037], [-2.3342226, 6.1318083], [0.0] * 2, [0.0] * 2, [3.0659041, 1.8276465],
]  # fmt: skip
_GRADIENTS = [
    [1.3915058, -0.0226961, 0.3655293, -0.1192029],
    [-6.6596508, -2.0046928, 0.3112297, -15.9946346], [0.0] * 4, [0.0] * 4,
    [1.0907843, 1.8553411, 1.7615941, 1.4621172],
]  # fmt: skip
_CLAMPED_GRADIENTS = [
    [1.7393823, -0.0567402, 0.0, -0.2980073], [-2.7748544, 0.0, 0.0, -6.1318083],
    [0.0] * 4, [0.0] * 4, [0.0, 4.6383524, 3.0659041, 3.6552930],
]  # fmt: skip


def _plain_rejects(*more: Reject) -> list[Reject]:
    return [
        Reject("fmt", "e4m3", changed(fmt="e4m3")),
        Reject("x", "half", lambda a: {**a, "x": a["x"].half()}),
        Reject("x", "odd", lambda a: {**a, "x": a["x"][:, :31].clone()}),
        Reject("topk_weights", "short", edited("topk_weights", _short)),
        Reject("psum_num_tokens_per_expert", "int64", lambda a: {
            **a, "psum_num_tokens_per_expert": a["psum_num_tokens_per_expert"].long()
        }),
        Reject("psum_num_tokens_per_expert", "empty", lambda a: {
            **a, "psum_num_tokens_per_expert": a["psum_num_tokens_per_expert"][:0]
        }),
        Reject("pos_to_token_topk", "with ranges", lambda a: {
            **a, "pos_to_token_topk": torch.zeros(len(a["x"]), dtype=_INT32)
        }),
        Reject("routed_scaling_factor", "without weights", changed(topk_weights=None)),
        Reject("routed_scaling_factor", "infinite", changed(routed_scaling_factor=torch.inf)),
        Reject("clamp_value", "negative", changed(clamp_value=-1.0)),
        Reject("clamp_value", "text", changed(clamp_value="1")),
        Reject("alignment", "zero", changed(alignment=0)),
        *more,
    ]  # fmt: skip


_KINDS = ("all", "ranges", "indexed")
_PLAIN_ALL: dict[str, Any] = {"factor": 2.5, "clamp": 1.0}

_SWIGLU_FORWARD = Cases(
    small=[
        Sample("9x16.all", _plain(9, 16, "ranges", **_PLAIN_ALL, counters=4)),
        *(Sample(f"0x16.{kind}", _plain(0, 16, kind)) for kind in _KINDS),
        Sample("1x8", _plain(1, 8, weighted=False)),
        *(
            Sample(f"{t}x{h}.{kind}.{c}", _plain(t, h, kind, clamp=c))
            for t, h in ((13, 576), (5, 1000), (14, 33))
            for kind in _KINDS
            for c in (None, 0.5)
        ),
        Sample("ranges.unweighted", _plain(13, 40, "ranges", weighted=False)),
        Sample("float32", _plain(4, 320, "indexed", dtype=_FP32, fmt="fp32", **_PLAIN_ALL)),
        Sample("to float32", _plain(4, 64, fmt="fp32")),
        Sample("from float32", _plain(4, 64, dtype=_FP32)),
        Sample("special", _plain(9, 160, "indexed", special=True)),
        Sample("special.clamped", _plain(9, 160, special=True, weighted=False, clamp=3.0)),
        Sample("counted", _plain(13, 1000, "indexed", clamp=0.5, counters=3)),
        Sample("counted.0", _plain(0, 16, clamp=0.5, counters=4)),
        Sample("strided", _plain(5, 128, "ranges", extra=64)),
        Sample("misaligned", _plain(4, 128, "indexed", shift=True)),
    ],
    large=[
        *(
            Sample(f"{t}x{h}.{kind}", _plain(t, h, kind, clamp=c))
            for t, h, c in ((25_536, 1536, None), (13_000, 3584, 0.5))
            for kind in _KINDS
        ),
        Sample("270001x4096", _plain(270_001, 4096, "ranges")),  # beyond 2^31 elements
    ],
    benchmarks=[
        Benchmark("bf16", _plain(25_536, 1536, "indexed")),
        Benchmark("bf16.wide", _plain(66_016, 2048, "indexed")),
        Benchmark("bf16.ranges", _plain(25_536, 1536, "filled")),
        Benchmark("bf16.counted", _plain(25_536, 1536, "filled", clamp=10.0, counters=4)),
    ],
    vectors=[
        Vector("ranges", _plain_vector, lambda: (torch.tensor(_ACTIVATIONS), None)),
        Vector(
            "factor, clamp, counts",
            lambda: _plain_vector(**_WITH_FACTOR, clamped_count=torch.zeros(4, dtype=torch.int64)),
            lambda: (torch.tensor(_CLAMPED_ACTIVATIONS), torch.tensor([2, 1, 1, 6])),
        ),
    ],
    rejects=_plain_rejects(
        Reject("clamped_count", "without a clamp", changed(clamp_value=None)),
        Reject("clamped_count", "two", edited("clamped_count", lambda x: x[:2])),
        Reject("clamped_count", "int32", edited("clamped_count", torch.Tensor.int)),
        Reject("fill_padding", "an int", changed(fill_padding=1)),
    ),
    bad_values=[
        Reject(
            "psum_num_tokens_per_expert",
            "descends",
            edited("psum_num_tokens_per_expert", lambda x: x.flip(0)),
        ),
        Reject(
            "psum_num_tokens_per_expert",
            "beyond the rows",
            edited("psum_num_tokens_per_expert", lambda x: x + 100),
        ),
    ],
    compare=_compare_plain,
)


_SWIGLU_BACKWARD = Cases(
    small=[
        Sample("9x16.all", _plain_backward(9, 16, "ranges", **_PLAIN_ALL)),
        *(Sample(f"0x16.{kind}", _plain_backward(0, 16, kind)) for kind in _KINDS),
        Sample("1x8", _plain_backward(1, 8, weighted=False, recompute=False)),
        *(
            Sample(f"{t}x{h}.{kind}.{c}", _plain_backward(t, h, kind, clamp=c))
            for t, h in ((13, 576), (5, 1032), (14, 33))
            for kind in _KINDS
            for c in (None, 0.5)
        ),
        Sample("no act", _plain_backward(5, 64, "indexed", recompute=False)),
        Sample("ranges.unweighted", _plain_backward(13, 40, "ranges", weighted=False)),
        Sample(
            "float32", _plain_backward(4, 320, "indexed", dtype=_FP32, fmt="fp32", **_PLAIN_ALL)
        ),
        Sample("to float32", _plain_backward(4, 64, fmt="fp32", factor=0.5)),
        Sample("special", _plain_backward(9, 160, "indexed", special=True)),
        Sample("special.clamped", _plain_backward(9, 160, special=True, clamp=3.0)),
        Sample("misaligned", _plain_backward(4, 128, "indexed", shift=True)),
    ],
    large=[
        *(
            Sample(f"{t}x{h}.{kind}", _plain_backward(t, h, kind, clamp=c))
            for t, h, c in ((25_536, 1536, None), (13_000, 3584, 0.5))
            for kind in _KINDS
        ),
    ],
    benchmarks=[
        Benchmark("bf16", _plain_backward(25_536, 1536, "indexed")),
        Benchmark("bf16.wide", _plain_backward(66_016, 2048, "indexed")),
    ],
    vectors=[
        Vector(
            "factor and clamp",
            lambda: _plain_gradient_vector(**_WITH_FACTOR, do_recompute=True),
            lambda: (
                torch.tensor(_CLAMPED_GRADIENTS),
                torch.tensor([2.4434624, -3.6494598, 0.0, 0.0, 6.7211971]),
                torch.tensor(_CLAMPED_ACTIVATIONS),
            ),
        ),
        Vector(
            "ranges",
            _plain_gradient_vector,
            lambda: (
                torch.tensor(_GRADIENTS),
                torch.tensor([2.0739729, -9.3978510, 0.0, 0.0, 3.2237113]),
            ),
        ),
    ],
    rejects=_plain_rejects(
        Reject("act_x_grad", "float32", lambda a: {**a, "act_x_grad": a["act_x_grad"].float()}),
        Reject("act_x_grad", "short", edited("act_x_grad", _short)),
        Reject("do_recompute", "an int", changed(do_recompute=1)),
        Reject(
            "token_topk_to_pos",
            "alone",
            lambda a: {**a, "token_topk_to_pos": torch.zeros(2, 2, dtype=_INT32)},
        ),
    ),
    compare=_compare_plain_backward,
)

CASES = {
    "swiglu_forward": _SWIGLU_FORWARD,
    "swiglu_backward": _SWIGLU_BACKWARD,
    "swiglu_forward_and_per_token_cast": _SWIGLU_FORWARD_AND_CAST,
    "swiglu_backward_and_per_token_cast": _SWIGLU_BACKWARD_AND_CAST,
}
