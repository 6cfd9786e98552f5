"""The tiny model in plain PyTorch, to compare with: the same parameters, ordinary operations.

No operator of this package runs here. Only the classes that hold the parameters are its own; what
they compute is written out below as one would write it without kernels. Streams are bfloat16 and
everything else has the dtypes of the model. `torch.compile` makes one graph of all of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_v4.model import (
    Attention,
    FeedForward,
    PlainResidual,
    SparseAttention,
    TinyV4,
)
from tile_kernels.modeling.attention import CompressedSparseAttention, HeavilyCompressedAttention
from tile_kernels.modeling.attention.entries import EntryCompressor
from tile_kernels.modeling.engram import EngramModule
from tile_kernels.modeling.mhc import HyperConnection, HyperHead
from tile_kernels.modeling.moe import MoELayer

E4M3_MAX = 448.0
LEAST = 1e-4  # the least magnitude that a scale is made from


class PlainTinyV4(nn.Module):
    """What `model` computes, with the very parameters of `model`."""

    def __init__(self, model: TinyV4) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits of the next token: int64 `[batch, length]` to `[batch, length, vocab]`."""
        model = self.model
        x = model.tokens(token_ids).bfloat16()
        residual = x[..., None, :].expand(-1, -1, model.streams, -1)
        with model.autocast():
            for i in range(model.config.layers):
                if str(i) in model.memories:
                    residual = remembered(model.memories[str(i)], residual, token_ids)
                residual = connected(model.parts[2 * i], residual)
                residual = connected(model.parts[2 * i + 1], residual)
        x = residual[..., 0, :] if model.leave is None else left(model.leave, residual)
        return model.head(model.norm(x.float()))


def block(part: Attention | SparseAttention | FeedForward, x: Tensor) -> Tensor:
    """A part by itself; dense attention and the dense one are plain PyTorch as they are."""
    if isinstance(part, SparseAttention):
        return attended(part.attend, part.norm(x.float()).to(x.dtype))
    if isinstance(part, FeedForward) and part.experts is not None:
        return mixture(part.experts, part.norm(x.float()).to(x.dtype))
    return part(x)


# ---- residual streams ---------------------------------------------------------------------------


def connected(part: HyperConnection | PlainResidual, residual: Tensor) -> Tensor:
    """The next residual: bfloat16 `[batch, length, streams, hidden]` to the same."""
    if isinstance(part, PlainResidual):
        y = block(part.block.block, residual[..., 0, :].to(part.block_dtype))
        return residual + y[..., None, :].to(residual.dtype)
    x, post, comb = read(part, residual)
    y = block(part.block, x if part.block_dtype is None else x.to(part.block_dtype))
    return written(y.bfloat16(), residual, post, comb)


def read(part: HyperConnection, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the block of a connection is given, and the mixes with which its output is written."""
    m, settings = part.mhc_mult, part.settings
    pre, post, comb = projected(part, residual, settings.norm_eps).split((m, m, m * m), dim=-1)
    pre = (pre * part.scale[0] + part.base[:m]).sigmoid() + settings.pre_eps
    post = (post * part.scale[1] + part.base[m : 2 * m]).sigmoid() * settings.post_mult_value
    comb = (comb * part.scale[2] + part.base[2 * m :]).unflatten(-1, (m, m))
    comb = doubly_stochastic(comb, settings.sinkhorn_repeat, settings.sinkhorn_eps)
    return (pre[..., None] * residual.float()).sum(-2).bfloat16(), post, comb


def written(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams mixed, and the output of a block added to each.

    The product of `comb` is written as a sum over streams, which a compiler fuses with the rest.
    """
    mixed = post[..., None] * y.float()[..., None, :]
    for i, stream in enumerate(residual.float().unbind(-2)):
        mixed = mixed + comb[..., i, :, None] * stream[..., None, :]
    return mixed.bfloat16()


def left(head: HyperHead, residual: Tensor) -> Tensor:
    """The streams as one, weighted by mixes that are computed from them."""
    mixes = projected(head, residual, head.norm_eps)
    mixes = (mixes * head.scale + head.base).sigmoid() + head.pre_eps
    return (mixes[..., None] * residual.float()).sum(-2).bfloat16()


def projected(part: HyperConnection | HyperHead, residual: Tensor, eps: float) -> Tensor:
    """The mixes of a token: a projection of the RMS norm of all its streams.

    The norm is a number per token and is applied after the product, to few columns.
    """
    rows = residual.flatten(-2).float()
    with torch.autocast(rows.device.type, enabled=False):
        mixes = F.linear(rows, part.fn)
    return mixes * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def doubly_stochastic(logits: Tensor, repeat: int, eps: float) -> Tensor:
    """Sinkhorn: rows and columns of `[..., m, m]` in turn made to add up to 1, nearly."""
    y = logits.softmax(-1) + eps
    for dim in [-2, *[-1, -2] * (repeat - 1)]:
        y = y / (y.sum(dim, keepdim=True) + eps)
    return y


# ---- attention ----------------------------------------------------------------------------------


def attended(layer: CompressedSparseAttention | HeavilyCompressedAttention, x: Tensor) -> Tensor:
    """Attention of `[batch, length, hidden]` over all rows with a mask, most of them not seen."""
    length, eps = x.shape[1], layer.norm_eps
    positions = torch.arange(length, device=x.device)
    a = normed(F.linear(x, layer.wq_a.weight), layer.q_norm.weight, eps)
    q = F.linear(a, layer.wq_b.weight).unflatten(-1, (layer.heads, -1))
    q = turned(layer, F.rms_norm(q, q.shape[-1:], eps=eps), positions).bfloat16()
    row = normed(F.linear(x, layer.wkv.weight).float(), layer.kv_norm.weight, eps)
    rows, age = cached(layer, row, positions), positions[:, None] - positions
    seen = ((age >= 0) & (age < layer.window)).expand(len(x), -1, -1)
    if layer.compressor is not None:
        entry, first = compressed(layer.compressor, x), positions[:: layer.ratio]
        first = first[: entry.shape[1]]
        complete = (first + layer.ratio <= positions[:, None] + 1).expand(len(x), -1, -1)
        if isinstance(layer, CompressedSparseAttention):
            complete = best(index_scores(layer, x, a, positions, first), complete, layer.topk)
        rows = torch.cat((rows, cached(layer, entry, first)), 1)
        seen = torch.cat((seen, complete), 2)
    with torch.autocast(x.device.type, enabled=False):
        keys = rows.float()
        logits = torch.einsum("blhd,bnd->bhln", q.float(), keys) * layer.head_dim**-0.5
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        sink = layer.attn_sink.float()[:, None, None].expand(len(x), -1, length, 1)
        weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        out = torch.einsum("bhln,bnd->blhd", weights, keys).bfloat16()
    out = turned(layer, out, positions, back=True).to(x.dtype)
    out = out.unflatten(2, (layer.out_groups, -1)).flatten(3)
    weight = layer.wo_a.weight.unflatten(0, (layer.out_groups, -1))
    return F.linear(torch.einsum("blgc,grc->blgr", out, weight).flatten(2), layer.wo_b.weight)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def turned(
    layer: CompressedSparseAttention | HeavilyCompressedAttention,
    x: Tensor,
    positions: Tensor,
    back: bool = False,
) -> Tensor:
    """The last channels of `[batch, length, ..., channels]` rotated, pairs as complex numbers."""
    angle = positions[:, None] * layer.frequency_bits.view(torch.float32)
    angle = angle.view(len(positions), *[1] * (x.dim() - 3), angle.shape[1])
    cos, sin = angle.cos(), -angle.sin() if back else angle.sin()
    width = 2 * angle.shape[-1]
    one, other = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((one * cos - other * sin, one * sin + other * cos), -1)
    return torch.cat((x[..., :-width], pairs.flatten(-2).to(x.dtype)), -1)


def cached(
    layer: CompressedSparseAttention | HeavilyCompressedAttention, x: Tensor, positions: Tensor
) -> Tensor:
    """Rows as a cache holds them: rotated channels in bfloat16, the others rounded to e4m3."""
    x = turned(layer, x.float(), positions)
    plain, tail = x.split((layer.head_dim - layer.rope_dim, layer.rope_dim), -1)
    scaled, scale = by_powers(plain.detach(), 64, E4M3_MAX, LEAST)
    rounded_plain = (scaled.to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    return torch.cat((plain + (rounded_plain - plain.detach()), tail), -1).bfloat16()


def by_powers(x: Tensor, group: int, largest: float, least: float) -> tuple[Tensor, Tensor]:
    """Groups of channels divided by the power of two that brings them to `largest`, and that."""
    groups = x.unflatten(-1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=least) / largest
    mantissa, exponent = torch.frexp(most)
    scale = torch.ldexp(torch.ones_like(most), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return groups / scale, scale


def compressed(part: EntryCompressor, x: Tensor) -> Tensor:
    """Normed entries: `[batch, length, hidden]` to `[batch, length // ratio, channels]`."""
    ratio, width = part.ratio, part.channels
    whole = x[:, : x.shape[1] // ratio * ratio].float()
    with torch.autocast(x.device.type, enabled=False):
        kv, z = (F.linear(whole, each.weight) for each in (part.wkv, part.wgate))
    kv, z = (
        each.unflatten(1, (-1, ratio))
        for each in (kv, z + part.ape.repeat(kv.shape[1] // ratio, 1))
    )
    values, scores = kv[..., -width:], z[..., -width:]
    if part.overlap:  # the window before, through the other half of the channels
        values = torch.cat((earlier(kv[..., :width], 1), values), 2)
        before = z[..., :width]
        first = torch.full_like(before[:, :1], -torch.inf)
        scores = torch.cat((torch.cat((first, before[:, :-1]), 1), scores), 2)
    return normed((scores.softmax(2) * values).sum(2), part.norm.weight, part.norm_eps)


def index_scores(
    layer: CompressedSparseAttention, x: Tensor, a: Tensor, positions: Tensor, first: Tensor
) -> Tensor:
    """How much each entry matters to each token, without a gradient: `[batch, length, entries]`."""
    indexer = layer.indexer
    with torch.no_grad():
        q = F.linear(a, indexer.wq_b.weight).unflatten(-1, (indexer.heads, -1))
        key = compressed(indexer.compressor, x)
        weights = F.linear(x, indexer.weights_proj.weight).float()
        with torch.autocast(x.device.type, enabled=False):
            q, key = (
                four_bits(F.linear(turned(layer, each, at).float(), indexer.hadamard.float()))
                for each, at in ((q, positions), (key, first))
            )
            scores = torch.einsum("blhc,bnc->blhn", q, key).relu()
        return (scores * weights[..., None]).sum(2)


def four_bits(x: Tensor) -> Tensor:
    """`x` divided by the root of its width, as e2m1 holds it with a power of two for 32 values."""
    x, scale = by_powers(x * x.shape[-1] ** -0.5, 32, 6.0, 6 * 2.0**-126)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return ((x / step).round() * step * scale).flatten(-2)


def best(scores: Tensor, allowed: Tensor, topk: int) -> Tensor:
    """Which of the allowed entries are among the `topk` best; of equal ones the first."""
    order = (
        scores.masked_fill(~allowed, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    )
    chosen = torch.zeros_like(allowed, dtype=torch.bool).scatter(-1, order[..., :topk], True)
    return chosen & allowed


# ---- memory -------------------------------------------------------------------------------------


def remembered(memory: EngramModule, residual: Tensor, token_ids: Tensor) -> Tensor:
    """The streams with what the last tokens bring to mind."""
    rows = F.embedding(hashed(memory, token_ids), memory.table.weight).flatten(-2)
    both = F.linear(rows, memory.projection.weight).bfloat16().float()
    keys, value = both.split((memory.num_streams * memory.hidden_size, memory.hidden_size), -1)
    gates = gate(memory, residual, keys.unflatten(-1, residual.shape[-2:]))
    y = (gates[..., None] * value[..., None, :]).bfloat16().float()
    return residual + (y + convolved(memory, y).bfloat16()).bfloat16()


def hashed(memory: EngramModule, token_ids: Tensor) -> Tensor:
    """The row of each n-gram in each table: `[batch, length]` to `[batch, length, tables]`.

    An n-gram ends at the start of the text and at the pad token.
    """
    hasher = memory.hasher
    multipliers, sizes, pad = hasher.multipliers[0], hasher.vocab_sizes[0].long(), hasher.pad_id
    known = token_ids != pad
    mixed, columns = token_ids * multipliers[0], []
    for order in range(1, len(multipliers)):
        before = earlier(token_ids, order, pad)
        known = known & (before != pad)
        mixed = mixed ^ (torch.where(known, before, pad) * multipliers[order])
        columns.append(mixed[..., None] % sizes[order - 1])
    return torch.cat(columns, dim=-1) + hasher.offsets[0]


def gate(memory: EngramModule, residual: Tensor, keys: Tensor) -> Tensor:
    """How well each stream fits its key, 0 to 1: `[..., streams, hidden]` to `[..., streams]`."""
    size = residual.shape[-1:]
    x = F.rms_norm(residual.float(), size, eps=memory.eps) * memory.weight_hidden
    k = F.rms_norm(keys, size, eps=memory.eps) * memory.weight_embed
    fit = (x * k).sum(-1) * memory.hidden_size**-0.5
    return (fit.sign() * fit.abs().clamp(min=memory.clamp_value).sqrt()).sigmoid()


def convolved(memory: EngramModule, y: Tensor) -> Tensor:
    """A causal convolution of the norm of `y`, each channel by itself."""
    part = memory.convolution
    y = F.rms_norm(y, y.shape[-1:], eps=part.eps) * part.norm_weight
    return F.silu(sum(earlier(y, i * part.dilation) * tap for i, tap in enumerate(part.taps)))


def earlier(x: Tensor, distance: int, fill: int = 0) -> Tensor:
    """What stood `distance` tokens before; `[batch, length, ...]` to the same."""
    before = torch.full_like(x[:, :distance], fill)
    return torch.cat((before, x[:, : max(0, x.shape[1] - distance)]), dim=1)


# ---- experts ------------------------------------------------------------------------------------


def mixture(layer: MoELayer, x: Tensor) -> Tensor:
    """Experts of `[..., hidden]`: all of them for every token, most with weight zero.

    That is `num_experts / num_topk` times the arithmetic, in two large products. In return nothing
    has a size that depends on who is chosen, so that the host never waits for the device.
    """
    with torch.autocast(x.device.type, enabled=False):
        scores = F.linear(x.float(), layer.router).sigmoid()
    chosen = (scores + layer.expert_bias).topk(layer.num_topk, dim=-1).indices
    weights = scores.gather(-1, chosen)
    weights = layer.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
    weights = torch.zeros_like(scores).scatter(-1, chosen, weights)
    every = F.linear(x, layer.w_in.flatten(0, 1)).unflatten(-1, (layer.num_experts, -1))
    inside = swiglu(every, layer.fp8) * weights[..., None]
    y = inside.flatten(-2) @ layer.w_out.mT.flatten(0, 1)
    if layer.shared_in is not None and layer.shared_out is not None:
        y = y + F.linear(swiglu(F.linear(x, layer.shared_in), layer.fp8), layer.shared_out)
    return y


def swiglu(x: Tensor, fp8: bool) -> Tensor:
    """`silu(gate) * value`, with `fp8` rounded to e4m3 in the forward pass."""
    if not fp8:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    gate, value = x.bfloat16().float().chunk(2, dim=-1)
    y = F.silu(gate) * value
    return y + (rounded(y.detach(), 128 if y.shape[-1] % 128 == 0 else 32) - y.detach())


def rounded(y: Tensor, group: int) -> Tensor:
    """`y` as e4m3 holds it, where each group of channels has a scale of its own."""
    groups = y.unflatten(-1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    codes = (groups * (E4M3_MAX / most)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * (most / E4M3_MAX)).bfloat16().float().flatten(-2)
