"""Calls that DeepSeek's TileKernels and this package both take, for `benchmarks.foreign`.

Most are made from the samples and benchmarks of our operators. The others are written here, as
functions of their sizes: what the package takes only in other sizes or with other arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.foreign import Arguments, Case, Package, difference, leaves
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Sample
from tile_kernels.runtime.operator import Operator

FAMILIES = ("moe", "quant", "engram", "transform", "transpose")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, drawn in float32."""
    return torch.randn(*shape).to(dtype)


def streams(n: int, m: int, h: int) -> Tensor:
    """Residual streams."""
    return randn(n, m, h, dtype=torch.bfloat16)


def layers_1_0(n: int, h: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Layers of `modeling.mhc.ops` of TileKernels 1.0, which have four streams."""
    x, residual = randn(1, n, h, dtype=torch.bfloat16), streams(n, 4, h)[None]
    fn, scale, base = randn(24, 4 * h) * 0.01, randn(3) * 0.1, randn(24) * 0.1
    pre, post = torch.rand(1, n, 4, 1), torch.rand(1, n, 4, 1)
    comb = torch.rand(1, n, 4, 4)
    yield "modeling.mhc.ops.expand_to_mhc", {"hidden": x, "mhc_mult": 4}, True
    yield "modeling.mhc.ops.mhc_pre_apply_mix", {"x": residual, "mix": pre}, False
    yield "modeling.mhc.ops.mhc_post", {"x": x, "residual": residual, "post_layer_mix": post,
                                        "comb_res_mix": comb}, True  # fmt: skip
    yield "modeling.mhc.ops.mhc_pre_norm_fn", {
        "residual": residual, "mhc_fn": fn, "mhc_norm_weight": None, "mhc_norm_eps": 1e-6,
        "fuse_grad_acc": False}, True  # fmt: skip
    yield "modeling.mhc.ops.mhc_pre_big_fuse", {
        "residual": residual, "fn": fn, "mhc_scale": scale, "mhc_base": base, "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-6, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 1.0,
        "sinkhorn_repeat": 10}, False  # fmt: skip


def mixes_1_0(n: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Their mixes."""
    yield (
        "modeling.mhc.ops.sinkhorn_normalize",
        {"x": randn(1, n, 4, 4), "repeat": 10, "eps": 1e-6},
        True,
    )
    yield "modeling.mhc.ops.mhc_head_compute_mix", {
        "input_mix": randn(1, n, 4), "mhc_scale": randn(1),
        "mhc_base": randn(4), "mhc_pre_eps": 1e-2}, True  # fmt: skip
    yield "modeling.mhc.ops.mhc_pre_split_mixes", {
        "input_mixes": randn(1, n, 24), "mhc_scale": randn(3), "mhc_base": randn(24),
        "mhc_mult": 4, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}, True  # fmt: skip


def recompute(n: int, h: int, reads: int, writes: int) -> Arguments:
    """Layers, all or all but one of which have an output."""
    bf16 = torch.bfloat16
    return {
        "initial_residual": streams(n, 4, h),
        "pre_mix_list": [torch.rand(n, 4, 1) for _ in range(reads)],
        "layer_output_list": [randn(n, h, dtype=bf16) for _ in range(writes)],
        "post_mix_list": [torch.rand(n, 4, 1) for _ in range(writes)],
        "comb_mix_list": [torch.rand(n, 4, 4) for _ in range(writes)],
        "layer_input_list": [torch.zeros(n, h, dtype=bf16) for _ in range(reads)],
        "residual_list": [torch.zeros(n, 4, h, dtype=bf16) for _ in range(writes)],
    }


def recomputed(
    module: str, n: int, h: int, reads: int, writes: int
) -> Iterator[tuple[str, Arguments, bool]]:
    """Both versions have it, in other modules."""
    yield f"{module}.mhc_multilayer_recompute", recompute(n, h, reads, writes), False


def layers_2_1(n: int, h: int, splits: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Layers of `mhc` of TileKernels 2.1, which writes into the caller's tensors."""
    bf16 = torch.bfloat16
    x, residual = randn(n, h, dtype=bf16), streams(n, 4, h)
    mix, post, comb = torch.rand(n, 4), torch.rand(1, n, 4, 1), torch.rand(1, n, 4, 4)
    to_x, to_streams = torch.zeros(n, h, dtype=bf16), torch.zeros(n, 4, h, dtype=bf16)
    mul, sqr = randn(splits, n, 24), torch.rand(splits, n) * 100
    layer = {"x": x[None], "residual": residual[None], "post_layer_mix": post,
             "comb_res_mix": comb}  # fmt: skip
    yield "mhc.expand_to_mhc_fwd", {"x": x, "o": to_streams}, False
    yield "mhc.expand_to_mhc_bwd", {"o_grad": residual, "x_grad": to_x}, False
    yield "mhc.mhc_pre_apply_mix_fwd", {"x": residual, "mix": mix, "o": to_x}, False
    yield "mhc.mhc_pre_apply_mix_bwd", {"o_grad": x, "x": residual, "mix": mix,
                                        "x_grad": streams(n, 4, h)}, False  # fmt: skip
    yield "mhc.mhc_post_fwd", layer, False
    yield "mhc.mhc_post_bwd", {**layer, "d_o": streams(n, 4, h)[None]}, False
    yield "mhc.mhc_fn_normw_merge_fwd", {"fn": randn(24, 4 * h), "normw": randn(4 * h),
                                         "out_fn": torch.zeros(24, 4 * h)}, False  # fmt: skip
    yield "mhc.mhc_fn_normw_merge_bwd", {
        "fn": randn(24, 4 * h), "normw": randn(4 * h), "out_fn_grad": randn(24, 4 * h),
        "fn_grad": randn(24, 4 * h), "normw_grad": randn(4 * h)}, False  # fmt: skip
    yield "mhc.mhc_pre_big_fuse_fwd", {
        "gemm_out_mul": mul, "gemm_out_sqrsum": sqr, "mhc_scale": randn(3),
        "mhc_base": randn(24), "residual": residual, "post_mix": torch.zeros(n, 4),
        "comb_mix": torch.zeros(n, 16), "layer_input": to_x, "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-6, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 1.0,
        "sinkhorn_repeat": 10, "n_splits": splits}, False  # fmt: skip
    yield "mhc.mhc_reduce_partials_and_rmsnorm_fwd", {
        "out_mul_splitted": mul[:, :, None], "sqrsum_splitted": sqr[..., None],
        "out_mul": torch.zeros(n, 1, 24), "sqrsum": torch.zeros(n, 1),
        "out": torch.zeros(n, 24), "rms_group_size": 4 * h, "rms_eps": 1e-6,
        "n_splits": splits}, False  # fmt: skip
    yield "mhc.mhc_reduce_partials_and_rmsnorm_bwd", {
        "out_grad": randn(n, 24), "out_mul": mul[0, :, None], "sqrsum": sqr[0, :, None],
        "out_mul_grad": torch.zeros(n, 1, 24), "sqrsum_grad": torch.zeros(n, 1),
        "rms_group_size": 4 * h, "rms_eps": 1e-6}, False  # fmt: skip


def mixes_2_1(n: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Their mixes."""
    head = {"input_mix": randn(n, 4), "mhc_scale": randn(1), "mhc_base": randn(4)}
    yield "mhc.mhc_head_compute_mix_fwd", {**head, "output_mix": torch.zeros(n, 4),
                                           "mhc_pre_eps": 1e-2}, False  # fmt: skip
    yield "mhc.mhc_head_compute_mix_bwd", {
        "output_mix_grad": randn(n, 4), **head, "input_mix_grad": torch.zeros(n, 4),
        "mhc_scale_grad_partial": torch.zeros(1, 1),
        "mhc_base_grad_partial": torch.zeros(1, 4), "num_sms": 1}, False  # fmt: skip
    mixes = {"input_mixes": randn(n, 24), "mhc_scale": randn(3), "mhc_base": randn(24)}
    saved = torch.sigmoid(mixes["input_mixes"] * mixes["mhc_scale"].repeat_interleave(
        torch.tensor([4, 4, 16])) + mixes["mhc_base"])[:, 4:8] * 2  # fmt: skip
    yield "mhc.mhc_pre_split_mixes_fwd", {
        **mixes, "pre_layer_mix": torch.zeros(n, 4), "post_layer_mix": torch.zeros(n, 4),
        "comb_res_mix": torch.zeros(n, 16), "mhc_post_mult_value": 2.0,
        "mhc_pre_eps": 1e-2}, False  # fmt: skip
    yield "mhc.mhc_pre_split_mixes_bwd", {
        "pre_layer_mix_grad": randn(n, 4), "post_layer_mix_grad": randn(n, 4),
        "comb_res_mix_grad": randn(n, 16), "input_mixes": mixes["input_mixes"],
        "post_layer_mix": saved, "mhc_scale": mixes["mhc_scale"],
        "mhc_base": mixes["mhc_base"], "input_mixes_grad": torch.zeros(n, 24),
        "mhc_scale_grad": torch.zeros(3), "mhc_base_grad": torch.zeros(24),
        "mhc_post_mult_value": 2.0}, False  # fmt: skip
    yield "mhc.mhc_sinkhorn_fwd", {"comb_res_mix": randn(n, 4, 4),
                                   "comb_res_mix_out": torch.zeros(n, 4, 4), "repeat": 10,
                                   "eps": 1e-6}, False  # fmt: skip
    yield "mhc.mhc_sinkhorn_bwd", {"grad_output": randn(n, 4, 4), "x": randn(n, 4, 4),
                                   "grad_input": torch.zeros(n, 4, 4), "repeat": 10,
                                   "eps": 1e-6}, False  # fmt: skip


# Our operator and the package's function, where the names differ.
ALIASES = {
    "2": {
        "quant.cast": "quant.plain_cast",
        "quant.per_token_cast_and_cast_back": "quant.fake_cast",
        "engram.engram_gate_fwd": "engram.engram_gate_packed_fwd",
        "engram.engram_gate_bwd": "engram.engram_gate_packed_bwd",
    }
}
RENAMED = {"swiglu_clamp_value": "clamp_value"}
# Samples of what the package leaves undefined, or takes with other dtypes.
OURS_ALONE = {
    "engram.engram_hash": ("int64",),  # offsets; theirs are int32
    "engram.engram_sinkhorn_step": ("9x2048",),  # has rows of zeros, whose scale becomes 1 / eps
}


def engram(major: str, n: int, h: int) -> Iterator[tuple[str, Arguments, bool]]:
    """The gate with its forward's results as the backward's arguments, and what goes with it."""
    from tile_kernels import engram as ours

    bf16, m = torch.bfloat16, 4
    x, k, v = streams(n, m, h), streams(n, m, h), randn(n, h, dtype=bf16)
    packed = {"kv": torch.cat([k, v[:, None]], 1)} if major == "2" else {"k": k, "v": v}
    fixed = {"hidden_states": x, **packed, "weight_fused": randn(m, h)}
    limits = {"eps": 1e-20, "clamp_value": 1e-6}
    _, *saved = ours.engram_gate_fwd(x, k, v, fixed["weight_fused"], 1e-20, 1e-6)
    yield "engram.engram_gate_fwd", {**fixed, **limits}, False
    named = dict(zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved))
    yield "engram.engram_gate_bwd", {
        "grad_out": streams(n, m, h), **fixed, **named, "clamp_value": 1e-6}, False  # fmt: skip
    weights = {
        "weight_hidden": randn(m, h, dtype=bf16),
        "weight_embed": randn(m, h, dtype=bf16),
    }
    yield "engram.fused_weight", weights, False
    yield "engram.grad_w_reduce", {
        "grad_w_partial": randn(132, m, h), **weights, "grad_weight_hidden": randn(m, h),
        "grad_weight_embed": randn(m, h)}, False  # fmt: skip
    if major == "2":
        matrix = {"matrix": randn(7, h), "row_scale": torch.rand(7), "col_scale": torch.rand(h)}
        yield "engram.engram_sinkhorn_finalize", {**matrix, "eps": 1e-20, "alpha": 2.0}, False


def routing(n: int, k: int, experts: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Ids in range and mappings that are ones: what 1.0 does with others is undefined."""
    idx = torch.rand(n, experts).argsort(1)[:, :k].contiguous()
    idx[torch.rand(n, k) < 0.3] = -1
    yield "moe.aux_fi", {"topk_idx": idx, "num_experts": experts, "num_aux_topk": k}, False
    yield "moe.group_count", {"group_idx": idx, "num_groups": experts}, False
    yield "moe.inplace_unique_group_indices", {
        "group_indices": torch.randint(0, experts, (n, k)),
        "num_groups": experts}, False  # fmt: skip
    yield "moe.mask_indices_by_tp", {"indices": idx, "n": experts * 4, "num_ep_ranks": 2,
                                     "tp_rank": 1, "num_tp_ranks": 2}, False  # fmt: skip
    yield "moe.get_fused_mapping", {"topk_idx": idx, "num_experts": experts,
                                    "num_expanded_tokens": 0, "alignment": 4}, False  # fmt: skip
    flat = idx.view(-1)
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    to_pos = torch.full((n * k,), -1, dtype=torch.int32)
    to_pos[order] = torch.arange(len(order), dtype=torch.int32)
    to_pos = to_pos.view(n, k)
    rows = len(order) + 3  # the last of which nothing goes to
    to_expert = torch.full((rows,), -1, dtype=torch.int32)
    to_expert[: len(order)] = flat[order].int()
    mapping = {"token_topk_to_pos": to_pos, "pos_to_expert": to_expert}
    x = randn(n, 256, dtype=torch.bfloat16)
    yield "moe.expand_to_fused", {"x": x, **mapping}, False
    codes = randn(n, 256).to(torch.float8_e4m3fn)
    yield "moe.expand_to_fused_with_sf", {"x": (codes, torch.rand(n, 2)), "num_per_channels": 128,
                                          **mapping}, False  # fmt: skip
    yield "moe.reduce_fused", {
        "x": randn(rows, 512, dtype=torch.bfloat16), "topk_weights": torch.rand(n, k),
        "token_topk_to_pos": to_pos}, False  # fmt: skip


def whole_tiles_1_0(n: int, h: int) -> Iterator[tuple[str, Arguments, bool]]:
    """What 1.0 takes only in sizes that our samples lack."""
    x = randn(n, h, dtype=torch.bfloat16)
    rows = torch.randint(0, n, (256,), dtype=torch.int32)
    rows[::7] = -1
    cast = {"fmt": "e4m3", "num_per_tokens": 128, "round_sf": True}
    yield "quant.per_channel_cast_fused", {"x": x, **cast, "pos_to_token": rows}, False
    codes = x.to(torch.float8_e4m3fn), torch.rand(n, h // 128) + 0.1
    yield "quant.per_channel_cast_fused", {
        "x": codes, **cast, "num_per_channels": 128, "pos_to_token": rows}, False  # fmt: skip
    yield "transpose.batched_transpose", {"x": x.view(2, n // 2, h)}, False


def quantized_2_1(n: int, h: int) -> Iterator[tuple[str, Arguments, bool]]:
    """What 2.1 takes only in sizes, or with arguments, that our samples lack."""
    bf16 = torch.bfloat16
    x = randn(n, h, dtype=bf16)
    flags = {"round_sf": True}
    yield "quant.per_block_cast", {"x": x, "fmt": "e4m3", "block_size": (128, 128), **flags}, False
    yield "quant.per_block_cast", {"x": x, "fmt": "e2m1", "block_size": (32, 32), **flags}, False
    yield "quant.per_block_cast_with_sf_only", {"x": x, "fmt": "e4m3", "block_size": (128, 128),
                                                **flags}, False  # fmt: skip
    sf = torch.exp2(torch.randint(-9, -3, (n // 128, h // 128)).float())
    yield "quant.per_block_cast_with_precomputed_sf", {
        "x": x, "fmt": "e4m3", "block_size": (128, 128), "sf": sf}, False  # fmt: skip
    data = torch.randint(-128, 128, (n, h // 2), dtype=torch.int8)
    powers = torch.exp2(torch.randint(-2, 2, (n, h // 32)).float())
    yield "quant.per_block_cast_lossless", {
        "x": (data, powers), "fmt": "e4m3", "x_block_size": (1, 32),
        "out_block_size": (128, 128), "round_sf": True}, False  # fmt: skip
    yield "quant.per_channel_cast", {"x": x, "fmt": "e4m3", "num_per_tokens": 128}, False
    yield "quant.per_token_cast_with_precomputed_sf", {
        "x": x, "fmt": "e4m3", "num_per_channels": 128, "sf": torch.rand(n, h // 128) + 0.1,
    }, False  # fmt: skip


def swiglu_backward_2_1(n: int, h: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Its results have another order than ours of 1.0."""
    x = randn(n, 2 * h).to(torch.float8_e4m3fn), torch.rand(n, h // 64) + 0.1
    yield "quant.swiglu_backward_and_per_token_cast", {
        "x": x, "act_x_grad": randn(n, h, dtype=torch.bfloat16), "fmt": "e4m3",
        "num_per_channels": 128, "topk_weights": torch.rand(n)}, False  # fmt: skip


def weight_scales_2_1(n: int, k: int) -> Iterator[tuple[str, Arguments, bool]]:
    """Powers of two, one for each 32 x 32 weights, and no buffers."""
    scales = torch.exp2(torch.randint(-9, 3, (n // 32, k // 32)).float())
    yield "quant.batched_transpose_weight_sf", {
        "sf": [scales], "block_size": 32, "transpose_sf1s": [False],
        "outs": [None]}, False  # fmt: skip


def gates_2_1(n: int, experts: int, k: int) -> Iterator[tuple[str, Arguments, bool]]:
    """The gate's backward, whose optional arguments come in pairs, and the update's pieces."""
    scores = torch.rand(n, experts) + 0.1
    idx = scores.argsort(1, descending=True)[:, :k].contiguous()
    weights = scores.gather(1, idx)
    weights = weights / weights.sum(1, keepdim=True) * 1.5
    common = {"scores": scores, "topk_idx": idx, "topk_weights": weights,
              "grad_topk_weights": randn(n, k), "routed_scaling_factor": 1.5}  # fmt: skip
    yield "moe.moe_topk_gate_backward", common, False
    mask = torch.rand(n) < 0.8  # the forward gives the others no experts
    more = {"mask": mask, "grad_scores_sum": randn(1, experts),
            "topk_idx": idx.where(mask[:, None], -1),
            "topk_weights": weights * mask[:, None]}  # fmt: skip
    yield "moe.moe_topk_gate_backward", {**common, **more}, False
    yield "engram.engram_sinkhorn_momentum_update", {
        "grad": randn(n, 256), "momentum_buffer": randn(n, 256),
        "beta1": 0.9}, False  # fmt: skip
    yield "engram.engram_sinkhorn_step", {
        "matrix": randn(n, 512), "row_scale": torch.rand(n), "col_scale": torch.rand(512),
        "eps": 1e-20}, False  # fmt: skip
    yield "engram.engram_sinkhorn_step_reduce", {
        "col_sumsq_partial": torch.rand(396, 512),
        "col_sumsq": torch.zeros(512)}, False  # fmt: skip


# Results that are partial sums, as many as the package likes: by function, the tensor's number.
PARTIAL = {
    "1": {"engram.engram_gate_bwd": 3},
    "2": {"engram.engram_gate_bwd": 2, "engram.engram_sinkhorn_step": 1},
}
# Factors that lie between two values of TF32 may be rounded to either.
TF32 = 2e-3


def compared(package: Package, case: Case, theirs: list[Tensor], ours: list[Tensor]) -> str:
    """`difference` of the results; partial sums are added first."""
    part = PARTIAL[package.version[0]].get(case.function)
    if part is not None:
        for tensors in (theirs, ours):
            tensors[part] = tensors[part].sum(0)
    return difference(theirs, ours, TF32 if case.function.endswith("norm_fn") else 1e-4)


def written(major: str) -> Iterator[Case]:
    """The calls that are written here, in small sizes."""
    sized = [engram(major, 3, h) for h in (512, 1024)]
    streams_of = ((5, 1280), (3, 2560))
    if major == "1":
        for n, h in streams_of:
            sized += [layers_1_0(n, h), recomputed("modeling.mhc.ops", n, h, 3, 2)]
        sized += [*(mixes_1_0(n) for n in (5, 70)), routing(37, 6, 8), routing(20, 2, 72)]
        sized += [whole_tiles_1_0(n, h) for n, h in ((128, 256), (256, 512))]
    else:
        for n, h in streams_of:
            sized += [layers_2_1(n, h, 2), recomputed("mhc", n, h, 3, 2)]
        sized += [mixes_2_1(n) for n in (5, 70)]
        for h in (256, 512):
            sized += [
                quantized_2_1(128, h),
                swiglu_backward_2_1(128, h),
                weight_scales_2_1(8192, h),
            ]
        sized += [gates_2_1(9, 64, 6), gates_2_1(5, 72, 8)]
    for calls in sized:
        for function, arguments, gradients in calls:
            yield Case(function, "written here", arguments, gradients)


def undefined(major: str) -> set[str]:
    """Functions that are undefined for some values in our samples."""
    return {name for name, _, _ in routing(20, 2, 72)} if major == "1" else set()


def operators(major: str) -> Iterator[tuple[Operator, str]]:
    """Our operators, and the functions of the package."""
    names = {ours: theirs for theirs, ours in ALIASES.get(major, {}).items()}
    for op in registry.all_ops():
        if op.family in FAMILIES:
            yield op, names.get(op.name, op.name)


def given(op: Operator, sample: Sample, device: str, major: str) -> Arguments | None:
    """A sample's arguments as the package names them; None for what only we have."""
    if any(word in sample.label for word in OURS_ALONE.get(op.name, ())):
        return None
    arguments = sample.build(device)
    if arguments.get("force_random") is not None:  # each package draws its own numbers
        return None
    defaults = {
        p.name: p.default for p in op.signature.parameters.values() if p.default is not p.empty
    }
    return {
        RENAMED.get(key, key) if major == "2" else key: value
        for key, value in arguments.items()
        if not _is_default(value, defaults.get(key, inspect.Parameter.empty))
        and not (key == "out_dtype" and value is torch.int64)
    }


def small(op: Operator, function: str, major: str) -> Iterator[Case]:
    """The calls of an operator's small samples, those of our own extensions and edges last."""
    if op.name in undefined(major):
        return
    for sample in sorted(op.cases.small, key=_unusual):
        arguments = given(op, sample, "cpu", major)
        if arguments is not None and all(t.numel() for t in leaves(arguments)):
            yield Case(function, sample.label, arguments)


def _unusual(sample: Sample) -> int:
    words = ("special", "misaligned", "strided", "bad", "too-few", "odd", "skip")
    arguments = leaves(sample.build("meta"))
    return any(w in sample.label for w in words) + any(1 in t.shape for t in arguments)


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) is type(default) and value == default
