"""What the argument sets of the mHC operators share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.runtime.cases import Benchmark, Build, Cases, Reject, Sample
from tile_kernels.runtime.sampling import (
    FP32,
    INF,
    NAN,
    assert_equal_results,
    changed,
    close_results,
    edited,
    misaligned,
    with_some,
)

# Operators take any number of leading dimensions.
LEADING = (2, 2, 3, 2)
# Tokens, streams, columns: every number of streams, columns that fill accesses and that do not.
SHAPES = [(3, 1, 8), (5, 2, 24), (2, 3, 40), (3, 5, 7), (4, 6, 12), (2, 7, 1), (3, 8, 264)]
# Sums over columns are taken in float64 by the reference, where nothing overflows.
SPECIAL: dict[str, Any] = {"special": True, "largest": 1e4}

Edit = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StreamCases(Cases):
    """For operators on tokens in any number of dimensions, some of which are always 1.

    The first sample is the ordinary one.
    """

    any_rank: bool = True

    def ordinary(self) -> Sample:
        """The first small sample."""
        return self.small[0]


def same(x: torch.Tensor) -> torch.Tensor:
    """No edit."""
    return x


def numbers(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    special: bool = False,
    largest: float = 3e38,
    shift: bool = False,
) -> torch.Tensor:
    """Normal numbers; special ones among them (NaN, infinities, zeros, large and tiny)."""
    x = torch.randn(shape, device=device)
    if special:
        x = with_some(x, (NAN, INF, -INF, 0.0, -0.0, largest, 1e-40))
    x = x.to(dtype)
    return misaligned(x) if shift else x


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every second element of a storage."""
    return torch.stack((x, x), -1)[..., 0]


def constant(x: torch.Tensor) -> torch.Tensor:
    """One number, in the shape of `x`, with strides 0."""
    return x.new_full((), 0.75).expand(x.shape)


# ---- lists of samples ---------------------------------------------------------------------------


def edge_samples(build: Callable[..., Build]) -> list[Sample]:
    """No token, one, no leading dimensions, each of `SHAPES`, and misaligned tensors.

    `build` takes the leading dimensions, `m` streams and `h` columns.
    """
    return [
        Sample("0", build(0)),
        Sample("1", build(1, h=8)),
        Sample("no leading", build(m=3, h=16)),
        *(Sample(f"{n}x{m}x{h}", build(n, m=m, h=h)) for n, m, h in SHAPES),
        Sample("misaligned", build(4, shift=True)),
    ]


def row_samples(build: Callable[..., Build]) -> list[Sample]:
    """`edge_samples`, rows in parts, many tokens, and special numbers: for sums over streams."""
    return [
        *edge_samples(build),
        Sample("2 parts", build(2, m=2, h=1096)),
        Sample("many", build(265, m=2, h=1048)),
        Sample("special", build(9, h=64, special=True)),
    ]


def large_samples(build: Callable[..., Build]) -> list[Sample]:
    """The sizes of models, and more than 2^31 elements."""
    return [
        *(
            Sample(f"{n}x{m}x{h}", build(*n, m=m, h=h))
            for n in ((1024,), (2, 4096))
            for m in (2, 4, 8)
            for h in (1280, 7168)
        ),
        Sample("over 2^31", build(80_001, h=7168)),
    ]


def row_benchmarks(build: Callable[..., Build], goal_us: float) -> list[Benchmark]:
    """Many tokens, which have a goal, and few."""
    return [
        Benchmark("4096x4x7168", build(4096, h=7168), goal_us=goal_us),
        Benchmark("64x4x7168", build(64, h=7168)),
    ]


def mix_samples(build: Callable[..., Build], num_tokens: int) -> list[Sample]:
    """No token, one, no leading dimensions, each number of streams, and misaligned tensors.

    `build` takes the leading dimensions and `m` streams.
    """
    return [
        Sample("0", build(0)),
        Sample("1", build(1)),
        Sample("no leading", build()),
        *(Sample(f"{num_tokens}x{m}", build(num_tokens, m=m)) for m in range(1, 9)),
        Sample("misaligned", build(5, shift=True)),
    ]


def large_mix_samples(build: Callable[..., Build], *leading: tuple[int, ...]) -> list[Sample]:
    """Many tokens, in the `leading` dimensions."""
    return [Sample(f"{n}x{m}", build(*n, m=m)) for n in leading for m in (3, 4, 8)]


def stream_rejects(name: str) -> list[Reject]:
    """Wrong bfloat16 `[..., m, h]`, where the good one has at least three streams."""
    return [
        Reject(name, "float32", edited(name, lambda x: x.float())),
        Reject(name, "9 streams", edited(name, lambda x: x.repeat_interleave(3, -2))),
        Reject(name, "no streams", edited(name, lambda x: x[..., :0, :])),
        Reject(name, "no columns", edited(name, lambda x: x[..., :0])),
        Reject(name, "one dimension", edited(name, lambda x: x.flatten())),
    ]


def grad_rejects(name: str) -> list[Reject]:
    """Wrong float32 gradients of mixes."""
    return [
        Reject(name, "double", edited(name, lambda g: g.double())),
        Reject(name, "fewer tokens", edited(name, lambda g: g[1:])),
    ]


# Of all that computes mixes from their projection.
MIX_REJECTS = [
    Reject("mhc_scale", "two", edited("mhc_scale", lambda x: x[1:])),
    Reject("mhc_base", "one less", edited("mhc_base", lambda x: x[1:])),
    Reject("rms_eps", "words", changed(rms_eps="small")),
    Reject("mhc_pre_eps", "words", changed(mhc_pre_eps="small")),
    Reject("mhc_sinkhorn_eps", "negative", changed(mhc_sinkhorn_eps=-1e-6)),
    Reject("mhc_post_mult_value", "words", changed(mhc_post_mult_value="two")),
    Reject("sinkhorn_repeat", "none", changed(sinkhorn_repeat=0)),
]


def renamed(kind: str, samples: list[Sample]) -> list[Sample]:
    """The same samples with `kind` behind their labels."""
    return [Sample(f"{sample.label}.{kind}", sample.make) for sample in samples]


# ---- comparisons --------------------------------------------------------------------------------

# A step of bfloat16, and in float32 what the order of a sum makes.
compare_sums = close_results(rtol=1e-4, atol=1e-4, rtol_bfloat16=2**-7)


def streams_exact(rtol: float, atol: float) -> Callable[[Any, Any], None]:
    """A comparison for `Cases`: bfloat16 to the bit, sums in float32 to a tolerance."""
    close = close_results(rtol, atol)

    def compare(result: Any, expected: Any) -> None:
        if isinstance(expected, tuple) and isinstance(result, tuple):
            assert_equal_results(len(result), len(expected))
            for one, other in zip(result, expected):
                compare(one, other)
        elif isinstance(expected, torch.Tensor) and expected.dtype == FP32:
            close(result, expected)
        else:
            assert_equal_results(result, expected)

    return compare
