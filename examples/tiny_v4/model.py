"""A decoder-only language model of sparse attention, hyper-connections, a memory and experts.

Each layer is attention and a feed-forward part. Both are between residual streams
(`HyperConnection`). Attention sees a window of tokens and compressed entries of older ones, chosen
by an indexer (`CompressedSparseAttention`) in even layers and all of them
(`HeavilyCompressedAttention`) in odd ones; the feed-forward part is a mixture of experts
(`MoELayer`); chosen layers begin with an Engram memory of the last tokens (`EngramModule`). Every
one of the four can be left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels import engram
from tile_kernels.modeling.attention import CompressedSparseAttention, HeavilyCompressedAttention
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
    # Of sparse attention: tokens that are seen as they are, tokens of an entry in even and in odd
    # layers, entries that are chosen, and channels of compressed queries and of a group of heads.
    window: int = 8
    ratio: int = 4
    heavy_ratio: int = 32
    entries: int = 8
    rank: int = 32
    sparse: bool = True
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


class SparseAttention(nn.Module):
    """Attention of the normed input over a window and compressed entries.

    With `trains_indexer`, a call leaves the loss of the indexer in `indexer_loss`.
    """

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden)
        self.trains_indexer = False
        self.indexer_loss: Tensor | None = None
        sizes: dict[str, Any] = {
            "heads": config.heads, "q_rank": config.rank, "out_groups": 2,
            "out_rank": config.rank, "window": config.window,
        }  # fmt: skip
        self.attend: CompressedSparseAttention | HeavilyCompressedAttention
        if index % 2:
            self.attend = HeavilyCompressedAttention(
                config.hidden, ratio=config.heavy_ratio, **sizes
            )
        else:
            self.attend = CompressedSparseAttention(
                config.hidden, ratio=config.ratio, topk=config.entries, index_heads=4,
                index_dim=64, **sizes,
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        x = self.norm(x.float()).to(x.dtype)
        if self.trains_indexer and isinstance(self.attend, CompressedSparseAttention):
            y, self.indexer_loss = self.attend(x, indexer_loss=True)
            return y
        return self.attend(x)


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
        parts: list[nn.Module] = []
        for i in range(config.layers):
            attend = SparseAttention(config, i) if config.sparse else Attention(config)
            parts += [attend, FeedForward(config)]
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

    def with_indexer_loss(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the loss of all indexers together; 0 where there is none."""
        layers = [part for part in self.modules() if isinstance(part, SparseAttention)]
        loss = torch.zeros((), device=token_ids.device)
        for layer in layers:
            layer.trains_indexer = True
        try:
            logits = self(token_ids)
        finally:
            for layer in layers:
                layer.trains_indexer = False
        for layer in layers:
            if layer.indexer_loss is not None:
                loss, layer.indexer_loss = loss + layer.indexer_loss, None
        return logits, loss

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
