"""Kernels of another package on the emulator: DeepSeek's TileKernels, compared with our references.

    pip install --target FOLDER --no-deps tile-kernels==2.1.0
    python benchmarks/emulator_foreign.py FOLDER [--tilelang FOLDER] [--only FUNCTION ...]

Calls each operator of the package in FOLDER, unmodified, in check mode, with small arguments: the
samples of our operator of the same name, as far as the package's signature and its own assertions
accept them, and the arguments written below. Writes `benchmarks/results/emulator_foreign.json`, one
entry for each version of the package. Needs no GPU. TileKernels 1.0 needs an older TileLang than
ours: `--tilelang` names a folder that holds one, with the `tvm_ffi` and `z3` that it needs.

The package has our package's import name. A child process therefore imports it from FOLDER, and
our emulator alone under another name. Arguments and results travel as files.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "emulator_foreign.json"
EMULATOR = "emulator_under_test"  # the name of our emulator in the child
CASE_SECONDS = 120

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call: a function of both packages and its arguments by name."""

    function: str  # its path below the package
    label: str
    arguments: Arguments
    gradients: bool = False  # of all floating-point arguments


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [t for i in items for t in leaves(i)]
        if isinstance(items, (tuple, list)) or isinstance(value, dict)
        else []
    )


def on(value: Any, device: str) -> Any:
    """Arguments with every tensor copied to `device`, strides kept."""
    if isinstance(value, torch.Tensor):
        size, stride = value.size(), value.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if value.numel() else 0
        if 0 in stride:  # of an expanded tensor
            return value.contiguous().to(device)
        storage = torch.empty(span, dtype=value.dtype, device=device)
        storage.view(torch.uint8).zero_()
        return storage.as_strided(size, stride).copy_(value)
    if isinstance(value, dict):
        return {name: on(item, device) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(on(item, device) for item in value)
    return value


def call(package: str, case: Case, device: str) -> tuple[Any, list[torch.Tensor]]:
    """The result, and the tensors of the arguments afterwards; with gradients, those too."""
    module, _, name = f"{package}.{case.function}".rpartition(".")
    function = getattr(importlib.import_module(module), name)
    arguments = on(case.arguments, device)
    if not case.gradients:
        result = function(**arguments)
        return result, leaves(arguments)
    inputs = [t.requires_grad_() for t in leaves(arguments) if t.is_floating_point()]
    result = function(**arguments)
    outputs = leaves(result)
    generator = torch.Generator().manual_seed(1)
    seeds = [on(torch.randn(o.shape, generator=generator).to(o.dtype), device) for o in outputs]
    gradients = torch.autograd.grad(outputs, inputs, seeds)
    return tuple(o.detach() for o in outputs), [*gradients]


# ---- cases --------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, drawn in float32."""
    return torch.randn(*shape).to(dtype)


def streams(n: int, m: int, h: int) -> torch.Tensor:
    """Residual streams."""
    return randn(n, m, h, dtype=torch.bfloat16)


def mhc_layers_1_0() -> Iterator[tuple[str, Arguments, bool]]:
    """`tile_kernels.modeling.mhc.ops` of TileKernels 1.0, whose layers have four streams."""
    for n, h in ((5, 1280), (3, 2560)):
        x, residual = randn(1, n, h, dtype=torch.bfloat16), streams(n, 4, h)[None]
        fn, scale, base = randn(24, 4 * h) * 0.01, randn(3) * 0.1, randn(24) * 0.1
        pre, post = torch.rand(1, n, 4, 1), torch.rand(1, n, 4, 1)
        comb = torch.rand(1, n, 4, 4)
        yield "expand_to_mhc", {"hidden": x, "mhc_mult": 4}, True
        yield "mhc_pre_apply_mix", {"x": residual, "mix": pre}, False
        yield "mhc_post", {"x": x, "residual": residual, "post_layer_mix": post,
                           "comb_res_mix": comb}, True  # fmt: skip
        yield "mhc_pre_norm_fn", {
            "residual": residual, "mhc_fn": fn, "mhc_norm_weight": None, "mhc_norm_eps": 1e-6,
            "fuse_grad_acc": False}, True  # fmt: skip
        yield "mhc_pre_big_fuse", {
            "residual": residual, "fn": fn, "mhc_scale": scale, "mhc_base": base, "rms_eps": 1e-6,
            "mhc_pre_eps": 1e-6, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 1.0,
            "sinkhorn_repeat": 10}, False  # fmt: skip
        yield "mhc_multilayer_recompute", recompute(n, h), False
    for n in (5, 70):
        yield "sinkhorn_normalize", {"x": randn(1, n, 4, 4), "repeat": 10, "eps": 1e-6}, True
        yield "mhc_head_compute_mix", {"input_mix": randn(1, n, 4), "mhc_scale": randn(1),
                                       "mhc_base": randn(4), "mhc_pre_eps": 1e-2}, True  # fmt: skip
        yield "mhc_pre_split_mixes", {
            "input_mixes": randn(1, n, 24), "mhc_scale": randn(3), "mhc_base": randn(24),
            "mhc_mult": 4, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}, True  # fmt: skip


def recompute(n: int, h: int) -> Arguments:
    """Three layers, of which two have an output."""
    bf16 = torch.bfloat16
    return {
        "initial_residual": streams(n, 4, h),
        "pre_mix_list": [torch.rand(n, 4, 1) for _ in range(3)],
        "layer_output_list": [randn(n, h, dtype=bf16) for _ in range(2)],
        "post_mix_list": [torch.rand(n, 4, 1) for _ in range(2)],
        "comb_mix_list": [torch.rand(n, 4, 4) for _ in range(2)],
        "layer_input_list": [torch.zeros(n, h, dtype=bf16) for _ in range(3)],
        "residual_list": [torch.zeros(n, 4, h, dtype=bf16) for _ in range(2)],
    }


def mhc_buffers_2_1() -> Iterator[tuple[str, Arguments, bool]]:
    """`tile_kernels.mhc` of TileKernels 2.1, which writes into the caller's tensors."""
    bf16 = torch.bfloat16
    for n, h in ((5, 1280), (3, 2560)):
        x, residual = randn(n, h, dtype=bf16), streams(n, 4, h)
        mix, post, comb = torch.rand(n, 4), torch.rand(1, n, 4, 1), torch.rand(1, n, 4, 4)
        to_x, to_streams = torch.zeros(n, h, dtype=bf16), torch.zeros(n, 4, h, dtype=bf16)
        mul, sqr = randn(2, n, 24), torch.rand(2, n) * 100
        layer = {"x": x[None], "residual": residual[None], "post_layer_mix": post,
                 "comb_res_mix": comb}  # fmt: skip
        yield "expand_to_mhc_fwd", {"x": x, "o": to_streams}, False
        yield "expand_to_mhc_bwd", {"o_grad": residual, "x_grad": to_x}, False
        yield "mhc_pre_apply_mix_fwd", {"x": residual, "mix": mix, "o": to_x}, False
        yield "mhc_pre_apply_mix_bwd", {"o_grad": x, "x": residual, "mix": mix,
                                        "x_grad": streams(n, 4, h)}, False  # fmt: skip
        yield "mhc_post_fwd", layer, False
        yield "mhc_post_bwd", {**layer, "d_o": streams(n, 4, h)[None]}, False
        yield "mhc_fn_normw_merge_fwd", {"fn": randn(24, 4 * h), "normw": randn(4 * h),
                                         "out_fn": torch.zeros(24, 4 * h)}, False  # fmt: skip
        yield "mhc_fn_normw_merge_bwd", {
            "fn": randn(24, 4 * h), "normw": randn(4 * h), "out_fn_grad": randn(24, 4 * h),
            "fn_grad": randn(24, 4 * h), "normw_grad": randn(4 * h)}, False  # fmt: skip
        yield "mhc_pre_big_fuse_fwd", {
            "gemm_out_mul": mul, "gemm_out_sqrsum": sqr, "mhc_scale": randn(3),
            "mhc_base": randn(24), "residual": residual, "post_mix": torch.zeros(n, 4),
            "comb_mix": torch.zeros(n, 16), "layer_input": to_x, "rms_eps": 1e-6,
            "mhc_pre_eps": 1e-6, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 1.0,
            "sinkhorn_repeat": 10, "n_splits": 2}, False  # fmt: skip
        yield "mhc_multilayer_recompute", recompute(n, h), False
        yield "mhc_reduce_partials_and_rmsnorm_fwd", {
            "out_mul_splitted": mul[:, :, None], "sqrsum_splitted": sqr[..., None],
            "out_mul": torch.zeros(n, 1, 24), "sqrsum": torch.zeros(n, 1),
            "out": torch.zeros(n, 24), "rms_group_size": 4 * h, "rms_eps": 1e-6,
            "n_splits": 2}, False  # fmt: skip
        yield "mhc_reduce_partials_and_rmsnorm_bwd", {
            "out_grad": randn(n, 24), "out_mul": mul[0, :, None], "sqrsum": sqr[0, :, None],
            "out_mul_grad": torch.zeros(n, 1, 24), "sqrsum_grad": torch.zeros(n, 1),
            "rms_group_size": 4 * h, "rms_eps": 1e-6}, False  # fmt: skip
    for n in (5, 70):
        head = {"input_mix": randn(n, 4), "mhc_scale": randn(1), "mhc_base": randn(4)}
        yield "mhc_head_compute_mix_fwd", {**head, "output_mix": torch.zeros(n, 4),
                                           "mhc_pre_eps": 1e-2}, False  # fmt: skip
        yield "mhc_head_compute_mix_bwd", {
            "output_mix_grad": randn(n, 4), **head, "input_mix_grad": torch.zeros(n, 4),
            "mhc_scale_grad_partial": torch.zeros(1, 1),
            "mhc_base_grad_partial": torch.zeros(1, 4), "num_sms": 1}, False  # fmt: skip
        mixes = {"input_mixes": randn(n, 24), "mhc_scale": randn(3), "mhc_base": randn(24)}
        saved = torch.sigmoid(mixes["input_mixes"] * mixes["mhc_scale"].repeat_interleave(
            torch.tensor([4, 4, 16])) + mixes["mhc_base"])[:, 4:8] * 2  # fmt: skip
        yield "mhc_pre_split_mixes_fwd", {
            **mixes, "pre_layer_mix": torch.zeros(n, 4), "post_layer_mix": torch.zeros(n, 4),
            "comb_res_mix": torch.zeros(n, 16), "mhc_post_mult_value": 2.0,
            "mhc_pre_eps": 1e-2}, False  # fmt: skip
        yield "mhc_pre_split_mixes_bwd", {
            "pre_layer_mix_grad": randn(n, 4), "post_layer_mix_grad": randn(n, 4),
            "comb_res_mix_grad": randn(n, 16), "input_mixes": mixes["input_mixes"],
            "post_layer_mix": saved, "mhc_scale": mixes["mhc_scale"],
            "mhc_base": mixes["mhc_base"], "input_mixes_grad": torch.zeros(n, 24),
            "mhc_scale_grad": torch.zeros(3), "mhc_base_grad": torch.zeros(24),
            "mhc_post_mult_value": 2.0}, False  # fmt: skip
        yield "mhc_sinkhorn_fwd", {"comb_res_mix": randn(n, 4, 4),
                                   "comb_res_mix_out": torch.zeros(n, 4, 4), "repeat": 10,
                                   "eps": 1e-6}, False  # fmt: skip
        yield "mhc_sinkhorn_bwd", {"grad_output": randn(n, 4, 4), "x": randn(n, 4, 4),
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


def engram(major: str) -> Iterator[tuple[str, Arguments, bool]]:
    """The gate with its forward's results as the backward's arguments, and what goes with it."""
    from tile_kernels import engram as ours

    bf16, n, m = torch.bfloat16, 3, 4
    for h in (512, 1024):
        x, k, v = streams(n, m, h), streams(n, m, h), randn(n, h, dtype=bf16)
        packed = {"kv": torch.cat([k, v[:, None]], 1)} if major == "2" else {"k": k, "v": v}
        fixed = {"hidden_states": x, **packed, "weight_fused": randn(m, h)}
        limits = {"eps": 1e-20, "clamp_value": 1e-6}
        _, *saved = ours.engram_gate_fwd(x, k, v, fixed["weight_fused"], **limits)
        yield "engram_gate_fwd", {**fixed, **limits}, False
        named = dict(zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved))
        yield "engram_gate_bwd", {
            "grad_out": streams(n, m, h), **fixed, **named, "clamp_value": 1e-6}, False  # fmt: skip
        weights = {
            "weight_hidden": randn(m, h, dtype=bf16),
            "weight_embed": randn(m, h, dtype=bf16),
        }
        yield "fused_weight", weights, False
        yield "grad_w_reduce", {
            "grad_w_partial": randn(132, m, h), **weights, "grad_weight_hidden": randn(m, h),
            "grad_weight_embed": randn(m, h)}, False  # fmt: skip
        if major == "2":
            matrix = {"matrix": randn(7, h), "row_scale": torch.rand(7), "col_scale": torch.rand(h)}
            yield "engram_sinkhorn_finalize", {**matrix, "eps": 1e-20, "alpha": 2.0}, False


def routing() -> Iterator[tuple[str, Arguments, bool]]:
    """Ids in range and mappings that are ones: what 1.0 does with others is undefined."""
    for n, k, experts in ((37, 6, 8), (20, 2, 72)):
        idx = torch.rand(n, experts).argsort(1)[:, :k].contiguous()
        idx[torch.rand(n, k) < 0.3] = -1
        yield "aux_fi", {"topk_idx": idx, "num_experts": experts, "num_aux_topk": k}, False
        yield "group_count", {"group_idx": idx, "num_groups": experts}, False
        yield "inplace_unique_group_indices", {
            "group_indices": torch.randint(0, experts, (n, k)),
            "num_groups": experts}, False  # fmt: skip
        yield "mask_indices_by_tp", {"indices": idx, "n": experts * 4, "num_ep_ranks": 2,
                                     "tp_rank": 1, "num_tp_ranks": 2}, False  # fmt: skip
        yield "get_fused_mapping", {"topk_idx": idx, "num_experts": experts,
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
        yield "expand_to_fused", {"x": x, **mapping}, False
        codes = randn(n, 256).to(torch.float8_e4m3fn)
        yield "expand_to_fused_with_sf", {"x": (codes, torch.rand(n, 2)), "num_per_channels": 128,
                                          **mapping}, False  # fmt: skip
        yield "reduce_fused", {
            "x": randn(rows, 512, dtype=torch.bfloat16), "topk_weights": torch.rand(n, k),
            "token_topk_to_pos": to_pos}, False  # fmt: skip


def whole_tiles_1_0() -> Iterator[tuple[str, Arguments, bool]]:
    """What 1.0 takes only in sizes that our samples lack."""
    for n, h in ((128, 256), (256, 512)):
        x = randn(n, h, dtype=torch.bfloat16)
        rows = torch.randint(0, n, (256,), dtype=torch.int32)
        rows[::7] = -1
        cast = {"fmt": "e4m3", "num_per_tokens": 128, "round_sf": True}
        yield "quant.per_channel_cast_fused", {"x": x, **cast, "pos_to_token": rows}, False
        codes = x.to(torch.float8_e4m3fn), torch.rand(n, h // 128) + 0.1
        yield "quant.per_channel_cast_fused", {
            "x": codes, **cast, "num_per_channels": 128, "pos_to_token": rows}, False  # fmt: skip
        yield "transpose.batched_transpose", {"x": x.view(2, n // 2, h)}, False


def quantized_2_1() -> Iterator[tuple[str, Arguments, bool]]:
    """What 2.1 takes only in sizes, or with arguments, that our samples lack."""
    bf16 = torch.bfloat16
    for h in (256, 512):
        x = randn(128, h, dtype=bf16)
        flags = {"round_sf": True}
        yield "per_block_cast", {"x": x, "fmt": "e4m3", "block_size": (128, 128), **flags}, False
        yield "per_block_cast", {"x": x, "fmt": "e2m1", "block_size": (32, 32), **flags}, False
        yield "per_block_cast_with_sf_only", {"x": x, "fmt": "e4m3", "block_size": (128, 128),
                                              **flags}, False  # fmt: skip
        sf = torch.exp2(torch.randint(-9, -3, (1, h // 128)).float())
        yield "per_block_cast_with_precomputed_sf", {
            "x": x, "fmt": "e4m3", "block_size": (128, 128), "sf": sf}, False  # fmt: skip
        data = torch.randint(-128, 128, (128, h // 2), dtype=torch.int8)
        powers = torch.exp2(torch.randint(-2, 2, (128, h // 32)).float())
        yield "per_block_cast_lossless", {
            "x": (data, powers), "fmt": "e4m3", "x_block_size": (1, 32),
            "out_block_size": (128, 128), "round_sf": True}, False  # fmt: skip
        yield "per_channel_cast", {"x": x, "fmt": "e4m3", "num_per_tokens": 128}, False
        yield "per_token_cast_with_precomputed_sf", {
            "x": x, "fmt": "e4m3", "num_per_channels": 128, "sf": torch.rand(128, h // 128) + 0.1,
        }, False  # fmt: skip
        gated = randn(128, 2 * h).to(torch.float8_e4m3fn), torch.rand(128, h // 64) + 0.1
        yield "swiglu_backward_and_per_token_cast", {
            "x": gated, "act_x_grad": randn(128, h, dtype=bf16), "fmt": "e4m3",
            "num_per_channels": 128, "topk_weights": torch.rand(128)}, False  # fmt: skip
        scales = torch.exp2(torch.randint(-9, 3, (256, h // 32)).float())
        yield "batched_transpose_weight_sf", {
            "sf": [scales], "block_size": 32, "transpose_sf1s": [False],
            "outs": [None]}, False  # fmt: skip


def gates_2_1() -> Iterator[tuple[str, Arguments, bool]]:
    """The gate's backward, whose optional arguments come in pairs, and the update's pieces."""
    for n, experts, k in ((9, 64, 6), (5, 72, 8)):
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


def made(major: str) -> list[Case]:
    """All cases for a version, in the order in which they are tried."""
    from tile_kernels.runtime import registry

    torch.manual_seed(0)
    cases = []
    written = [("engram", engram(major))]
    if major == "1":
        written += [("modeling.mhc.ops", mhc_layers_1_0()), ("moe", routing()),
                    ("", whole_tiles_1_0())]  # fmt: skip
    else:
        written += [("mhc", mhc_buffers_2_1()), ("quant", quantized_2_1()), ("", gates_2_1())]
    for family, generated in written:
        for name, arguments, gradients in generated:
            path = f"{family}.{name}".lstrip(".")
            cases.append(Case(path, "written here", arguments, gradients))
    undefined = [f"moe.{name}" for name, _, _ in routing()] if major == "1" else []
    aliases = {ours: theirs for theirs, ours in ALIASES.get(major, {}).items()}
    for op in registry.all_ops():
        name = aliases.get(op.name, op.name)
        if op.family not in ("moe", "quant", "engram", "transform", "transpose"):
            continue
        if op.name in undefined:  # for some values in our samples
            continue
        defaults = {
            p.name: p.default for p in op.signature.parameters.values() if p.default is not p.empty
        }
        for sample in sorted(op.cases.small, key=_unusual):
            if any(word in sample.label for word in OURS_ALONE.get(op.name, ())):
                continue
            arguments = sample.build("cpu")
            if any(t.numel() == 0 for t in leaves(arguments)):
                continue
            if arguments.get("force_random") is not None:  # each package draws its own numbers
                continue
            given = {
                RENAMED.get(key, key) if major == "2" else key: value
                for key, value in arguments.items()
                if not _is_default(value, defaults.get(key, inspect.Parameter.empty))
                and not (key == "out_dtype" and value is torch.int64)
            }
            cases.append(Case(name, sample.label, given))
    return cases


def _unusual(sample: Any) -> int:
    """Samples that show our own extensions and edges come last; order is kept otherwise."""
    words = ("special", "misaligned", "strided", "bad", "too-few", "odd", "skip")
    arguments = leaves(sample.build("meta"))
    return any(w in sample.label for w in words) + any(1 in t.shape for t in arguments)


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and type(value) is type(default) and value == default


# ---- the child ----------------------------------------------------------------------------------


def child(folder: Path, cases_file: Path, results_file: Path, start: int, samples: int) -> None:
    """Run the cases from number `start`; append one result for each."""
    sys.path.insert(0, str(folder))
    # Hooks of editable installations find our package where the folder has no module.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f).lower()]
    source = ROOT / "tile_kernels" / "emulator"
    spec = importlib.util.spec_from_file_location(
        EMULATOR, source / "__init__.py", submodule_search_locations=[str(source)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} has no emulator")
    module = importlib.util.module_from_spec(spec)
    sys.modules[EMULATOR] = module
    spec.loader.exec_module(module)
    jit = importlib.import_module(f"{EMULATOR}.jit")
    cases = torch.load(cases_file, weights_only=False)
    with jit.emulated_tilelang(jit.Settings()) as session:
        accepted: dict[str, int] = {}
        for number, case in enumerate(cases[start:], start):
            count = accepted.get(case.function, 0)
            if count >= samples:
                continue
            torch.save((number, "started", None), results_file / f"{number}.pt")
            launches, began = session.launches, time.perf_counter()
            outcome, value = one(folder, case, module)
            if outcome != "not accepted":
                accepted[case.function] = count + 1
            seconds = time.perf_counter() - began
            print(f"{number} {case.function} {case.label}: {outcome} {seconds:.1f} s",
                  value if isinstance(value, str) else "", flush=True)  # fmt: skip
            details = {"value": value, "launches": session.launches - launches}
            torch.save((number, outcome, details), results_file / f"{number}.pt")


def one(folder: Path, case: Case, emulator: Any) -> tuple[str, Any]:
    """How a call ended, and its results or the message."""
    runner = importlib.import_module(f"{EMULATOR}.runner")
    module, _, name = f"tile_kernels.{case.function}".rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return "not accepted", f"absent: {error}"
    parameters = inspect.signature(function).parameters
    starred = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in case.arguments if key not in parameters]
    if unknown and not starred:
        return "not accepted", f"has no argument {unknown[0]}"
    try:
        with runner.time_limit(CASE_SECONDS):
            result, arguments = call("tile_kernels", case, "cuda")
        value = [on(t.detach(), "cpu") for t in [*leaves(result), *arguments]]
    except emulator.EmulationError as error:
        if error.kind == "assert":  # the kernel's own, on values of its arguments
            return "not accepted", str(error)
        kind = "refused" if error.kind in ("unsupported", "toolchain") else "reported"
        text = error.message.partition("\n")[0]
        if error.python_file:
            text += f" ({Path(error.python_file).name}, line {error.python_line})"
        return kind, text
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        inside = Path(frames[-1].filename).is_relative_to(folder)
        where = f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
        return ("not accepted" if inside else "other error"), where
    return "ran", value


# ---- the parent ---------------------------------------------------------------------------------


def run_child(folder: Path, tilelang: Path | None, cases: list[Case], samples: int) -> list[Any]:
    """Results of the cases, in a child that is started again where it ends with a signal."""
    paths = [str(p) for p in (folder, tilelang) if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as scratch:
        cases_file, results = Path(scratch) / "cases.pt", Path(scratch) / "results"
        results.mkdir()
        torch.save(cases, cases_file)
        start = 0
        while True:
            command = [sys.executable, __file__, "--child", str(cases_file), str(results),
                       "--start", str(start), "--samples", str(samples), str(folder)]  # fmt: skip
            status = subprocess.run(command, env=environment, cwd=scratch, check=False).returncode
            found = [torch.load(f, weights_only=False) for f in results.iterdir()]
            if status == 0:
                return sorted(found, key=lambda item: item[0])
            died = [number for number, outcome, _ in found if outcome == "started"]
            if not died:
                raise RuntimeError(f"the child process ended with status {status}")
            details = {"value": f"the process ended with status {status}", "launches": 0}
            torch.save((died[0], "other error", details), results / f"{died[0]}.pt")
            start = died[0] + 1


def difference(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> str:
    """`"exact"`, `"close"`, or what differs."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} tensors, expected {len(ours)}"
    worst = "exact"
    for number, (a, b) in enumerate(zip(theirs, ours)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"tensor {number}: {a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"
        if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            continue
        if not a.is_floating_point():
            count = int((a != b).sum())
            return f"tensor {number}: {count} of {a.numel()} differ"
        x, y = a.double(), b.double()
        rtol = {torch.float32: 1e-4, torch.bfloat16: 8e-3}.get(a.dtype, 0.0)
        atol = rtol * y.nan_to_num(0, 0, 0).square().mean().sqrt().clamp_min(1e-6).item()
        far = ~torch.isclose(x, y, rtol, atol, equal_nan=True)
        if far.any():
            at = far.view(-1).nonzero()[0].item()
            return (f"tensor {number}: {int(far.sum())} of {far.numel()} differ, first at {at}: "
                    f"{x.reshape(-1)[at]:g}, expected {y.reshape(-1)[at]:g}")  # fmt: skip
        worst = "close"
    return worst


def judged(major: str, cases: list[Case], results: list[Any]) -> dict[str, Any]:
    """Outcomes by operator: right, wrong, refused, reported, other error."""
    package = "tile_kernels" if major == "1" else "tile_kernels.v2"
    operators: dict[str, Any] = {}
    for number, ended, details in results:
        case, outcome = cases[number], ended
        entry = operators.setdefault(case.function, {"calls": [], "not accepted": []})
        text = details["value"]
        if outcome == "not accepted":
            if text not in entry["not accepted"]:
                entry["not accepted"].append(text)
            continue
        if outcome == "ran":
            result, arguments = call(package, case, "cpu")
            expected = [t.detach() for t in [*leaves(result), *arguments]]
            part = PARTIAL[major].get(case.function)
            if part is not None:
                for tensors in (text, expected):
                    tensors[part] = tensors[part].sum(0)
            text = difference(text, expected)
            outcome = "right" if text in ("exact", "close") else "wrong"
        entry["calls"].append(
            {
                "sample": case.label,
                "outcome": outcome,
                "text": text,
                "launches": details["launches"],
            }
        )
    return {
        name: entry
        for name, entry in operators.items()
        if entry["calls"] or not all(r.startswith("absent") for r in entry["not accepted"])
    }


ENDS = ("wrong", "other error", "refused", "reported", "right")  # the worst first


def summary(operators: dict[str, Any]) -> dict[str, Any]:
    """Operators by the worst end of their calls; calls by their ends."""
    called = [entry["calls"] for entry in operators.values() if entry["calls"]]
    worst = [min((c["outcome"] for c in calls), key=ENDS.index) for calls in called]
    return {
        "operators": {"called": len(called), **{end: worst.count(end) for end in ENDS}},
        "calls": {
            "called": sum(map(len, called)),
            **{end: sum(c["outcome"] == end for calls in called for c in calls) for end in ENDS},
        },
        "not called": sorted(name for name, entry in operators.items() if not entry["calls"]),
    }


def main() -> None:
    """Run one version of the package and write its results beside those of the others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the package is installed")
    parser.add_argument("--tilelang", type=Path, help="where another TileLang is installed")
    parser.add_argument(
        "--only", nargs="+", metavar="FUNCTION", help="measure these again, leave the others"
    )
    parser.add_argument("--samples", type=int, default=3, help="calls per function")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.child:
        child(folder, *options.child, options.start, options.samples)
        return
    sys.path.insert(0, str(ROOT))
    (metadata,) = folder.glob("tile_kernels-*.dist-info")
    version = metadata.name.removeprefix("tile_kernels-").removesuffix(".dist-info")
    cases = made(version[0])
    if options.only:
        cases = [c for c in cases if c.function in options.only]
    tilelang = options.tilelang and options.tilelang.absolute()
    results = run_child(folder, tilelang, cases, options.samples)
    where = tilelang or Path(importlib.util.find_spec("tilelang").origin).parents[1]
    (used,) = Path(where).glob("tilelang-*.dist-info")
    run = {
        "tilelang": used.name.removeprefix("tilelang-").removesuffix(".dist-info"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    operators = {n: {**e, "run": run} for n, e in judged(version[0], cases, results).items()}
    everything = json.loads(options.json.read_text()) if options.json.exists() else {}
    before = everything.get(version, {}).get("operators", {}) if options.only else {}
    merged = {**before, **operators}
    everything[version] = {"summary": summary(merged), "operators": merged}
    options.json.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    for name, entry in sorted(operators.items()):
        print(name, [(c["sample"], c["outcome"], c["text"]) for c in entry["calls"]])


if __name__ == "__main__":
    main()
