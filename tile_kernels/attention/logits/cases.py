"""Argument sets of the indexer's logits, and of their gradients."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant import formats
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    builder,
    changed,
    close_results,
    edited,
    misaligned,
    with_value,
)

BF16, E4M3, E2M1 = "bf16", "e4m3", "e2m1"
_GROUP = 32


def operand(x: torch.Tensor, source: str, exponents: str, exact: bool) -> Any:
    """Rows in a format. `exponents` of e2m1: near each other, far apart, special ones too."""
    rows, width = x.shape[:-1], x.shape[-1]
    if exact:  # small integers: every sum is exact, and many are equal
        x = x.round().clamp(-2, 2)
    if source == BF16:
        return x.bfloat16()
    if source == E4M3:
        return formats.encode_e4m3(x)
    spread = {"near": 3, "far": 40, "special": 3}[exponents]
    size = (*rows, width // _GROUP)
    chosen = 127 + torch.randint(-spread, spread + 1, size, device=x.device)
    if exact:  # far: more than e4m3 spans, and still few bits
        chosen = 127 + torch.randint(0, 2, size, device=x.device) * (
            12 if exponents == "far" else 1
        )
    if exponents == "special" and chosen.numel():
        chosen.view(-1)[0], chosen.view(-1)[-1] = 0, 255
        x.view(-1, _GROUP)[1] = 0
        chosen.view(-1)[1] = 200  # of zeros
    return formats.encode_e2m1(x), chosen.to(torch.uint8)


def _ranges(kind: str, tokens: int, keys: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    place = torch.arange(tokens, device=device)
    every = torch.full((tokens,), keys, device=device)
    causal = (place + 1) * keys // max(tokens, 1)
    found = {
        "all": (0 * place, every),
        "causal": (0 * place, causal),
        "window": ((causal - 40).clamp(min=0), causal),
        "wild": (place - 3, torch.where(place % 3 == 0, keys + place, place - 5)),
        "none": (every, 0 * place),
    }[kind]
    return tuple(bound.int() for bound in found)


@builder
def arguments(
    device: torch.device,
    tokens: int,
    keys: int,
    heads: int = 4,
    depth: int = 32,
    source: str = E4M3,
    ranges: str = "all",
    exponents: str = "near",
    exact: bool = False,
    nan: bool = False,
    shift: bool = False,
    **more: Any,
) -> Arguments:
    """`exact`: logits that float32 holds exactly in any order of sums; `nan`: some rows are NaN."""
    q = torch.randn(tokens, heads, depth, device=device)
    k = torch.randn(keys, depth, device=device)
    weights = torch.randn(tokens, heads, device=device)
    scales = 0.5 + torch.rand(keys, device=device)
    if exact:
        weights = (4 * weights).round() / 4
        scales = torch.randint(0, 2, (keys,), device=device).float() + 1
    if nan:
        q[1, 0, 3] = k[2, 5] = weights[3, 0] = float("nan")
    of_q = operand(q, source, "near" if exact else exponents, exact)
    of_k = operand(k, source, exponents, exact)
    if shift:
        of_q, of_k = ((misaligned(x[0]), x[1]) if source == E2M1 else misaligned(x)
                      for x in (of_q, of_k))  # fmt: skip
        scales = misaligned(scales)
    start, end = _ranges(ranges, tokens, keys, device)
    return {
        "q": of_q, "k": (of_k, scales) if source == E4M3 else of_k,
        "weights": weights, "start": start, "end": end, **more,
    }  # fmt: skip


def worked(source: str, **more: Any) -> Any:
    """The example of the specification, in the first channels of 32 and heads of 4."""

    def make() -> Arguments:
        q, k, weights = torch.zeros(2, 4, 32), torch.zeros(4, 32), torch.zeros(2, 4)
        weights[:, :2] = torch.tensor([[0.5, 2], [1, -1]])
        q[:, :2, :2] = torch.tensor([[[1, 2], [-1, 1]], [[0, 1], [2, -1]]])
        k[:, :2] = torch.tensor([[1, 0], [0, 1], [1, 1], [-1, 2]])
        scales = torch.tensor([1, 0.5, 2, 1])
        ends = torch.tensor([[0, 0], [4, 4]], dtype=torch.int32)
        operands: tuple[Any, Any]
        if source == BF16:
            operands = q.bfloat16(), (k * scales[:, None]).bfloat16()
        elif source == E4M3:
            operands = formats.encode_e4m3(q), (formats.encode_e4m3(k), scales)
        else:
            ones = torch.full((2, 4, 1), 127, dtype=torch.uint8)
            operands = (
                (formats.encode_e2m1(q), ones),
                (formats.encode_e2m1(k), formats.encode_ue8m0(scales)[:, None]),
            )
        return {
            "q": operands[0], "k": operands[1], "weights": weights,
            "start": ends[0], "end": ends[1], **more,
        }  # fmt: skip

    return make


_LOGITS = [[0.5, 1.5, 3.0, 7.5], [-2.0, 0.5, 0.0, 2.0]]
_SOURCES = (BF16, E4M3, E2M1)

OPERAND_REJECTS = [
    Reject("q", "no tensor", changed(q=[1.0])),
    Reject("q", "three tensors", edited("q", lambda x: (x, x, x))),
    Reject("q", "with a scale", edited("q", lambda x: (x, torch.ones(3)))),
    Reject("q", "channels", edited("q", lambda x: x.repeat(1, 1, 3))),
    Reject("q", "no heads", edited("q", lambda x: x[:, :0])),
    Reject("q", "strides", edited("q", lambda x: x.repeat(1, 1, 2)[:, :, ::2])),
    Reject("k", "no scales", edited("k", lambda x: x[0])),
    Reject("k", "bfloat16", edited("k", lambda x: x[0].bfloat16())),
    Reject("k", "other channels", edited("k", lambda x: (x[0].repeat(1, 2), x[1]))),
    Reject("k", "fewer scales", edited("k", lambda x: (x[0], x[1][1:]))),
    Reject("weights", "fewer heads", edited("weights", lambda x: x[:, 1:].contiguous())),
    Reject("start", "int64", edited("start", lambda x: x.long())),
    Reject("end", "fewer", edited("end", lambda x: x[1:])),
]


def each_format(
    label: str, tokens: int, keys: int, heads: int, depth: int, **how: Any
) -> list[Sample]:
    """In each format; with `topk` for a selection, from exact logits."""
    how["exact"] = "topk" in how
    return [
        Sample(f"{s}.{label}", arguments(tokens, keys, heads, depth, s, **how)) for s in _SOURCES
    ]


INDEXER_LOGITS = Cases(
    small=[
        Sample("5x130.4x32", arguments(5, 130)),
        Sample("no queries", arguments(0, 130)),
        Sample("no keys", arguments(5, 0)),
        Sample("one of one", arguments(1, 1)),
        *each_format("3x150.64x128", 3, 150, 64, 128),
        *each_format("causal.19x400.4x32", 19, 400, 4, 32, ranges="causal"),
        Sample("2x140.128x64", arguments(2, 140, 128, 64)),
        Sample("bf16.2x64.5x256", arguments(2, 64, 5, 256, BF16)),
        Sample("window.40x700.4x32", arguments(40, 700, ranges="window")),
        Sample("wild.20x140.4x32", arguments(20, 140, ranges="wild")),
        Sample("no range.3x140.4x32", arguments(3, 140, 4, 32, E2M1, "none")),
        *(Sample(f"nan.{s}.5x70.4x32", arguments(5, 70, 4, 32, s, nan=True)) for s in (BF16, E4M3)),
        Sample("far.5x150.4x128", arguments(5, 150, 4, 128, E2M1, exponents="far")),
        Sample("special.5x150.4x128", arguments(5, 150, 4, 128, E2M1, exponents="special")),
        *(
            Sample(f"{e}.70x300.4x64", arguments(70, 300, 4, 64, E2M1, "causal", e))
            for e in ("near", "far", "special")  # keys are expanded before
        ),
        Sample(
            "bfloat16 out.5x130.4x32", arguments(5, 130, ranges="causal", out_dtype=torch.bfloat16)
        ),
        *each_format("shifted.3x40.4x32", 3, 40, 4, 32, shift=True),
    ],
    large=[
        *each_format("500x5000.64x128", 500, 5000, 64, 128, ranges="causal"),
        *each_format("1x20000.64x128", 1, 20000, 64, 128),
        *each_format("301x4001.33x256", 301, 4001, 33, 256, ranges="window"),
        *each_format("70x9000.128x64", 70, 9000, 128, 64),
        Sample("far.300x3000.64x128", arguments(300, 3000, 64, 128, E2M1, exponents="far")),
        Sample("over 2**31", arguments(2**15 + 9, 2**16 + 3, 1, out_dtype=torch.bfloat16)),
    ],
    benchmarks=[
        Benchmark("4096x65536.64x128", arguments(4096, 65536, 64, 128, E4M3), goal_us=3800.0),
        Benchmark("4096x16384.64x128", arguments(4096, 16384, 64, 128, E4M3), goal_us=1000.0),
        # Goals in proportion to that of e4m3.
        Benchmark("e2m1.4096x65536.64x128", arguments(4096, 65536, 64, 128, E2M1), goal_us=3760.0),
        Benchmark("bf16.4096x65536.64x128", arguments(4096, 65536, 64, 128, BF16), goal_us=5820.0),
        Benchmark("causal.4096x16384.64x128", arguments(4096, 16384, 64, 128, E4M3, "causal")),
        Benchmark("4x65536.64x128", arguments(4, 65536, 64, 128, E4M3)),
    ],
    vectors=[
        Vector(source, worked(source), lambda: torch.tensor(_LOGITS)) for source in _SOURCES
    ],
    rejects=[*OPERAND_REJECTS, Reject("out_dtype", "float16", changed(out_dtype=torch.float16))],
    # Matrix units add e4m3 products in fewer bits than float32 has: on an H200 up to 1.1 % of the
    # root mean square off in a million logits, for a width of 256.
    compare=close_results(rtol=2e-3, atol=1.5e-2, rtol_bfloat16=2**-7),
)  # fmt: skip


# ---- gradients -----------------------------------------------------------------------------------


def _gradients(
    tokens: int,
    keys: int,
    chosen: int,
    heads: int = 4,
    depth: int = 32,
    source: str = BF16,
    exact: bool = False,
    shift: bool = False,
) -> Build:
    """Distinct keys for each query in ascending order, some missing at the end; then any keys."""
    forward = arguments(tokens, keys, heads, depth, source, exact=exact, shift=shift)

    def make(device: torch.device) -> Arguments:
        given = forward(device)
        indices = torch.randint(max(keys, 1), (tokens, chosen), device=device)
        indices = indices.sort(dim=1).values
        indices[:, chosen - chosen // 4 if keys else 0 :] = -1
        grad = torch.randn(tokens, chosen, device=device)
        if exact:
            grad = grad.round()
        return {
            "q": given["q"], "k": given["k"], "weights": given["weights"],
            "indices": indices.int(), "grad": grad,
        }  # fmt: skip

    return make


def _worked_gradient() -> Arguments:
    q, k = torch.zeros(1, 2, 32), torch.zeros(2, 32)
    q[0, :, :2] = torch.tensor([[1, 2], [-1, 1]])
    k[:, :2] = torch.tensor([[0, 1], [1, 0]])
    return {
        "q": q.bfloat16(), "k": k.bfloat16(), "weights": torch.tensor([[0.5, 2.0]]),
        "indices": torch.tensor([[0, 1, -1]], dtype=torch.int32),
        "grad": torch.tensor([[1.0, 10.0, 100.0]]),
    }  # fmt: skip


def _expected_gradients() -> tuple[torch.Tensor, ...]:
    """Products: key 0 has 2 and 1, key 1 has 1 and -1."""
    of_q, of_k = torch.zeros(1, 2, 32), torch.zeros(2, 32)
    of_q[0, :, :2] = torch.tensor([[0.5 * 10, 0.5 * 1], [0, 2 * 1]])
    of_k[:, :2] = torch.tensor([[0.5 * 1 + 2 * -1, 0.5 * 2 + 2 * 1], [5 * 1, 5 * 2]])
    return of_q, of_k, torch.tensor([[2.0 + 10.0, 1.0]])


INDEXER_LOGITS_BWD = Cases(
    small=[
        Sample("5x70.20", _gradients(5, 70, 20)),
        Sample("no queries", _gradients(0, 70, 20)),
        Sample("no keys", _gradients(2, 0, 0)),
        Sample("no keys.e4m3.20", _gradients(2, 0, 20, source=E4M3)),
        Sample("none chosen", _gradients(2, 70, 0)),
        Sample("one of one", _gradients(1, 1, 1)),
        Sample("exact.3x300.150.64x128", _gradients(3, 300, 150, 64, 128, exact=True)),
        Sample("e4m3.3x70.80", _gradients(3, 70, 80, source=E4M3)),
        Sample("2x70.80.100x64", _gradients(2, 70, 80, 100, 64)),
        Sample("shifted.2x70.20", _gradients(2, 70, 20, shift=True)),
    ],
    large=[
        Sample("300x3000.512.64x128", _gradients(300, 3000, 512, 64, 128)),
        Sample("e4m3.300x3000.512.64x128", _gradients(300, 3000, 512, 64, 128, E4M3)),
        Sample("exact.200x3000.1000.128x128", _gradients(200, 3000, 1000, 128, 128, exact=True)),
        Sample("200x3000.500.64x256", _gradients(200, 3000, 500, 64, 256)),
    ],
    benchmarks=[
        Benchmark("4096x16384.2048.64x128", _gradients(4096, 16384, 2048, 64, 128)),
        Benchmark("e4m3.4096x16384.512.64x128", _gradients(4096, 16384, 512, 64, 128, E4M3)),
    ],
    vectors=[Vector("two heads", _worked_gradient, _expected_gradients)],
    rejects=[
        Reject("q", "packed", edited("q", lambda x: x.to(torch.int8))),
        Reject("k", "no tensor", edited("k", lambda x: (x, x, x))),
        Reject("weights", "fewer heads", edited("weights", lambda x: x[:, 1:].contiguous())),
        Reject("indices", "fewer", edited("indices", lambda x: x[1:])),
        Reject("grad", "fewer", edited("grad", lambda x: x[:, 1:].contiguous())),
    ],
    bad_values=[
        Reject("indices", "past the end", with_value("indices", 70)),
        Reject("indices", "negative", with_value("indices", -2)),
    ],
    # A product near zero counts or does not, by its sign: one that flips moves all channels of a
    # key, 128 of the 384,000 elements that a sample has.
    compare=close_results(rtol=1e-3, atol=1e-3, strays=1e-3),
)

CASES = {"indexer_logits": INDEXER_LOGITS, "indexer_logits_bwd": INDEXER_LOGITS_BWD}
