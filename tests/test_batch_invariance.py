"""A row's result has the same bits in any batch, and for any number of SMs that kernels may use.

Every operator is in one of two tables: `ROW_WISE` says which arguments have a row per token, query
or sequence, `OTHERS` says why there are no such rows. A new operator must be entered in one of
them. References need no such test: they define values, and sum in the order of PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tile_kernels
from tests.selection import emulated_of, operators
from tile_kernels.runtime.cases import Arguments, assert_equal_results, tensors_in
from tile_kernels.runtime.operator import Operator


@dataclass(frozen=True)
class Rows:
    """Which arguments have rows, in dimension 0, and which results.

    `results` are positions among the tensors of the outcome, in-place arguments last; None: all.
    Their rows lie in dimension `dim`. A batch has a multiple of `step` rows. Samples are those for
    which `when(arguments)` holds.
    """

    arguments: tuple[str, ...]
    results: tuple[int, ...] | None = None
    dim: int = 0
    step: int = 1
    when: Callable[[Arguments], bool] = lambda _: True


def _rows(*arguments: str, **how: Any) -> Rows:
    return Rows(arguments, **how)


def _single_rows(arguments: Arguments) -> bool:
    """The blocks of given scales are rows, or there are none; no seed counts rows."""
    seeded = arguments.get("seed") is not None
    return not seeded and arguments.get("x_block_size", (1, 1))[0] == 1


def _without_maps(arguments: Arguments) -> bool:
    """Rows are not looked up in the routing of all tokens."""
    names = ("psum_num_tokens_per_expert", "topk_weights", "pos_to_token_topk")
    return all(arguments.get(name) is None for name in names)


def _with_positions(arguments: Arguments) -> bool:
    """Tokens are not counted, and lie in the first dimension."""
    return arguments.get("positions") is not None and arguments["query"].dim() == 3


def _of_rows(arguments: Arguments) -> bool:
    """Weights are those of rows, not looked up."""
    weights = arguments.get("topk_weights")
    return weights is not None and weights.dim() == 1


ROW_WISE = {
    "attention.cache_indices": _rows("logical", "block_table"),
    "attention.attention_target": _rows("q", "indices", "lse_full"),
    "attention.indexer_kl": _rows("p", "logits"),
    "attention.indexer_logits": _rows("q", "weights", "start", "end"),
    # The gradient of the keys is a sum over queries.
    "attention.indexer_logits_bwd": _rows("q", "weights", "indices", "grad", results=(0, 2)),
    "attention.indexer_select": _rows("q", "weights", "start", "end"),
    "attention.indexer_topk": _rows("logits", "start", "end"),
    "attention.kv_cache_gather": _rows("slots"),
    "attention.kv_compress_step": _rows("state", "kv_a", "z_a", "kv_b", "z_b"),
    # A plan is made for a batch.
    "attention.sparse_attention_decode": _rows(
        "q",
        "indices",
        "topk_length",
        "extra_indices",
        "extra_topk_length",
        when=lambda a: a.get("plan") is None and a.get("splits") != "balanced",
    ),
    "attention.sparse_attention": _rows("q", "indices", "topk_length"),
    # The gradients of rows and of sinks are sums over queries.
    "attention.sparse_attention_bwd": _rows(
        "q", "indices", "grad", "out", "lse", "topk_length", results=(0,)
    ),
    # The gradient of the fused weight is a sum over tokens, in parts.
    "engram.engram_gate_bwd": _rows(
        "grad_out",
        "hidden_states",
        "k",
        "v",
        "dot",
        "gate_score",
        "rstd_x",
        "rstd_k",
        "image_token_mask",
        results=(0, 1, 2),
    ),
    "engram.engram_gate_fwd": _rows("hidden_states", "k", "v", "image_token_mask"),
    "engram.engram_gate_packed_bwd": _rows(
        "grad_out",
        "hidden_states",
        "kv",
        "dot",
        "gate_score",
        "rstd_x",
        "rstd_k",
        "image_token_mask",
        results=(0, 1),
    ),
    "engram.engram_gate_packed_fwd": _rows("hidden_states", "kv", "image_token_mask"),
    "engram.engram_hash": _rows("ngram_token_ids", "image_token_mask", dim=1),
    "gemm.bf16_gemm_nt": _rows("a", "c", "d"),
    "gemm.fp8_fp4_gemm_nt": _rows("a", "c", "d"),
    "gemm.fp8_gemm_nt": _rows("a", "c", "d"),
    # All rows of a block of 128 belong to one group.
    **{
        f"gemm.m_grouped_{kind}_gemm_nt_contiguous": _rows(
            "a", "grouped_layout", "d", step=128, when=lambda a: not a.get("use_psum_layout")
        )
        for kind in ("bf16", "fp8", "fp8_fp4")
    },
    "mhc.expand_to_mhc": _rows("hidden"),
    "mhc.expand_to_mhc_bwd": _rows("grad_out"),
    "mhc.mhc_head_compute_mix": _rows("input_mix"),
    "mhc.mhc_head_compute_mix_bwd": _rows("grad_mix", "input_mix", results=(0,)),
    "mhc.mhc_multilayer_recompute": _rows(
        "initial_residual",
        "pre_mix_list",
        "layer_output_list",
        "post_mix_list",
        "comb_mix_list",
        "layer_input_list",
        "residual_list",
    ),
    "mhc.mhc_norm_fn_bwd": _rows(
        "grad_mixes", "residual", "mul", "s", "grad_residual", results=(0,)
    ),
    "mhc.mhc_norm_fn_fwd": _rows("residual"),
    "mhc.mhc_post": _rows("x", "residual", "post_layer_mix", "comb_res_mix"),
    "mhc.mhc_post_bwd": _rows("x", "residual", "post_layer_mix", "comb_res_mix", "d_o"),
    "mhc.mhc_post_fwd": _rows("x", "residual", "post_layer_mix", "comb_res_mix"),
    "mhc.mhc_post_pre": _rows("x", "residual", "post_layer_mix", "comb_res_mix"),
    "mhc.mhc_post_pre_and_per_token_cast": _rows("x", "residual", "post_layer_mix", "comb_res_mix"),
    "mhc.mhc_pre_apply_mix": _rows("x", "mix"),
    "mhc.mhc_pre_apply_mix_bwd": _rows("grad_out", "x", "mix", "grad_x"),
    "mhc.mhc_pre_big_fuse": _rows("residual"),
    "mhc.mhc_pre_fwd": _rows("residual"),
    "mhc.mhc_reduce_partials_bwd": _rows("out_grad", "out_mul", "sqrsum"),
    "mhc.mhc_pre_split_mixes": _rows("input_mixes"),
    "mhc.mhc_pre_split_mixes_bwd": _rows(
        "grad_pre", "grad_post", "grad_comb", "input_mixes", results=(0,)
    ),
    "mhc.sinkhorn_normalize": _rows("x"),
    "mhc.sinkhorn_normalize_bwd": _rows("grad_out", "x"),
    "moe.hash_gate": _rows("logits", "token_ids", "mask"),
    "moe.inplace_unique_group_indices": _rows("group_indices"),
    "moe.mask_indices_by_tp": _rows("indices"),
    # Sequences have equal numbers of tokens.
    "moe.moe_topk_gate_backward": _rows(
        "scores",
        "topk_idx",
        "topk_weights",
        "grad_topk_weights",
        "mask",
        "grad_scores",
        when=lambda a: a.get("grad_scores_sum") is None,
    ),
    "moe.moe_topk_gate_forward": _rows(
        "logits",
        "mask",
        "image_token_mask",
        "fix_routing_mask",
        "unmapped_topk_idx",
        "force_random",
        "scores",
    ),
    "moe.normalize_weight": _rows("topk_weights"),
    "moe.reduce_fused": _rows("topk_weights", "token_topk_to_pos"),
    "moe.top2_sum_gate": _rows("logits", "mask", "fix_routing_mask", "unmapped_topk_idx"),
    "moe.topk_gate": _rows("scores"),
    "moe.topk_sum_and_topk_group_idx": _rows("scores"),
    "moe.topk_weights": _rows("logits", "topk_idx"),
    "moe.topk_weights_backward": _rows("grad_weights", "logits", "topk_idx"),
    "quant.cast_back": _rows("x", when=_single_rows),
    "quant.fake_cast": _rows("x"),
    # The gradient of the weight is a sum over tokens, in parts.
    "quant.norm_backward": _rows(
        "out_grad",
        "x",
        "rstd",
        "residual_out_grad",
        results=(0,),
        when=lambda a: a["x"].dim() == 2,
    ),
    "quant.norm_forward": _rows("x", "residual", when=lambda a: a["x"].dim() == 2),
    "quant.norm_forward_and_per_token_cast": _rows(
        "x",
        "residual",
        when=lambda a: (
            a["x"].dim() == 2
            and a.get("mega_moe_sf") is None
            and not a.get("use_tma_aligned_col_major_sf")
        ),
    ),
    "quant.per_token_cast": _rows("x", when=_single_rows),
    "quant.per_token_cast_back": _rows("x"),
    "quant.per_token_cast_with_precomputed_sf": _rows("x", "sf"),
    "quant.per_token_cast_with_sf_only": _rows("x", when=_single_rows),
    "quant.split_to_bf16": _rows("x"),
    "quant.swiglu_forward": _rows("x", when=_without_maps),
    # `clamped_count` counts over all rows.
    "quant.swiglu_forward_and_per_token_cast": _rows(
        "x",
        "pos_to_token_topk",
        "pos_to_expert",
        when=lambda a: a.get("clamped_count") is None and "alignment" not in a and not _of_rows(a),
    ),
    "transform.apply_rotary": _rows("query", "key", "positions", when=_with_positions),
    "transform.rotary_embedding": _rows("query", "key", "positions", when=_with_positions),
}

_SPLITS = "tokens lie in the second dimension, behind the splits of their sums"
_SEQUENCES = "the positions of tokens follow from the bounds of all sequences"
_WINDOWS = "a result is computed from neighbouring tokens"
_ROUTING = "the routing of all tokens decides where a row is"
_BLOCKS = "a scale is that of several rows"
_SUM = "sums over tokens"
OTHERS = {
    "attention.kv_cache_append": "rows are written into pages; no arithmetic spans two rows",
    "attention.decode_plan": "all requests share the device",
    "attention.attention_indices": _SEQUENCES,
    "attention.hca_attention": _SEQUENCES,
    "attention.hca_attention_bwd": _SEQUENCES,
    "quant.plain_cast": "values by themselves, or by their index",
    "attention.kv_compress": _WINDOWS,
    "attention.kv_compress_bwd": _WINDOWS,
    "attention.kv_compress_norm_rope_cast": _WINDOWS,
    "attention.kv_compress_packed": _WINDOWS,
    "attention.kv_compress_packed_bwd": _WINDOWS,
    "engram.engram_convolution_bwd": _WINDOWS,
    "engram.engram_convolution_fwd": _WINDOWS,
    "engram.engram_sinkhorn_finalize": "has no tokens",
    "engram.engram_sinkhorn_momentum_update": "has no tokens",
    "engram.engram_sinkhorn_step": "has no tokens",
    "engram.engram_sinkhorn_step_reduce": "has no tokens",
    "engram.fused_weight": "has no tokens",
    "engram.grad_w_reduce": _SUM,
    "engram.ngram_windows": _WINDOWS,
    "gemm.get_mn_major_tma_aligned_tensor": "moves rows to columns",
    "gemm.k_grouped_bf16_gemm_tn_contiguous": _SUM,
    "gemm.k_grouped_fp8_gemm_nt_contiguous": _SUM,
    "gemm.m_grouped_bf16_gemm_nt_masked": "`masked_m` counts rows of all groups",
    "gemm.m_grouped_fp8_fp4_gemm_nt_masked": "`masked_m` counts rows of all groups",
    "gemm.m_grouped_fp8_gemm_nt_masked": "`masked_m` counts rows of all groups",
    "mhc.mhc_pre_from_partials": _SPLITS,
    "mhc.mhc_reduce_partials": _SPLITS,
    "moe.aux_fi": _SUM,
    "moe.expand_to_fused": _ROUTING,
    "moe.expand_to_fused_with_sf": _ROUTING,
    "moe.get_fused_mapping": _ROUTING,
    "moe.group_count": _SUM,
    "quant.per_block_cast": _BLOCKS,
    "quant.per_block_cast_lossless": _BLOCKS,
    "quant.per_block_cast_with_precomputed_sf": _BLOCKS,
    "quant.per_block_cast_with_sf_only": _BLOCKS,
    "quant.per_channel_cast": _BLOCKS,
    "quant.per_channel_cast_and_transpose": _BLOCKS,
    "quant.per_channel_cast_fused": _BLOCKS,
    "quant.per_channel_cast_fused_and_transpose": _BLOCKS,
    "quant.swiglu_backward": _ROUTING,
    "quant.swiglu_backward_and_per_token_cast": _ROUTING,
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": _BLOCKS,
    "transpose.batched_transpose": "moves rows to columns",
    "transpose.transpose": "moves rows to columns",
}

MAX_EMULATED_ROWS, MAX_EMULATED_BLOCKS = 400, 5
BATCHES = (1, 3, 64, 65, 193, 1000, 4096, 16384)
MAX_BYTES = 1 << 30  # of the arguments with rows, on a GPU

each_row_wise = pytest.mark.parametrize(
    "op", [op for op in operators() if op.name in ROW_WISE], ids=lambda op: op.name
)


def test_every_operator_is_classified() -> None:
    names = {op.name for op in operators()}
    assert not ROW_WISE.keys() & OTHERS.keys()
    assert names <= ROW_WISE.keys() | OTHERS.keys()


# ---- batches ------------------------------------------------------------------------------------


def row_tensors(rows: Rows, arguments: Arguments) -> list[torch.Tensor]:
    return [t for name in rows.arguments for t in tensors_in(arguments.get(name))]


def count_rows(rows: Rows, arguments: Arguments) -> int:
    """How many rows there are; 0 where the arguments cannot be divided into batches."""
    tensors = row_tensors(rows, arguments)
    counts = {t.shape[0] if t.dim() else 0 for t in tensors}
    return counts.pop() if len(counts) == 1 and rows.when(arguments) else 0


def over_rows(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value).contiguous().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(over_rows(item, change) for item in value)
    return value


def with_rows(
    rows: Rows, arguments: Arguments, change: Callable[[torch.Tensor], torch.Tensor]
) -> Arguments:
    """Arguments with other rows; each call gets copies, since operators may write to them."""
    return {
        name: over_rows(value, change if name in rows.arguments else lambda t: t)
        for name, value in arguments.items()
    }


def results_of(op: Operator, rows: Rows, arguments: Arguments) -> list[torch.Tensor]:
    """The results with rows."""
    found = tensors_in(op.outcome(op.function, arguments))
    return found if rows.results is None else [found[i] for i in rows.results]


def check_batch(
    op: Operator, arguments: Arguments, whole: list[torch.Tensor], first: int, count: int
) -> None:
    """Rows `first` to `first + count` alone have the bits that they have in the whole batch."""
    rows = ROW_WISE[op.name]
    alone = results_of(op, rows, with_rows(rows, arguments, lambda t: t[first : first + count]))
    assert len(alone) == len(whole)
    for one, all_rows in zip(alone, whole):
        expected = all_rows.narrow(rows.dim, first, count)
        assert one.shape == expected.shape
        # Strides may differ: those of scales in columns depend on the number of rows.
        assert_equal_results(one.reshape(-1).contiguous(), expected.reshape(-1).contiguous())


def largest_sample(op: Operator) -> Arguments:
    """The sample with the most rows among those that show all kernels, or among all."""
    rows = ROW_WISE[op.name]
    limit = MAX_EMULATED_ROWS if rows.step == 1 else MAX_EMULATED_BLOCKS * rows.step
    for samples in (emulated_of((op,))[op], op.cases.small):
        counted = [(count_rows(rows, sample.build("meta")), sample) for sample in samples]
        fitting = [each for each in counted if rows.step < each[0] <= limit]
        if fitting:
            return max(fitting, key=lambda each: each[0])[1].build("cpu")
    raise AssertionError(f"{op.name} has no small sample with several rows")


@pytest.mark.emulated
@each_row_wise
def test_emulated_batches(op: Operator) -> None:
    """The first row and the last ones, alone and in the largest batch of the samples."""
    rows = ROW_WISE[op.name]
    arguments = largest_sample(op)
    count = count_rows(rows, arguments)
    with tile_kernels.backend("emulate"):
        whole = results_of(op, rows, with_rows(rows, arguments, lambda t: t))
        check_batch(op, arguments, whole, 0, rows.step)
        last = min(3, count - 1) if rows.step == 1 else rows.step
        check_batch(op, arguments, whole, count - last, last)


@pytest.mark.gpu
@each_row_wise
def test_batches(op: Operator) -> None:
    """Batches around the edges of tiles, from both ends of a large one; and with fewer SMs."""
    rows = ROW_WISE[op.name]
    arguments = next(
        built
        for sample in (*op.cases.benchmarks, *op.cases.large, *op.cases.small)
        if count_rows(rows, built := sample.build("cuda")) > rows.step
    )
    given = count_rows(rows, arguments)
    row_bytes = sum(t.nbytes for t in row_tensors(rows, arguments)) // given
    most = min(BATCHES[-1], max(given, MAX_BYTES // max(row_bytes, 1)))
    most -= most % rows.step
    indices = torch.arange(most, device="cuda") % given
    arguments = with_rows(rows, arguments, lambda t: take_rows(t, indices))
    whole = results_of(op, rows, with_rows(rows, arguments, lambda t: t))
    for count in sorted({batch * rows.step for batch in BATCHES if batch * rows.step <= most}):
        check_batch(op, arguments, whole, 0, count)
        check_batch(op, arguments, whole, most - count, count)
    num_sms = tile_kernels.get_num_sms()
    tile_kernels.set_num_sms(num_sms // 3)
    try:
        check_batch(op, arguments, whole, 0, most)
    finally:
        tile_kernels.set_num_sms(num_sms)


def take_rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows by index, of any dtype."""
    if tensor.dtype.itemsize == 1:
        return tensor.contiguous().view(torch.uint8)[indices].view(tensor.dtype)
    return tensor[indices]
