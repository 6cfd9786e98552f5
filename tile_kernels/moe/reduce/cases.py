"""Argument sets of `reduce_fused`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.moe.fused import dtype_names
from tile_kernels.moe.mappings import BENCHMARK, EXAMPLE, Mapping, mapping, masked, received, routed
from tile_kernels.moe.samples import fewer_tokens, int64, outside
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, INF, NAN, builder, changed, edited, normal

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@builder
def _reduce(
    device: torch.device,
    routing: Mapping,
    hidden: int,
    dtype: torch.dtype = BF16,
    *,
    weights: bool = True,
    x_sf: bool = False,
    sf: float | None = None,
    skip: int = 0,
    **more: Any,
) -> Arguments:
    """`more` are arguments as they are."""
    mapped = routing.on(device)
    slots, num_positions = mapped["token_topk_to_pos"], mapped["pos_to_expert"].shape[0]
    x = normal(num_positions, hidden, device=device, dtype=dtype, skip=skip)
    return {
        "x": (x, torch.randn(num_positions, device=device)) if x_sf else x,
        "topk_weights": torch.rand(slots.shape, device=device) if weights else None,
        "token_topk_to_pos": slots,
        **({} if sf is None else {"sf": torch.tensor([sf], device=device)}),
        **more,
    }


@mapping
def _sized(given: Mapping) -> tuple[Tensor, Tensor]:
    """As many positions as slots."""
    slots, pos_to_expert = given.make()
    return slots, pos_to_expert.new_zeros((slots.numel(),))


@builder
def _extreme(device: torch.device, dtype: torch.dtype, **more: Any) -> Arguments:
    """Signed zeros, subnormals, overflow, infinities and NaN, at every index of the sum."""
    values = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 3e38, -3e38, 65504.0, 448.0, INF, -INF, NAN]
    x = torch.tensor(values, device=device).expand(13, 13).clone()
    x[:, 1::2] = x.T[:, 1::2]  # every pair of values in a column
    slots = torch.arange(52, dtype=torch.int32, device=device).view(13, 4) * 5 % 15 - 1
    weights = torch.tensor([1.0, -1.0, 1e-3, -0.0, 3e38, INF, 0.0, 1e-45], device=device)
    return {
        "x": (x.to(dtype), x[:, 0].clone()),
        "topk_weights": weights.repeat(7)[:52].view(13, 4),
        "token_topk_to_pos": slots,
        **more,
    }


@mapping
def _any_slots(num_tokens: int, num_topk: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Positions repeat, between tokens too, and lie out of range."""
    slots = torch.randint(-3, num_positions + 3, (num_tokens, num_topk), dtype=torch.int32)
    slots[0, 0], slots[-1, -1] = 2**31 - 1, -(2**31)
    return slots, torch.zeros(num_positions, dtype=torch.int32)


def _worked_reduce(**more: Any) -> Arguments:
    rows = torch.arange(12.0)[:, None] + torch.tensor([0.0, 0.5])
    weights = torch.tensor([[0.5, 0.25], [1.0, 9.0], [2.0, 1.0], [1.0, -1.0]])
    slots = torch.tensor(EXAMPLE, dtype=torch.int32)
    return {"x": rows, "topk_weights": weights, "token_topk_to_pos": slots, **more}


def _worked_with_x_sf(**more: Any) -> Arguments:
    arguments = _worked_reduce(**more)
    return {**arguments, "x": (arguments["x"], torch.arange(12.0))}


def _no_x_sf(change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments]:
    """`x` becomes a tuple with edited scales."""
    return lambda a: {**a, "x": (a["x"], change(torch.ones(a["x"].shape[0])))}


_REDUCE_FUSED = Cases(
    small=[
        Sample("33x4x24.bf16", _reduce(routed(33, 4), 24)),
        Sample("0x2x8", _reduce(masked(0, 2, 9), 8)),
        Sample("3x2x8.no-positions", _reduce(masked(3, 2, 0), 8, sf=-1.0, fp8_format="e4m3")),
        Sample("1x1x8", _reduce(routed(1, 1, 1, 1, 1), 8)),
        *(
            Sample(f"9x3x40.{dtype_names(d)}", _reduce(_any_slots(9, 3, 30), 40, d))
            for d in (torch.float32, torch.float16, _E4M3)
        ),
        *(
            Sample(
                f"9x3x40.{dtype_names(d)}.{dtype_names(o)}",
                _reduce(_any_slots(9, 3, 30), 40, d, x_sf=True, out_dtype=o),
            )
            for d, o in [
                (_E4M3, BF16),
                (_E5M2, torch.float16),
                (_E5M2, _E4M3),
                (BF16, torch.float32),
                (torch.float32, BF16),
            ]
        ),
        *(
            Sample(
                f"20x4x48.{dtype_names(d)}.{w}{s}.e4m3",
                _reduce(
                    routed(20, 4), 48, d, weights=w, x_sf=s, sf=-0.5 * s or None, fp8_format="e4m3"
                ),
            )
            for d in (torch.float32, BF16)
            for w, s in [(False, True), (True, False), (True, True)]
        ),
        Sample("20x4x48.plain", _reduce(routed(20, 4), 48, weights=False)),
        Sample("33x4x33", _reduce(routed(33, 4), 33)),
        Sample("40x6x7.float32", _reduce(_any_slots(40, 6, 90), 7, torch.float32)),
        Sample("65x9x1.e4m3", _reduce(_any_slots(65, 9, 90), 1, _E4M3)),
        Sample("3x8x1032", _reduce(_any_slots(3, 8, 9), 1032)),  # two parts
        Sample("9x4x0", _reduce(routed(9, 4), 0)),
        Sample("5x40x16", _reduce(_any_slots(5, 40, 60), 16, x_sf=True)),  # more slots than lanes
        Sample("40x4x24-misaligned", _reduce(_any_slots(40, 4, 90), 24, skip=1)),
        Sample("masked.20x4x16", _reduce(masked(20, 4, 9), 16, sf=-1.0, fp8_format="e4m3")),
        Sample("extreme.float32", _extreme(torch.float32)),
        Sample("extreme.bf16", _extreme(BF16)),
        Sample("extreme.fp16", _extreme(torch.float16)),
        Sample("extreme.fp16.float32", _extreme(torch.float16, out_dtype=torch.float32)),
        Sample("extreme.e5m2.bf16", _extreme(_E5M2, out_dtype=BF16)),
        Sample("extreme.float32.e4m3", _extreme(torch.float32, fp8_format="e4m3")),
        # Several tokens in a block.
        Sample("300x8x72", _reduce(_any_slots(300, 8, 500), 72, x_sf=True)),
        Sample("300x2x1032.float32", _reduce(_any_slots(300, 2, 200), 1032, torch.float32)),
        Sample("300x2x1031", _reduce(_any_slots(300, 2, 100), 1031)),  # two parts
    ],
    large=[
        *(
            Sample(
                f"{k}.{e}.{r}x{h}.{dtype_names(d)}.{w}{s}{f}",
                _reduce(
                    _sized(received(4001, k, e, r, 1)),
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
                (6, 32, 8, 7168, BF16, True, False, ""),
                (8, 32, 8, 3072, BF16, False, True, "e4m3"),
                (9, 4, 64, 2560, torch.float32, True, True, "e4m3"),
                (8, 32, 8, 4096, _E4M3, True, True, ""),
            ]
        ),
        Sample("over-2^31.e4m3", _reduce(_any_slots(1000, 8, 40000), 65536, _E4M3, out_dtype=BF16)),
    ],
    benchmarks=[
        Benchmark("bf16", _reduce(BENCHMARK, 7168), goal_us=186.2),
        Benchmark(
            "e4m3.bf16",
            _reduce(BENCHMARK, 7168, _E4M3, x_sf=True, out_dtype=BF16),
        ),
        Benchmark("bf16.64", _reduce(routed(64, 8, 32, 16, 1), 7168)),
        Benchmark("bf16.8-valid", _reduce(routed(4096, 8, 32, 16, 1), 7168)),
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
    bad_values=outside("token_topk_to_pos"),
    rejects=[
        int64("token_topk_to_pos"),
        fewer_tokens("topk_weights"),
        Reject("x", "integers", edited("x", torch.Tensor.int)),
        Reject("x", "three tensors", edited("x", lambda x: (x,) * 3)),
        Reject("x_sf", "too few", _no_x_sf(lambda sf: sf[:-1])),
        Reject("x", "None", _no_x_sf(lambda _: None)),
        Reject("x_sf", "double", _no_x_sf(lambda sf: sf.double())),
        Reject("x_sf", "strided", _no_x_sf(lambda sf: sf.repeat(2)[::2])),
        Reject("topk_weights", "half", edited("topk_weights", torch.Tensor.half)),
        Reject("fp8_format", "e5m2", changed(fp8_format="e5m2")),
        Reject("fp8_format", "None", changed(fp8_format=None)),
        Reject("out_dtype", "e5m2", changed(out_dtype=_E5M2)),
        Reject("out_dtype", "int32", changed(out_dtype=torch.int32)),
        Reject("out_dtype", "two answers", changed(out_dtype=BF16, fp8_format="e4m3")),
        Reject("out_dtype", "e5m2 left open", edited("x", lambda x: x.to(_E5M2))),
        Reject("sf", "without float8", changed(sf=torch.ones(1))),
        Reject("sf", "two", changed(sf=torch.ones(2), fp8_format="e4m3")),
    ],
)

CASES = {"reduce_fused": _REDUCE_FUSED}
