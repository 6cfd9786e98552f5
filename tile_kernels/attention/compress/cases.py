"""Argument sets of the compression of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    FP32,
    INF,
    NAN,
    builder,
    changed,
    close_results,
    edited,
    misaligned,
    normal,
)


@builder
def series(
    device: torch.device,
    num_tokens: int,
    channels: int,
    window: int,
    *,
    overlap: bool = True,
    dtype: torch.dtype = BF16,
    lengths: Sequence[int] | None = None,
    num_windows: int | None = None,
    out_dtype: torch.dtype | None = None,
    pad: int = 0,
    special: bool = False,
) -> Arguments:
    """`lengths` of sequences make `cu_seqlens`; `special` puts -inf and NaN among the numbers."""
    arguments: Arguments = {}
    for name in ("a", "b")[: 1 + overlap]:
        kv, scores = (
            normal(num_tokens, channels, device=device, dtype=dtype, extra=pad) for _ in range(2)
        )
        z = 3 * scores
        if special and device.type != "meta":
            z[: 2 * window] = -INF  # the first windows have no score at all
            z[2 * window :: 3, ::2] = -INF
            z[3 * window, 1] = NAN
            kv[4 * window, 2] = NAN
            z[5 * window, 3] = INF
        bias = torch.randn(window, channels, device=device)
        arguments |= {f"kv_{name}": kv, f"z_{name}": z, f"bias_{name}": bias}
    if lengths is not None:
        arguments["cu_seqlens"] = bounds(lengths, device)
    if num_windows is not None:
        arguments["num_windows"] = num_windows
    if out_dtype is not None:
        arguments["out_dtype"] = out_dtype
    return arguments


def bounds(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """`cu_seqlens` of sequences with these lengths."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def many(count: int, most: int) -> tuple[int, ...]:
    """Lengths of many sequences, from 0 to `most`, in no order."""
    return tuple(i * 7919 % (most + 1) for i in range(count))


_LENGTHS = (9, 0, 1, 3, 4, 0, 17, 2)  # shorter than a window, empty, one token, exactly one window
RAGGED: dict[str, Any] = {"lengths": _LENGTHS}
_MANY = many(100, 11)

SMALL = {  # few shapes, since each compiles another kernel; 24 channels leave a thread idle
    "24x24.m4": series(24, 24, 4),
    "24x24.m4.alone": series(24, 24, 4, overlap=False),
    "0x24.m4": series(0, 24, 4),
    "1x24.m4": series(1, 24, 4),
    "4x24.m4": series(4, 24, 4),  # one window
    "27x24.m4.apart": series(27, 24, 4, pad=8),
    "27x24.m4.float32": series(27, 24, 4, dtype=FP32),
    "1x1.m1": series(1, 1, 1, dtype=FP32),
    "33x7.m3": series(33, 7, 3),  # single elements
    "33x6.m3.float32": series(33, 6, 3, dtype=FP32, pad=2),
    "31x12.m5": series(31, 12, 5),  # two groups, of which one has fewer tokens
    "290x8.m128.alone": series(290, 8, 128, overlap=False),
    "270x8.m70": series(270, 8, 70),  # chunks
    "300x4.m130.alone.float32": series(300, 4, 130, overlap=False, dtype=FP32),
    "20x2100.m4": series(20, 2100, 4),  # several blocks across
    "36x24.m4.ragged": series(36, 24, 4, **RAGGED),
    "36x24.m4.ragged.alone": series(36, 24, 4, overlap=False, **RAGGED),
    "36x24.m4.enough": series(36, 24, 4, num_windows=7, **RAGGED),
    "36x24.m4.none": series(36, 24, 4, lengths=(3, 0, 3, 3, 3)),
    "40x24.m4.beyond": series(40, 24, 4, **RAGGED),  # tokens of no sequence
    "many.m4": series(sum(_MANY), 24, 4, lengths=_MANY),
    "no-sequences": series(8, 24, 4, lengths=()),
    "70x24.m4.special": series(70, 24, 4, special=True),
    "70x24.m4.special.alone": series(70, 24, 4, overlap=False, special=True),
    "260x8.m20.special": series(260, 8, 20, special=True),
}


# ---- worked examples ----------------------------------------------------------------------------


def column(*numbers: float) -> torch.Tensor:
    """One channel."""
    return torch.tensor(numbers, dtype=FP32)[:, None]


def example(**changes: Any) -> Arguments:
    """Two sequences, of five and two tokens, in windows of two."""
    return {
        "kv_a": column(1, 2, 3, 4, 5, 6, 7),
        "z_a": column(0, 1, -1, 0.5, 2, 0, 1),
        "bias_a": column(0.1, -0.1),
        "kv_b": column(-10, -20, -30, -40, -50, -60, -70),
        "z_b": column(0.5, -0.5, 1, 0, 1, 1, 0),
        "bias_b": column(0, 0.2),
        "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32),
        **changes,
    }


def beginning(arguments: Arguments) -> Arguments:
    """Those without series b."""
    return {name: x for name, x in arguments.items() if not name.endswith("_b")}


_ENTRIES = (1.6899745, -5.6242867, 6.6899745)

VECTORS = [
    Vector("two sequences", example, lambda: column(*_ENTRIES)),
    Vector(
        "without overlap",
        lambda: beginning(example()),
        lambda: column(1.6899745, 3.7858350, 6.6899745),
    ),
    Vector("room", lambda: example(num_windows=4), lambda: column(*_ENTRIES, 0)),
    Vector("no room", lambda: example(num_windows=2), lambda: column(*_ENTRIES[:2])),
    Vector(
        "equal scores",
        lambda: {
            "kv_a": column(1, 3, 5, 7),
            "z_a": column(0, 0, 0, 0),
            "bias_a": column(0, 0),
            "out_dtype": BF16,
        },
        lambda: column(2, 6).bfloat16(),
    ),
    Vector(
        "no scores",
        lambda: {"kv_a": column(1, 3), "z_a": column(-INF, -INF), "bias_a": column(0, 0)},
        lambda: column(0),
    ),
]

SERIES_REJECTS = [
    Reject("kv_a", "no channels", edited("kv_a", lambda x: x[:, :0])),
    Reject("kv_a", "integers", edited("kv_a", lambda x: x.int())),
    Reject("z_a", "other rows", edited("z_a", lambda x: x[:-1])),
    Reject("z_a", "another dtype", edited("z_a", lambda x: x.half())),
    Reject("bias_a", "other channels", edited("bias_a", lambda x: x[:, :-1])),
    Reject("bias_a", "no rows", edited("bias_a", lambda x: x[:0])),
    Reject("bias_a", "bfloat16", edited("bias_a", lambda x: x.bfloat16())),
    Reject("kv_b", "alone", changed(z_b=None, bias_b=None)),
    Reject("bias_b", "missing", changed(bias_b=None)),
    Reject("kv_b", "other rows", edited("kv_b", lambda x: x[:-1])),
    Reject("kv_b", "another dtype", edited("kv_b", lambda x: x.float())),
    Reject("bias_b", "another window", edited("bias_b", lambda x: x[:-1])),
    Reject("cu_seqlens", "int64", lambda a: {**a, "cu_seqlens": torch.tensor([0, len(a["kv_a"])])}),
    Reject("cu_seqlens", "empty", changed(cu_seqlens=torch.zeros(0, dtype=torch.int32))),
    Reject("cu_seqlens", "two dimensions", changed(cu_seqlens=torch.zeros(1, 2).int())),
]

BAD_SEQUENCES = [
    Reject("cu_seqlens", "beyond the tokens", changed(cu_seqlens=torch.tensor([0, 99]).int())),
    Reject("cu_seqlens", "negative", changed(cu_seqlens=torch.tensor([-5, 8]).int())),
    Reject("cu_seqlens", "falling", changed(cu_seqlens=torch.tensor([0, 13, 5, 20]).int())),
]

KV_COMPRESS = Cases(
    small=[
        *(Sample(label, make) for label, make in SMALL.items()),
        Sample("24x24.m4.bfloat16", series(24, 24, 4, dtype=FP32, out_dtype=BF16)),
        Sample("24x24.m4.float32", series(24, 24, 4, out_dtype=FP32)),
        Sample(
            "24x7.m3.misaligned",
            lambda device: {name: misaligned(x) for name, x in series(24, 7, 3)(device).items()},
        ),
    ],
    large=[
        Sample("65539x512.m4", series(65539, 512, 4)),
        Sample("65536x512.m128", series(65536, 512, 128, overlap=False)),
        Sample("65536x512.m64.float32", series(65536, 512, 64, dtype=FP32)),
        Sample("ragged.m4", series(sum(many(3000, 40)), 128, 4, lengths=many(3000, 40))),
        Sample("4200001x8.m4.apart", series(4_200_001, 8, 4, overlap=False, pad=504)),  # > 2^31
    ],
    benchmarks=[
        Benchmark("csa.65536x512.m4", series(65536, 512, 4), goal_us=74.0),
        Benchmark("hca.65536x512.m128", series(65536, 512, 128, overlap=False), goal_us=35.0),
        Benchmark("csa.65536x512.m4.ragged", series(65536, 512, 4, lengths=(4096,) * 16)),
        Benchmark("csa.8192x512.m4", series(8192, 512, 4)),
    ],
    vectors=VECTORS,
    rejects=[
        *SERIES_REJECTS,
        Reject("num_windows", "without sequences", changed(num_windows=3)),
        Reject(
            "num_windows",
            "negative",
            changed(num_windows=-1, cu_seqlens=torch.tensor([0, 24]).int()),
        ),
        Reject("out_dtype", "float16", changed(out_dtype=torch.float16)),
    ],
    bad_values=BAD_SEQUENCES,
    compare=close_results(rtol=2e-5, atol=1e-5, rtol_bfloat16=0.008),
)


# ---- both series in one tensor ------------------------------------------------------------------


@builder
def packed(device: torch.device, make: Build) -> Arguments:
    """The same, with both series side by side: b, then a."""
    given = make(device)
    names = {"kv": "kv", "z": "gate", "bias": "ape"}
    joined = {
        name: torch.cat((given.pop(f"{short}_b"), given.pop(f"{short}_a")), 1)
        for short, name in names.items()
    }
    return {**joined, **given}


def _wide(device: torch.device) -> Arguments:
    """Rows that are further apart than they are long."""
    arguments = packed(series(24, 24, 4))(device)
    both = torch.randn(24, 104, device=device).bfloat16()
    return {**arguments, "kv": both[:, 8:56], "gate": both[:, 56:]}


_PACKED = {  # the kernels are those of the two series
    label: SMALL[label]
    for label in (
        "24x24.m4", "0x24.m4", "1x24.m4", "4x24.m4", "33x7.m3", "270x8.m70", "36x24.m4.ragged",
        "36x24.m4.enough", "70x24.m4.special",
    )
}  # fmt: skip
_PACKED_VECTOR = Vector(
    "two sequences", lambda: packed(lambda _: example())(torch.device("cpu")), VECTORS[0].expected
)
_PACKED_REJECTS = [
    Reject("kv", "odd channels", lambda a: {k: x[:, 1:] for k, x in a.items() if k != "grad_out"}),
    Reject("kv", "integers", edited("kv", lambda x: x.int())),
    Reject("gate", "other rows", edited("gate", lambda x: x[:-1])),
    Reject("gate", "another dtype", edited("gate", lambda x: x.half())),
    Reject("ape", "no rows", edited("ape", lambda x: x[:0])),
    Reject("ape", "other channels", edited("ape", lambda x: x[:, 2:])),
    *SERIES_REJECTS[-2:],
]

KV_COMPRESS_PACKED = Cases(
    small=[
        *(Sample(label, packed(make)) for label, make in _PACKED.items()),
        Sample("24x24.m4.wide", _wide),
        Sample("24x24.m4.float32", packed(series(24, 24, 4, out_dtype=FP32))),
    ],
    large=[
        Sample("65539x512.m4", packed(series(65539, 512, 4))),
        Sample("ragged.m4", packed(series(sum(many(3000, 40)), 128, 4, lengths=many(3000, 40)))),
    ],
    benchmarks=[Benchmark("csa.65536x512.m4", packed(series(65536, 512, 4)), goal_us=74.0)],
    vectors=[_PACKED_VECTOR],
    rejects=[
        *_PACKED_REJECTS,
        Reject("num_windows", "without sequences", changed(num_windows=3)),
        Reject("out_dtype", "float16", changed(out_dtype=torch.float16)),
    ],
    bad_values=BAD_SEQUENCES,
    compare=KV_COMPRESS.compare,
)


# ---- gradients ----------------------------------------------------------------------------------


@builder
def _with_grad(
    device: torch.device, make: Build, values: str = "kv_a", biases: str = "bias_a"
) -> Arguments:
    """The same with the gradient of the result, of its dtype."""
    given = make(device)
    entries = given[values].shape[0] // given[biases].shape[0]
    entries = given.pop("num_windows", entries)
    channels = given[values].shape[1] // (2 if values == "kv" else 1)
    dtype = given.pop("out_dtype", given[values].dtype)
    return {"grad_out": torch.randn(entries, channels, device=device).to(dtype), **given}


def _with_packed_grad(make: Build) -> Build:
    return _with_grad(packed(make), "kv", "ape")


_GRAD = (1.0, 2.0, -1.0)
_OF_KV_A = (0.3100255, 0.6899745, 0.1896343, 0.6958245, 0, -0.3100255, -0.6899745)
_OF_Z_A = (-0.2139097, 0.2139097, 1.6354605, 6.6968144, 0, 0.2139097, -0.2139097)
_OF_KV_B = (0.7690050, 0.3455362, 0, 0, 0, 0, 0)
_OF_Z_B = (-3.3649454, -4.9673296, 0, 0, 0, 0, 0)
_OF_BIASES = ((1.6354605, 6.6968144), (-3.3649454, -4.9673296))


def _expected_grads() -> tuple[torch.Tensor, ...]:
    of_a, of_b = (column(*numbers) for numbers in _OF_BIASES)
    a, b = (_OF_KV_A, _OF_Z_A), (_OF_KV_B, _OF_Z_B)
    return *(column(*x) for x in a), of_a, *(column(*x) for x in b), of_b


def _expected_packed() -> tuple[torch.Tensor, ...]:
    a_kv, a_z, a_bias, b_kv, b_z, b_bias = _expected_grads()
    return tuple(torch.cat(pair, 1) for pair in ((b_kv, a_kv), (b_z, a_z), (b_bias, a_bias)))


_GRAD_REJECTS = [
    Reject("grad_out", "other entries", edited("grad_out", lambda x: x[:-1])),
    Reject("grad_out", "other channels", edited("grad_out", lambda x: x[:, :-1])),
    Reject("grad_out", "integers", edited("grad_out", lambda x: x.int())),
]
# Weights have errors of the last bits, which a difference of values can make count for more.
_compare_gradients = close_results(rtol=1e-4, atol=5e-5, rtol_bfloat16=0.016)

KV_COMPRESS_BWD = Cases(
    small=[
        *(Sample(label, _with_grad(make)) for label, make in SMALL.items()),
        Sample("36x24.m4.too-few", _with_grad(series(36, 24, 4, num_windows=4, **RAGGED))),
        Sample("24x24.m4.float32", _with_grad(series(24, 24, 4, out_dtype=FP32))),
        Sample(
            "24x7.m3.misaligned",
            lambda device: {
                name: misaligned(x) for name, x in _with_grad(series(24, 7, 3))(device).items()
            },
        ),
    ],
    large=[
        Sample("65539x512.m4", _with_grad(series(65539, 512, 4))),
        Sample("65536x512.m128", _with_grad(series(65536, 512, 128, overlap=False))),
        Sample("ragged.m4", _with_grad(series(sum(many(3000, 40)), 64, 4, lengths=many(3000, 40)))),
        Sample("4200001x8.m4.apart", _with_grad(series(4_200_001, 8, 4, overlap=False, pad=504))),
    ],
    benchmarks=[
        Benchmark("csa.65536x512.m4", _with_grad(series(65536, 512, 4)), goal_us=143.0),
        Benchmark("hca.65536x512.m128", _with_grad(series(65536, 512, 128, overlap=False))),
        Benchmark(
            "csa.65536x512.m4.ragged", _with_grad(series(65536, 512, 4, lengths=(4096,) * 16))
        ),
    ],
    vectors=[
        Vector("two sequences", lambda: {"grad_out": column(*_GRAD), **example()}, _expected_grads),
        Vector(
            "equal scores",
            lambda: {
                "grad_out": column(1),
                "kv_a": column(1, 3, 5),
                "z_a": column(0, 0, 0),
                "bias_a": column(0, 0),
            },
            lambda: (
                column(0.5, 0.5, 0),
                column(-0.5, 0.5, 0),
                column(-0.5, 0.5),
                None,
                None,
                None,
            ),
        ),
    ],
    rejects=[*SERIES_REJECTS, *_GRAD_REJECTS],
    bad_values=BAD_SEQUENCES,
    compare=_compare_gradients,
)

KV_COMPRESS_PACKED_BWD = Cases(
    small=[Sample(label, _with_packed_grad(make)) for label, make in _PACKED.items()],
    large=[Sample("65539x512.m4", _with_packed_grad(series(65539, 512, 4)))],
    benchmarks=[
        Benchmark("csa.65536x512.m4", _with_packed_grad(series(65536, 512, 4)), goal_us=143.0)
    ],
    vectors=[
        Vector(
            "two sequences",
            lambda: {"grad_out": column(*_GRAD), **_PACKED_VECTOR.arguments()},
            _expected_packed,
        )
    ],
    rejects=[*_PACKED_REJECTS[1:], *_GRAD_REJECTS],
    bad_values=BAD_SEQUENCES,
    compare=_compare_gradients,
)

CASES = {
    "kv_compress": KV_COMPRESS,
    "kv_compress_bwd": KV_COMPRESS_BWD,
    "kv_compress_packed": KV_COMPRESS_PACKED,
    "kv_compress_packed_bwd": KV_COMPRESS_PACKED_BWD,
}
