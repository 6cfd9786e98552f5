"""`kv_cache_append`, `kv_cache_gather`, `cache_indices`: rows of a paged key-value cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention.cache import reference
from tile_kernels.attention.cache.plan import plan_append, plan_gather, plan_indices
from tile_kernels.attention.cache_layout import (
    check_cache,
    flat_pages,
    layout_of,
    num_slots,
)
from tile_kernels.attention.windows import accessible
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MODULE = "tile_kernels.attention.cache.kernel"
_APPEND = Kernel(_MODULE, "append_rows", plan_append)
_GATHER = Kernel(_MODULE, "gather_rows", plan_gather)
_INDICES = Kernel(_MODULE, "cache_slots", plan_indices)


def _check_slots(slots: Tensor, count: int | None = None) -> None:
    checks.tensor("slots", slots, ("num_rows",), torch.int32, shape=(count,), contiguous=True)


# ---- append -------------------------------------------------------------------------------------


class Append(NamedTuple):
    cache: Tensor
    slots: Tensor
    codes: Tensor
    sf: Tensor | None
    rotated: Tensor | None

    def check(self) -> None:
        layout = check_cache("cache", self.cache)
        dims = ("num_rows", "channels")
        if self.sf is None and self.rotated is None:
            checks.tensor(
                "codes", self.codes, dims, torch.bfloat16, shape=(None, layout.channels)
            )  # fmt: skip
        elif not layout.plain:
            raise ValueError("sf and rotated must be None for a cache in bfloat16")
        else:
            checks.tensor(
                "codes", self.codes, dims, torch.float8_e4m3fn, shape=(None, layout.plain)
            )
            count = self.codes.shape[0]
            shape = (count, layout.groups)
            checks.tensor("sf", self.sf, ("num_rows", "groups"), torch.float32, shape=shape)
            shape = (count, layout.rotated)
            checks.tensor("rotated", self.rotated, dims, torch.bfloat16, shape=shape)
        _check_slots(self.slots, self.codes.shape[0])

    def outputs(self) -> None:
        return None

    def launches(self) -> Launch | None:
        cache: Any = self.cache
        codes: Any = self.codes
        if not codes.numel() or not cache.numel():
            return None
        given: tuple[Any, ...] = (accessible(codes), None, None, None)
        sf: Any = self.sf
        rotated: Any = self.rotated
        if sf is not None:
            words = [accessible(x).view(torch.int32) for x in (codes, rotated)]
            given = (None, words[0], accessible(sf), words[1])
        pages, page_size = flat_pages(cache), cache.shape[1]
        problem = (layout_of(cache).name, sf is None)
        limit = Size(lambda a: num_slots(a.cache))
        return Launch(_APPEND, problem, (pages, self.slots, *given, page_size, limit))

    def check_values(self) -> None:
        checks.in_range("slots", self.slots, -1, num_slots(self.cache) - 1)
        checks.distinct("slots", self.slots)


def append_cost(cache: Tensor, slots: Tensor, sf: Tensor | None = None, **_: Any) -> Cost:
    """Rows are read and written once."""
    layout = layout_of(cache)
    read = 2 * layout.channels if sf is None else layout.row_bytes + 4 * layout.groups
    return Cost(slots.shape[0] * (read + layout.row_bytes + 4))


KV_CACHE_APPEND = Operator(
    "attention.kv_cache_append",
    Append,
    reference=reference.kv_cache_append,
    cost=append_cost,
    dynamic={"cache": 3, "slots": 0, "codes": 1, "sf": 1, "rotated": 1},
    mutates=("cache",),
    differentiable=False,
)


@KV_CACHE_APPEND.public()
def kv_cache_append(
    cache: Tensor,
    slots: Tensor,
    codes: Tensor,
    sf: Tensor | None = None,
    rotated: Tensor | None = None,
) -> None:
    """Writes rows at slots of a paged cache, in place.

    Takes the results of `kv_compress_norm_rope_cast` as they are, or bfloat16 rows that are normed
    and rotated, such as those of a sliding window: these are cast here, in the same pass, as
    `quant.per_token_cast(x, "e4m3", 64, round_sf=True)` does (in groups of 128 for `"v3.2"`).

    Args:
        cache: `[num_pages, page_size, 1, row]` or `[num_pages, page_size, row]`, as
            `kv_cache_empty` makes it; written in place.
        slots: `[num_rows]`, int32, contiguous: `page * page_size + offset` for each row. A row with
            -1, or any slot outside of the cache, is left out. No slot may come twice.
        codes: `[num_rows, 448]` (`"v4"`) or `[num_rows, 512]` (`"v3.2"`), float8_e4m3fn. Without
            `sf` and `rotated`: rows to cast, `[num_rows, 512]` (`"v4"`, `"bf16"`) or
            `[num_rows, 576]` (`"v3.2"`), bfloat16. Copied unless contiguous, as the next two.
        sf: `[num_rows, 7]` or `[num_rows, 4]`, float32. `"v4"` stores the exponents alone: the
            scales must be powers of two.
        rotated: `[num_rows, 64]`, bfloat16.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or the pages other strides.

    Example:
        >>> from tile_kernels.attention import kv_cache_empty, kv_cache_gather
        >>> cache, slots = kv_cache_empty(2, 61), torch.tensor([100]).int()
        >>> kv_cache_append(cache, slots, torch.ones(1, 512).bfloat16())
        >>> kv_cache_gather(cache, slots).sum().item()
        512.0
    """
    return KV_CACHE_APPEND(cache, slots, codes, sf, rotated)


# ---- gather -------------------------------------------------------------------------------------


class Gather(NamedTuple):
    cache: Tensor
    slots: Tensor

    def check(self) -> None:
        check_cache("cache", self.cache)
        _check_slots(self.slots)

    def outputs(self) -> Out:
        return Out("rows", (self.slots.shape[0], layout_of(self.cache).channels), torch.bfloat16)

    def launches(self, rows: Spec) -> Launch | None:
        if not rows.numel():
            return None
        cache: Any = self.cache
        limit = Size(lambda a: num_slots(a.cache))
        arguments = (flat_pages(cache), self.slots, rows, cache.shape[1], limit)
        return Launch(_GATHER, (layout_of(cache).name,), arguments)

    def check_values(self) -> None:
        checks.in_range("slots", self.slots, -1, num_slots(self.cache) - 1)


def gather_cost(cache: Tensor, slots: Tensor) -> Cost:
    layout = layout_of(cache)
    return Cost(slots.shape[0] * (layout.row_bytes + 2 * layout.channels + 4))


KV_CACHE_GATHER = Operator(
    "attention.kv_cache_gather",
    Gather,
    reference=reference.kv_cache_gather,
    cost=gather_cost,
    dynamic={"cache": 3, "slots": 0},
    differentiable=False,
)


@KV_CACHE_GATHER.public()
def kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Reads rows of a paged cache back, in bfloat16.

    Codes are multiplied by their scales in float32 and rounded once, which changes nothing for the
    power-of-two scales that `kv_cache_append` writes.

    Args:
        cache: `[num_pages, page_size, 1, row]` or `[num_pages, page_size, row]`, as
            `kv_cache_empty` makes it.
        slots: `[num_rows]`, int32, contiguous: `page * page_size + offset`. A slot outside of the
            cache, such as -1, gives a row of zeros.

    Returns:
        `[num_rows, 512]`, or `[num_rows, 576]` of a cache in `"v3.2"`; bfloat16, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or the pages other strides.

    Example:
        >>> from tile_kernels.attention import kv_cache_append, kv_cache_empty
        >>> cache, slots = kv_cache_empty(1, 2, "bf16"), torch.tensor([1, -1]).int()
        >>> kv_cache_append(cache, slots[:1], torch.ones(1, 512).bfloat16())
        >>> kv_cache_gather(cache, slots)[:, 0].tolist()
        [1.0, 0.0]
    """
    return KV_CACHE_GATHER(cache, slots)


# ---- indices ------------------------------------------------------------------------------------


class Indices(NamedTuple):
    logical: Tensor
    block_table: Tensor
    page_size: int

    def check(self) -> None:
        checks.integer("page_size", self.page_size, 1, checks.MOST_SIZE)
        dims: tuple[str, ...] = ("num_requests", "s_q", "k")
        if isinstance(self.logical, Tensor) and self.logical.dim() == 2:
            dims = ("num_requests", "k")
        checks.tensor("logical", self.logical, dims, torch.int32, contiguous=True)
        count = self.logical.shape[0]
        checks.tensor(
            "block_table", self.block_table, ("num_requests", "max_pages"), torch.int32,
            shape=(count, None), contiguous=True,
        )  # fmt: skip
        checks.countable("logical", self.logical)

    def outputs(self) -> Out:
        return Out("out", self.logical.shape, torch.int32)

    def launches(self, slots: Spec) -> Launch | Host | None:
        if not slots.numel():
            return None
        if not self.block_table.numel():
            return Host(Tensor.fill_, (slots, -1))
        logical: Any = self.logical
        table: Any = self.block_table
        count = Size(lambda a: a.logical.numel() // max(a.logical.shape[0], 1))
        arguments = (logical.view(-1), table, slots.view(-1), count, self.page_size)
        return Launch(_INDICES, (), arguments)

    def check_values(self) -> None:
        most = self.block_table.shape[1] * self.page_size - 1
        checks.in_range("logical", self.logical, -1, most)


def indices_cost(logical: Tensor, block_table: Tensor, **_: Any) -> Cost:
    return Cost(8 * logical.numel() + 4 * min(logical.numel(), block_table.numel()))


CACHE_INDICES = Operator(
    "attention.cache_indices",
    Indices,
    reference=reference.cache_indices,
    cost=indices_cost,
    dynamic={"logical": 0, "block_table": 0},
    out=("out",),
    differentiable=False,
)


@CACHE_INDICES.public()
def cache_indices(
    logical: Tensor, block_table: Tensor, page_size: int, *, out: Tensor | None = None
) -> Tensor:
    """Converts positions in sequences to slots of a paged cache, as attention takes them.

    `slots = block_table[request, i // page_size] * page_size + i % page_size` for `i = logical`;
    -1 stays -1. So do positions past the table, and pages that are negative in it, give -1.

    Args:
        logical: `[num_requests, k]` or `[num_requests, s_q, k]`, int32, contiguous: positions of
            rows (of tokens, or of compressed entries) in the sequence of their request.
        block_table: `[num_requests, max_pages]`, int32, contiguous: the pages of each sequence.
        page_size: Tokens of a page.
        out: A buffer for the result.

    Returns:
        `slots`, of the shape of `logical`, int32, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.

    Example:
        >>> cache_indices(torch.tensor([[0, 3, -1]]).int(), torch.tensor([[7, 5]]).int(), 2)
        tensor([[14, 11, -1]], dtype=torch.int32)
    """
    return CACHE_INDICES(logical, block_table, page_size, out=out)
