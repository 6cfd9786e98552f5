"""`sparse_attention_decode`: attention over chosen rows of paged caches, and how it is split."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.attention.cache_layout import check_cache, flat_pages, layout_of, num_slots
from tile_kernels.attention.decode import reference
from tile_kernels.attention.decode.plan import (
    HEADS,
    PAIR,
    DecodePlan,
    fixed_split,
    num_pairs,
    plan_attend,
    plan_combine,
    plan_plan,
)
from tile_kernels.attention.softmax_reference import VALUE_CHANNELS
from tile_kernels.attention.windows import accessible
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_MODULE = "tile_kernels.attention.decode.kernel"
_ATTEND = Kernel(_MODULE, "attend_pages", plan_attend)
_COMBINE = Kernel(_MODULE, "combine_parts", plan_combine)
_PLAN = Kernel(_MODULE, "make_plan", plan_plan)
LOG2E = 1.4426950408889634
INF = float("inf")


def _check_lists(
    prefix: str, q: Tensor, indices: Tensor, lengths: Tensor | None, length: str
) -> None:
    num_requests, s_q = q.shape[:2]
    shape = (num_requests, s_q, None)
    checks.tensor(
        f"{prefix}indices", indices, ("b", "s_q", "k"), torch.int32, shape=shape,
        unit_inner_stride=True,
    )  # fmt: skip
    if lengths is not None:
        checks.tensor(length, lengths, ("b",), torch.int32, shape=(num_requests,), contiguous=True)


def _check_queries(q: Tensor) -> None:
    checks.tensor("q", q, ("b", "s_q", "h", "d"), torch.bfloat16, unit_inner_stride=True)
    if q.shape[2] < 1:
        raise ValueError("q must have at least one head, got 0")


# ---- the plan -----------------------------------------------------------------------------------


class PlanArguments(NamedTuple):
    q: Tensor
    indices: Tensor
    topk_length: Tensor | None
    extra_indices: Tensor | None
    extra_topk_length: Tensor | None
    num_sms: int

    def check(self) -> None:
        _check_queries(self.q)
        _check_lists("", self.q, self.indices, self.topk_length, "topk_length")
        if self.extra_indices is not None:
            _check_lists(
                "extra_", self.q, self.extra_indices, self.extra_topk_length, "extra_topk_length"
            )
        elif self.extra_topk_length is not None:
            raise ValueError("extra_topk_length needs extra_indices, got None")
        checks.integer("num_sms", self.num_sms, 1, checks.MOST_SIZE)

    def outputs(self) -> tuple[Out, Out]:
        num_requests = self.q.shape[0]
        return (
            Out("items", (_blocks(self) + num_requests, 4), torch.int32),
            Out("splits", (num_requests, 2), torch.int32),
        )

    def launches(self, items: Spec, splits: Spec) -> Launch | Host:
        if not splits.numel():
            return Host(_fill_items, (items,))
        extra: Any = self.extra_indices
        sizes = (self.indices.shape[2], 0 if extra is None else extra.shape[2])
        arguments = (self.topk_length, self.extra_topk_length, items, splits, *sizes, Size(_blocks))
        problem = (self.topk_length is not None, self.extra_topk_length is not None)
        return Launch(_PLAN, problem, arguments)

    def check_values(self) -> None:
        checks.in_range("topk_length", self.topk_length, 0, self.indices.shape[2])
        if self.extra_indices is not None:
            most = self.extra_indices.shape[2]
            checks.in_range("extra_topk_length", self.extra_topk_length, 0, most)


def _fill_items(items: Tensor) -> None:
    """Items of no requests."""
    items.zero_()[:, 3] = -1


def _blocks(a: Any) -> int:
    """Splits of a request that run at once, for all of its tokens and heads."""
    s_q, heads = a.q.shape[1:3]
    return max(a.num_sms // max(s_q * -(-heads // HEADS), 1), 1)


def plan_cost(q: Tensor, indices: Tensor, **_: Any) -> Cost:  # noqa: ARG001
    return Cost(bytes=32 * q.shape[0])


DECODE_PLAN = Operator(
    "attention.decode_plan",
    PlanArguments,
    reference=reference.decode_plan,
    cost=plan_cost,
    dynamic={
        "q": 2, "indices": 1, "topk_length": 0, "extra_indices": 1, "extra_topk_length": 0
    },
    differentiable=False,
)  # fmt: skip


@DECODE_PLAN.public()
def decode_plan(
    q: Tensor,
    indices: Tensor,
    *,
    topk_length: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    num_sms: int | None = None,
) -> DecodePlan:
    """Divides the keys of all requests of a step into splits of similar length.

    One block on the device compares lengths of splits. The plan depends on sizes and lengths alone,
    not on the values of `q` and indices, so that one plan serves all layers of a step, and a CUDA
    graph can record its making. Results of `sparse_attention_decode` with a plan depend on the
    batch in their last bits; without one they do not.

    Args:
        q: `[b, s_q, h, d]`, bfloat16: as in `sparse_attention_decode`; only the shape counts.
        indices: `[b, s_q, k]`, int32; only the shape counts.
        topk_length: `[b]`, int32, contiguous: as in `sparse_attention_decode`.
        extra_indices: `[b, s_q, extra_k]`, int32; only the shape counts.
        extra_topk_length: `[b]`, int32, contiguous.
        num_sms: Blocks that run at once. None: the SMs of the device.

    Returns:
        `(items, splits)`, int32: `[num_items, 4]`, the request, its first pair of tiles of 64 keys,
        the end of its pairs, and the number of the split, -1 where there is none; and `[b, 2]`, the
        first split of a request, and how many it has.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.

    Example:
        >>> q, indices = torch.zeros(1, 1, 64, 512).bfloat16(), torch.zeros(1, 1, 512).int()
        >>> decode_plan(q, indices, num_sms=2)[1].tolist()  # too few keys for two splits
        [[0, 1]]
    """
    if num_sms is None and isinstance(q, Tensor):
        num_sms = config.get_device_num_sms(q.device if q.device.type == "cuda" else None)
    given = (q, indices, topk_length, extra_indices, extra_topk_length, num_sms)
    return DECODE_PLAN(*given)


# ---- attention ----------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """`items` and `splits` are the plan; `split_keys` the keys of a split without one, 0: fixed."""

    q: Tensor
    cache: Tensor
    indices: Tensor
    sm_scale: float
    sink: Tensor | None
    topk_length: Tensor | None
    extra_cache: Tensor | None
    extra_indices: Tensor | None
    extra_topk_length: Tensor | None
    items: Tensor | None
    splits: Tensor | None
    split_keys: int

    def check(self) -> None:
        _check_queries(self.q)
        layout = check_cache("cache", self.cache)
        num_requests, _, heads, channels = self.q.shape
        if channels != layout.channels:
            wanted = f"{layout.channels} channels, as cache in {layout.name} has"
            raise ValueError(f"q must have {wanted}, got {channels}")
        if not 0 < checks.number("sm_scale", self.sm_scale) < INF:
            given = checks.shown(self.sm_scale)
            raise ValueError(f"sm_scale must be positive and finite, got {given}")
        if self.sink is not None:
            checks.tensor("sink", self.sink, ("h",), torch.float32, shape=(heads,), contiguous=True)
        _check_lists("", self.q, self.indices, self.topk_length, "topk_length")
        self._check_extra()
        checks.integer("splits", self.split_keys, 0, checks.MOST_SIZE)
        if self.split_keys % PAIR:
            raise ValueError(f"splits must be a multiple of {PAIR} keys, got {self.split_keys}")
        if self.items is not None:
            dims = ("num_items", "4")
            checks.tensor("plan", self.items, dims, torch.int32, shape=(None, 4), contiguous=True)
            checks.tensor(
                "plan", self.splits, ("b", "2"), torch.int32, shape=(num_requests, 2),
                contiguous=True,
            )  # fmt: skip

    def _check_extra(self) -> None:
        if (self.extra_cache is None) != (self.extra_indices is None):
            missing = "extra_cache" if self.extra_cache is None else "extra_indices"
            raise ValueError(f"{missing} must be given with the other one, got None")
        if self.extra_cache is None or self.extra_indices is None:
            if self.extra_topk_length is not None:
                raise ValueError("extra_topk_length needs extra_indices, got None")
            return
        _check_lists(
            "extra_", self.q, self.extra_indices, self.extra_topk_length, "extra_topk_length"
        )
        if check_cache("extra_cache", self.extra_cache) is not layout_of(self.cache):
            wanted = layout_of(self.cache).name
            raise ValueError(
                f"extra_cache must have the layout of cache, {wanted}, got "
                f"{layout_of(self.extra_cache).name}"
            )

    def check_values(self) -> None:
        checks.in_range("indices", self.indices, -1, num_slots(self.cache) - 1)
        checks.in_range("topk_length", self.topk_length, 0, self.indices.shape[2])
        if self.extra_cache is not None and self.extra_indices is not None:
            most = num_slots(self.extra_cache) - 1
            checks.in_range("extra_indices", self.extra_indices, -1, most)
            most = self.extra_indices.shape[2]
            checks.in_range("extra_topk_length", self.extra_topk_length, 0, most)

    def outputs(self) -> tuple[Out, Out]:
        num_requests, s_q, heads, _ = self.q.shape
        return (
            Out("out", (num_requests, s_q, heads, VALUE_CHANNELS), self.q.dtype),
            Out("lse", (num_requests, heads, s_q), torch.float32),
        )

    def scratch(self) -> tuple[Out, ...]:
        num_requests, s_q, heads, _ = self.q.shape
        count = _fixed(self)[0]
        if self.items is None and count == 1:
            return ()
        splits = num_requests * count if self.items is None else self.items.shape[0]
        return (
            Out("part_out", (splits * s_q, heads, VALUE_CHANNELS), torch.float32),
            Out("part_lse", (splits * s_q, heads), torch.float32),
        )

    def launches(self, out: Spec, lse: Spec, *parts: Spec) -> list[Launch | Host]:
        if not out.numel():
            return []
        sources = [x for x in _sources(self) if x.has_rows]
        if not sources:
            return [Host(Tensor.fill_, (out, 0)), Host(Tensor.fill_, (lse, INF))]
        q: Any = self.q
        heads, channels = q.shape[2:]
        main, extra = sources[0], sources[1] if len(sources) > 1 else _NO_SOURCE
        planned, in_parts = self.items is not None, bool(parts)
        flags = (main.lengths is not None, extra.pages is not None, extra.lengths is not None)
        layout = layout_of(self.cache)
        paired = layout.plain and heads % (2 * HEADS) == 0
        problem = (layout.name, self.sink is not None, *flags, planned, in_parts, paired)
        count, pairs = _fixed(self)
        buffers = parts or (None, None)
        total = Size(lambda a: a.q.shape[0] * count if a.items is None else a.items.shape[0])
        attend = Launch(
            _ATTEND,
            problem,
            (
                accessible(q).view(-1, heads, channels), *main.lists, *extra.lists, self.sink,
                main.lengths, extra.lengths, self.items, self.splits,
                out.view(-1, heads, VALUE_CHANNELS), lse, *buffers, float(self.sm_scale) * LOG2E,
                *main.sizes, *extra.sizes, total, count, pairs,
            ),
        )  # fmt: skip
        if not parts:
            return [attend]
        combine = Launch(
            _COMBINE,
            (self.sink is not None, planned, flags[0], flags[2]),
            (
                *parts, self.sink, main.lengths, extra.lengths, self.splits,
                out.view(-1, heads, VALUE_CHANNELS), lse, main.k, extra.k, count, pairs,
            ),
        )  # fmt: skip
        return [attend, combine]


class _Source(NamedTuple):
    """Rows of a cache that are attended to, as the kernel takes them."""

    pages: Any
    indices: Any
    lengths: Any
    which: str

    @property
    def has_rows(self) -> bool:
        """Whether any index can be a row."""
        return self.pages is not None and 0 not in (self.pages.shape[0], self.indices.shape[2])

    @property
    def k(self) -> int:
        """Indices of a query."""
        return 0 if self.indices is None else self.indices.shape[2]

    @property
    def lists(self) -> tuple[Any, Any]:
        """Pages and indices."""
        if self.pages is None:
            return None, None
        return flat_pages(self.pages), self.indices.contiguous().view(-1, self.k)

    @property
    def sizes(self) -> tuple[Any, Any]:
        """The page size, and the number of slots."""
        if self.pages is None:
            return 1, 0
        which = self.which
        return self.pages.shape[1], Size(lambda a: num_slots(getattr(a, which)))


_NO_SOURCE = _Source(None, None, None, "")


def _sources(a: Arguments) -> tuple[_Source, _Source]:
    return (
        _Source(a.cache, a.indices, a.topk_length, "cache"),
        _Source(a.extra_cache, a.extra_indices, a.extra_topk_length, "extra_cache"),
    )


def _fixed(a: Arguments) -> tuple[int, int]:
    """The splits of a request without a plan: their number, and pairs of tiles of one."""
    lists = [source.k for source in _sources(a) if source.has_rows]
    return fixed_split(num_pairs(*(*lists, 0, 0)[:2]), a.split_keys)


def cost(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    **_: Any,
) -> Cost:
    """Each row that is chosen is read once; products of all indices, or of the lengths."""
    s_q, heads, channels = q.shape[1:]
    pairs, read = 0, 2 * q.numel() + q.shape[:3].numel() * (2 * VALUE_CHANNELS + 4)
    for pages, slots, lengths in (
        (cache, indices, topk_length),
        (extra_cache, extra_indices, extra_topk_length),
    ):
        if pages is None or slots is None:
            continue
        count = slots.numel()
        if lengths is not None and lengths.device.type != "meta":
            count = s_q * int(lengths.clamp(0, slots.shape[2]).sum())
        rows = count
        if slots.device.type != "meta":
            rows = min(slots.unique().numel(), count)
        pairs += count
        read += 4 * count + min(rows, num_slots(pages)) * layout_of(pages).row_bytes
    return Cost(read, 2 * heads * pairs * (channels + VALUE_CHANNELS))


SPARSE_ATTENTION_DECODE = Operator(
    "attention.sparse_attention_decode",
    Arguments,
    reference=reference.attended,
    cost=cost,
    dynamic={
        "q": 2, "cache": 3, "indices": 1, "topk_length": 0, "extra_cache": 3, "extra_indices": 1,
        "extra_topk_length": 0, "items": 1, "splits": 1,
    },
    instead="tile_kernels.attention.sparse_attention of rows in bfloat16",
    archs=("sm_90a",),
)  # fmt: skip


@SPARSE_ATTENTION_DECODE.public(reference=reference.sparse_attention_decode)
def sparse_attention_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    plan: DecodePlan | None = None,
    splits: str | int = "fixed",
) -> tuple[Tensor, Tensor]:
    """Computes attention of decoded tokens over selected rows of paged caches.

    For each head of each query, over the rows that its indices name in both caches together,

        s = sm_scale * q . row
        out = sum exp(s) row[:512] / (sum exp(s) + exp(sink))        lse = log sum exp(s)

    An index outside of the cache, such as -1, is no key: nothing of any row enters for it. Slots
    that are not chosen may hold anything. Duplicates count as often as they occur. Without any key
    `out` is 0 and `lse` is infinite, whatever the sink. A NaN in a chosen row or in a query makes
    its results NaN. Values are computed from bfloat16 rows (exact for e4m3 times a power of two)
    with float32 sums; weights are rounded to bfloat16 before they multiply values. Results below
    2**-126 are flushed to zero. There is no gradient.

    Where splits of a request's keys are computed by several blocks, a second kernel adds their
    parts in order. `"fixed"` splits depend on the number of indices alone: up to 2048 keys are in
    one piece, more in splits of 640. So the bits of a result depend neither on other requests nor
    on the device. `"balanced"` splits fill the device: the best for few requests and for lengths
    that differ much.

    The kernel needs an sm_90a GPU.

    Args:
        q: `[b, s_q, h, d]`, bfloat16: `s_q` queries of each request (1, or more with speculation).
            `d` is 512, or 576 for a cache in `"v3.2"`. Copied unless contiguous. Blocks have 64
            heads, so that 64 and 128 waste nothing.
        cache: `[num_pages, page_size, 1, row]` or `[num_pages, page_size, row]`, as
            `kv_cache_empty` makes it.
        indices: `[b, s_q, k]`, int32: slots `page * page_size + offset`, as `cache_indices` makes
            them. Copied unless contiguous. Multiples of 64 waste nothing.
        sm_scale: The factor of logits; positive and finite.
        sink: `[h]`, float32, contiguous: one more logit of each head, whose value is zero. `-inf`:
            none; `inf`: the result is 0.
        topk_length: `[b]`, int32, contiguous: only the first so many indices of a request count;
            clamped to `[0, k]`.
        extra_cache: A second cache of the same layout, with its own page size.
        extra_indices: `[b, s_q, extra_k]`, int32: slots of that cache.
        extra_topk_length: `[b]`, int32, contiguous: as `topk_length`.
        plan: A `decode_plan` of these sizes and lengths, for `"balanced"` splits.
        splits: `"fixed"`, `"balanced"` (makes a plan if there is none), or the number of keys of a
            split, a multiple of 128. Without effect where a plan is given.

    Returns:
        `(out, lse)`: `[b, s_q, h, 512]`, bfloat16; `[b, h, s_q]`, float32, the natural logarithm
        without the sink. Both contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or the pages other strides.

    Example:
        >>> from tile_kernels.attention import kv_cache_append, kv_cache_empty
        >>> cache, slots = kv_cache_empty(2, 64), torch.tensor([3, 100]).int()
        >>> kv_cache_append(cache, slots, torch.ones(2, 512).bfloat16())
        >>> q = torch.zeros(1, 1, 64, 512).bfloat16()
        >>> out, lse = sparse_attention_decode(q, cache, slots.view(1, 1, 2), 512**-0.5)
        >>> out.mean().item(), lse[0, 0].tolist()
        (1.0, [0.6931471824645996])
    """
    if plan is None and isinstance(splits, str) and splits == "balanced":
        plan = decode_plan(
            q, indices, topk_length=topk_length, extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
        )  # fmt: skip
    items, parts, keys = _split(plan, splits)
    return SPARSE_ATTENTION_DECODE(
        q, cache, indices, sm_scale, sink, topk_length, extra_cache, extra_indices,
        extra_topk_length, items, parts, keys,
    )  # fmt: skip


def _split(plan: Any, splits: Any) -> tuple[Any, Any, Any]:
    """The tensors of a plan, and the keys of a split without one, 0 for the default."""
    items, parts, keys = None, None, splits
    if splits == 0 and not isinstance(splits, str):
        raise ValueError(
            "sparse_attention_decode: splits must be fixed, balanced or a number of keys, got 0"
        )
    if plan is not None:
        if not (isinstance(plan, tuple) and len(plan) == 2):
            kind = type(plan).__name__
            raise TypeError(
                f"sparse_attention_decode: plan must be the tuple of decode_plan, got {kind}"
            )
        items, parts = plan
    if isinstance(splits, str):
        if splits not in ("fixed", "balanced"):
            raise ValueError(
                f"sparse_attention_decode: splits must be fixed, balanced or a number of keys, "
                f"got {splits!r}"
            )
        keys = 0
    return items, parts, keys


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: None = None,
    cache_seqlens: None = None,
    head_dim_v: int = VALUE_CHANNELS,
    tile_scheduler_metadata: DecodePlan | None = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention_decode` with the positional signature of FlashMLA's sparse calls.

    Args:
        q: As in `sparse_attention_decode`.
        k_cache: `cache` there.
        block_table: None: the page is part of an index.
        cache_seqlens: None.
        head_dim_v: 512.
        tile_scheduler_metadata: A `decode_plan`, or None.
        num_splits: None: the plan has them.
        softmax_scale: `sm_scale` there; None: `d**-0.5`.
        causal: False: indices say what a query sees.
        is_fp8_kvcache: Whether the cache is in bytes; False: bfloat16.
        indices: As in `sparse_attention_decode`; not None.
        attn_sink: `sink` there.
        extra_k_cache: `extra_cache` there.
        extra_indices_in_kvcache: `extra_indices` there.
        topk_length: As in `sparse_attention_decode`.
        extra_topk_length: As in `sparse_attention_decode`.

    Returns:
        `(out, lse)` as `sparse_attention_decode`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or belongs to a dense call.

    Example:
        >>> from tile_kernels.attention import kv_cache_empty
        >>> q = torch.zeros(1, 1, 64, 512).bfloat16()
        >>> indices = torch.full((1, 1, 64), -1).int()
        >>> cache = kv_cache_empty(1, 64)
        >>> flash_mla_with_kvcache(q, cache, is_fp8_kvcache=True, indices=indices)[0].any().item()
        False
    """
    with checks.named("flash_mla_with_kvcache"):
        for name, given in (
            ("block_table", block_table),
            ("cache_seqlens", cache_seqlens),
            ("num_splits", num_splits),
        ):
            if given is not None:
                raise ValueError(f"{name} must be None in a sparse call, got {checks.shown(given)}")
        if indices is None:
            raise ValueError("indices must be given: dense calls are not supported, got None")
        if causal:
            raise ValueError("causal must be False in a sparse call, got True")
        checks.one_of("head_dim_v", head_dim_v, (VALUE_CHANNELS,))
        checks.boolean("is_fp8_kvcache", is_fp8_kvcache)
        if isinstance(k_cache, Tensor) and is_fp8_kvcache == (k_cache.dtype is torch.bfloat16):
            raise ValueError(f"is_fp8_kvcache must fit k_cache, got {k_cache.dtype}")
        if softmax_scale is None:
            _check_queries(q)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    return sparse_attention_decode(
        q, k_cache, indices, softmax_scale, sink=attn_sink, topk_length=topk_length,
        extra_cache=extra_k_cache, extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length, plan=tile_scheduler_metadata,
    )  # fmt: skip
