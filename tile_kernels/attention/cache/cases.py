"""Argument sets of the operators on paged key-value caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.cache_layout import LAYOUTS, kv_cache_empty, num_slots
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    BF16,
    assert_equal_results,
    builder,
    changed,
    edited,
    normal,
    picked,
    random_bits,
    with_value,
)

E4M3 = torch.float8_e4m3fn


def filled_cache(
    device: torch.device, pages: int, page_size: int, layout: str, flat: bool = True
) -> Tensor:
    """Pages of random bits, as memory that was not initialised has them."""
    cache = kv_cache_empty(pages, page_size, layout, device)
    cache = cache.squeeze(2) if flat else cache
    if device.type != "meta":
        cache.copy_(random_bits(cache.shape, cache.dtype, device))
    return cache


def some_slots(device: torch.device, num_rows: int, cache: Tensor) -> Tensor:
    """Different slots in any order, every fifth row without one."""
    slots = torch.randperm(num_slots(cache), device=device)[:num_rows].int()
    slots[3::5] = -1
    return slots


@builder
def _append(
    device: torch.device,
    num_rows: int,
    pages: int,
    page_size: int,
    layout: str,
    cast: bool,
    special: bool = False,
    extra: int = 0,
    flat: bool = True,
) -> Arguments:
    sizes = LAYOUTS[layout]
    cache = filled_cache(device, pages, page_size, layout, flat)
    given: Arguments = {"cache": cache, "slots": some_slots(device, num_rows, cache)}
    if cast:
        if special:
            rows = picked(num_rows, sizes.channels, device=device).bfloat16()
        else:
            rows = normal(num_rows, sizes.channels, device=device, dtype=BF16, extra=extra)
        return {**given, "codes": rows}
    exponents = torch.randint(-20, 5, (num_rows, sizes.groups), device=device)
    return {
        **given,
        "codes": random_bits((num_rows, sizes.plain), E4M3, device),
        "sf": torch.exp2(exponents.float()),
        "rotated": normal(num_rows, sizes.rotated, device=device, dtype=BF16, extra=extra),
    }


@builder
def _gather(
    device: torch.device, num_rows: int, pages: int, page_size: int, layout: str
) -> Arguments:
    cache = filled_cache(device, pages, page_size, layout)
    if layout == "v3.2" and device.type != "meta":
        # Scales that are powers of two, as they are in practice, and one that is not.
        scales = torch.exp2(torch.randint(-20, 5, (pages, page_size, 1, 4), device=device).float())
        scales[0, 0, 0, 0] = 0.3
        cache[..., 512:528] = scales[:, :, 0].view(torch.uint8)
    return {"cache": cache, "slots": some_slots(device, num_rows, cache)}


def compare_rows(result: Any, expected: Any) -> None:
    """To the bit, except for the bits of NaN."""
    assert_equal_results(result.isnan(), expected.isnan())
    assert_equal_results(result.nan_to_num(0.0), expected.nan_to_num(0.0))


# ---- worked examples ----------------------------------------------------------------------------


def _row() -> Tensor:
    """Groups of 64 channels: the first of group g is 2**g, others 0; rotated channels are 3."""
    row = torch.zeros(1, 512)
    row[0, :448:64] = 2.0 ** torch.arange(7)
    row[0, 448:] = 3
    return row.bfloat16()


def _page(page_size: int, offset: int) -> Tensor:
    """The page with that row alone: 2**g is 256 (code 0x78) times 2**(g - 8), exponent 119 + g."""
    page = torch.zeros(584 * page_size, dtype=torch.uint8)
    page[576 * offset : 576 * offset + 448 : 64] = 0x78
    page[576 * offset + 448 : 576 * offset + 576 : 2] = 0x40  # 3 in bfloat16 is 0x4040
    page[576 * offset + 449 : 576 * offset + 576 : 2] = 0x40
    first = 576 * page_size + 8 * offset
    page[first : first + 7] = torch.arange(119, 126)
    return page.view(1, page_size, 1, 584)


def _append_example(**changes: Any) -> Arguments:
    given = {
        "cache": torch.zeros(1, 3, 1, 584, dtype=torch.uint8),
        "slots": torch.tensor([1]).int(),
        "codes": _row(),
    }
    return {**given, **changes}


def _append_codes() -> Arguments:
    codes = torch.zeros(1, 448)
    codes[0, ::64] = 256
    return _append_example(
        codes=codes.to(E4M3), sf=2.0 ** (torch.arange(7)[None] - 8), rotated=_row()[:, 448:]
    )


def _v32_example() -> Arguments:
    """A row of ones: 256 times 2**-8."""
    return {
        "cache": torch.zeros(2, 1, 1, 656, dtype=torch.uint8),
        "slots": torch.tensor([-1, 1]).int(),
        "codes": torch.ones(2, 576).bfloat16(),
    }


def _v32_after() -> Any:
    cache = torch.zeros(2, 1, 1, 656, dtype=torch.uint8)
    cache[1, 0, 0, :512] = 0x78
    cache[1, 0, 0, 512:528] = torch.full((4,), 2.0**-8).view(torch.uint8)
    cache[1, 0, 0, 528:] = torch.ones(64).bfloat16().view(torch.uint8)
    return None, cache


_SIZES: Sequence[tuple[int, int, int, str]] = (
    (9, 3, 6, "v4"),
    (5, 3, 7, "v3.2"),
    (4, 3, 2, "bf16"),
)

_CACHE_REJECTS = [
    Reject("cache", "another width", edited("cache", lambda x: x[..., :-8])),
    Reject("cache", "int8", edited("cache", lambda x: x.to(torch.int8))),
    Reject("cache", "two heads", edited("cache", lambda x: x[:, :, None].expand(-1, -1, 2, -1))),
    Reject("cache", "tokens apart", edited("cache", lambda x: x.repeat(1, 2, 1)[:, ::2])),
    Reject("cache", "odd page stride", edited("cache", lambda x: _padded(x, 8))),
    Reject("cache", "odd start", edited("cache", lambda x: _padded(x, 8)[:1])),
    Reject("slots", "int64", edited("slots", lambda x: x.long())),
]


def _padded(x: Tensor, extra: int) -> Tensor:
    """Pages `extra` cells further apart than 16 bytes allow, and a start that is not aligned."""
    pages, page_size, row = x.shape
    size = -(-page_size * row // 16) * 16 + extra
    return x.new_zeros(pages * size + 8)[8:].as_strided(x.shape, (size, row, 1), storage_offset=8)


def _as_codes(**changes: Any) -> Any:
    """An edit: codes, scales and rotated channels instead of rows, and then `changes`."""
    parts = {"sf": torch.ones(9, 7), "rotated": torch.ones(9, 64).bfloat16(), **changes}
    return lambda a: {**a, "codes": a["codes"][:, :448].to(E4M3), **parts}


KV_CACHE_APPEND = Cases(
    small=[
        *(Sample(f"{n}.{x}.{b}.rows", _append(n, p, b, x, True)) for n, p, b, x in _SIZES),
        *(Sample(f"{n}.{x}.{b}.codes", _append(n, p, b, x, False)) for n, p, b, x in _SIZES[:2]),
        Sample("0.v4.4.rows", _append(0, 2, 4, "v4", True)),
        Sample("1.v4.1.rows", _append(1, 1, 1, "v4", True)),
        Sample("3.v4.61.codes", _append(3, 2, 61, "v4", False, extra=3, flat=False)),
        Sample("8.v4.5.special", _append(8, 3, 5, "v4", True, special=True)),
        Sample("6.v4.5.strided", _append(6, 3, 5, "v4", True, extra=3)),
    ],
    large=[
        Sample("70001.v4.64.rows", _append(70001, 1200, 64, "v4", True)),
        Sample("4000.v3.2.64.codes", _append(4000, 100, 64, "v3.2", False)),
        Sample("100000.v4.64.beyond-4GB", _append(100000, 120000, 64, "v4", True)),
    ],
    benchmarks=[
        Benchmark("prefill.8192.v4.rows", _append(8192, 256, 64, "v4", True)),
        Benchmark("decode.256.v4.rows", _append(256, 256, 64, "v4", True)),
        Benchmark("entries.8192.v4.codes", _append(8192, 256, 64, "v4", False)),
    ],
    vectors=[
        Vector("rows", _append_example, lambda: (None, _page(3, 1))),
        Vector("codes", _append_codes, lambda: (None, _page(3, 1))),
        Vector("v3.2", _v32_example, _v32_after),
    ],
    rejects=[
        *_CACHE_REJECTS,
        Reject("slots", "too few", edited("slots", lambda x: x[:-1])),
        Reject("codes", "float32", edited("codes", lambda x: x.float())),
        Reject("codes", "too few channels", edited("codes", lambda x: x[:, :-64])),
        Reject("codes", "rows with scales", changed(sf=torch.ones(9, 7))),
        Reject("rotated", "missing", _as_codes(rotated=None)),
        Reject("sf", "missing", _as_codes(sf=None)),
        Reject("sf", "bfloat16", _as_codes(sf=torch.ones(9, 7).bfloat16())),
    ],
    bad_values=[
        Reject("slots", "beyond", with_value("slots", 18, 0)),
        Reject("slots", "below -1", with_value("slots", -2, 0)),
    ],
)  # fmt: skip

KV_CACHE_GATHER = Cases(
    small=[
        *(Sample(f"{n}.{layout}.{b}", _gather(n, p, b, layout)) for n, p, b, layout in _SIZES),
        Sample("0.v4.4", _gather(0, 2, 4, "v4")),
        Sample("1.v4.1", _gather(1, 1, 1, "v4")),
        Sample("60.v4.61", _gather(60, 1, 61, "v4")),
        Sample("5.bf16.no-pages", lambda device: {
            "cache": kv_cache_empty(0, 4, "bf16", device),
            "slots": torch.arange(5, device=device).int(),
        }),
    ],
    large=[Sample("70001.v4.64", _gather(70001, 1200, 64, "v4"))],
    benchmarks=[
        Benchmark("8192.v4", _gather(8192, 256, 64, "v4")),
        Benchmark("8192.bf16", _gather(8192, 256, 64, "bf16")),
    ],
    vectors=[
        Vector(
            "v4",
            lambda: {"cache": _page(3, 1), "slots": torch.tensor([1, -1]).int()},
            lambda: torch.cat((_row(), torch.zeros(1, 512).bfloat16())),
        ),
        Vector(
            "past the end",
            lambda: {"cache": _page(3, 1), "slots": torch.tensor([3, 1]).int()},
            lambda: torch.cat((torch.zeros(1, 512).bfloat16(), _row())),
        ),
        Vector(
            "v3.2",
            lambda: {"cache": _v32_after()[1], "slots": torch.tensor([1]).int()},
            lambda: torch.ones(1, 576).bfloat16(),
        ),
    ],
    rejects=_CACHE_REJECTS,
    bad_values=[
        Reject("slots", "beyond", with_value("slots", 18, 0)),
        Reject("slots", "below -1", with_value("slots", -2, 0)),
    ],
    compare=compare_rows,
)  # fmt: skip


@builder
def _indices(
    device: torch.device, shape: Sequence[int], max_pages: int, page_size: int
) -> Arguments:
    logical = torch.randint(-1, max(max_pages * page_size, 1) + 2, tuple(shape), device=device)
    table = torch.randint(-1, 1000, (shape[0], max_pages), device=device)
    return {"logical": logical.int(), "block_table": table.int(), "page_size": page_size}


def _indices_example(**changes: Any) -> Arguments:
    given = {
        "logical": torch.tensor([[0, 3, -1], [1, 4, 2**31 - 1]]).int(),
        "block_table": torch.tensor([[7, 5], [-1, 2**30]]).int(),
        "page_size": 2,
    }
    return {**given, **changes}


CACHE_INDICES = Cases(
    small=[
        Sample("3x2x5.61", _indices((3, 2, 5), 4, 61)),
        Sample("4x300.64", _indices((4, 300), 3, 64)),
        Sample("0x5.64", _indices((0, 5), 3, 64)),
        Sample("1x1.1", _indices((1, 1), 1, 1)),
        Sample("2x3x4.no-pages", _indices((2, 3, 4), 0, 64)),
    ],
    large=[Sample("321x3x1024.64", _indices((321, 3, 1024), 100, 64))],
    benchmarks=[Benchmark("128x2x1024.64", _indices((128, 2, 1024), 512, 64))],
    vectors=[
        Vector(
            "one request",
            lambda: {
                "logical": torch.tensor([[0, 3, -1]]).int(),
                "block_table": torch.tensor([[7, 5]]).int(),
                "page_size": 2,
            },
            lambda: torch.tensor([[14, 11, -1]]).int(),
        ),
        # Position 4 of the second request is past its table; 2**30 * 2 is past int32.
        Vector(
            "two requests",
            _indices_example,
            lambda: torch.tensor([[14, 11, -1], [-1, -1, -1]]).int(),
        ),
    ],
    rejects=[
        Reject("logical", "int64", edited("logical", lambda x: x.long())),
        Reject("logical", "one dimension", edited("logical", lambda x: x.view(-1))),
        Reject("block_table", "another number", edited("block_table", lambda x: x[:-1])),
        Reject("page_size", "zero", changed(page_size=0)),
    ],
    bad_values=[Reject("logical", "beyond", with_value("logical", 4 * 61, 0))],
)

CASES = {
    "kv_cache_append": KV_CACHE_APPEND,
    "kv_cache_gather": KV_CACHE_GATHER,
    "cache_indices": CACHE_INDICES,
}
