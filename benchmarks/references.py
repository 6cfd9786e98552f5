"""What the PyTorch references cost beside straightforward code: `python -m benchmarks.references`.

Without a GPU the references are what runs. Each operator's is timed beside what one would write
without a thought for single bits, on one thread of the CPU, at sizes of a few thousand tokens.
`SAME` marks a reference that is that code already. The results are a file
`references.<machine>.json`: the machine, versions, the date, and milliseconds of processor time.
"""

# ruff: noqa: D103 - the straightforward functions are named after what they compute

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Arguments, tensors_in
from tile_kernels.runtime.operator import Operator
from tile_kernels.testing import benchmark
from tile_kernels.torch import (
    get_fused_mapping,
    mhc,
    mhc_norm_fn_fwd,
    per_block_cast_with_sf_only,
    per_token_cast,
)

LIMIT = 3.0  # times the straightforward code
# Why some references stay above it: their results are defined to the bit.
REASONS = {
    "engram.grad_w_reduce": "parts are added one by one, in their order",
    "mhc.mhc_head_compute_mix": "a fused multiply-add, exact by float64; microseconds",
    "mhc.mhc_multilayer_recompute": "as mhc_post",
    "mhc.mhc_post": "20 fused multiply-adds in order, exact by float64, for one matrix product",
    "mhc.mhc_post_bwd": "as mhc_post, and sums in float64",
    "mhc.mhc_post_fwd": "as mhc_post",
    "mhc.mhc_pre_apply_mix": "4 fused multiply-adds in order, exact by float64",
    "mhc.mhc_pre_split_mixes": "a fused multiply-add, exact by float64; microseconds",
}
SAME = "the reference"  # is the straightforward code

Plain = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One operator. Milliseconds; no `plain_ms` where the reference is the straightforward code."""

    op: str
    reference_ms: float
    plain_ms: float | None

    @property
    def ratio(self) -> float:
        """Times the straightforward code; 1 where the two are the same."""
        return 1.0 if self.plain_ms is None else self.reference_ms / self.plain_ms


# ---- arguments ----------------------------------------------------------------------------------


class Sizes:
    """The sizes of all arguments, which tests make small."""

    def __init__(self, scale: int = 1) -> None:
        self.tokens, self.hidden = 4096 // scale, 2048 // min(scale, 8)
        self.experts, self.topk, self.streams, self.window = 64, 8, 4, 4

    def floats(self, *shape: int) -> Tensor:
        """Normal float32."""
        return torch.randn(shape)

    def bf16(self, *shape: int) -> Tensor:
        """Normal bfloat16."""
        return torch.randn(shape).bfloat16()


def _routed(s: Sizes, tokens: int) -> tuple[Tensor, ...]:
    chosen = torch.rand(tokens, s.experts).topk(s.topk).indices
    mapping = get_fused_mapping(chosen, s.experts, 0, 128)
    return mapping[:4]


def _moe(s: Sizes) -> dict[str, Arguments]:
    tokens = s.tokens // 8  # of which each has 8 rows
    pos_to_expert, _, _, slots = _routed(s, tokens)
    logits, bias = s.floats(s.tokens, s.experts * 4), s.floats(s.experts * 4)
    chosen = torch.rand(s.tokens, s.experts).topk(s.topk).indices
    x = s.bf16(tokens, s.hidden)
    gate: Arguments = {
        "logits": logits, "bias": bias, "num_topk": s.topk, "num_topk_groups": 4, "num_groups": 8,
        "use_shared_as_routed": False, "num_shared_experts": 0, "routed_scaling_factor": 1.5,
        "ep_rank": 0, "num_ep_ranks": 1, "tp_rank": 0, "num_tp_ranks": 1, "scoring_func": "sigmoid",
    }  # fmt: skip
    return {
        "aux_fi": {"topk_idx": chosen, "num_experts": s.experts, "num_aux_topk": s.topk},
        "expand_to_fused": {
            "x": x, "token_topk_to_pos": slots, "pos_to_expert": pos_to_expert,
        },
        "expand_to_fused_with_sf": {
            "x": per_token_cast(x, "e4m3", 128), "num_per_channels": 128,
            "token_topk_to_pos": slots, "pos_to_expert": pos_to_expert,
        },
        "get_fused_mapping": {
            "topk_idx": chosen, "num_experts": s.experts, "num_expanded_tokens": 0,
            "alignment": 128,
        },
        "group_count": {"group_idx": chosen, "num_groups": s.experts},
        "hash_gate": {
            "logits": logits, "token_ids": torch.randint(1000, (s.tokens,)),
            "table": torch.randint(s.experts * 4, (1000, 6)),
        },
        "inplace_unique_group_indices": {"group_indices": chosen // 8, "num_groups": 8},
        "mask_indices_by_tp": {
            "indices": chosen, "n": s.experts, "num_ep_ranks": 4, "tp_rank": 0, "num_tp_ranks": 2,
        },
        "normalize_weight": {"topk_weights": torch.rand(s.tokens, s.topk)},
        "reduce_fused": {
            "x": s.bf16(len(pos_to_expert), s.hidden), "topk_weights": torch.rand(tokens, s.topk),
            "token_topk_to_pos": slots,
        },
        "top2_sum_gate": gate,
        "topk_gate": {"scores": logits, "num_topk": s.topk},
        "topk_sum_and_topk_group_idx": {
            "scores": logits.view(s.tokens, 8, -1), "num_topk_sum": 2, "num_topk_groups": 4,
        },
        "topk_weights": {"logits": logits, "topk_idx": chosen},
        "topk_weights_backward": {
            "grad_weights": torch.rand(chosen.shape), "logits": logits, "topk_idx": chosen,
            "scoring_func": "sigmoid", "routed_scaling_factor": 1.0,
        },
    }  # fmt: skip


def _quant(s: Sizes) -> dict[str, Arguments]:
    x, wide = s.bf16(s.tokens, s.hidden), s.bf16(s.tokens // 2, 2 * s.hidden)
    small = per_token_cast(x, "e2m1", 32, round_sf=True)
    eights = per_token_cast(x, "e4m3", 128)
    blocks = per_block_cast_with_sf_only(x, "e4m3", (128, 128))
    rows, _, index, inverse = _routed(s, s.tokens // 16)
    row = {"x": x, "fmt": "e4m3", "num_per_channels": 128}
    block = {"x": x, "fmt": "e4m3", "block_size": (128, 128)}
    column = {"x": x, "fmt": "e4m3", "num_per_tokens": 128}
    return {
        "cast_back": {"x": eights, "fmt": "bf16", "x_block_size": (1, 128)},
        "fake_cast": row,
        "per_block_cast": block,
        "per_block_cast_lossless": {
            "x": small, "fmt": "e4m3", "x_block_size": (1, 32), "out_block_size": (128, 128),
        },
        "per_block_cast_with_precomputed_sf": {**block, "sf": blocks},
        "per_block_cast_with_sf_only": block,
        "per_channel_cast": column,
        "per_channel_cast_and_transpose": column,
        "per_channel_cast_fused": {**column, "pos_to_token": torch.randperm(s.tokens).int()},
        "per_channel_cast_fused_and_transpose": {
            **column, "pos_to_token": torch.randperm(s.tokens).int(),
        },
        "per_token_cast": row,
        "per_token_cast.e2m1": {**row, "fmt": "e2m1", "num_per_channels": 32},
        "per_token_cast.e5m6": {**row, "fmt": "e5m6", "num_per_channels": s.hidden},
        "per_token_cast_back": {"x": eights, "fmt": "bf16", "num_per_channels": 128},
        "per_token_cast_with_precomputed_sf": {**row, "sf": eights[1]},
        "per_token_cast_with_sf_only": row,
        "split_to_bf16": {"x": s.floats(s.experts, s.hidden), "parts": (0, 1, 2)},
        "swiglu_backward": {"x": wide, "act_x_grad": s.bf16(*x.shape)[: len(wide)], "fmt": "bf16"},
        "swiglu_backward_and_per_token_cast": {
            "x": per_token_cast(s.bf16(len(rows), 2 * s.hidden), "e4m3", 128),
            "grad_out": s.bf16(len(rows), s.hidden), "weight": torch.rand(inverse.shape),
            "pos_to_token_topk": index, "token_topk_to_pos": inverse, "num_per_channels": 128,
        },
        "swiglu_forward": {"x": wide, "fmt": "bf16"},
        "swiglu_forward_and_per_channel_cast_and_transpose": {
            "x": wide, "fmt": "e4m3", "num_per_tokens": 128,
        },
        "swiglu_forward_and_per_token_cast": {"x": wide, "fmt": "e4m3", "num_per_channels": 128},
    }  # fmt: skip


def _mhc(s: Sizes) -> dict[str, Arguments]:
    tokens, m, h = s.tokens // 4, s.streams, s.hidden
    residual, x = s.bf16(tokens, m, h), s.bf16(tokens, h)
    pre, post, comb = torch.rand(tokens, m, 1), torch.rand(tokens, m, 1), torch.rand(tokens, m, m)
    mixes, scale, base = s.floats(s.tokens, m * (m + 2)), torch.rand(3), torch.rand(m * (m + 2))
    fn = s.floats(m * (m + 2), m * h) / 100
    _, mul, square = mhc_norm_fn_fwd(residual, fn, 1e-6)
    head = {"input_mix": mixes[:, :m], "mhc_scale": scale[:1], "mhc_base": base[:m]}
    logits = s.floats(s.tokens, m, m)
    layer = {
        "residual": residual, "fn": fn, "mhc_scale": scale, "mhc_base": base, "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-3, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 10,
    }  # fmt: skip
    write = {"x": x, "residual": residual, "post_layer_mix": post, "comb_res_mix": comb}
    split = {"mhc_scale": scale, "mhc_base": base, "mhc_post_mult_value": 2.0}
    return {
        "expand_to_mhc": {"hidden": x, "mhc_mult": m},
        "expand_to_mhc_bwd": {"grad_out": residual},
        "mhc_head_compute_mix": {**head, "mhc_pre_eps": 1e-3},
        "mhc_head_compute_mix_bwd": {**head, "grad_mix": mixes[:, :m]},
        "mhc_multilayer_recompute": {
            "initial_residual": residual, "pre_mix_list": [pre, pre], "layer_output_list": [x],
            "post_mix_list": [post], "comb_mix_list": [comb],
            "layer_input_list": [x.clone(), x.clone()], "residual_list": [residual.clone()],
        },
        "mhc_norm_fn_bwd": {
            "grad_mixes": torch.rand_like(mul), "residual": residual, "fn": fn, "mul": mul,
            "s": square, "eps": 1e-6,
        },
        "mhc_norm_fn_fwd": {"residual": residual, "fn": fn, "eps": 1e-6},
        "mhc_post": write,
        "mhc_post_bwd": {**write, "d_o": residual},
        "mhc_post_fwd": write,
        "mhc_pre_apply_mix": {"x": residual, "mix": pre},
        "mhc_pre_apply_mix_bwd": {"grad_out": x, "x": residual, "mix": pre},
        "mhc_pre_big_fuse": layer,
        "mhc_pre_fwd": layer,
        "mhc_pre_split_mixes": {
            **split, "input_mixes": mixes, "mhc_mult": m, "mhc_pre_eps": 1e-3,
        },
        "mhc_pre_split_mixes_bwd": {
            **split, "input_mixes": mixes, "grad_pre": s.floats(s.tokens, m, 1),
            "grad_post": s.floats(s.tokens, m, 1), "grad_comb": logits,
        },
        "sinkhorn_normalize": {"x": logits},
        "sinkhorn_normalize_bwd": {"grad_out": torch.rand_like(logits), "x": logits},
    }  # fmt: skip


def _attention(s: Sizes) -> dict[str, Arguments]:
    tokens, channels = s.tokens, s.hidden // 4
    kv_a, z_a, kv_b, z_b = s.bf16(4, tokens, channels).unbind()
    bias = s.floats(s.window, channels)
    series = {"kv_a": kv_a, "z_a": z_a, "bias_a": bias, "kv_b": kv_b, "z_b": z_b, "bias_b": bias}
    grad = s.bf16(tokens // s.window, channels)
    packed = {
        "kv": torch.cat((kv_a, kv_b), 1), "gate": torch.cat((z_a, z_b), 1),
        "ape": torch.cat((bias, bias), 1),
    }  # fmt: skip
    angle = torch.rand(tokens, 32)
    queries, keys, heads = tokens // 16, tokens // 4, 16
    start, end = torch.zeros(queries).int(), torch.full((queries,), keys).int()
    scored = {
        "q": s.bf16(queries, heads, 64), "k": s.bf16(keys, 64),
        "weights": torch.rand(queries, heads),
    }  # fmt: skip
    topk = keys // 4
    chosen = torch.rand(queries, keys).topk(topk).indices.int()
    state = torch.zeros(256, 2 * s.window, 4, channels).bfloat16(), torch.zeros(256).int()
    return {
        "indexer_logits": {**scored, "start": start, "end": end},
        "indexer_logits_bwd": {**scored, "indices": chosen, "grad": s.floats(queries, topk)},
        "indexer_select": {**scored, "start": start, "end": end, "topk": topk},
        "indexer_topk": {"logits": s.floats(queries, keys), "k": topk, "end": end},
        "kv_compress": series,
        "kv_compress_bwd": {**series, "grad_out": grad},
        "kv_compress_norm_rope_cast": {
            **series, "weight": torch.rand(channels), "cos": angle.cos(), "sin": angle.sin(),
        },
        "kv_compress_packed": packed,
        "kv_compress_packed_bwd": {**packed, "grad_out": grad},
        "kv_compress_step": {
            **{name: x if "bias" in name else x[:256] for name, x in series.items()},
            "state": state,
        },
    }  # fmt: skip


def _engram(s: Sizes) -> dict[str, Arguments]:
    tokens, m, h, layers = s.tokens // 4, s.streams, s.hidden, 2
    x, k, v = s.bf16(tokens, m, h), s.bf16(tokens, m, h), s.bf16(tokens, h)
    weight = torch.rand(m, h)
    sizes = torch.randint(900, 1000, (layers, 2, 8)).int()
    offsets = sizes.flatten(1).cumsum(1).int()
    gate = {"hidden_states": x, "k": k, "v": v, "weight_fused": weight}
    sums = [torch.rand(tokens, m) for _ in range(4)]
    kept = dict(zip(("dot", "gate_score", "rstd_x", "rstd_k"), sums))
    starts = torch.zeros(tokens, dtype=torch.int32)
    filters = {"norm_weight": weight, "taps": torch.rand(4, m, h), "starts": starts, "dilation": 3}
    return {
        "engram_convolution_bwd": {"grad_out": x, "y": x, "rstd": sums[0], **filters},
        "engram_convolution_fwd": {"y": x, **filters, "eps": 1e-6},
        "engram_gate_bwd": {**gate, **kept, "grad_out": x, "clamp_value": 1e-6},
        "engram_gate_fwd": {**gate, "eps": 1e-6, "clamp_value": 1e-6},
        "engram_hash": {
            "ngram_token_ids": torch.randint(1000, (s.tokens, 3)).int(),
            "multipliers": torch.randint(2**60, (layers, 3)), "vocab_sizes": sizes,
            "offsets": offsets,
        },
        "fused_weight": {"weight_hidden": weight.bfloat16(), "weight_embed": weight.bfloat16()},
        "grad_w_reduce": {
            "grad_w_partial": s.floats(64, m, h), "weight_hidden": weight, "weight_embed": weight,
            "grad_weight_hidden": torch.zeros(m, h), "grad_weight_embed": torch.zeros(m, h),
        },
        "ngram_windows": {
            "token_ids": torch.randint(1000, (s.tokens,)), "max_ngram_size": 3, "pad_id": 0,
        },
    }  # fmt: skip


def _transpose(s: Sizes) -> dict[str, Arguments]:
    return {
        "transpose": {"x": s.bf16(s.tokens, s.hidden)},
        "batched_transpose": {"x": s.bf16(8, s.tokens // 8, s.hidden)},
    }


def _gemm(_: Sizes) -> dict[str, Arguments]:
    """Small samples: the references are the formula in float64."""
    ops = registry.select(["gemm"])
    return {op.short_name: op.cases.ordinary().build("cpu") for op in ops}


def arguments(sizes: Sizes) -> dict[str, Arguments]:
    """The arguments of every operator, by its name; `.variant` for a second set."""
    families = {
        "attention": _attention, "engram": _engram, "gemm": _gemm, "mhc": _mhc, "moe": _moe,
        "quant": _quant, "transpose": _transpose,
    }  # fmt: skip
    torch.manual_seed(0)
    return {
        f"{family}.{name}": given
        for family, build in families.items()
        for name, given in build(sizes).items()
    }


# ---- straightforward code -----------------------------------------------------------------------


def _slots(index: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and the slots that name them, where they do."""
    token, slot = (pos >= 0).nonzero(as_tuple=True)
    return index[token], pos[token, slot].long()


def expand(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, **_: Any) -> Tensor:
    out = x.new_zeros((len(pos_to_expert), x.shape[1]))
    rows, places = _slots(x, token_topk_to_pos)
    out[places] = rows
    return out


def expand_with_sf(x: tuple[Tensor, Tensor], **given: Any) -> list[Tensor]:
    given.pop("num_per_channels")
    return [expand(part, **given) for part in x]


def reduce(x: Tensor, topk_weights: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    rows = x[token_topk_to_pos.clamp(min=0).long()].float()
    weights = topk_weights.masked_fill(token_topk_to_pos < 0, 0)
    return (rows * weights[..., None]).sum(1).to(x.dtype)


def unique(group_indices: Tensor, **_: Any) -> None:
    equal = group_indices[:, :, None] == group_indices[:, None]
    repeats = equal.tril(-1).any(2)
    group_indices[repeats] = -1


def normalize(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    total = topk_weights.sum(1) + 1e-20
    return total, topk_weights / total[:, None]


def weights_of(scores: Tensor, topk_idx: Tensor, factor: float = 1.0) -> Tensor:
    chosen = scores.gather(1, topk_idx)
    return factor * chosen / chosen.sum(1, keepdim=True)


def grouped_gate(logits: Tensor, bias: Tensor, num_topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ranks = scores + bias
    groups = ranks.view(len(logits), 8, -1).topk(2).values.sum(2).topk(4).indices
    keep = torch.zeros(len(logits), 8, dtype=torch.bool).scatter_(1, groups, True)
    keep = keep.repeat_interleave(logits.shape[1] // 8, 1)
    chosen = ranks.masked_fill(~keep, -torch.inf).topk(num_topk).indices
    return chosen, weights_of(scores, chosen, 1.5)


def hashed_gate(logits: Tensor, token_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    chosen = table[token_ids]
    return chosen, weights_of(F.softplus(logits).sqrt(), chosen)


def to_e4m3(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`x` and its groups' dimensions."""
    scale = x.abs().amax(dims, keepdim=True).clamp(min=1e-4) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def rows_to_e4m3(x: Tensor, num_per_channels: int, **_: Any) -> tuple[Tensor, Tensor]:
    data, scale = to_e4m3(x.float().unflatten(1, (-1, num_per_channels)), (2,))
    return data.flatten(1), scale[..., 0]


def blocks_to_e4m3(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    blocks = x.float().view(x.shape[0] // 128, 128, -1, 128)
    data, scale = to_e4m3(blocks, (1, 3))
    return data.view(x.shape), scale[:, 0, :, 0]


def columns_to_e4m3(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    data, scale = to_e4m3(x.float().unflatten(0, (-1, 128)), (1,))
    return data.flatten(0, 1), scale[:, 0]


def transposed(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return result[0].T.contiguous(), result[1]


def rows_back(x: tuple[Tensor, Tensor], **_: Any) -> Tensor:
    data, scale = x
    return (data.float().unflatten(1, (-1, 128)) * scale[..., None]).flatten(1).bfloat16()


def fake(x: Tensor, **given: Any) -> Tensor:
    return rows_back(rows_to_e4m3(x, **given))


def rows_to_e2m1(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(1, (-1, 32))
    scale = groups.abs().amax(2, keepdim=True).clamp(min=6 * 2.0**-126) / 6
    values = (groups / scale).flatten(1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(values.abs(), bounds) + 8 * (values < 0)
    return (codes[:, ::2] + codes[:, 1::2] * 16).to(torch.uint8), scale[..., 0]


def rows_to_e5m6(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-4) / 65024
    codes = (wide / scale).half().view(torch.int16).long() >> 4 & 0xFFF
    h = codes.unflatten(1, (-1, 8)).unbind(2)
    words = (
        h[0] << 20 | h[1] << 8 | h[2] >> 4,
        (h[2] & 0xF) << 28 | h[3] << 16 | h[4] << 4 | h[5] >> 8,
        (h[5] & 0xFF) << 24 | h[6] << 12 | h[7],
    )
    return torch.stack(words, 2).flatten(1).int().view(torch.uint8), scale


def lossless(x: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, Tensor]:
    data, scale = x
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((table, -table))[
        torch.stack((data.view(torch.uint8) & 15, data.view(torch.uint8) >> 4), 2).flatten(1).int()
    ]
    wide = values.unflatten(1, (-1, 32)) * scale[..., None]
    blocks = wide.view(data.shape[0] // 128, 128, -1, 128)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    power = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (blocks / power).to(torch.float8_e4m3fn).view(values.shape), power[:, 0, :, 0]


def given_blocks(x: Tensor, sf: Tensor, **_: Any) -> Tensor:
    blocks = x.float().view(x.shape[0] // 128, 128, -1, 128) / sf[:, None, :, None]
    return blocks.clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape)


def given_rows(x: Tensor, sf: Tensor, **_: Any) -> Tensor:
    groups = x.float().unflatten(1, (-1, 128)) / sf[..., None]
    return groups.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)


def block_scales(x: Tensor, **_: Any) -> Tensor:
    blocks = x.float().view(x.shape[0] // 128, 128, -1, 128)
    return blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448


def row_scales(x: Tensor, **_: Any) -> Tensor:
    return x.float().unflatten(1, (-1, 128)).abs().amax(2).clamp(min=1e-4) / 448


def swiglu(x: Tensor) -> Tensor:
    gate, value = x.float().chunk(2, 1)
    return F.silu(gate) * value


def swiglu_backward(
    x: tuple[Tensor, Tensor], grad_out: Tensor, weight: Tensor, pos_to_token_topk: Tensor, **_: Any
) -> tuple[Any, ...]:
    wide = (x[0].float().unflatten(1, (-1, 128)) * x[1][..., None]).flatten(1)
    gate, value = wide.chunk(2, 1)
    index = pos_to_token_topk.clamp(min=0).long()
    of_row = weight.flatten()[index].masked_fill(pos_to_token_topk < 0, 0)[:, None]
    sigmoid = gate.sigmoid()
    act, grad = gate * sigmoid * value, grad_out.float()
    weighted = grad * of_row
    grad_gate = weighted * value * sigmoid * (1 + gate * (1 - sigmoid))
    x_grad = torch.cat((grad_gate, weighted * gate * sigmoid), 1)
    of_weight = torch.zeros(weight.numel()).index_add_(
        0, index, (grad * act).sum(1).masked_fill(pos_to_token_topk < 0, 0)
    )
    quantized = rows_to_e4m3(x_grad, 128)
    return (act * of_row).bfloat16(), quantized, x_grad.bfloat16(), of_weight.view(weight.shape)


def differentiated(function: Plain, *names: str) -> Plain:
    """The gradients of `function` by autograd; the first of `names` is that of its result."""

    def call(**given: Any) -> Any:
        grads = [given.pop(name) for name in names]
        inputs = [x for x in given.values() if isinstance(x, Tensor)]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            fresh = dict(zip([n for n, x in given.items() if isinstance(x, Tensor)], leaves))
            result = function(**{**given, **fresh})
        result = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(result, leaves, [g.to(r.dtype) for g, r in zip(grads, result)])

    return call


def streams_read(x: Tensor, mix: Tensor) -> Tensor:
    return (x * mix).sum(-2)


def normed(residual: Tensor, fn: Tensor, eps: float) -> Tensor:
    x = residual.flatten(-2).float()
    return F.linear(x, fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def before_sublayer(
    residual: Tensor, fn: Tensor, mhc_scale: Tensor, mhc_base: Tensor, rms_eps: float, **_: Any
) -> tuple[Tensor, ...]:
    mixes = normed(residual, fn, rms_eps)
    pre, post, comb = mhc.mhc_pre_split_mixes_ref(
        mixes, mhc_scale, mhc_base, residual.shape[-2], 2.0, 1e-3
    )
    comb = mhc.sinkhorn_normalize_ref(comb)
    return mhc.mhc_pre_apply_mix_ref(residual, pre), post, comb


def recompute(**given: Any) -> None:
    residual = given["initial_residual"]
    for i, pre in enumerate(given["pre_mix_list"]):
        given["layer_input_list"][i].copy_(mhc.mhc_pre_apply_mix_ref(residual, pre))
        if i < len(given["layer_output_list"]):
            mixes = given["post_mix_list"][i], given["comb_mix_list"][i]
            residual = mhc.mhc_post_ref(given["layer_output_list"][i], residual, *mixes)
            given["residual_list"][i].copy_(residual)


def split_bwd(grad_pre: Tensor, grad_post: Tensor, grad_comb: Tensor, **given: Any) -> Any:
    split = differentiated(mhc.mhc_pre_split_mixes_ref, "pre", "post", "comb")
    return split(**given, pre=grad_pre, post=grad_post, comb=grad_comb, mhc_mult=4, mhc_pre_eps=0.0)


def head_bwd(grad_mix: Tensor, **given: Any) -> Any:
    head = differentiated(mhc.mhc_head_compute_mix_ref, "grad_mix")
    return head(**given, grad_mix=grad_mix, mhc_pre_eps=0.0)


def norm_bwd(grad_mixes: Tensor, residual: Tensor, fn: Tensor, eps: float, **_: Any) -> Any:
    return differentiated(normed, "grad")(grad=grad_mixes, residual=residual, fn=fn, eps=eps)


def compress(
    kv_a: Tensor, z_a: Tensor, bias_a: Tensor, kv_b: Tensor, z_b: Tensor, bias_b: Tensor
) -> Tensor:
    """Each window with the one before it in the second series."""
    window = len(bias_a)
    values, scores = [], []
    for kv, z, bias, before in ((kv_a, z_a, bias_a, False), (kv_b, z_b, bias_b, True)):
        value = kv.float().unflatten(0, (-1, window))
        score = z.float().unflatten(0, (-1, window)) + bias
        if before:
            value = torch.cat((torch.zeros_like(value[:1]), value[:-1]))
            score = torch.cat((torch.full_like(score[:1], -torch.inf), score[:-1]))
        values.append(value)
        scores.append(score)
    return (torch.cat(scores, 1).softmax(1) * torch.cat(values, 1)).sum(1).to(kv_a.dtype)


def compress_packed(kv: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    half = kv.shape[1] // 2
    of_a, of_b = ((x[:, half:], x[:, :half]) for x in (kv, gate)), ape
    (kv_a, kv_b), (z_a, z_b) = of_a
    return compress(kv_a, z_a, of_b[:, half:], kv_b, z_b, of_b[:, :half])


def compress_and_cast(weight: Tensor, cos: Tensor, sin: Tensor, **series: Any) -> Any:
    entries = compress(**series).float()
    x = F.rms_norm(entries, entries.shape[-1:], weight, 1e-6)
    plain, c, s = x.shape[1] - 2 * cos.shape[1], cos[::4], sin[::4]
    left, right = x[:, plain::2], x[:, plain + 1 :: 2]
    rotated = torch.stack((left * c - right * s, left * s + right * c), 2).flatten(1).bfloat16()
    return *rows_to_e4m3(x[:, :plain], 64), rotated


def logits_of(q: Tensor, k: Tensor, weights: Tensor, **_: Any) -> Tensor:
    return (torch.relu(q.float() @ k.float().T) * weights[..., None]).sum(1)


def select(topk: int, **given: Any) -> Tensor:
    return logits_of(**given).topk(topk).indices.int()


def logits_bwd(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, grad: Tensor) -> Any:
    def chosen(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return logits_of(q, k, weights).gather(1, indices.long())

    call = differentiated(chosen, "grad")
    return call(q=q, k=k, weights=weights, grad=grad)


def gate_bwd(grad_out: Tensor, clamp_value: float, **given: Any) -> Any:
    def gate(hidden_states: Tensor, k: Tensor, v: Tensor, weight_fused: Tensor) -> Tensor:
        x, key = hidden_states.float(), k.float()
        dot = (x * weight_fused * key).sum(-1)
        s = dot * x.square().mean(-1).rsqrt() * key.square().mean(-1).rsqrt() * x.shape[-1] ** -0.5
        score = torch.sigmoid(s.abs().clamp(min=clamp_value).sqrt() * s.sign())
        return (x + score[..., None] * v.float()[:, None]).to(hidden_states.dtype)

    names = ("hidden_states", "k", "v", "weight_fused")
    return differentiated(gate, "grad")(**{n: given[n] for n in names}, grad=grad_out)


def reduce_parts(
    grad_w_partial: Tensor, weight_hidden: Tensor, weight_embed: Tensor,
    grad_weight_hidden: Tensor, grad_weight_embed: Tensor,
) -> None:  # fmt: skip
    total = grad_w_partial.sum(0)
    grad_weight_hidden += total * weight_embed
    grad_weight_embed += total * weight_hidden


PLAIN: dict[str, Plain | str] = {
    "attention.indexer_logits": logits_of,
    "attention.indexer_logits_bwd": logits_bwd,
    "attention.indexer_select": select,
    "attention.indexer_topk": lambda logits, k, end: logits.topk(k).indices.int(),  # noqa: ARG005
    "attention.kv_compress": compress,
    "attention.kv_compress_bwd": differentiated(compress, "grad_out"),
    "attention.kv_compress_norm_rope_cast": compress_and_cast,
    "attention.kv_compress_packed": compress_packed,
    "attention.kv_compress_packed_bwd": differentiated(compress_packed, "grad_out"),
    "attention.kv_compress_step": SAME,  # a scatter into the state, and kv_compress of a window
    "engram.engram_convolution_bwd": SAME,
    "engram.engram_convolution_fwd": SAME,
    "engram.engram_gate_bwd": gate_bwd,
    "engram.engram_gate_fwd": SAME,
    "engram.engram_hash": SAME,
    "engram.fused_weight": SAME,
    "engram.grad_w_reduce": reduce_parts,
    "engram.ngram_windows": SAME,
    "mhc.expand_to_mhc": SAME,
    "mhc.expand_to_mhc_bwd": lambda grad_out: grad_out.float().sum(-2).to(grad_out.dtype),
    "mhc.mhc_head_compute_mix": mhc.mhc_head_compute_mix_ref,
    "mhc.mhc_head_compute_mix_bwd": head_bwd,
    "mhc.mhc_multilayer_recompute": recompute,
    "mhc.mhc_norm_fn_bwd": norm_bwd,
    "mhc.mhc_norm_fn_fwd": normed,
    "mhc.mhc_post": mhc.mhc_post_ref,
    "mhc.mhc_post_bwd": differentiated(mhc.mhc_post_ref, "d_o"),
    "mhc.mhc_post_fwd": mhc.mhc_post_ref,
    "mhc.mhc_pre_apply_mix": mhc.mhc_pre_apply_mix_ref,
    "mhc.mhc_pre_apply_mix_bwd": differentiated(streams_read, "grad_out"),
    "mhc.mhc_pre_big_fuse": before_sublayer,
    "mhc.mhc_pre_fwd": before_sublayer,
    "mhc.mhc_pre_split_mixes": mhc.mhc_pre_split_mixes_ref,
    "mhc.mhc_pre_split_mixes_bwd": split_bwd,
    "mhc.sinkhorn_normalize": mhc.sinkhorn_normalize_ref,
    "mhc.sinkhorn_normalize_bwd": differentiated(mhc.sinkhorn_normalize_ref, "grad_out"),
    "moe.aux_fi": SAME,
    "moe.expand_to_fused": expand,
    "moe.expand_to_fused_with_sf": expand_with_sf,
    "moe.get_fused_mapping": SAME,
    "moe.group_count": SAME,
    "moe.hash_gate": hashed_gate,
    "moe.inplace_unique_group_indices": unique,
    "moe.mask_indices_by_tp": SAME,
    "moe.normalize_weight": normalize,
    "moe.reduce_fused": reduce,
    "moe.top2_sum_gate": grouped_gate,
    "moe.topk_gate": lambda scores, num_topk: scores.topk(num_topk).indices,
    "moe.topk_sum_and_topk_group_idx": lambda scores, num_topk_sum, num_topk_groups: (
        scores.topk(num_topk_sum).values.sum(2).topk(num_topk_groups).indices
    ),
    "moe.topk_weights": lambda logits, topk_idx: weights_of(logits.sigmoid(), topk_idx),
    "moe.topk_weights_backward": SAME,
    "quant.cast_back": rows_back,
    "quant.fake_cast": fake,
    "quant.per_block_cast": blocks_to_e4m3,
    "quant.per_block_cast_lossless": lossless,
    "quant.per_block_cast_with_precomputed_sf": given_blocks,
    "quant.per_block_cast_with_sf_only": block_scales,
    "quant.per_channel_cast": columns_to_e4m3,
    "quant.per_channel_cast_and_transpose": lambda x, **_: transposed(columns_to_e4m3(x)),
    "quant.per_channel_cast_fused": lambda x, pos_to_token, **_: columns_to_e4m3(x[pos_to_token]),
    "quant.per_channel_cast_fused_and_transpose": lambda x, pos_to_token, **_: transposed(
        columns_to_e4m3(x[pos_to_token])
    ),
    "quant.per_token_cast": rows_to_e4m3,
    "quant.per_token_cast.e2m1": rows_to_e2m1,
    "quant.per_token_cast.e5m6": rows_to_e5m6,
    "quant.per_token_cast_back": rows_back,
    "quant.per_token_cast_with_precomputed_sf": given_rows,
    "quant.per_token_cast_with_sf_only": row_scales,
    "quant.split_to_bf16": SAME,
    "quant.swiglu_backward": SAME,
    "quant.swiglu_backward_and_per_token_cast": swiglu_backward,
    "quant.swiglu_forward": lambda x, **_: swiglu(x).bfloat16(),
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": lambda x, **_: transposed(
        columns_to_e4m3(swiglu(x).bfloat16())
    ),
    "quant.swiglu_forward_and_per_token_cast": lambda x, **_: rows_to_e4m3(swiglu(x), 128),
    "transpose.batched_transpose": SAME,
    "transpose.transpose": SAME,
}


# ---- measuring ----------------------------------------------------------------------------------


def _fastest(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Milliseconds of processor time, the least of runs in turn that take `seconds` together."""
    times: list[list[float]] = [[] for _ in calls]
    began = time.process_time()
    while len(times[0]) < 3 or time.process_time() - began < seconds:
        for call, taken in zip(calls, times):
            start = time.process_time()
            call()
            taken.append(1e3 * (time.process_time() - start))
    return [min(taken) for taken in times]


def sample_of(op: Operator) -> Arguments:
    """The largest of an operator's small samples."""
    samples = [sample.build(torch.device("cpu")) for sample in op.cases.small]
    return max(samples, key=lambda given: sum(x.numel() for x in tensors_in(given)))


def measure(sizes: Sizes, seconds: float, only: str = "") -> list[Row]:
    """A row for each operator, and for variants; one thread.

    An operator that `arguments` does not list is measured with one of its samples, and its
    reference counts as the straightforward code.
    """
    by_name = {op.name: op for op in registry.all_ops()}
    calls_of = arguments(sizes)
    listed = {".".join(name.split(".")[:2]) for name in calls_of}
    calls_of |= {name: sample_of(op) for name, op in by_name.items() if name not in listed}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for name, given in calls_of.items():
            if not re.search(only, name):
                continue
            op, plain = by_name[".".join(name.split(".")[:2])], PLAIN.get(name, SAME)
            calls = [lambda op=op, given=given: op.public_reference(**given)]
            if not isinstance(plain, str):
                calls.append(lambda plain=plain, given=given: plain(**given))
            with torch.no_grad():
                reference, *other = _fastest(calls, seconds)
            rows.append(Row(name, round(reference, 3), round(other[0], 3) if other else None))
            print(text(rows[-1]), flush=True)
    finally:
        torch.set_num_threads(threads)
    return rows


def text(row: Row) -> str:
    """A line of the table."""
    beside = f"{row.plain_ms:9.2f} ms" if row.plain_ms is not None else f"{SAME:>12}"
    mark = ""
    if row.ratio > LIMIT:
        mark = f"  above {LIMIT:g}: {REASONS.get(row.op, 'not explained')}"
    return f"{row.op:56} {row.reference_ms:9.2f} ms {beside} {row.ratio:6.1f}{mark}"


def main(given: Sequence[str] | None = None) -> Path:
    """Measure, print and save; returns the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each operator")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(given)
    rows = measure(Sizes(options.scale), options.seconds, options.only)
    machine = {**benchmark.machine(), "threads": 1, "scale": options.scale}
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower()).strip("-")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"references.{name}.json"
    results = [
        {
            **asdict(row),
            "ratio": round(row.ratio, 2),
            "reason": REASONS.get(row.op) if row.ratio > LIMIT else None,
        }
        for row in rows
    ]
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    return path


if __name__ == "__main__":
    print(main())
