"""The indexer of an attention layer: which compressed entries each query attends to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tile_kernels import attention, quant
from tile_kernels.modeling.attention.entries import EntryCompressor
from tile_kernels.modeling.attention.rope import Angles, rotate_tail
from tile_kernels.modeling.bf16_experts import without_autocast

FORMATS = ("e2m1", "e4m3", "bf16")
DIMS = (32, 64, 128, 256)
GROUP = 32  # values of e2m1 that share a power of two
_MANTISSA_BITS = 23
_LOGITS_AT_ONCE = 2**28  # elements of the logits that the loss computes before it gathers
Parts = tuple[Tensor, ...]  # data, and scales where the format has them


class LightningIndexer(nn.Module):
    """Scores entries for each query with few channels, and selects the best.

    Queries are projected from the compressed queries of the attention layer, and keys come from a
    separate compressor. Both are rotated, multiplied by a Hadamard matrix, which spreads outliers
    over the channels, and rounded to `fmt`. The indexer is trained by `loss` only: its input is
    detached.

    Args:
        hidden: Channels of a token.
        q_rank: Channels of the attention layer's compressed queries.
        heads: Heads of the indexer.
        dim: Channels of a head: 32, 64, 128 or 256.
        rope_dim: How many of these are rotated.
        ratio: Tokens of an entry.
        fmt: `"e2m1"` with a power of two for 32 values, `"e4m3"` with a scale for a row, or
            `"bf16"`.
        norm_eps: Of the norm of keys.
        device: Of the parameters.
        dtype: Of the projections; the compressor is float32.
    """

    hadamard: Tensor

    def __init__(
        self,
        hidden: int,
        q_rank: int,
        *,
        heads: int,
        dim: int,
        rope_dim: int,
        ratio: int,
        fmt: str,
        norm_eps: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.dim, self.rope_dim, self.fmt = heads, dim, rope_dim, fmt
        self.wq_b = nn.Linear(q_rank, heads * dim, False, device, dtype)
        self.weights_proj = nn.Linear(hidden, heads, False, device, dtype)
        self.compressor = EntryCompressor(
            hidden, dim, ratio, overlap=True, norm_eps=norm_eps, device=device
        )
        signs = torch.empty(dim, dim, dtype=torch.int8, device=device)
        self.register_buffer("hadamard", signs, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills in the Hadamard matrix, which no checkpoint has."""
        index = torch.arange(self.dim, device=self.hadamard.device)
        common = index[:, None] & index
        parity = torch.zeros_like(common)
        for bit in range(self.dim.bit_length() - 1):
            parity ^= common >> bit & 1
        self.hadamard.copy_(1 - 2 * parity)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"heads={self.heads}, dim={self.dim}, fmt={self.fmt!r}"

    # ---- operands -------------------------------------------------------------------------------

    def queries(self, x: Tensor, compressed: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Queries before rounding, float32 `[T, heads, dim]`, and weights, float32 `[T, heads]`.

        Args:
            x: `[T, hidden]`.
            compressed: `[T, q_rank]`: the attention layer's compressed queries.
            angles: Of the tokens.
        """
        q = self.wq_b(compressed.detach()).unflatten(-1, (self.heads, self.dim))
        weights = self.weights_proj(x.detach()).float() * (self.dim * self.heads) ** -0.5
        return self._spread(rotate_tail(q, angles)), weights

    def keys(self, entries: Tensor, angles: Angles) -> Tensor:
        """Computes keys before rounding.

        Args:
            entries: `[n, dim]`: normed entries of the compressor.
            angles: The angles of the entries.

        Returns:
            `[n, dim]`, float32.
        """
        return self._spread(rotate_tail(entries, angles))

    def _spread(self, x: Tensor) -> Tensor:
        """The product with the Hadamard matrix, in float32, of orthonormal columns."""
        with without_autocast(x):
            return F.linear(x.float(), self.hadamard.float()) * self.dim**-0.5

    def parts(self, x: Tensor) -> Parts:
        """Converts values to the format of the indexer. There is no gradient.

        Args:
            x: `[..., dim]`.

        Returns:
            The data, and the scales where the format has them.
        """
        rows = x.detach().flatten(0, -2)
        if self.fmt == "bf16":
            return (x.detach().bfloat16(),)
        if self.fmt == "e4m3":
            codes, scales = quant.per_token_cast(rows, "e4m3", self.dim)
            return codes.view(x.shape), scales.view(x.shape[:-1])
        codes, scales = quant.per_token_cast(rows, "e2m1", GROUP, round_sf=True)
        exponents = (scales.contiguous().view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        shape = x.shape[:-1]
        return codes.view(*shape, self.dim // 2), exponents.view(*shape, self.dim // GROUP)

    def rounded(self, x: Tensor) -> Tensor:
        """Rounds values to the format of the indexer, as bfloat16; gradients ignore the rounding.

        Values of e2m1 are exact in bfloat16. Those of e4m3 are rounded a second time, because their
        scales are no powers of two.

        Args:
            x: `[..., dim]`.
        """
        if self.fmt != "bf16":
            rows = x.flatten(0, -2)
            group, powers = (GROUP, True) if self.fmt == "e2m1" else (self.dim, False)
            x = quant.fake_cast(rows, self.fmt, group, round_sf=powers).view(x.shape)
        return x.bfloat16()

    # ---- the choice -----------------------------------------------------------------------------

    def select(
        self, q: Parts, k: Parts, weights: Tensor, start: Tensor, end: Tensor, topk: int
    ) -> Tensor:
        """The `topk` best keys of each query in its range, ascending, -1 where there are fewer.

        Args:
            q: `parts` of queries.
            k: `parts` of keys.
            weights: Those of `queries`.
            start: `[T]`, int32: the first key of each query.
            end: `[T]`, int32: the key after its last.
            topk: How many.
        """
        if self.fmt == "e4m3" and len(q) == 2:  # the scale of a query is part of its weights
            return attention.indexer_select(q[0], (k[0], k[1]), weights * q[1], start, end, topk)
        query, key = (each[0] if len(each) == 1 else (each[0], each[1]) for each in (q, k))
        return attention.indexer_select(query, key, weights, start, end, topk)


class IndexerLoss(torch.autograd.Function):
    """The divergence of the indexer's distribution over chosen entries from a target.

    Only the logits of chosen entries have a gradient, which `attention.indexer_logits_bwd` takes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        target: Tensor,
        indices: Tensor,
        start: Tensor,
        end: Tensor,
    ) -> Tensor:
        """The mean over queries; `q`, `k` are bfloat16, `target` and `indices` are `[T, topk]`."""
        chosen = logits_of(q, k, weights, indices, start, end)
        loss, grad = attention.indexer_kl(target, chosen)
        ctx.save_for_backward(q, k, weights, indices, grad)
        return loss.sum() / max(q.shape[0], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of queries, keys and weights."""
        q, k, weights, indices, grad = ctx.saved_tensors
        grad = grad * (grad_loss / max(q.shape[0], 1))
        grad_q, grad_k, grad_weights = attention.indexer_logits_bwd(q, k, weights, indices, grad)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_weights, None, None, None, None


def logits_of(
    q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """The logits of chosen keys, float32 `[T, topk]`, -inf where an index is -1.

    All logits of some queries are computed at a time, so that those of a long text need no memory.
    """
    if k.shape[0] == 0:
        return torch.full(indices.shape, -torch.inf, device=q.device)
    step = max(1, _LOGITS_AT_ONCE // k.shape[0])
    parts = [torch.empty((0, indices.shape[1]), device=q.device)]
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        logits = attention.indexer_logits(q[rows], k, weights[rows], start[rows], end[rows])
        chosen = logits.gather(1, indices[rows].long().clamp(min=0))
        parts.append(chosen.masked_fill(indices[rows] < 0, -torch.inf))
    return torch.cat(parts)
