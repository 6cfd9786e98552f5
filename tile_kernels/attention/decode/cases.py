"""Argument sets of attention while decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.cache import reference as cache_reference
from tile_kernels.attention.cache_layout import LAYOUTS, kv_cache_empty
from tile_kernels.attention.decode.reference import decode_plan
from tile_kernels.attention.softmax_samples import compare as compare_softmax
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, NAN, builder, changed, edited, with_value

_INVALID = (-1, -(2**31), 2**31 - 1, 2**30)


def filled(device: torch.device, num_rows: int, page_size: int, layout: str, width: int) -> Tensor:
    """A cache with `num_rows` normal rows, one of them large, and NaN in every other slot."""
    pages = -(-num_rows // page_size) + 1
    cache = kv_cache_empty(pages, page_size, layout, device).squeeze(2)
    if device.type == "meta":
        return cache
    cache.view(torch.uint8).fill_(0xFF)
    slots = torch.arange(num_rows, device=device).int()
    for first in range(0, num_rows, 1 << 16):
        some = slots[first : first + (1 << 16)]
        rows = torch.randn(len(some), width, device=device)
        rows[len(some) // 3] *= 3
        if device.type == "cuda" or num_rows > 1 << 15:
            from tile_kernels.attention import kv_cache_append

            kv_cache_append(cache, some, rows.bfloat16())
        else:
            cache_reference.kv_cache_append(cache, some, rows.bfloat16())
    return cache


def chosen(
    device: torch.device, shape: tuple[int, int, int], num_rows: int, invalid: Sequence[int]
) -> Tensor:
    """Rows of a cache, some of them `invalid`, and then the first tile of the last query empty."""
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int32, device=device)
    index = torch.randint(max(num_rows, 1), shape, device=device).int()
    if not invalid or not index.numel():
        return index
    wrong = torch.tensor(invalid, device=device).int()
    picks = wrong[torch.randint(len(wrong), shape, device=device)]
    index = torch.where(torch.rand(shape, device=device) < 0.1, picks, index)
    index[-1, -1, :64] = -1
    return index


@builder
def _decode(
    device: torch.device,
    b: int,
    s_q: int,
    heads: int,
    k: int,
    extra_k: int = -1,
    *,
    layout: str = "v4",
    page_size: int = 64,
    extra_page_size: int = 2,
    rows: int = 100,
    extra_rows: int = 150,
    sink: str = "normal",
    lengths: bool = False,
    balanced: bool = False,
    splits: int | None = None,
    flat: bool = True,
    invalid: Sequence[int] = _INVALID,
) -> Arguments:
    width = LAYOUTS[layout].channels
    cache = filled(device, rows, page_size, layout, width)
    given: Arguments = {
        "q": torch.randn(b, s_q, heads, width, device=device).bfloat16(),
        "cache": cache if flat else cache.unsqueeze(2),
        "indices": chosen(device, (b, s_q, k), rows, invalid),
        "sm_scale": width**-0.5,
    }
    if sink:
        given["sink"] = 2 * torch.randn(heads, device=device)
    if sink == "wild":
        given["sink"][0::3], given["sink"][1::3] = INF, -INF
    if extra_k >= 0:
        given["extra_cache"] = filled(device, extra_rows, extra_page_size, layout, width)
        given["extra_indices"] = chosen(device, (b, s_q, extra_k), extra_rows, invalid)
    if lengths:
        for name, most in (("topk_length", k), ("extra_topk_length", extra_k)):
            if most >= 0:
                given[name] = torch.randint(0, most + 1, (b,), device=device).int()
                if b > 2:
                    given[name][1] = 0
    if balanced:
        shapes = {x: given.get(x) for x in ("topk_length", "extra_indices", "extra_topk_length")}
        if device.type == "meta":
            blocks = max(7 // max(s_q * math.ceil(heads / 64), 1), 1)
            empty = torch.empty(blocks + b, 4, dtype=torch.int32, device=device)
            given["plan"] = (empty, empty[:b, :2].contiguous())
        else:
            given["plan"] = decode_plan(given["q"], given["indices"], **shapes, num_sms=7)
    if splits is not None:
        given["splits"] = splits
    return given


def _with_nan(make: Any, name: str) -> Any:
    """A NaN in a row that one query has chosen, or in a head of a query."""

    def build(device: torch.device) -> Arguments:
        given = make(device)
        if device.type == "meta":
            return given
        if name == "q":
            given["q"][0, 0, 0, 5] = NAN
        else:
            given["indices"][given["indices"] == 40] = 41
            given["indices"][0, 0, 7] = 40
            given["topk_length"][0] = 8
            row = torch.zeros(1, given["q"].shape[3], device=device)
            row[0, 9] = NAN
            cache_reference.kv_cache_append(
                given["cache"], torch.tensor([40], device=device).int(), row.bfloat16()
            )
        return given

    return build


def compare(result: Any, expected: Any) -> None:
    """As other attention: `lse` takes the place of both statistics."""
    result, expected = ((x[0], x[1], x[1]) for x in (result, expected))
    compare_softmax(result, expected)


# ---- worked examples ----------------------------------------------------------------------------


def _example(layout: str, **changes: Any) -> Arguments:
    """Rows of ones and of twos, at slots 1 and 2, and a query that sees a logit of their sum."""
    width = LAYOUTS[layout].channels
    cache = kv_cache_empty(2, 2, layout).fill_(0)
    rows = torch.ones(2, width) * torch.tensor([[1.0], [2.0]])
    cache_reference.kv_cache_append(cache, torch.tensor([1, 2]).int(), rows.bfloat16())
    q = torch.zeros(1, 1, 2, width)
    q[0, 0, 1, 0] = 1
    return {
        "q": q.bfloat16(),
        "cache": cache,
        "indices": torch.tensor([[[1, -1, 2, 2]]]).int(),
        "sm_scale": math.log(2),
        **changes,
    }


def _expected(values: tuple[float, float], lse: tuple[float, float]) -> tuple[Tensor, Tensor]:
    out = torch.tensor(values).view(1, 1, 2, 1).expand(1, 1, 2, 512).bfloat16().contiguous()
    return out, torch.tensor(lse).view(1, 2, 1)


_SUM = (math.log(3), math.log(10))  # 1 + 1 + 1, and 2 + 4 + 4
_VECTORS = [
    # Weights 1, 1, 1: (1 + 2 + 2) / 3. Weights 2, 4, 4: (2 + 8 + 8) / 10.
    Vector("v4", lambda: _example("v4"), lambda: _expected((5 / 3, 1.8), _SUM)),
    Vector("v3.2", lambda: _example("v3.2"), lambda: _expected((5 / 3, 1.8), _SUM)),
    Vector("bf16", lambda: _example("bf16"), lambda: _expected((5 / 3, 1.8), _SUM)),
    # A sink adds exp(log 5) to the denominators.
    Vector(
        "sink",
        lambda: _example("v4", sink=torch.full((2,), math.log(5.0))),
        lambda: _expected((5 / 8, 18 / 15), _SUM),
    ),
    # Two caches: the second one adds a row of ones. Lengths leave two of four indices.
    Vector(
        "two caches",
        lambda: _example(
            "v4",
            topk_length=torch.tensor([2]).int(),
            extra_cache=_example("v4")["cache"],
            extra_indices=torch.tensor([[[1, 1, 2]]]).int(),
            extra_topk_length=torch.tensor([1]).int(),
        ),
        lambda: _expected((1, 1), (math.log(2), math.log(4))),
    ),
    Vector(
        "no key",
        lambda: _example("v4", indices=torch.full((1, 1, 4), -1).int(), sink=torch.zeros(2)),
        lambda: _expected((0, 0), (INF, INF)),
    ),
]

_LISTS: dict[str, Any] = {"page_size": 6, "lengths": True}
_SMALL = [
    Sample("3x2x4.40+30.v4", _decode(3, 2, 4, 40, 30, sink="wild", invalid=(-1,), **_LISTS)),
    Sample("2x2x70.130+40.v4.split", _decode(2, 2, 70, 130, 40, splits=128, lengths=True)),
    Sample("2x1x2.70+200.v4.plan", _decode(2, 1, 2, 70, 200, balanced=True, **_LISTS)),
    Sample("2x2x3.65+66.v3.2", _decode(2, 2, 3, 65, 66, layout="v3.2", page_size=6)),
    # Two blocks of heads, which share converted rows.
    Sample("3x1x128.40+150.v4", _decode(3, 1, 128, 40, 150, sink="wild", invalid=(-1,), **_LISTS)),
    Sample("1x2x128.130+40.v4.split", _decode(1, 2, 128, 130, 40, splits=128, lengths=True)),
    Sample("2x1x128.70+200.v4.plan", _decode(2, 1, 128, 70, 200, balanced=True, **_LISTS)),
    Sample("1x2x128.65+66.v3.2", _decode(1, 2, 128, 65, 66, layout="v3.2", page_size=6)),
    Sample("2x1x3.65+66.bf16", _decode(2, 1, 3, 65, 66, layout="bf16", page_size=61)),
    Sample("0x1x64.64", _decode(0, 1, 64, 64)),
    Sample("1x1x1.1+1", _decode(1, 1, 1, 1, 1, flat=False, **_LISTS)),
    Sample("2x1x2.0", _decode(2, 1, 2, 0)),
    Sample("2x1x3.20+5.nan-row", _with_nan(_decode(2, 1, 3, 20, 5, invalid=(), **_LISTS), "cache")),
    Sample("2x1x3.20+5.nan-query", _with_nan(_decode(2, 1, 3, 20, 5, invalid=(), **_LISTS), "q")),
]  # fmt: skip

_TINY: dict[str, Any] = {"page_size": 576, "rows": 3000, "extra_rows": 9000, "extra_page_size": 64}
_RAGGED: dict[str, Any] = {**_TINY, "lengths": True}
_FAR: dict[str, Any] = {"extra_rows": 8_000_000, "extra_page_size": 64}
_LARGE = [
    Sample("2x1x2.0+3", _decode(2, 1, 2, 0, 3)),
    Sample("2x3x64.70.no-sink", _decode(2, 3, 64, 70, sink="")),
    Sample("74x3x128.128+512", _decode(74, 3, 128, 128, 512, lengths=True, sink="wild", **_TINY)),
    Sample("321x1x64.128+512", _decode(321, 1, 64, 128, 512, sink="", **_TINY)),
    Sample("4x2x128.100+1500.plan", _decode(4, 2, 128, 100, 1500, balanced=True, **_RAGGED)),
    Sample("4x2x128.100+1500.split", _decode(4, 2, 128, 100, 1500, splits=256, **_RAGGED)),
    Sample("5x3x128.2048.v3.2", _decode(5, 3, 128, 2048, layout="v3.2", page_size=69, rows=9000)),
    Sample("5x1x100.200+900.bf16", _decode(5, 1, 100, 200, 900, layout="bf16", extra_rows=9000)),
    Sample("2x1x64.64+64.beyond-4GB", _decode(2, 1, 64, 64, 64, **_FAR)),
]  # fmt: skip


def _served(b: int, s_q: int = 1, heads: int = 128, extra_k: int = 1024, **how: Any) -> Any:
    """Window and entries of a served model: pages of 64, contexts of 32768 tokens."""
    sizes = {"rows": 128 * b, "extra_rows": 8192 * min(b, 64), "extra_page_size": 64}
    return _decode(b, s_q, heads, 128, extra_k, invalid=(), **{**sizes, **how})


def _empty_plan(b: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(9, 4).int(), torch.zeros(b, 2).int()


SPARSE_ATTENTION_DECODE = Cases(
    small=_SMALL,
    large=_LARGE,
    benchmarks=[
        Benchmark("b128.s2.h128.128+1024", _served(128, 2), goal_us=193.0),
        Benchmark("b128.s2.h128.128+1024.whole", _served(128, 2, splits=1152), goal_us=193.0),
        Benchmark("b32.s1.h128.128+1024", _served(32)),
        Benchmark("b8.s1.h128.128+1024", _served(8), goal_us=11.5),
        Benchmark("b1.s1.h128.128+1024", _served(1), goal_us=10.2),
        Benchmark("b64.s1.h64.128+512", _served(64, heads=64, extra_k=512)),
    ],
    vectors=_VECTORS,
    rejects=[
        Reject("q", "another width", edited("q", lambda x: x[..., :448])),
        Reject("q", "no heads", edited("q", lambda x: x[:, :, :0])),
        Reject("cache", "another width", edited("cache", lambda x: x[..., :-8])),
        Reject("extra_cache", "another layout", changed(extra_cache=kv_cache_empty(3, 2, "v3.2"))),
        Reject("extra_cache", "missing", changed(extra_cache=None)),
        Reject("extra_indices", "missing", changed(extra_indices=None)),
        Reject("extra_indices", "of other queries", edited("extra_indices", lambda x: x[:-1])),
        Reject("indices", "int64", edited("indices", lambda x: x.long())),
        Reject("indices", "of other queries", edited("indices", lambda x: x[:, :1])),
        Reject("topk_length", "of other requests", edited("topk_length", lambda x: x[:-1])),
        Reject("extra_topk_length", "alone", changed(extra_cache=None, extra_indices=None)),
        Reject("sm_scale", "zero", changed(sm_scale=0.0)),
        Reject("sm_scale", "infinite", changed(sm_scale=INF)),
        Reject("sm_scale", "a string", changed(sm_scale="1")),
        Reject("sink", "of other heads", edited("sink", lambda x: x[:-1])),
        Reject("plan", "a list", changed(plan=[1, 2])),
        Reject("plan", "of other requests", changed(plan=_empty_plan(2))),
        Reject("splits", "another word", changed(splits="even")),
        Reject("splits", "no multiple", changed(splits=100)),
        Reject("splits", "none", changed(splits=0)),
    ],
    bad_values=[
        Reject("indices", "below -1", with_value("indices", -2)),
        Reject("extra_indices", "beyond", with_value("extra_indices", 10**6)),
        Reject("topk_length", "too long", with_value("topk_length", 41)),
        Reject("extra_topk_length", "negative", with_value("extra_topk_length", -1)),
    ],
    compare=compare,
)  # fmt: skip


# ---- the plan -----------------------------------------------------------------------------------


@builder
def _plan(
    device: torch.device,
    b: int,
    s_q: int,
    heads: int,
    k: int,
    extra_k: int = -1,
    *,
    num_sms: int = 132,
    lengths: bool = True,
) -> Arguments:
    given: Arguments = {
        "q": torch.zeros(b, s_q, heads, 512, device=device).bfloat16(),
        "indices": torch.zeros(b, s_q, k, device=device).int(),
        "num_sms": num_sms,
    }
    if lengths:
        given["topk_length"] = torch.randint(0, k + 1, (b,), device=device).int()
    if extra_k >= 0:
        given["extra_indices"] = torch.zeros(b, s_q, extra_k, device=device).int()
        if lengths:
            given["extra_topk_length"] = torch.randint(0, extra_k + 1, (b,), device=device).int()
    return given


def _plan_example(lengths: list[int], num_sms: int) -> Arguments:
    return {
        "q": torch.zeros(len(lengths), 1, 64, 512).bfloat16(),
        "indices": torch.zeros(len(lengths), 1, 1024).int(),
        "topk_length": torch.tensor(lengths).int(),
        "num_sms": num_sms,
    }


DECODE_PLAN = Cases(
    small=[
        Sample("5x2x64.128+1024", _plan(5, 2, 64, 128, 1024)),
        Sample("300x2x2.128+1024", _plan(300, 2, 2, 128, 1024)),
        Sample("3x2x64.128", _plan(3, 2, 64, 128, lengths=False)),
        Sample("0x1x64.128", _plan(0, 1, 64, 128)),
        Sample("1x1x64.65536", _plan(1, 1, 64, 65536, lengths=False)),
        Sample("9x1x64.512.1", _plan(9, 1, 64, 512, num_sms=1)),
    ],
    benchmarks=[Benchmark("128x2x128.128+1024", _plan(128, 2, 128, 128, 1024))],
    vectors=[
        # 8 pairs of tiles on 4 blocks: 4 splits of 2 cost 2 * 2 + 5 and 4, one of 8 costs 21.
        Vector(
            "one request",
            lambda: _plan_example([1024], 4),
            lambda: (
                torch.tensor(
                    [[0, 0, 2, 0], [0, 2, 4, 1], [0, 4, 6, 2], [0, 6, 8, 3], [0, 0, 0, -1]]
                ).int(),
                torch.tensor([[0, 4]]).int(),
            ),
        ),
        # As many requests as blocks: nothing is split, not even for the one without keys.
        Vector(
            "two requests",
            lambda: _plan_example([1024, 0], 2),
            lambda: (
                torch.tensor([[0, 0, 8, 0], [1, 0, 0, 1], [0, 0, 0, -1], [0, 0, 0, -1]]).int(),
                torch.tensor([[0, 1], [1, 1]]).int(),
            ),
        ),
    ],
    rejects=[
        Reject("q", "no heads", edited("q", lambda x: x[:, :, :0])),
        Reject("indices", "of other queries", edited("indices", lambda x: x[:-1])),
        Reject("extra_topk_length", "alone", changed(extra_indices=None)),
        Reject("num_sms", "none", changed(num_sms=0)),
    ],
    bad_values=[Reject("topk_length", "too long", with_value("topk_length", 129))],
)  # fmt: skip

CASES = {"sparse_attention_decode": SPARSE_ATTENTION_DECODE, "decode_plan": DECODE_PLAN}
