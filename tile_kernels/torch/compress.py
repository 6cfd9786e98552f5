"""Oracles of the compression of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels.torch import quant

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


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


def _scores_and_values(
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


def _softmax(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
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


def _series(*tensors: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    given = [tensor for tensor in tensors if tensor is not None]
    return [(given[i], given[i + 1], given[i + 2]) for i in range(0, len(given), 3)]


def kv_compress(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One entry for each window of tokens; see `tile_kernels.attention.kv_compress`.

    >>> kv, z = torch.tensor([[1.0], [3.0], [5.0]]), torch.zeros(3, 1)
    >>> kv_compress(kv, z, torch.zeros(2, 1)).tolist()
    [[2.0]]
    """
    windows = windows_of(kv_a.shape[0], bias_a.shape[0], cu_seqlens, num_windows, kv_a.device)
    firsts = firsts_of(windows, bias_a.shape[0])
    scores, values, _ = _scores_and_values(firsts, _series(kv_a, z_a, bias_a, kv_b, z_b, bias_b))
    return _softmax(scores, values)[1].to(out_dtype or kv_a.dtype)


def kv_compress_bwd(
    grad_out: Tensor,
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Gradients:
    """The gradients of `kv_compress`: of a value `p g`, of a score `p g (value - out)`.

    >>> kv, z = torch.tensor([[1.0], [3.0], [5.0]]), torch.zeros(3, 1)
    >>> grad_kv, grad_z, grad_bias, *_ = kv_compress_bwd(torch.ones(1, 1), kv, z, torch.zeros(2, 1))
    >>> grad_kv.tolist(), grad_z.tolist()
    ([[0.5], [0.5], [0.0]], [[-0.5], [0.5], [0.0]])
    """
    series = _series(kv_a, z_a, bias_a, kv_b, z_b, bias_b)
    windows = windows_of(kv_a.shape[0], bias_a.shape[0], cu_seqlens, grad_out.shape[0], kv_a.device)
    scores, values, rows_of = _scores_and_values(firsts_of(windows, bias_a.shape[0]), series)
    weights, out = _softmax(scores, values)
    grad_values = weights * grad_out[:, None].to(weights.dtype)
    grad_scores = grad_values * (values - out[:, None])
    grads: list[Tensor | None] = []
    for i, ((kv, z, bias), rows) in enumerate(zip(series, rows_of)):
        part, here = slice(i * len(bias), (i + 1) * len(bias)), rows >= 0
        of_kv, of_z = (
            torch.zeros_like(kv, memory_format=torch.contiguous_format),
            torch.zeros_like(z, memory_format=torch.contiguous_format),
        )
        of_kv[rows[here]] = grad_values[:, part][here].to(kv.dtype)
        of_z[rows[here]] = grad_scores[:, part][here].to(z.dtype)
        of_bias = torch.where(here[:, :, None], grad_scores[:, part], 0).sum(0)
        grads += [of_kv, of_z, of_bias]
    return tuple(grads + [None] * (6 - len(grads)))  # type: ignore[return-value]


def halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Series a and series b of a packed tensor: its high and its low half."""
    width = packed.shape[1] // 2
    return packed[:, width:], packed[:, :width]


def unpacked(kv: Tensor, gate: Tensor, ape: Tensor) -> tuple[Tensor, ...]:
    """Values, scores and biases of series a, then those of series b."""
    of_a, of_b = zip(*(halves(packed) for packed in (kv, gate, ape)))
    return *of_a, *of_b


def kv_compress_packed(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`kv_compress` of both series in one tensor; see `tile_kernels.attention`.

    >>> kv = torch.tensor([[10.0, 1.0], [20.0, 2.0]])
    >>> kv_compress_packed(kv, torch.zeros(2, 2), torch.zeros(1, 2)).tolist()
    [[1.0], [6.0]]
    """
    return kv_compress(
        *unpacked(kv, gate, ape),
        cu_seqlens=cu_seqlens, num_windows=num_windows, out_dtype=out_dtype,
    )  # fmt: skip


def kv_compress_packed_bwd(
    grad_out: Tensor,
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `kv_compress_packed`, packed likewise.

    >>> kv = torch.tensor([[10.0, 1.0], [20.0, 2.0]])
    >>> grads = kv_compress_packed_bwd(torch.ones(2, 1), kv, torch.zeros(2, 2), torch.zeros(1, 2))
    >>> grads[0].tolist()
    [[0.5, 1.0], [0.0, 0.5]]
    """
    grads = kv_compress_bwd(grad_out, *unpacked(kv, gate, ape), cu_seqlens=cu_seqlens)
    pairs = zip(grads[3:], grads[:3])
    of_kv, of_gate, of_ape = (torch.cat(pair, 1) for pair in pairs)  # type: ignore[arg-type]
    return of_kv, of_gate, of_ape


def kv_compress_step(
    state: tuple[Tensor, Tensor],
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One token more for each sequence; see `tile_kernels.attention.kv_compress_step`.

    >>> state = torch.zeros(1, 2, 2, 1), torch.ones(1, dtype=torch.int32)
    >>> kv_compress_step(state, torch.tensor([[3.0]]), torch.zeros(1, 1), torch.zeros(2, 1))
    (tensor([[1.5000]]), tensor([True]))
    """
    kept, lengths = state
    num_sequences, ring, vectors, channels = kept.shape
    window = bias_a.shape[0]
    if slots is None:
        slots = torch.arange(num_sequences, device=kv_a.device)
    known = (slots >= 0) & (slots < num_sequences)
    slot = slots[known].long()
    length = lengths[slot].long().clamp(min=0)
    given = torch.stack([x for x in (kv_a, z_a, kv_b, z_b) if x is not None], 1)
    kept[slot, length % ring] = given[known]
    lengths[slot] = (length + 1).to(lengths.dtype)

    completed = torch.zeros_like(known)
    completed[known] = (length + 1) % window == 0
    own, previous = torch.full_like(known, -1, dtype=torch.int64).repeat(2, 1).unbind()
    at = length // window
    halves_kept = ring // window
    own[known] = slot * ring + at % halves_kept * window
    previous[known] = torch.where(at > 0, slot * ring + (at - 1) % halves_kept * window, -1)
    firsts = [torch.where(completed, first, -1) for first in (own, previous)]
    flat = kept.view(num_sequences * ring, vectors, channels).unbind(1)
    of_a = (flat[0], flat[1], bias_a)
    of_b = () if bias_b is None else (flat[2], flat[3], bias_b)
    scores, values, _ = _scores_and_values(firsts, _series(*of_a, *of_b))
    return _softmax(scores, values)[1].to(out_dtype or kv_a.dtype), completed


def kv_compress_norm_rope_cast(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kv_compress`, then norm, rotation and cast; see `tile_kernels.attention`.

    >>> x, ones = torch.ones(1, 66), torch.ones(1, 1)
    >>> codes, sf, rotated = kv_compress_norm_rope_cast(
    ...     x, x, x, weight=x[0], cos=ones, sin=0 * ones, eps=0.0
    ... )
    >>> codes[0, 0].item(), sf.item(), rotated.tolist()
    (256.0, 0.00390625, [[1.0, 1.0]])
    """
    window = bias_a.shape[0]
    entries = kv_compress(
        kv_a, z_a, bias_a, kv_b, z_b, bias_b,
        cu_seqlens=cu_seqlens, num_windows=num_windows, out_dtype=torch.float32,
    )  # fmt: skip
    normed = entries * torch.rsqrt(entries.square().mean(1, keepdim=True) + eps) * weight
    plain = entries.shape[1] - 2 * cos.shape[1]
    codes, sf = quant.per_token_cast(normed[:, :plain].contiguous(), "e4m3", 64, round_sf=True)
    windows = windows_of(kv_a.shape[0], window, cu_seqlens, num_windows, kv_a.device)
    position = (windows.place * window).clamp(max=cos.shape[0] - 1)
    left, right = normed[:, plain::2], normed[:, plain + 1 :: 2]
    c, s = cos[position], sin[position]
    rotated = torch.stack((left * c - right * s, left * s + right * c), 2)
    return codes, sf, rotated.flatten(1).bfloat16()
