"""The definitions of the kernels that write into the memory of peers, in PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


def memory_at(address: int, num_bytes: int) -> Tensor:
    """The host memory at an address, as bytes. The caller keeps it alive."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def put_at(address: int, rows: Tensor, slots: Tensor) -> None:
    """Writes `rows` `[n, width]` to the rows `slots` of a matrix that begins at an address."""
    if rows.numel() == 0:
        return
    width = rows.shape[1] * rows.element_size()
    target = memory_at(address, (int(slots.max()) + 1) * width).view(-1, width)
    # One column counts as contiguous whatever its stride is.
    rows = rows.clone(memory_format=torch.contiguous_format)
    target[slots.long()] = rows.view(torch.uint8)


def put_rows(
    x: Tensor,
    ranks: Tensor,
    slots: Tensor,
    peers: Tensor,
    sf: Tensor | None = None,
    items: Tensor | None = None,
    words: Tensor | None = None,
) -> None:
    """Row `t` of `x` and of `sf` goes to row `slots[t, k]` of rank `ranks[t, k]`, for each slot.

    Negative slots name nothing. Row `t` of `words` goes to the rows `items[t, k]`. `peers`
    `[3, num_ranks]` are the addresses of the matrices on each rank: rows, scales, words.
    """
    parts: Sequence[tuple[Tensor | None, Tensor | None]] = ((x, slots), (sf, slots), (words, items))
    for table, (rows, at) in zip(peers.tolist(), parts):
        if rows is None or at is None:
            continue
        for rank, address in enumerate(table):
            token, slot = ((at >= 0) & (ranks == rank)).nonzero(as_tuple=True)
            put_at(address, rows[token], at[token, slot])


def put_sums(
    x: Tensor,
    positions: Tensor,
    ranks: Tensor,
    slots: Tensor,
    peers: Tensor,
    words: Tensor | None = None,
) -> None:
    """The sum of the rows `positions[n]` of `x` goes to row `slots[n]` of rank `ranks[n]`.

    The sum is accumulated in float32 in the order of the positions, from +0.0, and rounded once;
    negative positions name nothing. Row `n` of `words` goes along.
    """
    total = torch.zeros((positions.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    for k in range(positions.shape[1]):
        at = positions[:, k].long()
        valid = (at >= 0) & (at < x.shape[0])
        total[valid] += x[at[valid]].float()
    for rank in range(peers.shape[1]):
        mine = ranks == rank
        put_at(int(peers[0, rank]), total.to(x.dtype)[mine], slots[mine])
        if words is not None:
            put_at(int(peers[2, rank]), words[mine], slots[mine])
