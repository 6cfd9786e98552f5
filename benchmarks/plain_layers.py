"""Layers in plain PyTorch, for `benchmarks.layers` to compare with.

Each is the layer as one writes it without kernels, with the parameters of a layer of this package:
`torch._grouped_mm` for experts, no waiting for the GPU, nothing larger than needed in memory, and
written so that `torch.compile` makes one graph of it and fuses what it can. Streams, memory and
hashes are those of the demo's plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_v4.plain import read, remembered, written
from tile_kernels.modeling.attention import KVCompressor
from tile_kernels.modeling.engram import EngramModule
from tile_kernels.modeling.mhc import HyperConnection
from tile_kernels.modeling.moe import MoELayer


class OneStream(nn.Module):
    """`x + block(x)`: what residual streams are compared with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The next residual."""
        return x + self.block(x)


class PlainConnection(nn.Module):
    """A `HyperConnection` around `block`, which may be a plain form of the connection's own."""

    def __init__(self, part: HyperConnection, block: nn.Module) -> None:
        super().__init__()
        self.part, self.inner = part, block

    def forward(self, residual: Tensor) -> Tensor:
        """bfloat16 `[..., streams, hidden]` to the same."""
        x, post, comb = read(self.part, residual)
        return written(self.inner(x), residual, post, comb)


class PlainEngram(nn.Module):
    """An `EngramModule`."""

    def __init__(self, memory: EngramModule) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, residual: Tensor, token_ids: Tensor) -> Tensor:
        """bfloat16 `[batch, length, streams, hidden]` to the same."""
        return remembered(self.memory, residual, token_ids)


# ---- experts ------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """`x[token]`; the gradient adds up the `topk` rows of a token by gathering, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_tokens = x.shape[0]
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (ctx.num_tokens, -1)).sum(1), None, None


class _Reorder(torch.autograd.Function):
    """`rows[back]` for a permutation, whose gradient is the opposite one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, back: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[back]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


class PlainMoE(nn.Module):
    """A `MoELayer`: rows sorted by expert, two grouped products, rows of a token added up."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.num_topk, self.num_experts = layer.num_topk, layer.num_experts
        self.router, self.w_in, self.w_out = layer.router, layer.w_in, layer.w_out
        self.shared_in, self.shared_out = layer.shared_in, layer.shared_out
        self.register_buffer("expert_bias", layer.expert_bias, persistent=False)

    def forward(self, given: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        x = given.flatten(0, -2)
        scores = F.linear(x.float(), self.router).sigmoid()
        chosen = (scores + self.expert_bias).topk(self.num_topk).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        back = order.argsort()
        numbers = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True).int()
        rows = _Gather.apply(x, order // self.num_topk, back)
        rows = self.product(swiglu(self.product(rows, self.w_in, ends)), self.w_out, ends)
        rows = _Reorder.apply(rows, back, order).unflatten(0, chosen.shape)
        y = (rows * weights[..., None]).sum(1).to(x.dtype)
        if self.shared_in is not None and self.shared_out is not None:
            y = y + F.linear(swiglu(F.linear(x, self.shared_in)), self.shared_out)
        return y.view(given.shape)

    def product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Each expert's rows by its weight."""
        if rows.is_cuda:
            multiply: Callable[..., Tensor] = torch._grouped_mm
            return multiply(rows, weight.transpose(1, 2), offs=ends)
        starts = [0, *ends.tolist()]
        return torch.cat([rows[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight)])


def swiglu(x: Tensor) -> Tensor:
    """`silu(gate) * value`."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


# ---- attention ----------------------------------------------------------------------------------


class PlainCompressor(nn.Module):
    """A `KVCompressor` with overlap, for texts of a whole number of windows."""

    def __init__(self, layer: KVCompressor) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to `[batch, length // window, channels]`."""
        layer = self.layer
        split = (-1, layer.window, layer.width)
        values, scores = (
            part.unflatten(1, split[:2]) for part in layer.projection(x).split(layer.width, dim=-1)
        )
        scores = scores.float() + layer.ape
        values = torch.cat(with_previous(values.float(), 0.0, layer.channels), dim=2)
        scores = torch.cat(with_previous(scores, float("-inf"), layer.channels), dim=2)
        entries = (scores.softmax(2) * values).sum(2).to(x.dtype)
        normed = F.rms_norm(
            entries.float(), entries.shape[-1:], layer.norm_weight, eps=layer.norm_eps
        )
        return normed.to(x.dtype)


def with_previous(x: Tensor, fill: float, channels: int) -> tuple[Tensor, Tensor]:
    """Series b of the window before and series a of this one, of `[batch, windows, window, 2C]`."""
    previous = torch.cat((torch.full_like(x[:, :1], fill), x[:, :-1]), dim=1)
    return previous[..., :channels], x[..., channels:]


class PlainIndexer(nn.Module):
    """`attention.indexer_select` over bfloat16."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def forward(self, q: Tensor, k: Tensor, weights: Tensor, end: Tensor) -> Tensor:
        """Queries `[T, h, D]`, keys `[S, D]`, weights `[T, h]` and ranges to int32 `[T, topk]`."""
        products = F.relu(q.flatten(0, 1) @ k.T).unflatten(0, q.shape[:2])
        logits = (weights[:, None].to(q.dtype) @ products)[:, 0].float()
        outside = torch.arange(len(k), device=k.device) >= end[:, None]
        return logits.masked_fill(outside, float("-inf")).topk(self.topk).indices.int()
