"""Argument sets of the compression with norm, rotation and cast."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.attention.compress.cases import (
    BAD_SEQUENCES,
    RAGGED,
    SERIES_REJECTS,
    many,
    series,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    FP32,
    assert_equal_results,
    builder,
    changed,
    edited,
    misaligned,
)


@builder
def _tail(device: torch.device, make: Build, rotated: int, positions: int) -> Arguments:
    given = make(device)
    angle = torch.rand(positions, rotated // 2, device=device) * 6
    channels = given["kv_a"].shape[1]
    extra = {"weight": 1 + torch.randn(channels, device=device) / 4, "eps": 1e-5}
    return {**given, **extra, "cos": angle.cos(), "sin": angle.sin()}


def compare(result: Any, expected: Any) -> None:
    """Within a step of the format, nearly all codes equal: sums differ in their last bits."""
    for one, other in zip(result, expected):
        laid_out = [(x.dtype, x.shape, x.numel() and x.stride()) for x in (one, other)]
        assert_equal_results(*laid_out)
    values, steps = [], []
    for codes, sf, _ in (result, expected):
        wide = sf.repeat_interleave(64, 1)
        values.append(codes.float() * wide)
        steps.append(wide * 2.0**-9)
    here, there = values
    assert_equal_results(here.isnan(), there.isnan())
    allowed = torch.maximum(there.abs() / 8, torch.maximum(*steps))
    off = ((here - there).abs() > allowed).nonzero()
    if len(off):
        raise AssertionError(f"{len(off)} values are more than a step off, first at {off[0]}")
    unequal = (here != there) & ~here.isnan()
    if unequal.sum() > 0.02 * unequal.numel() + 2:
        raise AssertionError(f"{int(unequal.sum())} of {unequal.numel()} values differ")
    torch.testing.assert_close(result[2], expected[2], rtol=0.016, atol=1e-3, equal_nan=True)


# ---- worked examples ----------------------------------------------------------------------------


def _example(**changes: Any) -> Arguments:
    """Two windows of two equal tokens: 3 in the first channel, 4 in the last one."""
    kv = torch.zeros(4, 66)
    kv[:, 0], kv[:, 65] = 3, 4
    return {
        "kv_a": kv,
        "z_a": torch.zeros(4, 66),
        "bias_a": torch.zeros(2, 66),
        "weight": torch.ones(66),
        "cos": torch.tensor([[1.0], [9.0], [0.0]]),
        "sin": torch.tensor([[0.0], [9.0], [1.0]]),
        "eps": 0.0,
        **changes,
    }


def _expected(turned: list[list[float]]) -> Any:
    # The mean square is 25 / 66, so x = 3 sqrt(66) / 5 = 4.874 and 4 sqrt(66) / 5 = 6.499: the
    # first needs a scale of 1/64, which leaves 312, and a step is 32 there.
    codes = torch.zeros(len(turned), 64)
    codes[:, 0] = 320
    sf = torch.full((len(turned), 1), 2.0**-6)
    return codes.to(torch.float8_e4m3fn), sf, torch.tensor(turned).bfloat16()


_X = 4 * 66**0.5 / 5


KV_COMPRESS_NORM_ROPE_CAST = Cases(
    small=[
        Sample("24x128.m4", _tail(series(24, 128, 4), 64, 24)),
        Sample("24x80.m4.alone", _tail(series(24, 80, 4, overlap=False), 16, 24)),
        Sample("0x128.m4", _tail(series(0, 128, 4), 64, 1)),
        Sample("1x66.m1", _tail(series(1, 66, 1), 2, 1)),
        Sample("9x512.m4", _tail(series(9, 512, 4), 64, 8)),
        Sample("9x512.m4.float32", _tail(series(9, 512, 4, dtype=FP32), 64, 8)),
        Sample("40x128.m20", _tail(series(80, 128, 20), 64, 80)),
        Sample("36x96.m4.ragged", _tail(series(36, 96, 4, **RAGGED), 32, 20)),
        Sample("36x96.m4.past-tables", _tail(series(36, 96, 4, **RAGGED), 32, 9)),
        Sample("70x80.m16.ragged", _tail(series(70, 80, 16, lengths=(33, 0, 37)), 16, 33)),
        Sample("20x68.m2.odd-rows", _tail(series(20, 68, 2, pad=3, num_windows=None), 4, 20)),
        Sample("70x128.m4.special", _tail(series(70, 128, 4, special=True), 64, 70)),
        Sample(
            "24x128.m4.misaligned",
            lambda device: {
                name: misaligned(x) if isinstance(x, torch.Tensor) else x
                for name, x in _tail(series(24, 128, 4), 64, 24)(device).items()
            },
        ),
    ],
    large=[
        Sample("65539x512.m4", _tail(series(65539, 512, 4), 64, 65539)),
        Sample("65536x512.m128", _tail(series(65536, 512, 128, overlap=False), 64, 65536)),
        Sample(
            "ragged.m4",
            _tail(series(sum(many(3000, 40)), 128, 4, lengths=many(3000, 40)), 64, 40),
        ),
    ],
    benchmarks=[
        Benchmark("csa.65536x512.m4", _tail(series(65536, 512, 4), 64, 65536), goal_us=74.0),
        Benchmark("hca.65536x512.m128", _tail(series(65536, 512, 128, overlap=False), 64, 65536)),
        Benchmark("csa.1024x512.m4", _tail(series(1024, 512, 4), 64, 1024)),
    ],
    vectors=[
        Vector("positions", _example, lambda: _expected([[0, _X], [-_X, 0]])),
        Vector(
            "bfloat16, two sequences",
            lambda: {
                name: x.bfloat16() if name in ("kv_a", "z_a") else x
                for name, x in _example(cu_seqlens=torch.tensor([0, 2, 4]).int()).items()
            },
            lambda: _expected([[0, _X], [0, _X]]),
        ),
    ],
    rejects=[
        *SERIES_REJECTS,
        Reject("num_windows", "without sequences", changed(num_windows=3)),
        Reject("weight", "too short", edited("weight", lambda x: x[:-1])),
        Reject("weight", "bfloat16", edited("weight", lambda x: x.bfloat16())),
        Reject(
            "cos",
            "too few positions",
            lambda a: {k: x[:20] if k in ("cos", "sin") else x for k, x in a.items()},
        ),
        Reject(
            "cos",
            "no pairs",
            lambda a: {k: x[:, :0] if k in ("cos", "sin") else x for k, x in a.items()},
        ),
        Reject(
            "cos",
            "not 64 left",
            lambda a: {k: x[:, 1:] if k in ("cos", "sin") else x for k, x in a.items()},
        ),
        Reject("sin", "other pairs", edited("sin", lambda x: x[:, 1:])),
        Reject("eps", "a string", changed(eps="0")),
    ],
    bad_values=BAD_SEQUENCES,
    compare=compare,
)

CASES = {"kv_compress_norm_rope_cast": KV_COMPRESS_NORM_ROPE_CAST}
