"""What references of the compression share: windows of tokens, and the weighted sum over one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """Where compressed entries come from: `row` is a window's first token, `place` which window of
    its sequence it is. Entries that no window fills do not exist.
    """

    row: Tensor  # int64 [num_windows]
    place: Tensor  # int64 [num_windows]
    exists: Tensor  # bool [num_windows]


def windows_of(
    num_tokens: int,
    window: int,
    cu_seqlens: Tensor | None,
    num_windows: int | None,
    device: torch.device,
) -> Windows:
    """The windows of all sequences, one after the other; see `tile_kernels.attention.kv_compress`.

    >>> cpu = torch.device("cpu")
    >>> windows_of(7, 2, torch.tensor([0, 5, 7]), None, cpu).row.tolist()
    [0, 2, 5]
    """
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, num_tokens], device=device)
    bounds = cu_seqlens.long().clamp(0, num_tokens).cummax(0).values
    counts = bounds.diff() // window
    ends = counts.cumsum(0)
    index = torch.arange(
        num_tokens // window if num_windows is None else num_windows, device=device
    )
    sequence = torch.searchsorted(ends, index, right=True)
    exists = sequence < len(counts)
    if len(counts) == 0:
        return Windows(torch.zeros_like(index), torch.zeros_like(index), exists)
    sequence = sequence.clamp(max=len(counts) - 1)
    place = torch.where(exists, index - (ends - counts)[sequence], 0)
    return Windows(torch.where(exists, bounds[sequence] + window * place, 0), place, exists)


def firsts_of(windows: Windows, window: int) -> list[Tensor]:
    """The first row of each window and of the one before it, -1 where there is none."""
    own = torch.where(windows.exists, windows.row, -1)
    return [own, torch.where(windows.exists & (windows.place > 0), windows.row - window, -1)]


def scores_and_values(
    firsts: list[Tensor], series: list[tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Scores and values `[num_windows, rows, channels]`, and the rows that each series contributes.

    `firsts` has the first row of each series, negative where it has none.
    """
    scores, values, rows_of = [], [], []
    for first, (kv, z, bias) in zip(firsts, series):
        rows = first[:, None] + torch.arange(bias.shape[0], device=kv.device)
        rows = torch.where(first[:, None] >= 0, rows, -1)
        some = rows.clamp(min=0)
        # An empty tensor has no row to stand in for those that are missing.
        picked = [
            x[some] if x.shape[0] else x.new_zeros((*some.shape, x.shape[1])) for x in (kv, z)
        ]
        value, score = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in picked)
        here = (rows >= 0)[:, :, None]
        scores.append(torch.where(here, score + bias, -torch.inf))
        values.append(torch.where(here, value, 0))
        rows_of.append(rows)
    return torch.cat(scores, 1), torch.cat(values, 1), rows_of


def softmax(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Weights over the rows, 0 where all scores are -inf, and the weighted sum.

    Sums go from row to row, so that a window's result does not depend on what else is computed.
    """
    top = scores.amax(1, keepdim=True).detach()
    terms = torch.exp(scores - torch.where(top == -torch.inf, 0, top))
    total, out = torch.zeros_like(terms[:, 0]), torch.zeros_like(terms[:, 0])
    for term, value in zip(terms.unbind(1), values.unbind(1)):
        total = total + term
        out = out + term * value
    empty = total == 0
    total = torch.where(empty, 1, total)
    return terms / total[:, None], torch.where(empty, 0, out / total)


def as_series(*tensors: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Values, scores and bias of each series that is there."""
    given = [tensor for tensor in tensors if tensor is not None]
    return [(given[i], given[i + 1], given[i + 2]) for i in range(0, len(given), 3)]
