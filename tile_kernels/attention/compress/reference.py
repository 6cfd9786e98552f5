"""References of the compression of keys and values, and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.windows_reference import (
    as_series,
    firsts_of,
    scores_and_values,
    softmax,
    windows_of,
)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


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
    scores, values, _ = scores_and_values(firsts, as_series(kv_a, z_a, bias_a, kv_b, z_b, bias_b))
    return softmax(scores, values)[1].to(out_dtype or kv_a.dtype)


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
    series = as_series(kv_a, z_a, bias_a, kv_b, z_b, bias_b)
    windows = windows_of(kv_a.shape[0], bias_a.shape[0], cu_seqlens, grad_out.shape[0], kv_a.device)
    scores, values, rows_of = scores_and_values(firsts_of(windows, bias_a.shape[0]), series)
    weights, out = softmax(scores, values)
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
