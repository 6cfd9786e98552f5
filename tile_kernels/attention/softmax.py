"""What operators of attention over shared rows have in common: their checks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.attention.indices.reference import entry_ranges, window_ranges
from tile_kernels.attention.softmax_reference import VALUE_CHANNELS
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Host, Out, Spec, contiguous_strides
from tile_kernels.runtime.operator import Operator

WIDTHS = (512, 576)  # channels of a row
MAX_WINDOW = 65536
LOG2E = math.log2(math.e)
_BYTES = 16  # alignment of asynchronous copies


def check_queries(q: Tensor, sm_scale: float, sink: Tensor | None) -> None:
    """`q [T, h, d]`, the factor of logits, and the sink of each head."""
    checks.tensor("q", q, ("T", "h", "d"), torch.bfloat16, unit_inner_stride=True)
    if q.shape[1] < 1:
        raise ValueError("q must have at least one head, got 0")
    if q.shape[2] not in WIDTHS:
        raise ValueError(f"q must have 512 or 576 channels, got {q.shape[2]}")
    _check_copies("q", q)
    if not 0 < checks.number("sm_scale", sm_scale) < float("inf"):
        raise ValueError(f"sm_scale must be positive and finite, got {checks.shown(sm_scale)}")
    if sink is not None:
        checks.tensor(
            "sink", sink, ("h",), torch.float32, shape=(q.shape[1],), unit_inner_stride=True
        )


def check_rows(name: str, rows: Tensor, q: Tensor, count: str, shape: tuple[Any, ...]) -> None:
    """Keys `[count, d]`, as wide as queries."""
    checks.tensor(
        name, rows, (count, "d"), torch.bfloat16, shape=(*shape, q.shape[2]),
        unit_inner_stride=True,
    )  # fmt: skip
    _check_copies(name, rows)


def check_lists(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    sink: Tensor | None,
    topk_length: Tensor | None,
) -> None:
    """The arguments of attention over chosen rows."""
    check_queries(q, sm_scale, sink)
    check_rows("kv", kv, q, "N", (None,))
    checks.tensor(
        "indices", indices, ("T", "k"), torch.int32, shape=(q.shape[0], None),
        unit_inner_stride=True,
    )  # fmt: skip
    if topk_length is not None:
        checks.tensor(
            "topk_length", topk_length, ("T",), torch.int32, shape=(q.shape[0],),
            unit_inner_stride=True,
        )  # fmt: skip


def check_list_values(kv: Tensor, indices: Tensor, topk_length: Tensor | None) -> None:
    """For the checked mode: indices of rows or -1, lengths within them."""
    checks.in_range("indices", indices, -1, kv.shape[0] - 1)
    checks.in_range("topk_length", topk_length, 0, indices.shape[1])


def without_kv_head(operator: Operator, kv: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`kv [N, d]` and `indices [T, k]` without the dimension of the one key/value head."""
    if isinstance(kv, Tensor) and kv.dim() != 2:
        operator.require(_one_kv_head, "kv", kv)
        kv = kv.select(1, 0)
    if isinstance(indices, Tensor) and indices.dim() != 2:
        operator.require(_one_kv_head, "indices", indices)
        indices = indices.select(1, 0)
    return kv, indices


def _one_kv_head(name: str, x: Tensor) -> None:
    if x.dim() != 3 or x.shape[1] != 1:
        raise ValueError(
            f"{name} must have 2 dimensions, or 3 with one key/value head, got {tuple(x.shape)}"
        )


def _check_copies(name: str, x: Tensor) -> None:
    """Asynchronous copies move 16 bytes at a time, from addresses that 16 divides."""
    for size, stride in zip(x.shape[:-1], x.stride()):
        if size > 1 and stride * x.element_size() % _BYTES:
            raise ValueError(
                f"{name} must have rows that start at multiples of {_BYTES} bytes, got strides "
                f"{x.stride()}"
            )


def accessible(x: Any) -> Spec:
    """`x` if its address and the strides of all dimensions are multiples of 16 bytes, else a copy.

    Strides that `check_queries` lets pass belong to dimensions of size 1.
    """
    strides = (stride * x.element_size() for stride in x.stride()[:-1])
    good = x.alignment == _BYTES and not any(stride % _BYTES for stride in strides)
    return x if good else x.clone()


def dense(x: Any) -> Any:
    """A contiguous tensor on 16 bytes, with the strides that kernels expect: `x`, or a copy."""
    if x is None:
        return None
    good = x.is_contiguous() and x.alignment == _BYTES
    return x.apply(_compact) if good else x.clone()


def _compact(x: Tensor) -> Tensor:
    """A dimension of size 1 may have any stride in PyTorch, in a kernel only the dense one."""
    strides = contiguous_strides(x.shape)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def num_blocks(device: torch.device) -> int:
    """Blocks of a persistent kernel: one for each SM that kernels may use."""
    return config.get_num_sms(device if device.type == "cuda" else None)


def without_rows(out: Spec, max_logits: Spec, lse: Spec) -> list[Host]:
    """The results of queries that have no row."""
    infinity = float("inf")
    values = ((out, 0), (max_logits, -infinity), (lse, infinity))
    return [Host(Tensor.fill_, value) for value in values]


def outputs(q: Tensor) -> tuple[Out, Out, Out]:
    """The results: values, and statistics of logits."""
    heads = tuple(q.shape[:2])
    return (
        Out("out", (*heads, VALUE_CHANNELS), q.dtype),
        Out("max_logits", heads, torch.float32),
        Out("lse", heads, torch.float32),
    )


def check_sequences(cu_seqlens: Tensor, ratio: int, window: int, *, with_entries: bool) -> None:
    """Where sequences begin, the tokens of an entry, and those of a window."""
    checks.tensor("cu_seqlens", cu_seqlens, ("B + 1",), torch.int32, contiguous=True)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have at least 2 elements, got {cu_seqlens.shape[0]}")
    checks.integer("ratio", ratio, 1 if with_entries else 0, MAX_WINDOW)
    checks.integer("window", window, 1, MAX_WINDOW)


def check_visible(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    sm_scale: float,
    cu_seqlens: Tensor,
    ratio: int,
    window: int,
    sink: Tensor | None,
) -> None:
    """The arguments of attention over windows and all entries."""
    check_queries(q, sm_scale, sink)
    check_rows("window_kv", window_kv, q, "T", (q.shape[0],))
    if entries is not None:
        check_rows("entries", entries, q, "E", (None,))
    check_sequences(cu_seqlens, ratio, window, with_entries=entries is not None)


def visible_pairs(
    q: Tensor, entries: Tensor | None, cu_seqlens: Tensor, ratio: int, window: int
) -> int:
    """How many rows all queries see together; without the bounds, how many they may see."""
    num_tokens = q.shape[0]
    if cu_seqlens.device.type == "meta":
        return num_tokens * (window + (0 if entries is None else entries.shape[0]))
    first, end = window_ranges(cu_seqlens, window, num_tokens)
    pairs = int((end - first).sum())
    if entries is not None:
        first, end = entry_ranges(cu_seqlens, ratio, num_tokens)
        pairs += int((end - first).sum())
    return pairs


def check_bounds(cu_seqlens: Tensor, num_tokens: int) -> None:
    """For the checked mode: sequences are within the tokens and do not decrease."""
    checks.in_range("cu_seqlens", cu_seqlens, 0, num_tokens)
    falls = (cu_seqlens.diff() < 0).nonzero()
    if len(falls):
        raise ValueError(f"cu_seqlens must not decrease, but element {falls[0].tolist()} does")
