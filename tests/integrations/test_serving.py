"""Functions of vLLM and SGLang against definitions in plain PyTorch; their signatures."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.integrations.test_deep_gemm import close, logits_of, moved, paged
from tests.requirements import CUDA, EMULATED_IN_FULL, TORCH
from tile_kernels.integrations import deep_gemm, serving, sglang, vllm
from tile_kernels.quant.formats import words_to_bytes

each_ground = pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
each_engine = pytest.mark.parametrize("engine", [vllm, sglang], ids=["vllm", "sglang"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- signatures ---------------------------------------------------------------------------------

# As the released packages have them: names, order, and defaults where they have any.
MHC = (
    "residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, "
    "sinkhorn_repeat, n_splits=1"
)
BEFORE = "x, residual, post_layer_mix, comb_res_mix"
SIGNATURES = {
    (vllm, "fused_topk"): "hidden_states, gating_output, topk, renormalize, indices_type=None, "
    "scoring_func='softmax'",
    (vllm, "fused_topk_bias"): "hidden_states, gating_output, scoring_func, "
    "e_score_correction_bias, topk, renormalize, indices_type=None, input_tokens=None, "
    "hash_indices_table=None, routed_scaling_factor=1.0, bias_vl=None, image_sentinel_lo=0",
    (vllm, "grouped_topk"): "hidden_states, gating_output, topk, renormalize, num_expert_group=0, "
    "topk_group=0, scoring_func='softmax', routed_scaling_factor=1.0, e_score_correction_bias=None",
    (vllm, "moe_align_block_size"): "topk_ids, block_size, num_experts, expert_map=None, "
    "pad_sorted_ids=False, ignore_invalid_experts=False, return_scatter_idx=False",
    (vllm, "moe_permute"): "hidden_states, a1q_scale, topk_ids, n_expert, n_local_expert=-1, "
    "expert_map=None, permuted_hidden_states=None, scratch=None",
    (vllm, "top_k_per_row_prefill"): "logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, "
    "num_rows, stride0, stride1, topk_tokens",
    (vllm, "top_k_per_row_decode"): "logits, next_n, seq_lens, raw_topk_indices, num_rows, "
    "stride0, stride1, topk_tokens",
    (vllm, "per_token_group_quant_fp8"): "x, group_size, eps=1e-10, dtype=None, "
    "column_major_scales=False, tma_aligned_scales=False, out_q=None, use_ue8m0=None",
    (vllm, "per_token_group_quant_fp8_packed_for_deepgemm"): "x, group_size, eps=1e-10, "
    "use_ue8m0=None, out_q=None",
    (vllm, "mhc_pre"): f"{MHC}, norm_weight=None, norm_eps=0.0",
    (vllm, "mhc_pre_delayed"): f"{MHC.removesuffix(', n_splits=1')}, pre_mix=None, x=None, "
    "norm_weight=None, norm_eps=1e-06",
    (vllm, "mhc_post"): BEFORE,
    (vllm, "mhc_fused_post_pre"): f"{BEFORE}, {MHC.partition(', ')[2]}, tile_n=1, "
    "norm_weight=None, norm_eps=0.0",
    (vllm, "hc_head"): "hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps",
    (sglang, "moe_fused_gate"): "scores, bias, topk, scoring_func='sigmoid', "
    "num_fused_shared_experts=0, renormalize=True, routed_scaling_factor=1.0, "
    "apply_routed_scaling_factor_on_output=False, moe_softcapping=0.0, num_expert_group=1, "
    "topk_group=1, *, bias_alt=None, input_ids=None, bias_alt_token_id=None, "
    "num_token_non_padded=None, renormalize_epsilon=0.0, packed_out=None, sqrtsoftplus_log1p=False",
    (sglang, "hash_topk"): "router_logits, input_ids, tid2eid, num_fused_shared_experts=0, "
    "routed_scaling_factor=1.0, scoring_func='sqrtsoftplus'",
    (sglang, "moe_align_block_size"): "topk_ids, block_size, num_experts, "
    "ignore_invalid_expert=False, *, return_inactive_prefix_count=False, pad_expert_ids=False",
    (sglang, "topk_transform_paged"): "scores, seq_lens, page_tables, out_page_indices, page_size, "
    "out_raw_indices=None",
    (sglang, "topk_transform_ragged_v2"): "scores, seq_lens, *, out_offsets, out_indices, "
    "row_starts=None",
    (sglang, "sglang_per_token_group_quant_fp8"): "x, group_size, eps=1e-10, "
    "column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False, "
    "fuse_silu_and_mul=False, masked_m=None, *, output_q=None, output_s=None",
    (sglang, "mhc_pre"): f"{MHC}, n_splits_pre=32, *, norm_weight=None, norm_eps=None",
    (sglang, "mhc_post"): BEFORE,
    (sglang, "mhc_fused_post_pre"): f"{BEFORE}, {MHC.partition(', ')[2]}, tile_n=1, *, "
    "norm_weight=None, norm_eps=None",
    (sglang, "fused_hc_head"): "x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps",
    (deep_gemm, "fp8_mqa_logits"): "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, "
    "clean_logits=True, max_seqlen_k=0",
    (deep_gemm, "get_paged_mqa_logits_metadata"): "context_lens, block_kv, num_sms, indices=None",
    (deep_gemm, "tf32_hc_prenorm_gemm"): "a, b, d, sqr_sum, num_splits=None",
}


@pytest.mark.parametrize(("where", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x))
def test_signatures(where: Any, name: str) -> None:
    parameters = inspect.signature(getattr(where, name)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[where, name]})"


@each_engine
def test_every_name_is_recorded(engine: Any) -> None:
    assert set(engine.__all__) == {name for where, name in SIGNATURES if where is engine}


# ---- routing ------------------------------------------------------------------------------------


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    logits = logits.double()
    if scoring == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if scoring == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def routed(
    logits: Tensor, bias: Tensor | None, topk: int, scoring: str, groups: int, kept: int
) -> tuple[Tensor, Tensor]:
    """Experts, best first, and their scores, by the definition."""
    scores = scores_of(logits, scoring)
    ranked = scores if bias is None else scores + bias
    if groups > 1:
        by_group = ranked.unflatten(1, (groups, -1))
        best = by_group.amax(2) if bias is None else by_group.topk(2, 2).values.sum(2)
        chosen = torch.zeros_like(best).scatter(1, best.topk(kept).indices, 1.0)
        whole = chosen.repeat_interleave(logits.shape[1] // groups, 1)
        ranked = ranked.masked_fill(whole == 0, -torch.inf)
    ids = ranked.topk(topk).indices
    return ids, scores.gather(1, ids)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("with_bias", [False, True])
@each_ground
def test_experts_of_groups(
    scoring: str, with_bias: bool, renormalize: bool, ground: tuple[str, str]
) -> None:
    backend, device = ground
    if scoring == "softmax" and with_bias:
        with pytest.raises(ValueError, match="bias must be None with scoring_func softmax"):
            serving.route(draw(3, 8), 2, scoring_func=scoring, bias=torch.zeros(8))
        return
    logits = draw(40, 64)
    bias = draw(64, seed=1) if with_bias else None
    expected, scores = routed(logits, bias, 6, scoring, 8, 3)
    weights = 2.5 * (scores / scores.sum(1, keepdim=True) if renormalize else scores)
    given = moved((logits, logits, 6, renormalize, 8, 3, scoring, 2.5, bias), device)
    with tile_kernels.backend(backend):
        found, ids = vllm.grouped_topk(*given)
    assert (found.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids.cpu().long(), expected)
    torch.testing.assert_close(found.cpu(), weights.float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_ground
def test_experts_without_groups(dtype: torch.dtype, ground: tuple[str, str]) -> None:
    backend, device = ground
    logits = (draw(9, 32) * 4).to(dtype)
    expected, scores = routed(logits, None, 4, "softmax", 0, 0)
    with tile_kernels.backend(backend):
        weights, ids, numbers = vllm.fused_topk(logits.to(device), logits.to(device), 4, False)
        _, wide, _ = vllm.fused_topk(logits.to(device), logits.to(device), 4, True, torch.int64)
    chosen = logits.float().gather(1, ids.cpu().long())
    assert torch.equal(chosen, logits.float().gather(1, expected))  # equal logits may swap
    torch.testing.assert_close(weights.cpu(), scores.float(), rtol=2e-6, atol=0)
    assert torch.equal(wide, ids.long())
    assert numbers.tolist() == [[k * 9 + t for k in range(4)] for t in range(9)]


@each_ground
def test_the_gate_of_sglang(ground: tuple[str, str]) -> None:
    backend, device = ground
    logits, bias = draw(10, 64), draw(64, seed=1)
    expected, scores = routed(logits, bias, 6, "sigmoid", 8, 4)
    valid = torch.tensor([7], device=device)
    with tile_kernels.backend(backend):
        weights, ids = sglang.moe_fused_gate(
            logits.to(device), bias.to(device), 6, routed_scaling_factor=2.5, num_expert_group=8,
            topk_group=4, num_token_non_padded=valid,
        )  # fmt: skip
        scaled, _ = sglang.moe_fused_gate(
            logits.to(device), bias.to(device), 6, "sigmoid", 0, True, 2.5, True, 0, 8, 4
        )
        plain, none = sglang.moe_fused_gate(
            logits.to(device), None, 6, num_expert_group=8, topk_group=4,
            num_token_non_padded=valid,
        )  # fmt: skip
    right = (scores / scores.sum(1, keepdim=True)).float()
    assert torch.equal(ids[:7].cpu().long(), expected[:7])
    torch.testing.assert_close(weights[:7].cpu(), right[:7], rtol=2e-6, atol=0)
    torch.testing.assert_close(scaled.cpu(), 2.5 * right, rtol=2e-6, atol=0)
    for count in (0, 7, 70):
        with tile_kernels.backend(backend):
            _, of_count = serving.route(
                logits.to(device), 6, scoring_func="sigmoid", bias=bias.to(device), num_groups=8,
                topk_groups=4, num_valid=count,
            )  # fmt: skip
        assert torch.equal(of_count[:count].cpu().long(), expected[:count])
        assert of_count[count:].eq(-1).all()
    for padded, of_padding in ((ids, weights), (none, plain)):
        assert padded[7:].eq(-1).all()
        assert of_padding[7:].eq(0).all()
        assert padded[:7].ge(0).all()


@each_ground
def test_experts_from_a_table(ground: tuple[str, str]) -> None:
    backend, device = ground
    table = torch.rand(50, 16, generator=torch.Generator().manual_seed(0)).topk(4).indices
    tokens, logits = torch.tensor([3, 49, 3, 0]), draw(4, 16)
    scores = scores_of(logits, "sqrtsoftplus").gather(1, table[tokens])
    right = (1.5 * scores / scores.sum(1, keepdim=True)).float()
    given = moved((logits, tokens.int(), table.int()), device)
    with tile_kernels.backend(backend):
        weights, ids = sglang.hash_topk(*given, routed_scaling_factor=1.5)
        again = vllm.fused_topk_bias(
            given[0], given[0], "sqrtsoftplus", None, 4, True, None, given[1], given[2], 1.5
        )
    assert torch.equal(ids.cpu(), table[tokens].int())
    torch.testing.assert_close(weights.cpu(), right, rtol=2e-6, atol=0)
    assert torch.equal(weights, again[0])
    assert torch.equal(ids, again[1])
    biased = vllm.fused_topk_bias(logits, logits, "sigmoid", torch.arange(16.0), 4, True)[1]
    assert biased.eq(torch.tensor([15, 14, 13, 12])).all()


# ---- maps of rows -------------------------------------------------------------------------------


def blocks_of(ids: Tensor, size: int, experts: list[int]) -> tuple[list[int], list[int]]:
    """Rows and the experts of blocks, one expert after another."""
    rows, numbers, flat = [], [], ids.flatten().tolist()
    for expert in experts:
        own = [i for i, found in enumerate(flat) if found == expert]
        own += [len(flat)] * (-len(own) % size)
        rows += own
        numbers += [expert] * (len(own) // size)
    return rows, numbers


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("padded", [False, True])
@each_ground
def test_blocks(tokens: int, padded: bool, ground: tuple[str, str]) -> None:
    backend, device = ground
    ids = torch.rand(tokens, 16, generator=torch.Generator().manual_seed(0)).topk(3).indices
    ids[0, 0] = -1
    rows, experts = blocks_of(ids, 4, list(range(16)))
    with tile_kernels.backend(backend):
        found = vllm.moe_align_block_size(ids.int().to(device), 4, 16, pad_sorted_ids=padded)
        other = sglang.moe_align_block_size(ids.int().to(device), 4, 16)
    most = tokens * 3 + 16 * 3
    most = -(-most // 4) * 4 if padded else most
    assert len(found[0]) == (min(most, tokens * 12) if tokens * 3 < 16 else most)
    assert [x.dtype for x in found] == [torch.int32] * 3
    assert found[2].tolist() == [len(rows)]
    assert found[0][: len(rows)].tolist() == rows
    assert found[0][len(rows) :].eq(tokens * 3).all()
    assert found[1][: len(experts)].tolist() == experts
    assert len(found[1]) == -(-len(found[0]) // 4)
    assert torch.equal(other[2], found[2])
    assert torch.equal(other[0][: len(rows)], found[0][: len(rows)])


def test_blocks_of_the_experts_of_a_rank() -> None:
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]]).int()
    local = torch.tensor([-1, 0, -1, 1]).int()
    rows, experts, count = vllm.moe_align_block_size(ids, 2, 4, local)
    assert rows[: count.item()].tolist() == [0, 6, 3, 6, 2, 5, 1, 4]
    assert experts[: count.item() // 2].tolist() == [-1, 0, -1, 1]
    rows, experts, count = vllm.moe_align_block_size(ids, 2, 4, local, ignore_invalid_experts=True)
    assert rows[: count.item()].tolist() == [3, 6, 1, 4]
    assert experts[: count.item() // 2].tolist() == [0, 1]
    none = vllm.moe_align_block_size(ids[:0], 2, 4)
    assert [x.tolist() for x in none] == [[], [], [0]]


@each_ground
def test_permutation(ground: tuple[str, str]) -> None:
    backend, device = ground
    hidden, scale = draw(5, 32).bfloat16(), draw(5, 2, seed=1)
    ids = torch.tensor([[0, 5], [5, 3], [2, 1], [3, 0], [4, 5]]).int()
    local = torch.tensor([-1, 0, -1, 1, -1, 2]).int()
    given = moved((hidden, scale, ids), device)
    with tile_kernels.backend(backend):
        rows, scales, first, places, choices = vllm.moe_permute(
            *given, 6, 3, local.to(device), torch.empty(10, 32).bfloat16().to(device)
        )
    order = [5, 3, 6, 1, 2, 9]  # choices of the experts 1, 3 and 5
    assert first.tolist() == [0, 1, 3, 6]
    assert first.dtype == torch.int64
    assert choices.tolist() == [*order, 10, 10, 10, 10]
    tokens = torch.tensor(order) // 2
    assert torch.equal(rows[:6].cpu(), hidden[tokens])
    assert torch.equal(scales[:6].cpu(), scale[tokens])
    assert rows[6:].eq(0).all()
    expected = torch.full((10,), -1)
    expected[torch.tensor(order)] = torch.arange(6)
    assert places.flatten().tolist() == expected.tolist()
    empty = vllm.moe_permute(hidden[:0], None, ids[:0], 6)
    assert empty[0].shape == (0, 32)
    assert empty[2].tolist() == [0] * 7


# ---- the choice of keys -------------------------------------------------------------------------


def best(logits: Tensor, k: int, start: int, end: int) -> list[int]:
    row = logits[start:end]
    return sorted(row.topk(min(k, len(row))).indices.tolist())


def rows_of(found: Tensor) -> list[list[int]]:
    return [[i for i in row if i >= 0] for row in found.tolist()]


@each_ground
def test_rows_of_a_prompt(ground: tuple[str, str]) -> None:
    backend, device = ground
    memory = draw(6, 320)
    logits = memory[:, :300]
    start, end = torch.tensor([0, 5, 100, 7, 9, 0]), torch.tensor([300, 200, 104, 7, 60, 9])
    out = torch.full((6, 16), 7, dtype=torch.int32, device=device)
    with tile_kernels.backend(backend):
        vllm.top_k_per_row_prefill(
            memory.to(device)[:, :300], start.int().to(device), end.int().to(device), out, 5, 320,
            1, 16,
        )  # fmt: skip
    right = [best(logits[r], 16, int(start[r]), int(end[r])) for r in range(5)]
    assert rows_of(out[:5]) == right
    assert out[5].eq(7).all()  # not one of the rows
    assert out[3].eq(-1).all()


@each_ground
def test_rows_of_decoding(ground: tuple[str, str]) -> None:
    backend, device = ground
    logits, lengths = draw(6, 64).to(device), torch.tensor([10, 64, 2], device=device).int()
    ends = [9, 10, 63, 64, 1, 2]
    with tile_kernels.backend(backend):
        for given in (lengths, torch.tensor(ends, device=device).int().view(3, 2)):
            out = torch.empty(6, 8, dtype=torch.int32, device=device)
            vllm.top_k_per_row_decode(logits, 2, given, out, 6, 64, 1, 8)
            assert rows_of(out) == [best(logits[r].cpu(), 8, 0, end) for r, end in enumerate(ends)]


@each_ground
def test_slots_of_pages(ground: tuple[str, str]) -> None:
    backend, device = ground
    scores, lengths = draw(3, 64), torch.tensor([64, 5, 0])
    tables = torch.tensor([[3, 9, 1, 0], [7, 7, 7, 7], [2, 2, 2, 2]])
    given = moved((scores, lengths.int(), tables.int()), device)
    slots = torch.empty(3, 8, dtype=torch.int32, device=device)
    raw = torch.empty_like(slots)
    with tile_kernels.backend(backend):
        sglang.topk_transform_paged(*given, slots, 16, raw)
    right = [best(scores[r], 8, 0, int(lengths[r])) for r in range(3)]
    assert rows_of(raw) == right
    pages = [[int(tables[r, i // 16]) * 16 + i % 16 for i in row] for r, row in enumerate(right)]
    assert rows_of(slots) == pages


@each_ground
def test_ragged_positions(ground: tuple[str, str]) -> None:
    backend, device = ground
    scores, lengths = draw(3, 64), torch.tensor([20, 5, 0])
    starts, offsets = torch.tensor([40, 3, 9]), torch.tensor([1000, 50, 3])
    given = moved((scores, lengths.int()), device)
    out = torch.empty(3, 8, dtype=torch.int32, device=device)
    with tile_kernels.backend(backend):
        for begin in (None, starts):
            sglang.topk_transform_ragged_v2(
                *given, out_offsets=offsets.int().to(device), out_indices=out,
                row_starts=None if begin is None else begin.int().to(device),
            )  # fmt: skip
            first = [0, 0, 0] if begin is None else begin.tolist()
            for r in range(3):
                chosen = best(scores[r], 8, first[r], first[r] + int(lengths[r]))
                assert rows_of(out)[r] == [i + int(offsets[r]) for i in chosen]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@each_ground
def test_keys_of_pages(fmt: str, ground: tuple[str, str]) -> None:
    """The choice is exact for the logits that the same formats give."""
    backend, device = ground
    *given, expected = paged(fmt)
    given = moved(tuple(given), device)
    slots = torch.empty(6, 16, dtype=torch.int32, device=device)
    with tile_kernels.backend(backend):
        logits = deep_gemm.fp8_fp4_paged_mqa_logits(*given, None, 192)
        found = serving.indexer_select_paged(*given, 16, page_out=slots)
        early = serving.indexer_select_paged(*given, 16, max_context_len=70)
    close(logits, expected)
    lengths, table = given[3].flatten().tolist(), given[4].tolist()
    for row, length in enumerate(lengths):
        assert rows_of(found)[row] == best(logits[row].cpu(), 16, 0, length)
        # Pages of 64: keys of the first two of them are looked at.
        assert rows_of(early)[row] == best(logits[row].cpu(), 16, 0, min(length, 128))
        pages = [table[row // 2][i // 64] * 64 + i % 64 for i in rows_of(found)[row]]
        assert rows_of(slots)[row] == pages
    assert logits_of(draw(1, 1, 4), draw(2, 4), draw(1, 1)).shape == (1, 2)


# ---- casts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 9])
@each_ground
def test_casts_of_groups(rows: int, ground: tuple[str, str]) -> None:
    backend, device = ground
    x = draw(rows, 384).bfloat16()
    x[0, :128] = 0
    groups = x.float().unflatten(1, (3, 128))
    sf = groups.abs().amax(2).clamp(min=1e-10) / 448
    data = (groups / sf[..., None]).clamp(-448, 448).flatten(1)
    x = x.to(device)
    with tile_kernels.backend(backend):
        found, scales = vllm.per_token_group_quant_fp8(x, 128)
        columns = vllm.per_token_group_quant_fp8(x, 128, column_major_scales=True)[1]
        padded = sglang.sglang_per_token_group_quant_fp8(
            x, 128, column_major_scales=True, scale_tma_aligned=True
        )[1]
        powers = vllm.per_token_group_quant_fp8(x, 128, use_ue8m0=True)[1]
        row_major = sglang.sglang_per_token_group_quant_fp8(x, 128, scale_ue8m0=True)[1]
        _, packed = vllm.per_token_group_quant_fp8_packed_for_deepgemm(x, 128)
        _, same = sglang.sglang_per_token_group_quant_fp8(
            x, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=True
        )
        batch = vllm.per_token_group_quant_fp8(x.view(rows, 1, 384), 128)
        into = torch.empty(rows, 384, dtype=torch.float8_e4m3fn, device=device)
        assert vllm.per_token_group_quant_fp8(x, 128, out_q=into)[0] is into
    torch.testing.assert_close(scales.cpu(), sf, rtol=1e-6, atol=0)
    assert (found.float().cpu() - data).abs().le(data.abs() / 15 + 2**-9).all()
    assert torch.equal(into.float(), found.float())
    assert torch.equal(columns, scales)
    assert torch.equal(padded, scales)
    assert columns.stride() == (1, rows)
    assert padded.stride() == (1, -(-rows // 4) * 4)
    assert torch.equal(powers, row_major)
    assert torch.equal(powers, torch.exp2(torch.ceil(torch.log2(scales))))
    exponents = words_to_bytes(packed)[:, :3]
    assert torch.equal(torch.exp2(exponents.float() - 127), powers)
    assert torch.equal(packed, same)
    assert (batch[0].shape, batch[1].shape) == ((rows, 1, 384), (rows, 1, 3))
    assert torch.equal(batch[1].view(rows, 3), scales)


@pytest.mark.parametrize("ue8m0", [False, True])
@each_ground
def test_casts_of_masked_batches(ue8m0: bool, ground: tuple[str, str]) -> None:
    """SwiGLU of the rows that count, in a matrix for each expert, with scales in its columns."""
    backend, device = ground
    experts, size, width = 3, 6, 128
    x = draw(experts, size, 2 * width).bfloat16().to(device)
    counts = torch.tensor([6, 0, 2], dtype=torch.int32, device=device)
    poisoned = x.clone()
    poisoned[1], poisoned[2, 2:] = torch.nan, torch.nan
    layout = {
        "column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": ue8m0,
    }  # fmt: skip
    with tile_kernels.backend(backend):
        cast = sglang.sglang_per_token_group_quant_fp8
        found, scales = cast(poisoned, 64, fuse_silu_and_mul=True, masked_m=counts, **layout)
        whole, of_whole = cast(x, 64, fuse_silu_and_mul=True, **layout)
        plain, of_plain = cast(x, 64, masked_m=counts, **layout)
    assert (found.shape, scales.shape) == ((3, 6, 128), (3, 6, 1 if ue8m0 else 2))
    assert scales.stride()[1:] == (1, 8)

    def values(data: Tensor, sf: Tensor) -> Tensor:
        if ue8m0:
            sf = torch.exp2(words_to_bytes(sf)[..., : data.shape[-1] // 64].float() - 127)
        return data.float() * sf.repeat_interleave(64, -1)

    gate, value = x.double().chunk(2, -1)
    expected = (gate * gate.sigmoid() * value).cpu()
    for e, count in ((0, 6), (2, 2)):
        for got in (values(found, scales), values(whole, of_whole)):
            near(got[e, :count], expected[e, :count], 0.06 * float(expected.abs().max()))
        near(values(plain, of_plain)[e, :count], x[e, :count].double().cpu(), 0.25)
    assert torch.isfinite(found.float()).all()  # other rows are not read


# ---- hyper-connections --------------------------------------------------------------------------


def streams(device: str, seed: int = 0) -> tuple[Any, ...]:
    """`residual`, then the arguments of `mhc_pre` after it."""
    m, h = 4, 64
    tensors = (
        draw(2, 5, m, h, seed=seed).bfloat16(), 0.05 * draw(m * (m + 2), m * h, seed=1),
        torch.tensor([0.5, 0.7, 0.9]), 0.3 * draw(m * (m + 2), seed=2),
    )  # fmt: skip
    return (*moved(tensors, device), 1e-6, 1e-6, 1e-6, 2.0, 20)


def defined_pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`post`, `comb` and layer input in float64, by the definition."""
    rms_eps, pre_eps, sinkhorn_eps, factor, repeat = numbers
    streams, m = residual.double(), residual.shape[-2]
    flat = streams.flatten(-2)
    mixes = flat @ fn.double().T * (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()
    scales = torch.cat([scale[i].expand(n) for i, n in enumerate((m, m, m * m))])
    pre, post, comb = (mixes * scales + base).split([m, m, m * m], -1)
    comb = comb.unflatten(-1, (m, m)).softmax(-1) + sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    layer_input = ((pre.sigmoid() + pre_eps)[..., None] * streams).sum(-2)
    return (factor * post.sigmoid())[..., None], comb, layer_input


def near(found: Tensor, expected: Tensor, limit: float) -> None:
    assert found.shape == expected.shape
    assert (found.double().cpu() - expected).abs().max() < limit


@each_engine
@each_ground
def test_before_a_sublayer(engine: Any, ground: tuple[str, str]) -> None:
    backend, device = ground
    given = streams(device)
    weight = draw(64, seed=3).abs().bfloat16()
    post, comb, layer_input = defined_pre(*moved(given, "cpu"))
    norm = layer_input * (layer_input.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    with tile_kernels.backend(backend):
        plain = engine.mhc_pre(*given)
        found = engine.mhc_pre(*given, norm_weight=weight.to(device), norm_eps=1e-5)
    for results in (plain, found):
        near(results[0], post, 2e-3)
        near(results[1], comb, 2e-3)
    near(plain[2], layer_input, 0.03)
    near(found[2], norm * weight.double(), 0.06)
    assert found[2].dtype == torch.bfloat16


@each_engine
@each_ground
def test_between_sublayers(engine: Any, ground: tuple[str, str]) -> None:
    """The fused form has the bits of the two steps, but for the norm; the first is defined."""
    backend, device = ground
    residual, *rest = streams(device)
    x = draw(2, 5, 64, seed=4).bfloat16().to(device)
    weight = draw(64, seed=3).to(device)
    norm = {"norm_weight": weight, "norm_eps": 1e-6}
    with tile_kernels.backend(backend):
        post, comb, _ = engine.mhc_pre(residual, *rest)
        found = engine.mhc_fused_post_pre(x, residual, post, comb, *rest, **norm)
        after = engine.mhc_post(x, residual, post, comb)
        steps = (after, *engine.mhc_pre(after, *rest, **norm))
    for one, other in zip(found[:3], steps[:3]):
        assert torch.equal(one, other)
    near(found[3], steps[3].double().cpu(), 0.03)  # the norm adds in another order
    mixed = torch.einsum("...ij,...ih->...jh", comb.double(), residual.double())
    near(found[0], (mixed + post.double() * x.double()[..., None, :]).cpu(), 0.04)


@each_ground
def test_delayed_weights(ground: tuple[str, str]) -> None:
    """A sublayer reads the streams with the weights that the one before it computed."""
    backend, device = ground
    residual, *rest = streams(device)
    weight = draw(64, seed=3).abs().bfloat16().to(device)
    norm = {"norm_weight": weight, "norm_eps": 1e-5}
    with tile_kernels.backend(backend):
        post, comb, x, weights = vllm.mhc_pre_delayed(residual, *rest)
        _, _, after, again = vllm.mhc_pre_delayed(residual, *rest, weights)
        _, _, normed, _ = vllm.mhc_pre_delayed(residual, *rest, weights, **norm)
        projected = vllm.mhc_pre_delayed(residual, *rest, x=residual.flatten(-2).contiguous() * 0.5)
        same = vllm.mhc_pre(residual, *rest)
    expected = defined_pre(*moved((residual, *rest), "cpu"))
    near(post, expected[0], 2e-3)
    near(comb, expected[1], 2e-3)
    assert torch.equal(x, residual[..., 0, :])  # nothing is known before
    assert torch.equal(again, weights)
    # The weights of the same sublayer: then it is the form without delay.
    near(after, expected[2], 0.03)
    near(after, same[2].double().cpu(), 0.03)
    values = after.double().cpu()
    rms = (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    near(normed, values * rms * weight.double().cpu(), 0.06)
    near(projected[0], expected[0], 2e-3)  # a norm removes the factor


@each_ground
def test_head(ground: tuple[str, str]) -> None:
    backend, device = ground
    residual, fn, scale, base, *_ = streams(device)
    given = residual, fn[:4].contiguous(), scale[:1], base[:4].contiguous(), 1e-6, 1e-3
    with tile_kernels.backend(backend):
        found = vllm.hc_head(*given)
        assert torch.equal(found, sglang.fused_hc_head(*given))
    values, fn, scale, base = (x.double().cpu() for x in given[:4])
    flat = values.flatten(-2)
    mixes = flat @ fn.T * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    weights = (mixes * scale + base).sigmoid() + 1e-3
    near(found, (weights[..., None] * values).sum(-2), 0.03)


# ---- no host waits ------------------------------------------------------------------------------


@pytest.mark.gpu
def test_nothing_waits_and_graphs_record() -> None:
    """Each function in a CUDA graph, whose replay follows new values of its inputs."""
    *given, _ = moved(paged("e4m3"), "cuda")
    logits = draw(6, 64).cuda()
    ends = torch.full((6,), 60, device="cuda", dtype=torch.int32)
    x, weight = draw(5, 256).bfloat16().cuda(), draw(64).cuda()
    state = streams("cuda")
    slots = torch.empty(6, 8, dtype=torch.int32, device="cuda")
    calls: list[Any] = [
        lambda: vllm.grouped_topk(logits, logits, 4, True, 8, 4, "sigmoid"),
        lambda: sglang.moe_fused_gate(logits, logits[0], 4, num_token_non_padded=ends[:1]),
        lambda: vllm.moe_align_block_size(slots, 16, 64),
        lambda: vllm.moe_permute(logits, None, slots, 64),
        lambda: serving.topk_rows(logits, 8, ends, start=ends - 50),
        lambda: sglang.topk_transform_paged(logits, ends, given[4].repeat(2, 1), slots, 32),
        lambda: serving.indexer_select_paged(*given, 16),
        lambda: deep_gemm.fp8_fp4_paged_mqa_logits(*given, None, 192),
        lambda: deep_gemm.get_paged_mqa_logits_metadata(given[3], 64, 132),
        lambda: vllm.per_token_group_quant_fp8(x, 128, use_ue8m0=True),
        lambda: vllm.mhc_pre(*state, norm_weight=weight, norm_eps=1e-6),
    ]
    slots.random_(0, 64)
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for call in (calls[0], calls[2], calls[4], calls[6], calls[10]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = call()
        graph.replay()
        again = call()
        for one, other in zip(
            recorded if isinstance(recorded, tuple) else (recorded,),
            again if isinstance(again, tuple) else (again,),
        ):
            assert torch.equal(one, other)


# ---- errors -------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    residual, *rest = streams("cpu")
    between = residual[..., 0, :].contiguous(), residual, residual, residual, *rest
    logits, slots = draw(4, 16), torch.zeros(4, 8, dtype=torch.int32)
    ends = torch.full((4,), 9)
    for call, message in (
        (
            lambda: vllm.fused_topk(logits[:2], logits, 2, True),
            "fused_topk: hidden_states must have 4",
        ),
        (
            lambda: vllm.grouped_topk(logits, logits, 5, True, 8, 2),
            "grouped_topk: num_groups and topk",
        ),
        (
            lambda: vllm.fused_topk_bias(logits, logits, "tanh", None, 2, True),
            "scoring_func must be",
        ),
        (
            lambda: vllm.fused_topk_bias(logits, logits, "sigmoid", None, 2, True, bias_vl=ends),
            "fused_topk_bias: bias_vl must be None, got a value of type Tensor",
        ),
        (
            lambda: sglang.moe_fused_gate(logits, None, 2, num_fused_shared_experts=1),
            "moe_fused_gate: num_fused_shared_experts must be 0, got 1",
        ),
        (
            lambda: sglang.moe_fused_gate(logits, slots, 2),
            r"bias must have 1 dim|bias must be float32",
        ),
        (lambda: vllm.moe_align_block_size(logits, 4, 8), "topk_ids must be int32 or int64"),
        (
            lambda: vllm.moe_align_block_size(slots, 4, 8, return_scatter_idx=True),
            "moe_align_block_size: return_scatter_idx must be False, got True",
        ),
        (lambda: vllm.moe_permute(logits, None, slots, 8, 4), "expert_map must be given where"),
        (
            lambda: vllm.top_k_per_row_prefill(logits, ends, ends, slots, 4, 20, 1, 8),
            r"stride0 and stride1 must be the strides \(16, 1\) of logits, got 20 and 1",
        ),
        (
            lambda: vllm.top_k_per_row_prefill(logits, ends, ends, slots, 4, 16, 1, 4),
            r"out must be a torch.int32 tensor of shape \(4, 4\), got",
        ),
        (
            lambda: vllm.per_token_group_quant_fp8(logits, 12),
            "x must have a multiple of 12 channels",
        ),
        (
            lambda: vllm.per_token_group_quant_fp8(logits, 16, dtype=torch.int8),
            "per_token_group_quant_fp8: dtype must be float8_e4m3fn or None, got torch.int8",
        ),
        (
            lambda: sglang.sglang_per_token_group_quant_fp8(logits, 16, fuse_silu_and_mul=True),
            "x must have a multiple of 32 channels, got 16",
        ),
        (
            lambda: sglang.sglang_per_token_group_quant_fp8(
                logits, 16, masked_m=torch.ones(1).int()
            ),
            "x must have 3 dimensions with masked_m, got 2",
        ),
        (
            lambda: vllm.mhc_pre_delayed(*streams("cpu"), torch.ones(2, 5)),
            "mhc_pre_delayed: pre_mix must be float32 of shape",
        ),
        (
            lambda: sglang.mhc_pre(*streams("cpu"), norm_weight=torch.ones(64)),
            "^mhc_pre: norm_eps must be given with norm_weight",
        ),
        (
            lambda: vllm.mhc_pre(*streams("cpu"), n_splits=0),
            "^mhc_pre: n_splits must be at least 1, got 0",
        ),
        (
            lambda: sglang.mhc_pre(streams("cpu")[0].float(), *streams("cpu")[1:]),
            "^mhc_pre: residual must be bfloat16, got float32",
        ),
        (
            lambda: sglang.mhc_pre(*streams("cpu"), n_splits_pre=0),
            "^mhc_pre: n_splits_pre must be at least 1, got 0",
        ),
        (
            lambda: vllm.mhc_pre_delayed(None, *streams("cpu")[1:]),
            "^mhc_pre_delayed: residual must",
        ),
        (
            lambda: serving.pre(*streams("cpu"), norm_weight=torch.ones(64), norm_eps=None),
            "^pre: norm_eps must be given with norm_weight",
        ),
        *(
            (
                functools.partial(
                    engine.mhc_fused_post_pre, *between, norm_weight=torch.ones(64), norm_eps=None
                ),
                f"^{name}: norm_eps must be given with norm_weight",
            )
            for engine, name in ((sglang, "mhc_fused_post_pre"), (vllm, "mhc_fused_post_pre"))
        ),
        (
            lambda: serving.fused_post_pre(*between, norm_weight=torch.ones(64), norm_eps=None),
            "^fused_post_pre: norm_eps must be given with norm_weight",
        ),
        (
            lambda: sglang.mhc_fused_post_pre(*between, tile_n=0),
            "^mhc_fused_post_pre: tile_n must be at least 1, got 0",
        ),
        (lambda: vllm.mhc_post(*between[:3], None), "^mhc_post: post_layer_mix must be float32"),
        (lambda: vllm.hc_head(None, *between[5:8], 1e-6, 1e-6), "^hc_head: residual must be"),
        (lambda: sglang.hash_topk(None, slots[0], slots), "^hash_topk: logits must be"),
        (lambda: vllm.fused_topk(logits, logits, 17, True), "^fused_topk: num_topk must be"),
        (lambda: serving.route(logits, 17, scoring_func="softmax"), "^route: num_topk must be"),
        (lambda: serving.topk_rows(logits, 0, ends), "^topk_rows: k must be"),
        (
            lambda: serving.route(logits, 2, scoring_func="sigmoid", num_valid=torch.ones(4).int()),
            r"^route: num_valid must have shape \[1\], got \(4,\)",
        ),
        (
            lambda: sglang.moe_fused_gate(logits, None, 2, num_token_non_padded=torch.ones(1)),
            "^moe_fused_gate: num_valid must be int32 or int64, got float32",
        ),
        (
            lambda: serving.route(logits, 2, scoring_func="sigmoid", num_valid=-1),
            "^route: num_valid must be at least 0, got -1",
        ),
        (
            lambda: vllm.per_token_group_quant_fp8(logits, 16, eps="1"),
            "^per_token_group_quant_fp8: eps must be a number, got str",
        ),
        (lambda: vllm.fused_topk(None, logits, 2, True), "^fused_topk: hidden_states must be a t"),
        (
            lambda: vllm.fused_topk_bias(
                logits, logits, "sigmoid", None, 2, True, None, slots[0, :4], slots
            ),
            r"^fused_topk_bias: hash_indices_table must have shape \[vocabulary, 2\], got \(4, 8\)",
        ),
        (
            lambda: vllm.top_k_per_row_prefill(logits, ends, None, slots, 4, 16, 1, 8),
            "^top_k_per_row_prefill: cu_seqlen_ke must be a torch.Tensor, got NoneType",
        ),
        (
            lambda: vllm.top_k_per_row_decode(logits, 1, [1], slots, 4, 16, 1, 8),
            "^top_k_per_row_decode: seq_lens must be a torch.Tensor, got list",
        ),
        (
            lambda: sglang.topk_transform_paged(logits, ends, None, slots, 2),
            "^topk_transform_paged: page_table must be a torch.Tensor, got NoneType",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
