"""Argument sets of the compression while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tile_kernels.attention.compress.cases import (
    KV_COMPRESS,
    SERIES_REJECTS,
    column,
    series,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, FP32, builder, changed

CPU = torch.device("cpu")


@builder
def _step(
    device: torch.device,
    num_tokens: int,
    channels: int,
    window: int,
    *,
    lengths: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    num_sequences: int | None = None,
    **how: Any,
) -> Arguments:
    """Sequences that have tokens already, of these `lengths` (default: 0, 1, 2 and so on)."""
    given = series(num_tokens, channels, window, **how)(device)
    count = num_tokens if num_sequences is None else num_sequences
    number = 2 if "kv_b" in given else 1
    kept = torch.randn(count, number * window, 2 * number, channels, device=device)
    before = torch.tensor([*(lengths or range(count))], dtype=torch.int32, device=device)
    if slots is not None:
        given["slots"] = torch.tensor(slots, dtype=torch.int32, device=device)
    return {"state": (kept.to(given["kv_a"].dtype), before), **given}


def _example(**changes: Any) -> Arguments:
    """The last token of the second window of the first worked sequence of `kv_compress`."""
    vectors = [(1, 0, -10, 0.5), (2, 1, -20, -0.5), (3, -1, -30, 1), (0, 0, 0, 0)]
    return {
        "state": (
            torch.tensor(vectors, dtype=FP32).view(1, 4, 4, 1), torch.tensor([3]).int()
        ),
        "kv_a": column(4),
        "z_a": column(0.5),
        "bias_a": column(0.1, -0.1),
        "kv_b": column(-40),
        "z_b": column(0),
        "bias_b": column(0, 0.2),
        **changes,
    }  # fmt: skip


def _example_after() -> Any:
    kept, _ = _example()["state"]
    kept[0, 3, :, 0] = torch.tensor([4, 0.5, -40, 0])
    return (column(-5.6242867), torch.tensor([True])), (kept, torch.tensor([4]).int())


def _of_state(part: int, change: Any) -> Any:
    def edit(arguments: Arguments) -> Arguments:
        state = list(arguments["state"])
        state[part] = change(state[part])
        return {**arguments, "state": tuple(state)}

    return edit


KV_COMPRESS_STEP = Cases(
    small=[
        Sample("9x8.m4", _step(9, 8, 4)),
        Sample("9x16.m4.alone", _step(9, 16, 4, overlap=False)),
        Sample("0x8.m4", _step(0, 8, 4)),
        Sample("1x1.m1", _step(1, 1, 1, dtype=FP32)),
        Sample("5x7.m3", _step(5, 7, 3)),
        Sample("6x24.m2.float32", _step(6, 24, 2, dtype=FP32, pad=4, out_dtype=BF16)),
        Sample("3x8.m128.alone", _step(3, 8, 128, overlap=False, lengths=(127, 5, 383))),
        Sample("3x8.m20", _step(3, 8, 20, lengths=(39, 19, 2**31 - 3))),
        Sample("4x8.m2.slots", _step(4, 8, 2, slots=(6, -1, 0, 3), num_sequences=7)),
        Sample("2x2100.m2", _step(2, 2100, 2, lengths=(1, 4))),
        Sample("4x8.m2.nowhere", _step(4, 8, 2, slots=(7, -5, 99, 1), num_sequences=7)),
        Sample("3x8.m2.negative", _step(3, 8, 2, lengths=(-1, -2, 1))),
    ],
    large=[
        Sample("512x512.m4", _step(512, 512, 4)),
        Sample("512x512.m128", _step(512, 512, 128, overlap=False)),
    ],
    benchmarks=[
        Benchmark("csa.256x512.m4", _step(256, 512, 4)),
        Benchmark("hca.256x512.m128", _step(256, 512, 128, overlap=False)),
    ],
    vectors=[Vector("the last of a window", _example, _example_after)],
    rejects=[
        *SERIES_REJECTS[:-3],
        Reject("state", "a tensor", changed(state=torch.zeros(9, 8, 4, 8))),
        Reject("state", "another dtype", _of_state(0, lambda x: x.float())),
        Reject("state", "another window", _of_state(0, lambda x: x[:, :-1])),
        Reject("state", "of one series", _of_state(0, lambda x: x[:, :, :2])),
        Reject("state", "lengths of others", _of_state(1, lambda x: x[:-1])),
        Reject("state", "int64 lengths", _of_state(1, lambda x: x.long())),
        Reject("kv_a", "fewer tokens", lambda a: {**a, "state": _step(12, 8, 4)(CPU)["state"]}),
        Reject("slots", "int64", changed(slots=torch.arange(9))),
        Reject("slots", "too few", changed(slots=torch.arange(8).int())),
        Reject("out_dtype", "float16", changed(out_dtype=torch.float16)),
    ],
    bad_values=[
        Reject("slots", "beyond", changed(slots=torch.tensor([9, 0, 1, 2, 3, 4, 5, 6, 7]).int())),
        Reject(
            "slots", "below -1", changed(slots=torch.tensor([-2, 0, 1, 2, 3, 4, 5, 6, 7]).int())
        ),
        Reject("state", "a negative length", _of_state(1, lambda x: x - 1)),
    ],
    compare=KV_COMPRESS.compare,
)

CASES = {"kv_compress_step": KV_COMPRESS_STEP}
