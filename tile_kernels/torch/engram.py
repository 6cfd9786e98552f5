"""Oracles of Engram: n-gram windows, their hash, and the gate that adds what the hash looks up.

With `T` tokens, `hc` residual streams, hidden size `H`, windows of `N` tokens, `L` layers and `E`
tables per n-gram order, so that `C = (N - 1) * E` tables belong to a layer.

The gate compares a stream `x` with its key `k`, both after RMSNorm, whose weights `w` are the
product of the two norms' weights:

    dot    = sum_d x_d w_d k_d              rstd_x = rsqrt(mean_d x_d^2 + eps), rstd_k likewise
    s      = dot rstd_x rstd_k / sqrt(H)
    gate   = sigmoid(sign(s) sqrt(max(|s|, clamp)))
    output = x + gate v

It is computed in float32, and in float64 where the input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

# ---- addresses ---------------------------------------------------------------------------------


def ngram_windows(
    token_ids: Tensor,
    max_ngram_size: int,
    pad_id: int,
    cu_seqlens: Tensor | None = None,
    token_map: Tensor | None = None,
) -> Tensor:
    """For each token the token itself and those before it in its document.

    | argument | shape | dtype |
    |---|---|---|
    | `token_ids` | `[S]`, or `[B, S]`: each row a text of its own | int32, int64 |
    | `cu_seqlens`, optional | `[D + 1]`: starts in the flattened tokens | int32, int64 |
    | `token_map`, optional | `[V]`: the id that stands for each id | int32, int64 |
    | returns | `[*token_ids.shape, max_ngram_size]` | int32 |

    Column 0 is the token, column `i` the one `i` places before it. From the first column on that
    would lie before the document, or that is `pad_id`, all columns are `pad_id`. A token that is
    `pad_id` itself has only those. `token_map` applies first; ids outside of it become `pad_id`.
    Without a map ids keep their lower 32 bits. Boundaries outside of the tokens are ignored.

    >>> ngram_windows(torch.tensor([5, 6, 0, 7, 8]), 3, pad_id=0).tolist()
    [[5, 0, 0], [6, 5, 0], [0, 0, 0], [7, 0, 0], [8, 7, 0]]
    >>> ngram_windows(torch.tensor([5, 6, 7]), 2, pad_id=-1, cu_seqlens=torch.tensor([0, 1, 3]))
    tensor([[ 5, -1],
            [ 6, -1],
            [ 7,  6]], dtype=torch.int32)
    """
    if max_ngram_size < 1:
        raise ValueError(f"ngram_windows: max_ngram_size must be at least 1, got {max_ngram_size}")
    flat = token_ids.reshape(-1)
    num_tokens = flat.numel()
    if token_map is not None:
        flat = mapped_ids(flat, token_map, pad_id)
    flat = flat.to(torch.int32)

    row_length = token_ids.shape[-1]
    place = torch.arange(num_tokens, device=flat.device)
    starts = place % max(row_length, 1) == 0
    if cu_seqlens is not None:
        inside = (cu_seqlens >= 0) & (cu_seqlens < num_tokens)
        boundary = torch.where(inside, cu_seqlens, num_tokens).long()
        marked = starts.new_zeros(num_tokens + 1).index_fill(0, boundary, True)
        starts = starts | marked[:num_tokens]

    known = flat != pad_id  # columns 0..i are tokens of the document
    columns = [flat]
    for distance in range(1, max_ngram_size):
        before = shifted_down(flat, distance, pad_id)
        known = known & ~shifted_down(starts, distance - 1, True) & (before != pad_id)
        columns.append(torch.where(known, before, pad_id))
    return torch.stack(columns, dim=-1).view(*token_ids.shape, max_ngram_size)


def mapped_ids(token_ids: Tensor, token_map: Tensor, pad_id: int) -> Tensor:
    """`token_map[token_ids]`, and `pad_id` for ids outside of the map.

    >>> mapped_ids(torch.tensor([0, 2, 3, -1]), torch.tensor([10, 11, 12]), 99).tolist()
    [10, 12, 99, 99]
    """
    size = token_map.shape[0]
    with_pad = torch.cat((token_map, token_map.new_full((1,), pad_id)))
    return with_pad[torch.where((token_ids >= 0) & (token_ids < size), token_ids, size).long()]


def shifted_down(x: Tensor, distance: int, fill: int) -> Tensor:
    """`x` moved to later places along its only dimension; the places before it are `fill`.

    >>> shifted_down(torch.tensor([1, 2, 3]), 2, 0).tolist()
    [0, 0, 1]
    """
    distance = min(distance, x.shape[0])
    return torch.cat((x.new_full((distance,), fill), x[: x.shape[0] - distance]))


def make_offsets(vocab_sizes: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Where each table starts among the rows of its layer: `[L, N - 1, E]` sizes to `[L, C]`.

    Sums wrap in `dtype`; int64 is for layers of 2^31 rows and more.

    >>> make_offsets(torch.tensor([[[3, 4], [5, 6]], [[7, 8], [9, 10]]])).tolist()
    [[0, 3, 7, 12], [0, 7, 15, 24]]
    """
    flat = vocab_sizes.flatten(1).to(dtype)
    return flat.cumsum(1, dtype=dtype) - flat


def engram_hash(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Tensor:
    """The row that each n-gram has in each table of each layer.

    | argument | shape | dtype |
    |---|---|---|
    | `ngram_token_ids` | `[T, N]`, of `ngram_windows` | int32 |
    | `multipliers` | `[L, N]` | int64 |
    | `vocab_sizes` | `[L, N - 1, E]`: rows of each table | int32 |
    | `offsets` | `[L, C]`: first row of each table, of `make_offsets` | int32, int64 |
    | returns | `[L, T, C]` | that of `offsets` |

    In 64 bits that wrap, with `p_i = id_i * multiplier_i`, the hash of `i + 1` tokens is
    `h_i = p_0 ^ ... ^ p_i`. Column `(i - 1) * E + j` is `h_i mod vocab_sizes[l, i - 1, j]`, never
    negative, plus its offset; a table without rows gives its offset. `N` is at least 2.

    >>> ids = torch.tensor([[5, 7, 11], [-1, 0, 2]], dtype=torch.int32)
    >>> sizes = torch.tensor([[[10, 13], [17, 19]]], dtype=torch.int32)
    >>> engram_hash(ids, torch.tensor([[3, 5, 9]]), sizes, make_offsets(sizes)).tolist()
    [[[4, 15, 34, 43], [7, 20, 23, 42]]]
    """
    window = multipliers.shape[1]
    if window < 2:
        raise ValueError(f"engram_hash: windows must have at least 2 tokens, got {window}")
    products = ngram_token_ids.long() * multipliers[:, None]  # [L, T, N]
    hashed = products[..., 0]
    columns = []
    for order in range(1, window):
        hashed = hashed ^ products[..., order]
        sizes = vocab_sizes[:, None, order - 1].long()
        columns.append(hashed[..., None] % torch.where(sizes == 0, 1, sizes))
    rows = torch.cat(columns, dim=-1) + offsets[:, None].long()
    return rows.to(offsets.dtype)


def engram_hash_ref(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Tensor:
    """`engram_hash` under the name that TileKernels gave its reference."""
    return engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets)


# ---- the gate ----------------------------------------------------------------------------------


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The product of the weights of the two norms, `[hc, H]` in float32.

    >>> fused_weight(torch.tensor([[1.5]]).bfloat16(), torch.tensor([[-2.25]]).bfloat16())
    tensor([[-3.3750]])
    """
    return widened(weight_hidden) * widened(weight_embed)


def engram_gate_ref(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gate from its definition, differentiable by autograd. `clamp_value` stands before `eps`.

    | argument | shape | dtype |
    |---|---|---|
    | `hidden_states`, `k` | `[*, hc, H]` | bfloat16, or any float |
    | `v` | `[*, H]` | as `hidden_states` |
    | `weight_hidden`, `weight_embed` | `[hc, H]` | any float |
    | returns `output` | `[*, hc, H]` | that of `hidden_states` |
    | with `save_for_backward` also `dot`, `gate_score`, `rstd_x`, `rstd_k` | `[*, hc]` | float32 |

    >>> x, v = torch.zeros(1, 1, 4), torch.ones(1, 4)
    >>> engram_gate_ref(x, x, v, torch.ones(1, 4), torch.ones(1, 4), 1e-6, 1e-20)
    tensor([[[0.5000, 0.5000, 0.5000, 0.5000]]])
    """
    x, key = widened(hidden_states), widened(k)
    dot = ((x * widened(weight_hidden)) * (key * widened(weight_embed))).sum(-1)
    rstd_x, rstd_k = rstd(x, eps), rstd(key, eps)
    gate_score = gate_of(dot, rstd_x, rstd_k, clamp_value, x.shape[-1])
    output = (x + gate_score[..., None] * widened(v)[..., None, :]).to(hidden_states.dtype)
    return (output, dot, gate_score, rstd_x, rstd_k) if save_for_backward else output


def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gated value added to each stream, and what the gradient needs. `eps` comes first.

    | argument | shape | dtype |
    |---|---|---|
    | `hidden_states`, `k` | `[T, hc, H]` | bfloat16 |
    | `v` | `[T, H]` | bfloat16 |
    | `weight_fused` | `[hc, H]`, of `fused_weight` | float32 |
    | returns `output` | `[T, hc, H]` | bfloat16 |
    | returns `dot`, `gate_score`, `rstd_x`, `rstd_k` | `[T, hc]`, or None | float32 |

    With `add_residual=False` the output is `gate * v`. Where `s` is 0 the gate is one half.

    >>> x, v = torch.ones(1, 1, 4), torch.ones(1, 4)
    >>> engram_gate_fwd(x, x, v, torch.ones(1, 4), 0.0, 1e-6)
    (tensor([[[1.8044, 1.8044, 1.8044, 1.8044]]]), tensor([[4.]]), tensor([[0.8044]]),
     tensor([[1.]]), tensor([[1.]]))
    """
    x, key = widened(hidden_states), widened(k)
    dot = (x * weight_fused * key).sum(-1)
    rstd_x, rstd_k = rstd(x, eps), rstd(key, eps)
    gate_score = gate_of(dot, rstd_x, rstd_k, clamp_value, x.shape[-1])
    gated = gate_score[..., None] * widened(v)[..., None, :]
    output = (x + gated if add_residual else gated).to(hidden_states.dtype)
    if not save_for_backward:
        return output, None, None, None, None
    return output, dot, gate_score, rstd_x, rstd_k


@torch.no_grad()
def engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    num_parts: int,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the gate; that of the fused weight in `num_parts` sums.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_out` | `[T, hc, H]` | bfloat16 |
    | `hidden_states`, `k`, `v`, `weight_fused` | those of `engram_gate_fwd` | |
    | `dot`, `gate_score`, `rstd_x`, `rstd_k` | `[T, hc]`, of `engram_gate_fwd` | float32 |
    | returns `grad_hidden_states`, `grad_k` | `[T, hc, H]` | bfloat16 |
    | returns `grad_v` | `[T, H]` | bfloat16 |
    | returns `grad_w_partial` | `[num_parts, hc, H]` | float32 |

    With `G = sum_d grad_out_d v_d`, the gradient of `dot` is

        D = G gate (1 - gate) / 2 sqrt(rstd_x rstd_k / (sqrt(H) |dot|))

    and 0 where `dot` is 0 or `|s| < clamp_value`. With it

        grad_x = grad_out + D (k w - x dot rstd_x^2 / H)      grad_v = sum_h grad_out_h gate_h
        grad_k =            D (x w - k dot rstd_k^2 / H)      grad_w = sum_t D x k

    `grad_v` adds the streams in order. Part `p` of `grad_w` is the sum over the tokens from
    `p * T // num_parts` on, up to the next such number. Without the residual `grad_x` has no
    `grad_out`.

    >>> one = torch.ones(1, 1)
    >>> x = one[None]
    >>> engram_gate_bwd(x, x, x, one, one, one, 0.75 * one, one, one, 0.0, num_parts=2)
    (tensor([[[1.]]]), tensor([[[0.]]]), tensor([[0.7500]]), tensor([[[0.0000]], [[0.0938]]]))
    """
    x, key, value, grad = (widened(tensor) for tensor in (hidden_states, k, v, grad_out))
    num_tokens, num_streams, hidden = x.shape
    scale = hidden**-0.5

    into_gate = (grad * value[:, None]).sum(-1)
    slope = gate_score * (1 - gate_score) * 0.5 * (scale * rstd_x * rstd_k / dot.abs()).sqrt()
    flat = (dot.abs() * scale * rstd_x * rstd_k < clamp_value) | (dot == 0)
    grad_dot = torch.where(flat, 0.0, into_gate * slope)[..., None]

    along_x, along_k = (
        (dot * rstd * rstd / hidden)[..., None] * tensor
        for rstd, tensor in ((rstd_x, x), (rstd_k, key))
    )
    grad_x = grad_dot * (key * weight_fused - along_x)
    if add_residual:
        grad_x = grad + grad_x
    grad_k = grad_dot * (x * weight_fused - along_k)
    grad_v = torch.zeros_like(value)
    for stream in range(num_streams):
        grad_v = grad_v + grad[:, stream] * gate_score[:, stream, None]

    starts = torch.arange(1, num_parts, device=x.device) * num_tokens // num_parts
    part = torch.bucketize(torch.arange(num_tokens, device=x.device), starts, right=True)
    of_tokens = grad_dot * x * key
    grad_w_partial = x.new_zeros(num_parts, num_streams, hidden).index_add(0, part, of_tokens)
    return (
        grad_x.to(hidden_states.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_w_partial,
    )  # fmt: skip


@torch.no_grad()
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of the two norms' weights to what their buffers hold.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_w_partial` | `[P, hc, H]`, of `engram_gate_bwd` | float32 |
    | `weight_hidden`, `weight_embed` | `[hc, H]` | bfloat16, float32 |
    | `grad_weight_hidden`, `grad_weight_embed` | `[hc, H]`, written | float32 |

    The parts are added in order; the sum times the one weight is the gradient of the other.

    >>> of_hidden, of_embed = torch.tensor([[10.0]]), torch.zeros(1, 1)
    >>> parts = torch.tensor([[[1.0]], [[3.5]]])
    >>> grad_w_reduce(parts, torch.tensor([[2.0]]), torch.tensor([[0.5]]), of_hidden, of_embed)
    >>> of_hidden.item(), of_embed.item()
    (12.25, 9.0)
    """
    total = torch.zeros_like(grad_w_partial[0] if len(grad_w_partial) else grad_weight_hidden)
    for part in grad_w_partial:
        total = total + part
    grad_weight_hidden += total * widened(weight_embed)
    grad_weight_embed += total * widened(weight_hidden)


def gate_of(dot: Tensor, rstd_x: Tensor, rstd_k: Tensor, clamp_value: float, hidden: int) -> Tensor:
    """The gate from the raw dot product and the two norms.

    >>> one = torch.ones(3)
    >>> gate_of(torch.tensor([-4.0, 0.0, 4.0]), one, one, 1e-6, 16)
    tensor([0.2689, 0.5000, 0.7311])
    """
    s = dot * rstd_x * rstd_k * hidden**-0.5
    return torch.sigmoid(s.abs().clamp(min=clamp_value).sqrt() * s.sign())


def rstd(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` along the last dimension.

    >>> rstd(torch.tensor([[1.0, 7.0]]), 0.0)
    tensor([0.2000])
    """
    return torch.rsqrt(x.square().mean(-1) + eps)


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is float64."""
    return x if x.dtype == torch.float64 else x.float()
