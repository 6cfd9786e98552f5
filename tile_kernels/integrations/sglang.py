"""Functions of SGLang, by their names and in their argument order, on this package's operators.

    from tile_kernels.integrations import sglang

    weights, ids = sglang.moe_fused_gate(scores, bias, 8, num_expert_group=8, topk_group=4)

What they compute with is in `integrations.serving`; the indexer's logits are in
`integrations.deep_gemm`. Signatures are those of SGLang 0.5.23.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.integrations import serving
from tile_kernels.integrations.serving import mhc_post
from tile_kernels.runtime import checks

__all__ = [
    "fused_hc_head",
    "hash_topk",
    "mhc_fused_post_pre",
    "mhc_post",
    "mhc_pre",
    "moe_align_block_size",
    "moe_fused_gate",
    "sglang_per_token_group_quant_fp8",
    "topk_transform_paged",
    "topk_transform_ragged_v2",
]


# ---- routing ------------------------------------------------------------------------------------


@checks.named_errors
def moe_fused_gate(
    scores: Tensor,
    bias: Tensor | None,
    topk: int,
    scoring_func: str = "sigmoid",
    num_fused_shared_experts: int = 0,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    moe_softcapping: float = 0.0,
    num_expert_group: int = 1,
    topk_group: int = 1,
    *,
    bias_alt: Tensor | None = None,
    input_ids: Tensor | None = None,
    bias_alt_token_id: int | None = None,
    num_token_non_padded: Tensor | None = None,
    renormalize_epsilon: float = 0.0,
    packed_out: Tensor | None = None,
    sqrtsoftplus_log1p: bool = False,
) -> tuple[Tensor, Tensor]:
    """Experts of the best groups of experts, and their weights; see `serving.route`.

    Args:
        scores: `[T, E]`, float32, bfloat16 or float16: logits.
        bias: `[E]`, added to scores for the choice only; or None.
        topk: Experts of a token.
        scoring_func: `"sigmoid"` or `"sqrtsoftplus"`; `"softmax"` without a bias.
        num_fused_shared_experts: Must be 0.
        renormalize: Whether the weights of a token are divided by their sum.
        routed_scaling_factor: See the next one.
        apply_routed_scaling_factor_on_output: Whether weights are multiplied by it.
        moe_softcapping: Must be 0.
        num_expert_group: Groups of experts.
        topk_group: Groups that stay.
        bias_alt: Must be None, like `packed_out`: `moe.moe_topk_gate` has a bias of image tokens.
        input_ids: Only `bias_alt` would need them, as the next one.
        bias_alt_token_id: See there.
        num_token_non_padded: An integer tensor with one element: tokens that route. Those after
            them have ids -1 and weights 0. None: all.
        renormalize_epsilon: 0; the sum of weights is guarded by 1e-20.
        packed_out: Must be None.
        sqrtsoftplus_log1p: It has no effect: the softplus is exact to a rounding.

    Returns:
        `(weights, ids)`, `[T, topk]`: float32 and int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    del input_ids, bias_alt_token_id, sqrtsoftplus_log1p
    serving.must_be_default(
        num_fused_shared_experts=(num_fused_shared_experts, 0),
        moe_softcapping=(moe_softcapping, 0),
        bias_alt=(bias_alt, None),
        renormalize_epsilon=(renormalize_epsilon, 0),
        packed_out=(packed_out, None),
    )
    factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else 1.0
    return serving.route(
        scores, topk, scoring_func=scoring_func, bias=bias, renormalize=renormalize,
        num_groups=num_expert_group, topk_groups=topk_group, routed_scaling_factor=factor,
        num_valid=num_token_non_padded,
    )  # fmt: skip


@checks.named_errors
def hash_topk(
    router_logits: Tensor,
    input_ids: Tensor,
    tid2eid: Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
) -> tuple[Tensor, Tensor]:
    """Experts from a table by token id, weights by the router: `moe.hash_gate`.

    Args:
        router_logits: `[T, E]`, float32 or bfloat16.
        input_ids: `[T]`, int32 or int64.
        tid2eid: `[vocabulary, K]`, int32 or int64.
        num_fused_shared_experts: Must be 0.
        routed_scaling_factor: Multiplies the normalized weights.
        scoring_func: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"`.

    Returns:
        `(weights, ids)`, `[T, K]`: float32 and int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    serving.must_be_default(num_fused_shared_experts=(num_fused_shared_experts, 0))
    ids, weights = moe.hash_gate(
        router_logits, input_ids, tid2eid, routed_scaling_factor, scoring_func
    )
    return weights, ids.int()


@checks.named_errors
def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    ignore_invalid_expert: bool = False,
    *,
    return_inactive_prefix_count: bool = False,
    pad_expert_ids: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts choices by expert in blocks; see `serving.align_blocks`.

    Args:
        topk_ids: `[T, K]`, int32 or int64.
        block_size: Rows of a block.
        num_experts: The number of experts.
        ignore_invalid_expert: Whether ids outside `0..num_experts-1` have no rows. They never have.
        return_inactive_prefix_count: Must be False.
        pad_expert_ids: Must be False.

    Returns:
        `(sorted_token_ids, expert_ids, num_tokens_post_pad)`, int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    checks.boolean("ignore_invalid_expert", ignore_invalid_expert)
    serving.must_be_default(
        return_inactive_prefix_count=(return_inactive_prefix_count, False),
        pad_expert_ids=(pad_expert_ids, False),
    )
    return serving.align_blocks(topk_ids, block_size, num_experts)


# ---- the choice of keys -------------------------------------------------------------------------


@checks.named_errors
def topk_transform_paged(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None = None,
) -> None:
    """The best positions of each row, as slots of a paged cache; see `serving.topk_paged`.

    Args:
        scores: `[rows, columns]`, float32 or bfloat16, stride 1 in a row.
        seq_lens: `[rows]`: the length of each row.
        page_tables: `[rows, pages]`, int32.
        out_page_indices: `[rows, k]`, int32: receives slots, -1 for none; `k` is taken from it.
        page_size: Tokens of a page.
        out_raw_indices: `[rows, k]`, int32: receives positions; or None.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.
    """
    checks.tensor("out_page_indices", out_page_indices, ("rows", "k"), torch.int32)
    serving.topk_paged(
        scores, out_page_indices.shape[1], seq_lens, page_tables, page_size,
        out=out_page_indices, positions_out=out_raw_indices,
    )  # fmt: skip


@checks.named_errors
def topk_transform_ragged_v2(
    scores: Tensor,
    seq_lens: Tensor,
    *,
    out_offsets: Tensor,
    out_indices: Tensor,
    row_starts: Tensor | None = None,
) -> None:
    """The best positions of each row, counted from its start, plus an offset.

    Args:
        scores: `[rows, columns]`, float32 or bfloat16, stride 1 in a row.
        seq_lens: `[rows]`: the length of each row.
        out_offsets: `[rows]`, int32: what is added to the positions of a row.
        out_indices: `[rows, k]`, int32: receives positions, -1 for none; `k` is taken from it.
        row_starts: `[rows]`: the first position of each row; None: 0.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride.
    """
    checks.tensor("out_indices", out_indices, ("rows", "k"), torch.int32)
    checks.tensor("out_offsets", out_offsets, ("rows",), torch.int32, shape=(out_indices.shape[0],))
    ends = seq_lens if row_starts is None else seq_lens + row_starts
    found = serving.topk_rows(scores, out_indices.shape[1], ends, start=row_starts)
    out_indices.copy_(torch.where(found >= 0, found + out_offsets[:, None], -1))


# ---- casts --------------------------------------------------------------------------------------


@checks.named_errors
def sglang_per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: Tensor | None = None,
    *,
    output_q: Tensor | None = None,
    output_s: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """e4m3 with a scale for each group of channels; see `serving.group_quant`.

    Args:
        x: `[..., H]`, bfloat16, float16 or float32; `[..., 2 * H]` with `fuse_silu_and_mul`.
        group_size: Channels of a scale.
        eps: The least magnitude that counts as the largest of a group.
        column_major_scales: Whether scales are stored column by column.
        scale_tma_aligned: Whether columns are padded to a multiple of 4 rows.
        scale_ue8m0: Whether scales are powers of two: packed exponents in int32 if column-major and
            padded, float32 otherwise.
        fuse_silu_and_mul: Whether SwiGLU of the first `H` channels, the gate, and the other ones is
            cast.
        masked_m: `[E]`, for `x` `[E, T, H]`: how many rows of each matrix count; or None.
        output_q: `[..., H]`, float8_e4m3fn: a buffer for the data.
        output_s: A buffer for the scales.

    Returns:
        `(data, scales)`: `[..., H]`, and `[..., H / group_size]` float32 or packed int32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is out of range.
    """
    checks.boolean("fuse_silu_and_mul", fuse_silu_and_mul)
    data, scales = serving.group_quant(
        x, group_size, eps, column_major=column_major_scales, tma_aligned=scale_tma_aligned,
        round_sf=scale_ue8m0, packed=scale_ue8m0 and column_major_scales and scale_tma_aligned,
        silu_and_mul=fuse_silu_and_mul, masked_m=masked_m,
    )  # fmt: skip
    data = serving.filled("output_q", output_q, data)
    return data, serving.filled("output_s", output_s, scales)


# ---- hyper-connections --------------------------------------------------------------------------


@checks.named_errors
def mhc_pre(
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
    n_splits_pre: int = 32,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a sublayer reads of the streams, and the mixes with which it writes: `serving.pre`.

    Args:
        residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
            sinkhorn_repeat, norm_weight, norm_eps: As in `serving.pre`.
        n_splits, n_splits_pre: At least 1; they have no effect.

    Returns:
        `(post, comb, layer_input)`: `[..., m, 1]` and `[..., m, m]`, float32; `[..., h]`, bfloat16.
    """
    checks.integer("n_splits_pre", n_splits_pre, 1)
    return serving.pre(
        residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
        sinkhorn_repeat, n_splits, norm_weight, norm_eps,
    )  # fmt: skip


@checks.named_errors
def mhc_fused_post_pre(
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
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The write of a sublayer, then `mhc_pre` of the next one: `serving.fused_post_pre`.

    Args:
        x, residual, post_layer_mix, comb_res_mix: As in `serving.fused_post_pre`.
        fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
            sinkhorn_repeat, norm_weight, norm_eps: As in `serving.pre`.
        n_splits, tile_n: At least 1; they have no effect.

    Returns:
        `(residual, post, comb, layer_input)`, for the next sublayer.
    """
    return serving.fused_post_pre(
        x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps,
        hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, n_splits, tile_n, norm_weight,
        norm_eps,
    )  # fmt: skip


@checks.named_errors
def fused_hc_head(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, norm_eps: float, hc_eps: float
) -> Tensor:
    """Combines the streams into one, weighted by mixes that are computed from them.

    Args:
        x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps: The arguments of `serving.head`.

    Returns:
        `[..., h]`, bfloat16.
    """
    return serving.head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps)
