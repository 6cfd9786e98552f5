"""Functions of vLLM, by their names and in their argument order, on the operators of this package.

    from tile_kernels.integrations import vllm

    weights, ids = vllm.grouped_topk(hidden, logits, 8, True, 8, 4, "sigmoid", 2.5, bias)

What they compute with is in `integrations.serving`; the indexer's logits are in
`integrations.deep_gemm`. Signatures are those of vLLM 0.32.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.integrations import serving
from tile_kernels.integrations.serving import mhc_post
from tile_kernels.runtime import checks

__all__ = [
    "fused_topk",
    "fused_topk_bias",
    "grouped_topk",
    "hc_head",
    "mhc_fused_post_pre",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_delayed",
    "moe_align_block_size",
    "moe_permute",
    "per_token_group_quant_fp8",
    "per_token_group_quant_fp8_packed_for_deepgemm",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]


# ---- routing ------------------------------------------------------------------------------------


def _check_hidden(hidden_states: Tensor, gating_output: Tensor) -> None:
    checks.tensor("gating_output", gating_output, ("T", "E"))
    checks.tensor("hidden_states", hidden_states, ("T", "H"))
    if hidden_states.shape[0] != gating_output.shape[0]:
        raise ValueError(
            f"hidden_states must have {gating_output.shape[0]} rows like gating_output, got "
            f"{hidden_states.shape[0]}"
        )


@checks.named_errors
def fused_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts and weights of each token.

    Args:
        hidden_states: `[T, H]`; only its rows are counted.
        gating_output: `[T, E]`, float32, bfloat16 or float16.
        topk: Experts of a token.
        renormalize: Whether the weights of a token are divided by their sum.
        indices_type: int32 (None) or int64.
        scoring_func: `"softmax"`, `"sigmoid"` or `"sqrtsoftplus"`.

    Returns:
        `(weights, ids, token_expert_indices)`, `[T, topk]`: float32, `indices_type`, and int32
        `k * T + t`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    _check_hidden(hidden_states, gating_output)
    weights, ids = serving.route(
        gating_output, topk, scoring_func=scoring_func, renormalize=renormalize,
        ids_dtype=indices_type or torch.int32,
    )  # fmt: skip
    numbers = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    return weights, ids, numbers.view(topk, -1).t().contiguous()


@checks.named_errors
def fused_topk_bias(
    hidden_states: Tensor,
    gating_output: Tensor,
    scoring_func: str,
    e_score_correction_bias: Tensor | None,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    input_tokens: Tensor | None = None,
    hash_indices_table: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    bias_vl: Tensor | None = None,
    image_sentinel_lo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Experts by score plus bias, weights by score; or experts from a table by token id.

    Args:
        hidden_states, gating_output, topk, indices_type: As in `fused_topk`.
        scoring_func: `"sigmoid"` or `"sqrtsoftplus"`; `"softmax"` without a bias.
        e_score_correction_bias: `[E]`; or None.
        renormalize: Whether the weights of a token are divided by their sum. With a table they are.
        input_tokens: `[T]`, int32 or int64: token ids, for the table.
        hash_indices_table: `[vocabulary, topk]`, int32 or int64; or None.
        routed_scaling_factor: Multiplies the weights.
        bias_vl: Must be None: `moe.moe_topk_gate` has a bias of image tokens.
        image_sentinel_lo: Only `bias_vl` would need it.

    Returns:
        `(weights, ids)`, `[T, topk]`: float32 and `indices_type`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    del image_sentinel_lo
    dtype = indices_type or torch.int32
    _check_hidden(hidden_states, gating_output)
    serving.must_be_default(bias_vl=(bias_vl, None))
    if hash_indices_table is None:
        return serving.route(
            gating_output, topk, scoring_func=scoring_func, bias=e_score_correction_bias,
            renormalize=renormalize, routed_scaling_factor=routed_scaling_factor,
            ids_dtype=dtype,
        )  # fmt: skip
    if input_tokens is None or not renormalize:
        raise ValueError("hash_indices_table needs input_tokens and renormalize=True")
    checks.tensor(
        "hash_indices_table", hash_indices_table, ("vocabulary", "topk"), checks.INTEGERS,
        shape=(None, topk),
    )  # fmt: skip
    ids, weights = moe.hash_gate(
        gating_output, input_tokens, hash_indices_table, routed_scaling_factor, scoring_func
    )
    return weights, ids.to(dtype)


@checks.named_errors
def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts of the best groups of experts; see `serving.route`.

    Args:
        hidden_states, gating_output, topk, renormalize: As in `fused_topk`.
        num_expert_group: Groups of experts.
        topk_group: Groups that stay.
        scoring_func: `"sigmoid"` or `"sqrtsoftplus"`; `"softmax"` without a bias.
        routed_scaling_factor: Multiplies the weights.
        e_score_correction_bias: `[E]`; or None: then groups rank by their best expert.

    Returns:
        `(weights, ids)`, `[T, topk]`: float32 and int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    _check_hidden(hidden_states, gating_output)
    return serving.route(
        gating_output, topk, scoring_func=scoring_func, bias=e_score_correction_bias,
        renormalize=renormalize, num_groups=num_expert_group, topk_groups=topk_group,
        routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip


# ---- maps of rows -------------------------------------------------------------------------------


@checks.named_errors
def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts choices by expert in blocks that one expert each has: `serving.align_blocks`.

    Args:
        topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts: As in
            `serving.align_blocks`.
        return_scatter_idx: Must be False.

    Returns:
        `(sorted_token_ids, expert_ids, num_tokens_post_pad)`, int32.
    """
    serving.must_be_default(return_scatter_idx=(return_scatter_idx, False))
    return serving.align_blocks(
        topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts
    )


@checks.named_errors
def moe_permute(
    hidden_states: Tensor,
    a1q_scale: Tensor | None,
    topk_ids: Tensor,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Tensor | None = None,
    permuted_hidden_states: Tensor | None = None,
    scratch: object = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Copies tokens sorted by expert; see `serving.permute`.

    Args:
        hidden_states: `[T, H]`, contiguous.
        a1q_scale: `[T, G]`, float32; or None.
        topk_ids: `[T, K]`, int32 or int64.
        n_expert: Experts of all ranks.
        n_local_expert: Experts of this rank; -1: all.
        expert_map: `[n_expert]`: the number of an expert on this rank, or -1; or None.
        permuted_hidden_states: `[T * K, H]`: a buffer for the rows.
        scratch: It has no effect.

    Returns:
        `(rows, scales, expert_first_token_offset, inv_permuted_idx, permuted_idx)`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    local = n_expert if n_local_expert == -1 else n_local_expert
    if local != n_expert and expert_map is None:
        raise ValueError("expert_map must be given where n_local_expert is not n_expert")
    if expert_map is not None:
        checks.tensor("expert_map", expert_map, ("E",), checks.INTEGERS, shape=(n_expert,))
        topk_ids = serving.mapped(topk_ids, expert_map)
    del scratch
    permuted = serving.permute(hidden_states, a1q_scale, topk_ids, local)
    rows = serving.filled("permuted_hidden_states", permuted_hidden_states, permuted[0])
    return rows, *permuted[1:]


# ---- the choice of keys -------------------------------------------------------------------------


@checks.named_errors
def top_k_per_row_prefill(
    logits: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    raw_topk_indices: Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """The best positions of each row, counted from its start; see `serving.topk_rows`.

    Args:
        logits: `[rows, columns]`, float32 or bfloat16.
        cu_seqlen_ks: `[rows]`: the first position of a row.
        cu_seqlen_ke: `[rows]`: one past the last.
        raw_topk_indices: `[rows, topk_tokens]`, int32: receives positions, -1 for none.
        num_rows: How many rows to do.
        stride0: `logits.stride(0)`.
        stride1: `logits.stride(1)`, 1.
        topk_tokens: How many positions.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.
    """
    logits, out = _rows(logits, raw_topk_indices, num_rows, stride0, stride1)
    for name, bound in (("cu_seqlen_ks", cu_seqlen_ks), ("cu_seqlen_ke", cu_seqlen_ke)):
        checks.tensor(name, bound, ("rows",), checks.INTEGERS)
    start, end = cu_seqlen_ks[:num_rows], cu_seqlen_ke[:num_rows]
    serving.topk_rows(logits, topk_tokens, end, start=start, out=out)


@checks.named_errors
def top_k_per_row_decode(
    logits: Tensor,
    next_n: int,
    seq_lens: Tensor,
    raw_topk_indices: Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """The best positions of each row of `next_n` queries in each sequence.

    Args:
        logits: `[rows, columns]`, float32 or bfloat16.
        next_n: Queries of a sequence.
        seq_lens: `[rows / next_n]`: row `r` ends at `seq_lens[r // next_n] - next_n + r % next_n +
            1`; or `[rows / next_n, next_n]`: the end of each row.
        raw_topk_indices, num_rows, stride0, stride1, topk_tokens: As in `top_k_per_row_prefill`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.
    """
    checks.integer("next_n", next_n, 1)
    logits, out = _rows(logits, raw_topk_indices, num_rows, stride0, stride1)
    ends = seq_lens
    single = isinstance(seq_lens, Tensor) and seq_lens.dim() == 1
    dims = ("sequences",) if single else ("sequences", "next_n")
    checks.tensor("seq_lens", seq_lens, dims, checks.INTEGERS)
    if single:
        later = torch.arange(1 - next_n, 1, device=seq_lens.device, dtype=seq_lens.dtype)
        ends = seq_lens[:, None] + later
    serving.topk_rows(logits, topk_tokens, ends.reshape(-1)[:num_rows], out=out)


def _rows(
    logits: Tensor, out: Tensor, num_rows: int, stride0: int, stride1: int
) -> tuple[Tensor, Tensor]:
    checks.tensor("logits", logits, ("rows", "columns"))
    checks.integer("num_rows", num_rows, 0, logits.shape[0])
    if (stride0, stride1) != logits.stride():
        raise ValueError(
            f"stride0 and stride1 must be the strides {tuple(logits.stride())} of logits, got "
            f"{stride0} and {stride1}"
        )
    checks.tensor("raw_topk_indices", out, ("rows", "topk_tokens"), torch.int32)
    return logits[:num_rows], out[:num_rows]


# ---- casts --------------------------------------------------------------------------------------


@checks.named_errors
def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each group of channels; see `serving.group_quant`.

    Args:
        x: `[..., H]`, bfloat16, float16 or float32.
        group_size: Channels of a scale.
        eps: The least magnitude that counts as the largest of a group.
        dtype: float8_e4m3fn, or None for it.
        column_major_scales: Whether scales are stored column by column.
        tma_aligned_scales: Whether columns are padded to a multiple of 4 rows.
        out_q: `[..., H]`, float8_e4m3fn: a buffer for the data.
        use_ue8m0: Whether scales are powers of two, in float32. None: no.

    Returns:
        `(data, scales)`: `[..., H]` and `[..., H / group_size]` float32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    serving.must_be_e4m3(dtype)
    data, scales = serving.group_quant(
        x, group_size, eps, column_major=column_major_scales, tma_aligned=tma_aligned_scales,
        round_sf=bool(use_ue8m0),
    )  # fmt: skip
    return serving.filled("out_q", out_q, data), scales


@checks.named_errors
def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    use_ue8m0: bool | None = None,
    out_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """e4m3 with packed exponents, as DeepGEMM takes them.

    Args:
        x: `[T, H]`, bfloat16, float16 or float32.
        group_size, eps: As in `per_token_group_quant_fp8`.
        use_ue8m0: True or None: scales are powers of two.
        out_q: `[T, H]`, float8_e4m3fn: a buffer for the data.

    Returns:
        `(data, scales)`: `[T, H]` e4m3, and `[T, ceil(H / group_size / 4)]` int32 with strides
        `(1, align(T, 4))`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    if use_ue8m0 is False:
        raise ValueError("use_ue8m0 must be True or None, got False")
    data, scales = serving.group_quant(
        x, group_size, eps, column_major=True, tma_aligned=True, round_sf=True, packed=True
    )
    return serving.filled("out_q", out_q, data), scales


# ---- hyper-connections --------------------------------------------------------------------------


mhc_pre = checks.named_errors(serving.pre, "mhc_pre", __name__)
mhc_fused_post_pre = checks.named_errors(serving.fused_post_pre, "mhc_fused_post_pre", __name__)
mhc_pre_delayed = checks.named_errors(serving.pre_delayed, "mhc_pre_delayed", __name__)


@checks.named_errors
def hc_head(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> Tensor:
    """Combines the streams into one, weighted by mixes that are computed from them.

    Args:
        hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps: The arguments of
            `serving.head`.

    Returns:
        `[..., h]`, bfloat16.
    """
    return serving.head(hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps)
