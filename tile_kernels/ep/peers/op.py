"""Rows to the memory of peers: the calls of the kernels.

These write memory that no argument names, so they are no operators of PyTorch: the engine that
uses them orders them with what the peers do, on a stream.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.ep.peers import reference
from tile_kernels.ep.peers.plan import put_plan, sum_plan
from tile_kernels.runtime import backends, emulation
from tile_kernels.runtime.declaration import ALIGNMENT
from tile_kernels.runtime.launch import Kernel

_MODULE = "tile_kernels.ep.peers.kernel"
_PUT = Kernel(_MODULE, "put_rows", put_plan)
_SUM = Kernel(_MODULE, "put_sums", sum_plan)


def _run(kernel: Kernel, problem: tuple[Any, ...], x: Tensor, *arguments: Any) -> bool:
    """Runs a kernel; False where the reference must do it."""
    if x.is_cuda:
        with torch.cuda.device(x.device):
            kernel.bound(problem, x.device.index or 0)(x, *arguments)
        return True
    if backends.choose(x.device) != "emulate":
        return False
    emulation.run(kernel, problem, x, *arguments)
    return True


def put_rows(
    x: Tensor,
    ranks: Tensor,
    slots: Tensor,
    peers: Tensor,
    alignment: int,
    capacity: int,
    sf: Tensor | None = None,
    items: Tensor | None = None,
    words: Tensor | None = None,
    wide: bool = False,
) -> None:
    """Writes each row of `x`, and of `sf`, to the rows `slots[t, k]` of the ranks `ranks[t, k]`.

    Each row is read once. Negative slots name nothing.

    Args:
        x: `[num_tokens, width]`, contiguous, any dtype.
        ranks: `[num_tokens, num_topk]`, int32, contiguous.
        slots: As `ranks`.
        peers: `[3, num_ranks]`, int64: for each rank the addresses of its rows, scales and words.
        alignment: What divides the addresses in `peers`, in bytes.
        capacity: More than any slot or item.
        sf: `[num_tokens, num_scales]` of 4-byte elements, any strides, or None.
        items: As `slots`, for `words`.
        words: `[num_tokens, num_words]`, int32, contiguous, or None: written to the rows `items`.
        wide: Whether most rows are written several times, as in the expanded layout.
    """
    if x.shape[0] == 0 or ranks.shape[1] == 0:
        return
    rows = _as_words(x)
    scales = None if sf is None or sf.shape[1] == 0 else sf.view(torch.int32)
    problem = (
        str(rows.dtype).removeprefix("torch."), rows.element_size(), rows.shape[1], ranks.shape[1],
        rows.shape[0], math.gcd(alignment, rows.data_ptr(), ALIGNMENT),
        0 if scales is None else scales.shape[1], 0 if words is None else words.shape[1],
        wide,
    )  # fmt: skip
    items = None if words is None else items
    arguments = (ranks, slots, peers, scales, items, words)
    if not _run(_PUT, problem, rows, *arguments, capacity):
        reference.put_rows(rows, *arguments)


def put_sums(
    x: Tensor,
    positions: Tensor,
    ranks: Tensor,
    slots: Tensor,
    peers: Tensor,
    alignment: int,
    capacity: int,
    words: Tensor | None = None,
) -> None:
    """Writes the sum of the rows `positions[n]` of `x` to row `slots[n]` of rank `ranks[n]`.

    Args:
        x: `[num_positions, hidden]`, contiguous: float32, float16 or bfloat16.
        positions: `[num_rows, num_topk]`, int32, contiguous; negative: none.
        ranks: `[num_rows]`, int32.
        slots: `[num_rows]`, int32.
        peers: As of `put_rows`; scales are not used.
        alignment: As of `put_rows`.
        capacity: More than any slot.
        words: `[num_rows, num_words]`, int32, contiguous, or None: written to the same rows.
    """
    if positions.shape[0] == 0:
        return
    problem = (
        str(x.dtype).removeprefix("torch."), x.element_size(), x.shape[1], positions.shape[1],
        positions.shape[0], math.gcd(alignment, x.data_ptr(), ALIGNMENT),
        0 if words is None else words.shape[1],
    )  # fmt: skip
    arguments = (positions, ranks, slots, peers, words)
    if x.shape[1] == 0 or not _run(_SUM, problem, x, *arguments, capacity):
        reference.put_sums(x, *arguments)


def _as_words(x: Tensor) -> Tensor:
    """The rows as 4-byte words if they are a whole number of them, else as bytes."""
    size = x.shape[1] * x.element_size()
    whole = size % 4 == 0 and x.data_ptr() % 4 == 0 and size > 0
    return x.view(torch.int32 if whole else torch.uint8)
