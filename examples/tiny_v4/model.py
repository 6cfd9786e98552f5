"""A decoder-only language model of hyper-connections, an n-gram memory and experts.

Each layer is attention and a feed-forward part. Both stand between residual streams
(`HyperConnection`); the feed-forward part is a mixture of experts (`MoELayer`); chosen layers begin
with an Engram memory of the last tokens (`EngramModule`). Every one of the three can be left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels import engram
from tile_kernels.modeling.engram import EngramHasher, EngramModule
from tile_kernels.modeling.mhc import HyperConnection, HyperHead, expand_from_embedding
from tile_kernels.modeling.moe import MoELayer


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, and which parts there are."""

    vocab: int
    hidden: int = 64
    heads: int = 4
    layers: int = 2
    streams: int = 4
    experts: int = 8
    topk: int = 2
    intermediate: int = 64
    engram_layers: tuple[int, ...] = (1,)
    table_rows: int = 4096
    mhc: bool = True
    engram: bool = True
    moe: bool = True
    fp8: bool = True
    precision: str = "bf16"
    # What attention and experts multiply in; parameters are float32. Any CPU has float32; with
    # bfloat16 on a GPU nothing waits for the host, so that a step can be a CUDA graph.
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):
    """Causal self-attention of the normed input, with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.RMSNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        heads = self.qkv(self.norm(x.float()).to(x.dtype)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


def rotated(x: Tensor) -> Tensor:
    """Pairs of channels turned by angles that grow with the position; `[..., length, width]`."""
    length, width = x.shape[-2:]
    speed = 1000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angle = torch.arange(length, device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


class FeedForward(nn.Module):
    """Experts, or one dense part that computes as much per token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden)
        self.experts: MoELayer | None = None
        if config.moe:
            self.experts = MoELayer(
                config.hidden, config.intermediate, config.experts, config.topk,
                num_shared_experts=1, precision=config.precision, fp8=config.fp8,
            )  # fmt: skip
        else:
            width = (config.topk + 1) * config.intermediate
            self.gate_and_value = nn.Linear(config.hidden, 2 * width, bias=False)
            self.out = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        x = self.norm(x.float()).to(x.dtype)
        if self.experts is not None:
            return self.experts(x)
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * value)


class PlainResidual(nn.Module):
    """`x + block(x)` where a `HyperConnection` could stand, for one stream."""

    def __init__(self, block: nn.Module, block_dtype: torch.dtype) -> None:
        super().__init__()
        self.block, self.block_dtype = block, block_dtype

    def forward(self, residual: Tensor) -> Tensor:
        """`[..., 1, hidden]` to the same."""
        return residual + self.block(residual.to(self.block_dtype)).to(residual.dtype)


class _OnOneStream(nn.Module):
    """A block on `[..., 1, hidden]`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x[..., 0, :])[..., None, :]


class TinyV4(nn.Module):
    """Embedding, layers between residual streams, head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.streams = config.streams if config.mhc else 1
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.memories = nn.ModuleDict()
        if config.engram:
            hasher = EngramHasher(
                num_layers=len(config.engram_layers), vocab_size=config.vocab,
                table_rows=config.table_rows, num_tables=2, max_ngram_size=3,
            )  # fmt: skip
            for i, layer in enumerate(config.engram_layers):
                self.memories[str(layer)] = EngramModule(
                    hasher, i, config.hidden, self.streams, embed_dim=16
                )
        parts = [part(config) for _ in range(config.layers) for part in (Attention, FeedForward)]
        self.parts = nn.ModuleList(self._between_streams(part) for part in parts)
        self.leave = HyperHead(config.hidden, config.streams) if config.mhc else None
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=config.hidden**-0.5)

    def _between_streams(self, part: nn.Module) -> nn.Module:
        if not self.config.mhc:
            return PlainResidual(_OnOneStream(part), self.config.dtype)
        return HyperConnection(
            part, self.config.hidden, self.streams, block_dtype=self.config.dtype
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits of the next token: int64 `[batch, length]` to `[batch, length, vocab]`."""
        residual = expand_from_embedding(self.tokens(token_ids).bfloat16(), self.streams)
        with self.autocast():
            for i in range(self.config.layers):
                if str(i) in self.memories:
                    residual = self.memories[str(i)](residual, token_ids).contiguous()
                residual = self.parts[2 * i](residual)
                residual = self.parts[2 * i + 1](residual)
        x = residual[..., 0, :] if self.leave is None else self.leave(residual)
        return self.head(self.norm(x.float()))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Products in the dtype of the parts."""
        if self.config.dtype is not torch.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.tokens.weight.device.type, torch.bfloat16)

    def experts(self) -> list[MoELayer]:
        """The mixtures of experts, in order."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    @torch.no_grad()
    def looked_at(self, token_ids: Tensor) -> dict[str, list[Tensor]]:
        """What the parts do with a text: mixing matrices and gates, for pictures."""
        combs: list[Tensor] = []
        gates: list[Tensor] = []

        def mixing(module: Any, given: tuple[Tensor, ...]) -> None:
            combs.append(module.read(given[0]).comb.mean((0, 1)))

        def letting_in(memory: Any, given: tuple[Tensor, ...]) -> None:
            gates.append(gate_scores(memory, *given))

        connections = [part for part in self.parts if isinstance(part, HyperConnection)]
        hooks = [part.register_forward_pre_hook(mixing) for part in connections]
        hooks += [memory.register_forward_pre_hook(letting_in) for memory in self.memories.values()]
        try:
            self(token_ids)
        finally:
            for hook in hooks:
                hook.remove()
        return {"combs": combs, "gates": gates}


def gate_scores(memory: EngramModule, residual: Tensor, token_ids: Tensor) -> Tensor:
    """How far each stream lets the memory in, 0 to 1: `[batch, length, streams]`."""
    k, v = memory.project(memory.table(memory.hasher(token_ids)[0]))
    weight = engram.fused_weight(memory.weight_hidden, memory.weight_embed)
    rows = (x.bfloat16().flatten(0, 1).contiguous() for x in (residual, k, v))
    scores = engram.engram_gate_fwd(*rows, weight, memory.eps, memory.clamp_value)[2]
    return scores.view(residual.shape[:-1])
