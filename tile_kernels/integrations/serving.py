"""What the adapters for serving engines share: routing, the choice of keys, maps of rows, streams.

`integrations.vllm` and `integrations.sglang` have these under the names and in the argument order
of their engines. Ids are int32 and weights float32, as engines take them. Nothing waits for the
GPU, so that CUDA graphs can record every function. On a CPU the references compute the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels import attention, mhc, moe, quant
from tile_kernels.integrations import deep_gemm
from tile_kernels.moe.weight.reference import gate_scores
from tile_kernels.runtime import checks
from tile_kernels.utils import align, ceil_div

__all__ = [
    "align_blocks",
    "fused_post_pre",
    "head",
    "indexer_select_paged",
    "pre",
    "pre_delayed",
    "route",
    "topk_paged",
    "topk_rows",
]

_SCORING = ("sigmoid", "sqrtsoftplus", "softmax")
_IDS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


# ---- routing ------------------------------------------------------------------------------------


@checks.named_errors
def route(
    logits: Tensor,
    topk: int,
    *,
    scoring_func: str,
    bias: Tensor | None = None,
    renormalize: bool = True,
    num_groups: int = 0,
    topk_groups: int = 0,
    routed_scaling_factor: float = 1.0,
    num_valid: Tensor | int | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor]:
    """Chooses experts and computes their weights: `moe.top2_sum_gate` in an engine's dtypes.

    With a bias, groups of experts rank by the sum of their two best biased scores; without one, by
    their best score.

    Args:
        logits: `[T, E]`, float32, bfloat16 or float16.
        topk: Experts of a token, up to 32.
        scoring_func: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"`, which takes no bias: engines
            add it to the probability, and the operators here to the logit.
        bias: `[E]`, added to scores for the choice only; or None.
        renormalize: Whether the weights of a token are divided by their sum.
        num_groups: Groups of experts; 0 or 1 for none.
        topk_groups: Groups that stay.
        routed_scaling_factor: Multiplies the weights.
        num_valid: Tokens that route, an int or an integer tensor with one element; those after them
            have ids -1 and weights 0. None: all.
        ids_dtype: int32 or int64.

    Returns:
        `(weights, ids)`: `[T, topk]`, float32 and `ids_dtype`, best expert first.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or is not one of these.

    Example:
        >>> weights, ids = route(torch.tensor([[0.0, 2.0, 1.0]]), 2, scoring_func="softmax")
        >>> ids.tolist(), ids.dtype, round(weights.sum().item(), 4)
        ([[1, 2]], torch.int32, 1.0)
    """
    checks.tensor("logits", logits, ("T", "E"), _FLOATS)
    checks.one_of("scoring_func", scoring_func, _SCORING)
    checks.one_of("ids_dtype", ids_dtype, _IDS)
    checks.boolean("renormalize", renormalize)
    checks.integer("topk", topk, 1)
    if isinstance(num_valid, Tensor):
        checks.tensor("num_valid", num_valid.reshape(-1), ("1",), checks.INTEGERS, shape=(1,))
    elif num_valid is not None:
        checks.integer("num_valid", num_valid, 0)
    num_tokens, num_experts = logits.shape
    factor = checks.finite("routed_scaling_factor", routed_scaling_factor)
    if bias is not None and scoring_func == "softmax":
        raise ValueError(
            "bias must be None with scoring_func softmax: engines add it to the probability, the "
            "operators here to the logit"
        )
    if bias is not None:
        checks.tensor("bias", bias, ("E",), _FLOATS, shape=(num_experts,))
    groups = checks.integer("num_groups", num_groups, 0, num_experts)
    kept = checks.integer("topk_groups", topk_groups, 0, max(groups, 0))
    grouped = groups > 1 and kept != groups
    if grouped and (num_experts % groups or not kept or topk > kept * (num_experts // groups)):
        raise ValueError(
            f"num_groups and topk_groups must divide {num_experts} experts into groups of which "
            f"some hold {topk} experts, got {groups} and {kept}"
        )
    scores = logits.float().contiguous()
    mask = None
    if num_valid is not None:
        mask = torch.arange(num_tokens, device=logits.device) < num_valid
    if grouped and bias is None:
        best = scores.unflatten(1, (groups, -1)).amax(2)
        stays = torch.zeros_like(best, dtype=torch.bool)
        stays.scatter_(1, moe.topk_gate(best, kept), True)
        outside = ~stays.repeat_interleave(num_experts // groups, 1)
        ids = moe.topk_gate(scores.masked_fill(outside, -torch.inf), topk)
        weights = moe.topk_weights(scores, ids, scoring_func, factor)
        if mask is not None:
            ids, weights = torch.where(mask[:, None], ids, -1), weights * mask[:, None]
    else:
        offset = scores.new_zeros(num_experts) if bias is None else bias.float().contiguous()
        gate_groups = (kept, groups) if grouped else (0, 0)
        ids, weights = moe.top2_sum_gate(
            scores, offset, topk, *gate_groups, False, 0, factor, 0, 1, 0, 1, scoring_func, mask
        )
    if not renormalize:
        chosen = ids.clamp(min=0)
        if scoring_func == "softmax":
            weights = scores.softmax(1).gather(1, chosen) * factor
        else:
            weights = gate_scores(scores.gather(1, chosen), scoring_func) * factor
        weights = weights.masked_fill(ids < 0, 0.0)
    return weights, ids.to(ids_dtype)


# ---- the choice of keys -------------------------------------------------------------------------


@checks.named_errors
def topk_rows(
    logits: Tensor,
    k: int,
    end: Tensor,
    *,
    start: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The best `k` positions of each row, counted from the row's start: `attention.indexer_topk`.

    Args:
        logits: `[rows, columns]`, float32 or bfloat16, stride 1 in a row.
        k: How many, in `1..4096`.
        end: `[rows]`, int32 or int64: one past the last position of a row.
        start: `[rows]`, int32 or int64: its first position; None: 0.
        out: `[rows, k]`, int32: a buffer for the result.

    Returns:
        `[rows, k]`, int32: positions in ascending order, -1 where a row has fewer.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.

    Example:
        >>> logits = torch.tensor([[9.0, 1.0, 3.0, 2.0]])
        >>> start, end = torch.tensor([1]).int(), torch.tensor([4]).int()
        >>> topk_rows(logits, 2, end, start=start).tolist()
        [[1, 2]]
    """
    end = _bound("end", end)
    begin = None if start is None else _bound("start", start)
    found = attention.indexer_topk(logits, k, end, start=begin)
    if begin is not None:
        found = _from_start(found, begin)
    return filled("out", out, found)


def _bound(name: str, value: Tensor) -> Tensor:
    checks.tensor(name, value, ("rows",), _IDS)
    return value.to(torch.int32).contiguous()


def _from_start(found: Tensor, start: Tensor) -> Tensor:
    return torch.where(found >= 0, found - start.clamp(min=0)[:, None], -1)


def filled(name: str, out: Tensor | None, found: Tensor) -> Tensor:
    """`found`, or the buffer `out`, called `name`, which receives it."""
    if out is None:
        return found
    if not isinstance(out, Tensor) or (out.dtype, out.shape) != (found.dtype, found.shape):
        given = (
            (str(out.dtype), tuple(out.shape)) if isinstance(out, Tensor) else type(out).__name__
        )
        raise ValueError(
            f"{name} must be a {found.dtype} tensor of shape {tuple(found.shape)}, got {given}"
        )
    return out.copy_(found)


def must_be_default(**given: tuple[Any, Any]) -> None:
    """Raises for arguments of an engine that have no counterpart here: `name=(value, default)`."""
    for name, (value, default) in given.items():
        if value is not default and (isinstance(value, Tensor) or value != default):
            raise ValueError(f"{name} must be {default}, got {checks.shown(value)}")


def must_be_e4m3(dtype: torch.dtype | None) -> None:
    """Raises for other dtypes of the results of casts."""
    if dtype not in (None, torch.float8_e4m3fn):
        raise ValueError(f"dtype must be float8_e4m3fn or None, got {dtype}")


@checks.named_errors
def topk_paged(
    scores: Tensor,
    k: int,
    end: Tensor,
    page_table: Tensor,
    page_size: int,
    *,
    out: Tensor | None = None,
    positions_out: Tensor | None = None,
) -> Tensor:
    """The best `k` positions of each row, as slots of a paged cache.

    Args:
        scores: `logits` of `topk_rows`.
        k, end: As in `topk_rows`.
        page_table: `[rows, pages]`, int32: the pages of each row.
        page_size: Tokens of a page.
        out: `[rows, k]`, int32: a buffer for the slots.
        positions_out: `[rows, k]`, int32: a buffer for the positions.

    Returns:
        `[rows, k]`, int32: `page_table[r, i // page_size] * page_size + i % page_size`, -1 where a
        row has fewer than `k` positions.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.

    Example:
        >>> table = torch.tensor([[7, 5]]).int()
        >>> topk_paged(torch.tensor([[1.0, 4.0, 3.0]]), 2, torch.tensor([3]), table, 2).tolist()
        [[15, 10]]
    """
    checks.tensor("page_table", page_table, ("rows", "pages"))
    positions = topk_rows(scores, k, end, out=positions_out)
    slots = attention.cache_indices(positions.contiguous(), page_table.contiguous(), page_size)
    return filled("out", out, slots)


@checks.named_errors
def indexer_select_paged(
    q: deep_gemm.Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    *,
    max_context_len: int | None = None,
    out: Tensor | None = None,
    page_out: Tensor | None = None,
) -> Tensor:
    """The best `topk` keys of each query among the paged keys of its sequence.

    The pages of all sequences are copied (`deep_gemm.paged_keys`); then `attention.indexer_select`
    chooses for all queries together. Each query has the keys of its sequence as its range.

    Args:
        q: As for `deep_gemm.fp8_fp4_paged_mqa_logits`: `(data, None)` or `(data, scales)`.
        kv_cache: `[blocks, page, 1, bytes]`, as there.
        weights: `[B * n, h]`, float32.
        context_lens: `[B, n]`, int32: how many keys each query has.
        block_table: `[B, P]`, int32.
        topk: How many, in `1..4096`.
        max_context_len: Keys after these are not looked at; None: the pages of `block_table`.
        out: `[B * n, topk]`, int32: a buffer for the positions.
        page_out: `[B * n, topk]`, int32: a buffer that receives the slots in `kv_cache`,
            `block * page + i % page`, -1 for none.

    Returns:
        `[B * n, topk]`, int32: positions in the sequence, ascending, -1 for none.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.
    """
    queries, keys, weights, lengths = deep_gemm.paged_operands(
        q, kv_cache, weights, context_lens, block_table, max_context_len
    )
    count, each = lengths.shape
    num_keys = keys[0].shape[1]
    start = deep_gemm.first_keys(count, each, num_keys, lengths)
    end = start + lengths.reshape(-1).clamp(0, num_keys)

    def flat(operand: Any) -> Any:
        if isinstance(operand, tuple):
            return tuple(part.flatten(0, 1) for part in operand)
        return operand.flatten(0, 1)

    found = attention.indexer_select(flat(queries), flat(keys), weights, start, end, topk)
    found = _from_start(found, start)
    if page_out is not None:
        table = block_table.to(torch.int32).contiguous()
        slots = attention.cache_indices(
            found.view(count, each, topk), table, kv_cache.shape[1]
        ).view_as(found)
        filled("page_out", page_out, slots)
    return filled("out", out, found)


# ---- maps of rows -------------------------------------------------------------------------------


@checks.named_errors
def align_blocks(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts choices by expert in blocks that one expert each has: `moe.get_fused_mapping`.

    Results have the size of the worst case, so that the host knows it.

    Args:
        topk_ids: `[T, K]`, int32 or int64; others than `0..num_experts-1` have no row.
        block_size: Rows of a block.
        num_experts: The number of experts, of all ranks if there is an `expert_map`.
        expert_map: `[num_experts]`, int32: the number of an expert on this rank, or -1; or None.
        pad_sorted_ids: Whether to round the number of rows up to a multiple of `block_size`.
        ignore_invalid_experts: Whether experts of other ranks have no rows, instead of blocks of
            expert -1. It needs an `expert_map`.

    Returns:
        `(sorted_token_ids, expert_ids, num_tokens_post_pad)`, int32: `token * K + k` of each row,
        `T * K` for padding; the expert of each block, -1 behind the last one; the number of rows
        with padding, `[1]`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.

    Example:
        >>> rows, experts, count = align_blocks(torch.tensor([[2, 0], [2, 1]]).int(), 2, 3)
        >>> rows[: count.item()].tolist(), experts[: count.item() // 2].tolist()
        ([1, 4, 3, 4, 0, 2], [0, 1, 2])
    """
    checks.tensor("topk_ids", topk_ids, ("T", "K"), _IDS)
    checks.integer("block_size", block_size, 1, 2**16)
    checks.integer("num_experts", num_experts, 1)
    checks.boolean("pad_sorted_ids", pad_sorted_ids)
    checks.boolean("ignore_invalid_experts", ignore_invalid_experts)
    if expert_map is not None:
        checks.tensor("expert_map", expert_map, ("E",), _IDS, shape=(num_experts,))
    choices = topk_ids.numel()
    rows = choices + num_experts * (block_size - 1)
    if pad_sorted_ids:
        rows = align(rows, block_size)
    if choices < num_experts:
        rows = min(choices * block_size, rows)
    ids = topk_ids.long()
    if expert_map is not None and ignore_invalid_experts:
        ids = mapped(ids, expert_map)
    if not rows:
        empty = topk_ids.new_zeros(0, dtype=torch.int32)
        return empty, empty, topk_ids.new_zeros(1, dtype=torch.int32)
    pos_to_expert, _, pos_to_choice, _, _, ends, *_ = moe.get_fused_mapping(
        ids.contiguous(), num_experts, rows, block_size
    )
    experts = pos_to_expert[::block_size]
    if expert_map is not None and not ignore_invalid_experts:
        experts = mapped(experts, expert_map).int()
    ordered = torch.where(pos_to_choice >= 0, pos_to_choice, choices)
    return ordered, experts.contiguous(), ends[-1:].clone()


def mapped(experts: Tensor, expert_map: Tensor) -> Tensor:
    """The numbers of experts on this rank, int64; -1 for others and for what is no expert."""
    known = (experts >= 0) & (experts < expert_map.shape[0])
    local = expert_map[torch.where(known, experts, 0).long()]
    return torch.where(known, local.long(), -1)


@checks.named_errors
def permute(
    hidden: Tensor, scale: Tensor | None, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Copies each token once for each of its experts, sorted by expert and without padding.

    Args:
        hidden: `[T, H]`, of a dtype that `moe.expand_to_fused` takes.
        scale: `[T, G]`, float32: scales of `hidden`; or None.
        topk_ids: `[T, K]`, int32 or int64; others than `0..num_experts-1` have no row.
        num_experts: The number of experts.

    Returns:
        `(rows, scales, first, positions, choices)`: `[T * K, H]` and `[T * K, G]`, zero behind the
        last row; `[num_experts + 1]`, int64: the first row of each expert, then the number of rows;
        `[T, K]`, int32: the row of a choice, -1 for none; `[T * K]`, int32: `token * K + k` of a
        row, `T * K` behind the last one.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    checks.tensor("hidden", hidden, ("T", "H"), contiguous=True)
    checks.tensor("topk_ids", topk_ids, ("T", "K"), _IDS, shape=(hidden.shape[0], None))
    if scale is not None:
        checks.tensor("scale", scale, ("T", "G"), torch.float32, shape=(hidden.shape[0], None))
    checks.integer("num_experts", num_experts, 1)
    choices = topk_ids.numel()
    if not choices:
        rows, ids = hidden[:0], topk_ids.new_zeros(0, dtype=torch.int32)
        first = topk_ids.new_zeros(num_experts + 1, dtype=torch.int64)
        return rows, None if scale is None else scale[:0], first, topk_ids.int(), ids
    pos_to_expert, _, pos_to_choice, positions, _, ends, *_ = moe.get_fused_mapping(
        topk_ids.long().contiguous(), num_experts, choices, 1
    )
    first = torch.nn.functional.pad(ends.long(), (1, 0))
    rows = moe.expand_to_fused(hidden, positions, pos_to_expert)
    scales = None
    if scale is not None:
        scales = moe.expand_to_fused(scale.contiguous(), positions, pos_to_expert)
    return rows, scales, first, positions, torch.where(pos_to_choice >= 0, pos_to_choice, choices)


# ---- casts --------------------------------------------------------------------------------------


@checks.named_errors
def group_quant(
    x: Tensor,
    group_size: int,
    eps: float,
    *,
    column_major: bool,
    tma_aligned: bool,
    round_sf: bool,
    packed: bool = False,
    silu_and_mul: bool = False,
    masked_m: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each group of channels: `quant.per_token_cast` for any leading sizes.

    Args:
        x: `[..., H]`, bfloat16, float16 or float32; `[..., 2 * H]` with `silu_and_mul`.
        group_size: Channels of a scale: 16, 32, 64, 128 or `H`, which it divides.
        eps: The least magnitude that counts as the largest of a group.
        column_major: Whether scales are stored column by column, in each matrix `[T, H]` of `x`,
            which has two dimensions then, or three with `tma_aligned`.
        tma_aligned: Whether columns are padded to a multiple of 4 rows.
        round_sf: Whether scales are powers of two.
        packed: Whether scales are int32 with four exponents each, in padded columns.
        silu_and_mul: Whether SwiGLU of the gate, the first `H` channels, and the value is cast:
            `quant.swiglu_forward_and_per_token_cast`.
        masked_m: `[E]`, int32 or int64, for `x` of three dimensions: how many rows of each matrix
            count. What the other ones get is not specified; with `silu_and_mul` they are not read.

    Returns:
        `(data, scales)`: `[..., H]` e4m3 and `[..., H / group_size]` float32, or packed int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise ValueError("x must be a tensor of two dimensions or more")
    rows = x.flatten(0, -2)
    checks.tensor("x", rows, ("rows", "H"), _FLOATS)
    checks.integer("group_size", group_size, 1)
    step = group_size * (2 if silu_and_mul else 1)
    if x.shape[-1] % step:
        raise ValueError(f"x must have a multiple of {step} channels, got {x.shape[-1]}")
    if tma_aligned and not column_major:
        raise ValueError("tma_aligned scales must be column-major")
    batched = column_major and x.dim() != 2
    if batched and not (x.dim() == 3 and tma_aligned):
        raise ValueError(
            "x must have 2 dimensions for column-major scales, or 3 if they are TMA-aligned, got "
            f"{x.dim()}"
        )
    if masked_m is not None:
        if x.dim() != 3:
            raise ValueError(f"x must have 3 dimensions with masked_m, got {x.dim()}")
        checks.tensor("masked_m", masked_m, ("E",), _IDS, shape=(x.shape[0],))
    given = (rows.float() if rows.dtype == torch.float16 else rows).contiguous()
    layout: dict[str, Any] = {
        "use_tma_aligned_col_major_sf": column_major and not batched, "round_sf": round_sf,
        "use_packed_ue8m0": packed and not batched, "amax_min": checks.number("eps", eps),
    }  # fmt: skip
    if silu_and_mul:
        expert = None if masked_m is None else _experts_of_rows(masked_m, x.shape[1])
        data, scales = quant.swiglu_forward_and_per_token_cast(
            given, "e4m3", group_size, pos_to_expert=expert, **layout
        )
    else:
        data, scales = quant.per_token_cast(given, "e4m3", group_size, **layout)
    if column_major and not tma_aligned and not packed and scales.shape[0] % 4:
        scales = scales.t().contiguous().t()
    if x.dim() != 2:
        scales = scales.view(*x.shape[:-1], ceil_div(data.shape[1], group_size))
    if batched and packed:
        scales = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    elif batched:
        scales = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    return data.view(*x.shape[:-1], data.shape[1]), scales


def _experts_of_rows(masked_m: Tensor, size: int) -> Tensor:
    """The matrix of each row, int32; -1 for rows that do not count."""
    count = len(masked_m)
    number = torch.arange(size, device=masked_m.device)
    experts = torch.arange(count, device=masked_m.device, dtype=torch.int32)
    return torch.where(number < masked_m[:, None], experts[:, None], -1).flatten()


# ---- hyper-connections --------------------------------------------------------------------------


def _norm_eps(norm_weight: Tensor | None, norm_eps: float | None) -> float:
    if norm_weight is not None and norm_eps is None:
        raise ValueError("norm_eps must be given with norm_weight")
    return 0.0 if norm_eps is None else norm_eps


def _normed(layer_input: Tensor, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    """The layer input after its RMS norm, if it has one."""
    if norm_weight is None:
        return layer_input
    rows = layer_input.flatten(0, -2)
    return quant.norm_forward(rows, norm_weight, norm_eps)[0].view_as(layer_input)


@checks.named_errors
def pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc.mhc_pre_big_fuse`, and the RMS norm that follows it: `quant.norm_forward`.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous.
        fn: `[m * (m + 2), m * h]`, float32, contiguous.
        hc_scale: `[3]`, float32.
        hc_base: `[m * (m + 2)]`, float32.
        rms_eps: Of the norm of the streams.
        hc_pre_eps: Added to the weights of the streams.
        hc_sinkhorn_eps: Of the Sinkhorn normalization.
        hc_post_mult_value: The factor of `post`.
        sinkhorn_repeat: Steps of the normalization.
        n_splits: At least 1; it has no effect.
        norm_weight: `[h]`, bfloat16 or float32: the weight of an RMS norm of the layer input; or
            None: no norm.
        norm_eps: Of that norm; None only without it.

    Returns:
        `(post, comb, layer_input)`: `[..., m, 1]` and `[..., m, m]`, float32; `[..., h]`, bfloat16.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape differs.
    """
    checks.integer("n_splits", n_splits, 1)
    eps = _norm_eps(norm_weight, norm_eps)
    post, comb, layer_input = mhc.mhc_pre_big_fuse(
        residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
        sinkhorn_repeat,
    )  # fmt: skip
    return post, comb, _normed(layer_input, norm_weight, eps)


@checks.named_errors
def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """The write of a sublayer to the streams: `mhc.mhc_post`.

    Args:
        x, residual, post_layer_mix, comb_res_mix: As in `fused_post_pre`.

    Returns:
        `[..., m, h]`, bfloat16: the new streams.
    """
    return mhc.mhc_post(x, residual, post_layer_mix, comb_res_mix)


@checks.named_errors
def fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc.mhc_post_pre`: the write of a sublayer, then `pre` of the next one on its result.

    Args:
        x: `[..., h]`, bfloat16, contiguous: the output of the sublayer.
        residual: `[..., m, h]`, bfloat16, contiguous.
        post_layer_mix: `[..., m, 1]`, float32.
        comb_res_mix: `[..., m, m]`, float32.
        fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
            sinkhorn_repeat, norm_weight, norm_eps: As in `pre`.
        n_splits, tile_n: At least 1; they have no effect.

    Returns:
        `(residual, post, comb, layer_input)`, for the next sublayer.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape differs.
    """
    for name, value in (("n_splits", n_splits), ("tile_n", tile_n)):
        checks.integer(name, value, 1)
    return mhc.mhc_post_pre(
        x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps,
        hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight,
        _norm_eps(norm_weight, norm_eps),
    )  # fmt: skip


@checks.named_errors
def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `pre`, but a sublayer reads the streams with the weights of the sublayer before it.

    Args:
        residual: `[..., m, h]`, bfloat16, contiguous.
        fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
            sinkhorn_repeat, norm_weight, norm_eps: As in `pre`.
        pre_mix: `[..., m]`, float32: the last result of the sublayer before; None: the first stream
            is read.
        x: `[..., k]`, bfloat16, contiguous: what is projected in place of the streams, with `fn`
            `[m * (m + 2), k]`; None: the streams.

    Returns:
        `(post, comb, layer_input, pre_mix)`: `[..., m, 1]` and `[..., m, m]`, float32; `[..., h]`,
        bfloat16; `[..., m]`, float32: the weights for the next sublayer.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape differs.

    Example:
        >>> streams = torch.arange(4.0).repeat_interleave(8).view(1, 4, 8).bfloat16()
        >>> fn, scale, base = torch.zeros(24, 32), torch.ones(3), torch.zeros(24)
        >>> given = streams, fn, scale, base, 1e-6, 0.0, 1e-6, 2.0, 20
        >>> *_, first, weights = pre_delayed(*given)
        >>> *_, second, _ = pre_delayed(*given, weights)
        >>> first[0, 0].item(), second[0, 0].item()
        (0.0, 3.0)
    """
    projected = residual if x is None else x.unsqueeze(-2)
    mixes = mhc.mhc_norm_fn_fwd(projected, fn, rms_eps)[0]
    weights, post, logits = mhc.mhc_pre_split_mixes(
        mixes, hc_scale, hc_base, residual.shape[-2], hc_post_mult_value, hc_pre_eps
    )
    comb = mhc.sinkhorn_normalize(logits, sinkhorn_repeat, hc_sinkhorn_eps)
    if pre_mix is None:
        layer_input = residual.select(-2, 0).contiguous()
    else:
        if pre_mix.dtype != torch.float32 or pre_mix.shape != weights.shape[:-1]:
            raise ValueError(
                f"pre_mix must be float32 of shape {tuple(weights.shape[:-1])}, got "
                f"{pre_mix.dtype} of shape {tuple(pre_mix.shape)}"
            )
        layer_input = mhc.mhc_pre_apply_mix(residual, pre_mix.contiguous().unsqueeze(-1))
    return post, comb, _normed(layer_input, norm_weight, norm_eps), weights.squeeze(-1)


@checks.named_errors
def head(
    hidden: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, eps: float
) -> Tensor:
    """Combines the streams into one: their sum, weighted by mixes that are computed from them.

    Args:
        hidden: `[..., m, h]`, bfloat16, contiguous.
        fn: `[m, m * h]`, float32, contiguous.
        scale: `[1]`, float32.
        base: `[m]`, float32.
        rms_eps: Of the norm of the streams.
        eps: Added to the weights.

    Returns:
        `[..., h]`, bfloat16.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape differs.
    """
    mixes = mhc.mhc_norm_fn_fwd(hidden, fn, rms_eps)[0]
    weights = mhc.mhc_head_compute_mix(mixes, scale.reshape(1), base, eps)
    return mhc.mhc_pre_apply_mix(hidden, weights.unsqueeze(-1))
