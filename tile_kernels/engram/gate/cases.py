"""Argument sets of the gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tile_kernels.engram.gate import reference
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    INF,
    NAN,
    builder,
    changed,
    close_results,
    edited,
    normal,
)

_EPS, _CLAMP = 1e-20, 1e-6
_SAVED = ("dot", "gate_score", "rstd_x", "rstd_k")


@builder
def _gate(
    device: torch.device,
    num_tokens: int,
    streams: int,
    hidden: int,
    *,
    special: bool = False,
    skip: int = 0,
    extra: int = 0,
    image: bool = False,
    **more: Any,
) -> Arguments:
    """With `extra`, k and v have gaps between rows; with `skip`, all start off a vector."""
    shape, layout = (num_tokens, streams, hidden), {"extra": extra, "skip": skip}
    arguments: Arguments = {
        "hidden_states": normal(*shape, device=device, dtype=BF16, skip=skip),
        "k": normal(*shape, device=device, dtype=BF16, **layout),
        "v": normal(num_tokens, hidden, device=device, dtype=BF16, **layout),
        "weight_fused": torch.randn(streams, hidden, device=device),
        "eps": _EPS,
        "clamp_value": _CLAMP,
        **more,
    }
    if image:
        arguments["image_token_mask"] = torch.arange(num_tokens, device=device) % 3 == 1
    if special:
        x, k = arguments["hidden_states"], arguments["k"]
        x[0] = 0  # an exact zero of the dot product, with norms of almost nothing
        x[1, :, 1::2], k[1, :, ::2] = 0, 0  # and with ordinary ones
        x[2, 0, 3], k[3, 0, 1] = NAN, INF
    return arguments


@builder
def _backward(
    device: torch.device, *shape: int, expanded: bool = False, **options: Any
) -> Arguments:
    """The arguments of the backward pass, with what the reference saves; `options` of `_gate`."""
    arguments = _gate(*shape, **options)(device)
    grad_out = normal(*shape, device=device, dtype=BF16)
    if expanded:
        grad_out = grad_out[:1, :1, :1].expand(shape)
    inputs = {name: arguments[name] for name in ("hidden_states", "k", "v", "weight_fused")}
    clamp = arguments["clamp_value"]
    mask = arguments.get("image_token_mask")
    _, *saved = reference.engram_gate_fwd(
        **inputs, eps=arguments["eps"], clamp_value=clamp, image_token_mask=mask
    )
    names = ("add_residual", "image_token_mask")
    residual = {key: arguments[key] for key in names if key in arguments}
    saved_by_name = dict(zip(_SAVED, saved))
    return {"grad_out": grad_out, **inputs, **saved_by_name, "clamp_value": clamp, **residual}


_SHAPES = [(1, 1, 8), (5, 4, 64), (3, 2, 520), (37, 3, 264), (2, 8, 1000), (300, 1, 40)]
_LARGE = [(t, 4, h) for t in (4001,) for h in (2048, 2560, 4096, 6144, 7168)]
_LARGE += [(513, 8, 7168), (700, 5, 1288), (64, 1, 16384), (40, 2, 40960), (9, 1, 131072)]
_HUGE = (2**17, 4, 4104)  # more than 2**31 elements


def _samples(build: Callable[..., Build], shapes: Sequence[tuple[int, ...]]) -> list[Sample]:
    return [Sample("x".join(map(str, shape)), build(*shape)) for shape in shapes]


def _small(build: Callable[..., Build]) -> list[Sample]:
    """What the gate and its gradients are both tested with."""
    return [
        Sample("7x2x272", build(7, 2, 272)),
        Sample("none", build(0, 4, 64)),
        *_samples(build, _SHAPES),
        Sample("special.9x2x72", build(9, 2, 72, special=True)),
        Sample("strided.6x3x80", build(6, 3, 80, extra=8)),
        Sample("odd strides.6x3x80", build(6, 3, 80, extra=3)),
        Sample("misaligned.6x3x80", build(6, 3, 80, skip=1)),
        Sample("no residual.5x2x64", build(5, 2, 64, add_residual=False)),
        Sample("image.9x2x72", build(9, 2, 72, special=True, image=True)),
        Sample("image, no residual.5x2x64", build(5, 2, 64, image=True, add_residual=False)),
        Sample("image, long.2x1x37600", build(2, 1, 37600, image=True)),
        Sample("no clamp.5x2x64", build(5, 2, 64, special=True, clamp_value=0.0, eps=1e-6)),
        Sample("long.2x1x37600", build(2, 1, 37600)),
    ]


def _large(build: Callable[..., Build]) -> list[Sample]:
    return [
        *_samples(build, _LARGE),
        Sample("strided.4001x4x7168", build(4001, 4, 7168, extra=64)),
    ]


# A step of bfloat16, and in float32 what the order of a sum makes.
_compare = close_results(rtol=1e-4, atol=1e-4, rtol_bfloat16=2**-7)


def _worked() -> Arguments:
    """Sixteen columns, so that `s` is exactly 4 and -4, and the gate sigmoid(2) and sigmoid(-2)."""
    ones = torch.ones(1, 2, 16).bfloat16()
    return {
        "hidden_states": ones,
        "k": ones * torch.tensor([1.0, -1.0]).bfloat16()[:, None],
        "v": ones[0, :1],
        "weight_fused": torch.tensor([2.0, 0.0]).repeat(2, 8),
        "eps": 0.0,
        "clamp_value": _CLAMP,
    }


_OPEN, _SHUT = 0.8807970779778823, 0.11920292202211755


def _saved() -> tuple[torch.Tensor, ...]:
    one = torch.ones(1, 2)
    return torch.tensor([[16.0, -16.0]]), torch.tensor([[_OPEN, _SHUT]]), one, one.clone()


def _row(*values: float) -> torch.Tensor:
    return torch.tensor(values).repeat(16 // len(values)).bfloat16()


ENGRAM_GATE_FWD = Cases(
    small=[
        *_small(_gate),
        Sample("plain.5x2x64", _gate(5, 2, 64, save_for_backward=False)),
        Sample("neither.5x2x64", _gate(5, 2, 64, save_for_backward=False, add_residual=False)),
    ],
    large=[*_large(_gate), Sample("over 2**31", _gate(*_HUGE, save_for_backward=False))],
    benchmarks=[
        Benchmark("4096x4x7168", _gate(4096, 4, 7168), goal_us=192.0),
        Benchmark("plain.4096x4x7168", _gate(4096, 4, 7168, save_for_backward=False)),
        *(
            Benchmark(f"{t}x4x{h}", _gate(t, 4, h))
            for t, h in [(4096, 6144), (4096, 4096), (1, 7168), (64, 7168)]
        ),
    ],
    vectors=[
        Vector(
            "open and shut",
            _worked,
            lambda: (
                torch.stack((_row(1 + _OPEN), _row(1 + _SHUT)))[None],
                *_saved(),
            ),
        ),
        Vector(
            "zero opens it by half",
            lambda: {**_worked(), "weight_fused": torch.zeros(2, 16), "save_for_backward": False},
            lambda: (torch.stack((_row(1.5), _row(1.5)))[None], None, None, None, None),
        ),
    ],
    rejects=[
        Reject(
            "hidden_states", "no streams", edited("hidden_states", lambda x: x[:, :0].contiguous())
        ),
        Reject(
            "hidden_states", "columns", edited("hidden_states", lambda x: x[..., :4].contiguous())
        ),
        Reject("k", "another shape", edited("k", lambda x: x[1:])),
        Reject("v", "another shape", edited("v", lambda x: x[:, :8])),
        Reject("weight_fused", "bfloat16", edited("weight_fused", torch.Tensor.bfloat16)),
        Reject("eps", "words", changed(eps="small")),
        Reject("clamp_value", "words", changed(clamp_value="small")),
        Reject("clamp_value", "NaN", changed(clamp_value=float("nan"))),
        Reject("save_for_backward", "an int", changed(save_for_backward=1)),
        Reject("add_residual", "an int", changed(add_residual=1)),
        Reject("image_token_mask", "float", changed(image_token_mask=torch.zeros(7))),
        Reject("inplace", "with saving", changed(inplace=True)),
    ],
    compare=_compare,
)


@builder
def _packed(
    device: torch.device, num_tokens: int, streams: int, hidden: int, **options: Any
) -> Arguments:
    """Of `_gate`, with keys and values in one tensor."""
    arguments = _gate(num_tokens, streams, hidden, **options)(device)
    skip = options.get("skip", 0)
    kv = normal(num_tokens, streams + 1, hidden, device=device, dtype=BF16, skip=skip)
    del arguments["k"], arguments["v"]
    return {"hidden_states": arguments.pop("hidden_states"), "kv": kv, **arguments}


@builder
def _packed_backward(
    device: torch.device, *shape: int, alone: bool = False, **options: Any
) -> Arguments:
    """`alone`: the output was the gated value without the stream."""
    arguments = _packed(*shape, **options)(device)
    _, *saved = reference.engram_gate_packed_fwd(**arguments)
    del arguments["eps"]
    grad_out = normal(*shape, device=device, dtype=BF16)
    arguments = {"grad_out": grad_out, **arguments, **dict(zip(_SAVED, saved))}
    return {**arguments, "add_residual": False} if alone else arguments


def _worked_packed() -> Arguments:
    """The worked example as two tokens, the second of which is masked."""
    arguments = _worked()
    k, v = arguments.pop("k"), arguments.pop("v")
    kv = torch.cat((k, v[:, None]), 1).repeat(2, 1, 1)
    mask = torch.tensor([False, True])
    x = arguments.pop("hidden_states").repeat(2, 1, 1)
    return {"hidden_states": x, "kv": kv, **arguments, "image_token_mask": mask}


def _two(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, torch.zeros_like(x)))


_PACKED_REJECTS = [
    Reject("kv", "no value", edited("kv", lambda x: x[:, 1:].contiguous())),
    Reject("kv", "strided", edited("kv", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))),
    Reject("image_token_mask", "float", changed(image_token_mask=torch.zeros(7))),
]

ENGRAM_GATE_PACKED_FWD = Cases(
    small=[
        Sample("7x2x272", _packed(7, 2, 272)),
        Sample("none", _packed(0, 4, 64)),
        Sample("1x1x8", _packed(1, 1, 8)),
        Sample("image.9x4x72", _packed(9, 4, 72, special=False, image=True)),
        Sample("misaligned.6x3x80", _packed(6, 3, 80, skip=1)),
        Sample("plain.5x2x64", _packed(5, 2, 64, save_for_backward=False, image=True)),
    ],
    large=[Sample("4001x4x7168", _packed(4001, 4, 7168, image=True))],
    benchmarks=[
        Benchmark("4096x4x7168", _packed(4096, 4, 7168)),
        Benchmark("plain.4096x4x7168", _packed(4096, 4, 7168, save_for_backward=False, image=True)),
    ],
    vectors=[
        Vector(
            "the second is an image token",
            _worked_packed,
            lambda: (
                torch.stack((_row(1 + _OPEN), _row(1 + _SHUT), _row(1.0), _row(1.0))).view(
                    2, 2, 16
                ),
                *map(_two, _saved()),
            ),
        )
    ],
    rejects=[
        *_PACKED_REJECTS,
        Reject("save_for_backward", "an int", changed(save_for_backward=1)),
        Reject("inplace", "with saving", changed(inplace=True)),
        Reject("inplace", "an int", changed(inplace=1)),
    ],
    compare=_compare,
)

ENGRAM_GATE_PACKED_BWD = Cases(
    small=[
        Sample("7x2x272", _packed_backward(7, 2, 272)),
        Sample("none", _packed_backward(0, 4, 64)),
        Sample("1x1x8", _packed_backward(1, 1, 8)),
        Sample("image.9x4x72", _packed_backward(9, 4, 72, image=True)),
        Sample("misaligned.6x3x80", _packed_backward(6, 3, 80, skip=1)),
        Sample("alone.5x4x64", _packed_backward(5, 4, 64, alone=True)),
        Sample("in groups.3x6x8448", _packed_backward(3, 6, 8448, image=True)),
    ],
    large=[Sample("4001x4x7168", _packed_backward(4001, 4, 7168, image=True))],
    benchmarks=[
        Benchmark("4096x4x7168", _packed_backward(4096, 4, 7168, image=True)),
        Benchmark("alone.4096x4x7168", _packed_backward(4096, 4, 7168, alone=True)),
    ],
    vectors=[
        Vector(
            "the second is an image token",
            lambda: {
                "grad_out": torch.ones(2, 2, 16).bfloat16(),
                **{key: value for key, value in _worked_packed().items() if key != "eps"},
                **dict(zip(_SAVED, map(_two, _saved()))),
            },
            lambda: (
                torch.stack(
                    (_row(1.10499, 0.89501), _row(0.89501, 1.10499), _row(1.0), _row(1.0))
                ).view(2, 2, 16),
                _two(
                    torch.stack((_row(0.10499, -0.10499), _row(0.10499, -0.10499), _row(1.0)))[None]
                ),
                _two(
                    torch.tensor([0.1049936, -0.1049936])[:, None].expand(2, 16)[None].contiguous()
                ),
            ),
        )
    ],
    rejects=[
        *_PACKED_REJECTS,
        Reject("dot", "another shape", edited("dot", lambda x: x[1:])),
    ],
    compare=_compare,
)

ENGRAM_GATE_BWD = Cases(
    small=[
        *_small(_backward),
        Sample("expanded.6x2x64", _backward(6, 2, 64, expanded=True)),
        Sample("in groups.3x6x8448", _backward(3, 6, 8448)),
        Sample("parts.400x1x40", _backward(400, 1, 40)),
    ],
    large=[*_large(_backward), Sample("over 2**31", _backward(*_HUGE))],
    benchmarks=[
        Benchmark("4096x4x7168", _backward(4096, 4, 7168), goal_us=340.0),
        Benchmark("4096x4x4096", _backward(4096, 4, 4096)),
        Benchmark("64x4x7168", _backward(64, 4, 7168)),
    ],
    vectors=[
        Vector(
            "open and shut",
            lambda: {
                "grad_out": torch.ones(1, 2, 16).bfloat16(),
                **{key: value for key, value in _worked().items() if key != "eps"},
                **dict(zip(_SAVED, _saved())),
            },
            # D = 16 * gate * (1 - gate) / 2 * sqrt(1 / (4 * 16)) = gate * (1 - gate) = 0.10499
            lambda: (
                torch.stack((_row(1.10499, 0.89501), _row(0.89501, 1.10499)))[None],
                torch.stack((_row(0.10499, -0.10499), _row(0.10499, -0.10499)))[None],
                _row(1.0)[None],
                torch.tensor([0.1049936, -0.1049936])[:, None].expand(2, 16)[None].contiguous(),
            ),
        )
    ],
    rejects=[
        Reject("grad_out", "another shape", edited("grad_out", lambda x: x[1:])),
        Reject("dot", "another shape", edited("dot", lambda x: x[1:])),
        Reject("gate_score", "bfloat16", edited("gate_score", torch.Tensor.bfloat16)),
        Reject("rstd_x", "another shape", edited("rstd_x", lambda x: x[:, 1:])),
        Reject("rstd_k", "another shape", edited("rstd_k", lambda x: x[1:])),
        Reject("add_residual", "an int", changed(add_residual=1)),
    ],
    compare=_compare,
)

CASES = {
    "engram_gate_fwd": ENGRAM_GATE_FWD,
    "engram_gate_bwd": ENGRAM_GATE_BWD,
    "engram_gate_packed_fwd": ENGRAM_GATE_PACKED_FWD,
    "engram_gate_packed_bwd": ENGRAM_GATE_PACKED_BWD,
}
