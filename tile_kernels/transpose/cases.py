"""Argument sets of the transposes."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, random_bits

_FP8 = torch.float8_e4m3fn


@builder
def _bits(
    device: torch.device, *shape: int, dtype: torch.dtype = BF16, extra: int = 0, skip: int = 0
) -> Arguments:
    """`x` of `shape`, cut out of rows that are `extra` wider, `skip` elements in."""
    wide = random_bits((*shape[:-1], shape[-1] + extra), dtype, device)
    return {"x": wide[..., skip : skip + shape[-1]]}


def _label(shape: tuple[int, ...], dtype: torch.dtype, extra: int = 0) -> str:
    strided = f"+{extra}" if extra else ""
    return f"{'x'.join(map(str, shape))}{strided}.{str(dtype).removeprefix('torch.')}"


# Around the edges of 128- and 64-element tiles and of every access width.
_EDGES = [(0, 8), (8, 0), (1, 1), (1, 130), (130, 1), (64, 64), (127, 129), (128, 136), (136, 256)]
_DTYPES = [BF16, _FP8, FP32, torch.float64]


def _scattered(x: torch.Tensor) -> torch.Tensor:
    """The same values with stride 2 in the last dimension."""
    return torch.stack([x, x], dim=-1)[..., 0]


_REJECTS = [
    Reject("x", "16-byte elements", lambda a: {"x": a["x"].to(torch.complex128)}),
    Reject("x", "inner stride 2", lambda a: {"x": _scattered(a["x"])}),
]


def _counted(*shape: int) -> torch.Tensor:
    """`x[i, j] = 64 i + j`, with `10000 b` in front for batches."""
    batch, rows, cols = (1, *shape)[-3:]
    b, i, j = torch.meshgrid(*map(torch.arange, (batch, rows, cols)), indexing="ij")
    return (10000 * b + 64 * i + j).float().view(shape)


_TRANSPOSE = Cases(
    small=[
        *(Sample(_label(s, d), _bits(*s, dtype=d)) for d in _DTYPES for s in _EDGES),
        *(Sample(_label((65, 96), d, 32), _bits(65, 96, dtype=d, extra=32)) for d in _DTYPES),
        Sample("272x304.float8_e4m3fn", _bits(272, 304, dtype=_FP8)),  # beyond the widest tile
        Sample("48x64-misaligned", _bits(48, 64, extra=16, skip=3)),
        Sample("bool", lambda d: {"x": torch.arange(35, device=d).view(5, 7) % 2 == 0}),
        Sample("complex64", lambda d: {"x": torch.ones(3, 5, dtype=torch.complex64, device=d)}),
        Sample("expanded", lambda d: {"x": torch.arange(72.0, device=d).expand(40, 72)}),
        Sample("column-of-one", lambda d: {"x": torch.arange(9.0, device=d).view(1, 9).T}),
    ],
    large=[
        Sample("4032x7168+7168.e4m3", _bits(4032, 7168, dtype=_FP8, extra=7168)),
        Sample("8001x4100.bf16", _bits(8001, 4100)),
        Sample("over-2^31.e4m3", _bits(65792, 32768, dtype=_FP8)),
    ],
    benchmarks=[
        Benchmark("bf16", _bits(8192, 7168), goal_us=58.6),
        Benchmark("bf16.strided", _bits(8192, 7168, extra=7168)),
        Benchmark("bf16.8191x7167", _bits(8191, 7167)),
        Benchmark("fp32", _bits(8192, 7168, dtype=FP32)),
    ],
    vectors=[
        Vector("64i+j", lambda: {"x": _counted(64, 64)}, lambda: _counted(64, 64).T.contiguous()),  # noqa: PLW0108
        Vector(
            "2x3",
            lambda: {"x": torch.tensor([[1, 2, 3], [4, 5, 6]])},
            lambda: torch.tensor([[1, 4], [2, 5], [3, 6]]),
        ),
    ],
    rejects=_REJECTS,
)

_BATCHED_TRANSPOSE = Cases(
    small=[
        *(Sample(_label((2, *s), d), _bits(2, *s, dtype=d)) for d in _DTYPES for s in _EDGES[::2]),
        Sample("empty-batch", _bits(0, 4, 8)),
        Sample("3x72x40+24.bf16", _bits(3, 72, 40, extra=24)),
        Sample("expanded", lambda d: {"x": _bits(24, 40)(d)["x"].expand(3, 24, 40)}),
        Sample("every-other", lambda d: {"x": _bits(6, 24, 40)(d)["x"][::2]}),
    ],
    large=[
        Sample("8x4032x576.fp32", _bits(8, 4032, 576, dtype=FP32)),
        Sample("over-2^31.e4m3", _bits(3, 27008, 27008, dtype=_FP8)),
    ],
    benchmarks=[
        Benchmark("e4m3", _bits(2, 8192, 7168, dtype=_FP8), goal_us=58.7),
        Benchmark("e4m3.32x512", _bits(32, 512, 7168, dtype=_FP8)),
        Benchmark("bf16.8x1024", _bits(8, 1024, 7168)),
    ],
    vectors=[
        Vector(
            "10000b+64i+j",
            lambda: {"x": _counted(2, 64, 64)},
            lambda: torch.stack([_counted(64, 64).T, _counted(64, 64).T + 10000]).contiguous(),
        ),
    ],
    rejects=_REJECTS,
)

CASES = {"transpose": _TRANSPOSE, "batched_transpose": _BATCHED_TRANSPOSE}
