"""Argument sets of rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    builder,
    changed,
    close_results,
    edited,
    misaligned,
    with_some,
)


def cache(num_positions: int, dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines by position, as models have them."""
    exponents = torch.arange(0, dim, 2, device=device) / dim
    angles = torch.arange(num_positions, device=device)[:, None] * 10000.0**-exponents
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


@builder
def _rotary(
    device: torch.device,
    *shape: int,
    key_heads: int = 0,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype = FP32,
    positions: torch.dtype | None = None,
    special: bool = False,
    sliced: int = 0,
    shift: bool = False,
    **others: Any,
) -> Arguments:
    *tokens, heads, dim = shape

    def numbers(num_heads: int) -> torch.Tensor:
        x = torch.randn(*tokens, num_heads, dim + sliced, device=device)
        x = (with_some(x) if special else x).to(dtype)
        return misaligned(x) if shift else x[..., sliced:]

    arguments: Arguments = {
        "query": numbers(heads),
        "cos_sin_cache": cache(tokens[-1] + 8, dim, device, cache_dtype),
        **others,
    }
    if key_heads:
        arguments["key"] = numbers(key_heads)
    if positions is not None:
        arguments["positions"] = torch.randint(
            tokens[-1] + 4, tuple(tokens), dtype=positions, device=device
        )
    return arguments


_ANGLES = torch.tensor([0.5, 1.0])


def _arguments(**changes: Any) -> Arguments:
    cos_sin = torch.cat((_ANGLES.cos(), _ANGLES.sin()))[None]
    return {"query": torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), "cos_sin_cache": cos_sin, **changes}


_HALVES = [-0.5606941, -2.2852793, 3.1121731, 3.8441513]
_VECTORS: list[tuple[str, Arguments, list[float]]] = [
    ("halves", {}, _HALVES),
    ("halves, conjugate", {"conjugate": True}, [2.3158593, 4.4464884, 2.1533222, 0.4782674]),
    ("interleaved", {"interleaved": True}, [-0.0812685, 2.2345905, -1.7449768, 4.6856222]),
    (
        "interleaved, conjugate",
        {"interleaved": True, "conjugate": True},
        [1.8364336, 1.2757396, 4.9867907, -0.3632035],
    ),
    (
        "bfloat16",
        {"query": torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).bfloat16()},
        [-0.5625, -2.28125, 3.109375, 3.84375],
    ),
]


def _vectors(in_place: bool) -> list[Vector]:
    def vector(label: str, changes: Arguments, values: list[float]) -> Vector:
        dtype = changes.get("query", torch.zeros(0)).dtype
        expected = torch.tensor([[values]]).to(dtype)
        return Vector(
            label,
            lambda: _arguments(**{k: v.clone() if k == "query" else v for k, v in changes.items()}),
            lambda: (None, expected, None) if in_place else expected,
        )

    return [vector(*each) for each in _VECTORS]


_SMALL = [
    Sample("5x3x64", _rotary(5, 3, 64, key_heads=2, positions=torch.int32)),
    Sample("0x3x64", _rotary(0, 3, 64)),
    Sample("1x2x128", _rotary(1, 2, 128, interleaved=True)),
    Sample("5x3x64.alone", _rotary(5, 3, 64)),
    Sample("7x3x96", _rotary(7, 3, 96, positions=torch.int64, seqlen_offset=3, conjugate=True)),
    Sample("5x2x2", _rotary(5, 2, 2, interleaved=True, key_heads=1)),
    Sample("3x5x6.fp32", _rotary(3, 5, 6, dtype=FP32, positions=torch.int32)),
    Sample("4x3x64.fp32", _rotary(4, 3, 64, dtype=FP32, cache_dtype=BF16, interleaved=True)),
    Sample("2x5x3x64", _rotary(2, 5, 3, 64, key_heads=1, positions=torch.int64)),
    Sample("3x4x2x64", _rotary(3, 4, 2, 64, seqlen_offset=2, cache_dtype=BF16)),
    Sample("strided.5x3x64", _rotary(5, 3, 64, sliced=128, key_heads=1, positions=torch.int32)),
    Sample("strided.odd", _rotary(3, 3, 64, sliced=3)),
    Sample("misaligned", _rotary(3, 3, 64, shift=True, interleaved=True)),
    Sample("special", _rotary(9, 3, 64, special=True, key_heads=2, positions=torch.int32)),
]
_LARGE = [
    Sample("8001x128x64", _rotary(8001, 128, 64, sliced=128, interleaved=True)),
    Sample("4x2001x32x128", _rotary(4, 2001, 32, 128, key_heads=8, positions=torch.int64)),
    Sample("140001x128x128", _rotary(140_001, 128, 128)),  # beyond 2^31 elements
]
_BENCHMARKS = [
    # 90 % of the copy bandwidth.
    Benchmark("8192x32x128.8", _rotary(8192, 32, 128, key_heads=8, positions=torch.int64),
              goal_us=44.9),
    Benchmark("8192x128x64", _rotary(8192, 128, 64, interleaved=True, positions=torch.int64),
              goal_us=70.6),
    Benchmark("8192x128x64.of.192",
              _rotary(8192, 128, 64, key_heads=1, sliced=128, interleaved=True,
                      positions=torch.int64), goal_us=71.2),
    Benchmark("128x32x128.8", _rotary(128, 32, 128, key_heads=8, positions=torch.int64)),
]  # fmt: skip
_REJECTS = [
    Reject("query", "odd", lambda a: {**a, "query": a["query"][..., :63],
                                      "cos_sin_cache": a["cos_sin_cache"][:, :63]}),
    Reject("key", "tokens", edited("key", lambda k: k[:-1])),
    Reject("key", "dtype", edited("key", lambda k: k.float())),
    Reject("cos_sin_cache", "narrow", edited("cos_sin_cache", lambda c: c[:, :32])),
    Reject("positions", "too few", edited("positions", lambda p: p[:-1])),
    Reject("positions", "int16", edited("positions", lambda p: p.short())),
    Reject("interleaved", "an int", changed(interleaved=1)),
    Reject("seqlen_offset", "too large", changed(seqlen_offset=2**40)),
]  # fmt: skip


def _cases(in_place: bool) -> Cases:
    return Cases(
        small=_SMALL,
        large=_LARGE,
        benchmarks=_BENCHMARKS,
        vectors=_vectors(in_place),
        rejects=_REJECTS,
        # The bits of NaN may differ; vectors are rounded to 7 digits.
        compare=close_results(rtol=0.0, atol=2e-7),
        any_rank=True,
    )


CASES = {"apply_rotary": _cases(in_place=True), "rotary_embedding": _cases(in_place=False)}
