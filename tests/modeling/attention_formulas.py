"""Attention layers by their formulas, for one sequence: float64, token by token, no operator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tile_kernels.modeling.attention import CompressedSparseAttention, HeavilyCompressedAttention

Layer = CompressedSparseAttention | HeavilyCompressedAttention


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value with the gradient of `x`."""
    return x + (rounded - x).detach()


def bf16(x: Tensor) -> Tensor:
    return straight_through(x, x.bfloat16().double())


def e4m3(x: Tensor) -> Tensor:
    """Through e4m3 and back, with a power of two for 64 channels."""
    groups = x.detach().float().unflatten(-1, (-1, 64))
    least = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    scale = 2.0 ** least.double().log2().ceil()
    codes = (groups / scale).float().to(torch.float8_e4m3fn).double()
    return straight_through(x, (codes * scale).flatten(-2))


def e2m1(x: Tensor) -> Tensor:
    """The same for e2m1 and 32 channels."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    groups = x.detach().float().double().unflatten(-1, (-1, 32))
    least = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6
    scaled = groups / 2.0 ** least.log2().ceil()
    distance = (scaled.abs()[..., None] - grid).abs()
    # Between two values the one with an even code is nearer.
    even = distance - 1e-12 * (torch.arange(8) % 2 == 0)
    codes = grid[even.argmin(-1)] * scaled.sign()
    return straight_through(x, (codes * 2.0 ** least.log2().ceil()).flatten(-2))


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, sign: int = 1) -> Tensor:
    """The last channels of `[n, ..., channels]` as complex numbers, times a power of `i`."""
    angles = (positions.float()[:, None] * frequencies).double() * sign
    turns = torch.polar(torch.ones_like(angles), angles)
    turns = turns.view(len(x), *[1] * (x.dim() - 2), frequencies.numel())
    width = 2 * frequencies.numel()
    pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-width], torch.view_as_real(pairs * turns).flatten(-2)), -1)


def frequencies_of(layer: Layer) -> Tensor:
    """YaRN, pair by pair, from the turns that each makes within the original length."""
    rope, width = layer.rope, layer.rope_dim

    def pair_of(turns: float) -> float:
        wavelength = rope.original_length / turns
        return width / 2 * math.log(wavelength / (2 * math.pi), rope.base)

    found = []
    low, high = max(math.floor(pair_of(rope.fast)), 0), math.ceil(pair_of(rope.slow))
    for i in range(width // 2):
        frequency = rope.base ** (-2 * i / width)
        mixed = min(max((i - low) / (min(high, width - 1) - low), 0), 1)
        kept = 1.0 if rope.factor == 1 else 1 - mixed
        found.append(frequency * kept + frequency / rope.factor * (1 - kept))
    return torch.tensor(found)


def compressed(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Normed entries, window by window."""
    kv, z = x @ module.wkv.weight.double().T, x @ module.wgate.weight.double().T
    m, d, ape = module.ratio, module.channels, module.ape.double()
    entries = [x.new_zeros(0, d)]
    for i in range(len(x) // m):
        own = slice(i * m, (i + 1) * m)
        scores, values = z[own, -d:] + ape[:, -d:], kv[own, -d:]
        if module.overlap and i > 0:
            before = slice((i - 1) * m, i * m)
            scores = torch.cat((z[before, :d] + ape[:, :d], scores))
            values = torch.cat((kv[before, :d], values))
        entries.append((scores.softmax(0) * values).sum(0)[None])
    return norm(torch.cat(entries), module.norm.weight, module.norm_eps)


def index_scores(layer: CompressedSparseAttention, x: Tensor, a: Tensor) -> Tensor:
    """The indexer's scores `[T, entries]`, -inf for entries that are not complete."""
    indexer, frequencies = layer.indexer, frequencies_of(layer)
    positions = torch.arange(len(x))
    matrix = torch.ones(1, 1).double()
    while len(matrix) < indexer.dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    matrix = matrix * indexer.dim**-0.5
    rounded = {"e2m1": e2m1, "bf16": bf16}[indexer.fmt]
    q = (a @ indexer.wq_b.weight.double().T).unflatten(-1, (indexer.heads, indexer.dim))
    q = rounded(rotate(q, positions, frequencies) @ matrix)
    keys = compressed(indexer.compressor, x)
    places = torch.arange(len(keys)) * layer.ratio
    keys = rounded(rotate(keys, places, frequencies) @ matrix)
    weights = x @ indexer.weights_proj.weight.double().T
    weights = weights * indexer.dim**-0.5 * indexer.heads**-0.5
    scores = torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, keys).relu())
    complete = (torch.arange(len(keys)) + 1) * layer.ratio <= positions[:, None] + 1
    return scores.masked_fill(~complete, -torch.inf)


def chosen_entries(scores: Tensor, topk: int) -> Tensor:
    """Whether each entry is among the best, of equal ones the first: bool like `scores`."""
    order = scores.detach().argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    return (rank < topk) & (scores > -torch.inf)


def by_formula(layer: Layer, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`y` of one sequence `x [T, hidden]`, and the indexer's loss (0 without one).

    `mask` replaces the indexer's choice: bool `[T, entries]`.
    """
    x = x.double()
    positions, frequencies, eps = torch.arange(len(x)), frequencies_of(layer), layer.norm_eps
    a = norm(x @ layer.wq_a.weight.double().T, layer.q_norm.weight, eps)
    q = (a @ layer.wq_b.weight.double().T).unflatten(-1, (layer.heads, -1))
    q = bf16(rotate(norm(q, None, eps), positions, frequencies))
    plain = layer.head_dim - layer.rope_dim

    def rows_of(normed: Tensor, at: Tensor) -> Tensor:
        turned = rotate(normed, at, frequencies)
        return torch.cat((e4m3(turned[:, :plain]), bf16(turned[:, plain:])), 1)

    rows = rows_of(norm(x @ layer.wkv.weight.double().T, layer.kv_norm.weight, eps), positions)
    age = positions[:, None] - positions
    seen = (age >= 0) & (age < layer.window)
    scores = None
    if layer.compressor is not None:
        entries = compressed(layer.compressor, x)
        at = torch.arange(len(entries)) * layer.ratio
        complete = at + layer.ratio <= positions[:, None] + 1
        if isinstance(layer, CompressedSparseAttention):
            scores = index_scores(layer, x.detach(), a.detach())
            complete = chosen_entries(scores, layer.topk) if mask is None else mask
        rows, seen = torch.cat((rows, rows_of(entries, at))), torch.cat((seen, complete), 1)
    logits = torch.einsum("thd,nd->thn", q, rows) * layer.head_dim**-0.5
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    sink = layer.attn_sink.double().expand(len(x), -1)[..., None]
    weights = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    out = rotate(torch.einsum("thn,nd->thd", weights, rows), positions, frequencies, -1)
    out = out.unflatten(1, (layer.out_groups, -1)).flatten(2)
    wo_a = layer.wo_a.weight.double().unflatten(0, (layer.out_groups, -1))
    y = torch.einsum("tgc,grc->tgr", out, wo_a).flatten(1) @ layer.wo_b.weight.double().T
    loss = torch.zeros(()).double()
    if scores is not None:
        loss = divergence(weights.detach()[..., len(x) :].sum(1), scores, seen[:, len(x) :])
    return y, loss


def divergence(teacher: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
    """The mean over tokens of the divergence over chosen entries; 0 for tokens without any."""
    losses = [scores.new_zeros(())]
    for p, score, here in zip(teacher, scores, chosen):
        if here.any():
            target = p[here] / p[here].sum()
            losses.append((target * (target.log() - score[here].log_softmax(0))).sum())
    return torch.stack(losses).sum() / len(scores)
