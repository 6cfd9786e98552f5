"""Plug-ins of vLLM and SGLang: which of their operators this package replaces.

Both engines find a plug-in `tile_kernels` in the metadata of the installed package, and call it in
each of their processes. It replaces something only if the engine's list of plug-ins names it:

    VLLM_PLUGINS=tile_kernels vllm serve ...
    SGLANG_PLUGINS=tile_kernels python -m sglang.launch_server ...

A program that starts an engine itself can call `register_vllm` or `register_sglang` before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.integrations import sglang, vllm
from tile_kernels.moe.plan import MAX_SLOTS

__all__ = ["register_sglang", "register_vllm", "sglang_plugin", "vllm_plugin"]

NAME = "tile_kernels"
_LAYERNORM = "sglang.kernels.ops.layernorm"
_SPARSE = "sglang.kernels.ops.attention.dsv4.topk"
# Functions of SGLang with the arguments and results of ours.
SGLANG_TARGETS: dict[str, Callable[..., Any]] = {
    f"{_LAYERNORM}.mhc.mhc_pre": sglang.mhc_pre,
    f"{_LAYERNORM}.mhc.mhc_post": sglang.mhc_post,
    f"{_LAYERNORM}.mhc.mhc_fused_post_pre": sglang.mhc_fused_post_pre,
    f"{_LAYERNORM}.mhc_head.fused_hc_head": sglang.fused_hc_head,
    f"{_SPARSE}.topk_transform_paged": sglang.topk_transform_paged,
    f"{_SPARSE}.topk_transform_ragged_v2": sglang.topk_transform_ragged_v2,
}


def _named_in(variable: str) -> bool:
    """Whether an engine's list of plug-ins, separated by commas, names this one."""
    return NAME in (word.strip() for word in os.environ.get(variable, "").split(","))


def vllm_plugin() -> None:
    """What vLLM calls: `register_vllm`, if `VLLM_PLUGINS` names `tile_kernels`."""
    if _named_in("VLLM_PLUGINS"):
        register_vllm()


def sglang_plugin() -> None:
    """What SGLang calls: `register_sglang`, if `SGLANG_PLUGINS` names `tile_kernels`."""
    if _named_in("SGLANG_PLUGINS"):
        register_sglang()


# ---- vLLM ---------------------------------------------------------------------------------------


def _vllm_classes() -> dict[str, type]:
    """Subclasses of vLLM's operators, by the name of the class that each replaces."""
    from vllm.model_executor.layers import mhc
    from vllm.model_executor.layers.fused_moe.router import grouped_topk_router

    class Pre(mhc.MHCPreOp):
        def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
            return vllm.mhc_pre(*args, **kwargs)

    class PreDelayed(mhc.MHCPreDelayedOp):
        def forward_cuda(
            self,
            residual: Tensor,
            *args: Any,
            sublayer_out: Tensor | None = None,
            post_layer_mix: Tensor | None = None,
            comb_res_mix: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            streams = self._maybe_post(residual, sublayer_out, post_layer_mix, comb_res_mix)
            return streams, *vllm.mhc_pre_delayed(streams, *args, **kwargs)

    class Post(mhc.MHCPostOp):
        def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
            return vllm.mhc_post(*args, **kwargs)

    class PostPre(mhc.MHCFusedPostPreOp):
        def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
            return vllm.mhc_fused_post_pre(*args, **kwargs)

    class Head(mhc.HCHeadOp):
        def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
            return vllm.hc_head(*args, **kwargs)

    class GroupedTopk(grouped_topk_router.GroupedTopk):
        @classmethod
        def enabled(cls) -> bool:
            return True

        def forward_cuda(
            self,
            hidden_states: Tensor,
            gating_output: Tensor,
            e_score_correction_bias: Tensor | None = None,
        ) -> Any:
            biased_softmax = self.scoring_func == "softmax" and e_score_correction_bias is not None
            if biased_softmax or self.num_fused_shared_experts or self.topk > MAX_SLOTS:
                return super().forward_cuda(hidden_states, gating_output, e_score_correction_bias)
            return vllm.grouped_topk(
                hidden_states, gating_output, self.topk, self.renormalize, self.num_expert_group,
                self.topk_group, self.scoring_func, self.routed_scaling_factor,
                e_score_correction_bias,
            )  # fmt: skip

    return {
        "MHCPreOp": Pre,
        "MHCPreDelayedOp": PreDelayed,
        "MHCPostOp": Post,
        "MHCFusedPostPreOp": PostPre,
        "HCHeadOp": Head,
        "GroupedTopk": GroupedTopk,
    }


def register_vllm() -> list[str]:
    """Lets vLLM build operators of this package in place of its own, on CUDA.

    Replaced are the operators of hyper-connections and the gate with groups of experts, which keeps
    vLLM's function for a bias with softmax scores, for shared experts in the gate and for more than
    32 experts per token. Operators that another plug-in replaced stay that plug-in's. Calling it
    again changes nothing. Call it before vLLM builds a model.

    Returns:
        The classes of vLLM that this call replaced.

    Raises:
        ImportError: If vLLM is not installed.

    Example:
        >>> register_vllm()  # doctest: +SKIP
        ['MHCPreOp', 'MHCPreDelayedOp', 'MHCPostOp', 'MHCFusedPostPreOp', 'HCHeadOp', 'GroupedTopk']
    """
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    replaced = []
    for name, cls in _vllm_classes().items():
        if name not in op_registry_oot:
            CustomOp.register_oot(cls, name=name)
            replaced.append(name)
    return replaced


# ---- SGLang -------------------------------------------------------------------------------------

_registered: set[str] = set()


def register_sglang() -> list[str]:
    """Lets SGLang call functions of this package in place of its own, on CUDA.

    Replaced are the functions of hyper-connections and the choice of keys of sparse attention.
    Calling it again changes nothing. SGLang applies the replacements when it has loaded all
    plug-ins; a program that registers them itself calls `HookRegistry.apply_hooks()` afterwards.

    Returns:
        The functions of SGLang that this call replaced: none with a PyTorch for another GPU than
        NVIDIA's.

    Raises:
        ImportError: If SGLang is not installed.

    Example:
        >>> register_sglang()[0]  # doctest: +SKIP
        'sglang.kernels.ops.layernorm.mhc.mhc_pre'
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if torch.version.hip is not None:
        return []
    replaced = [target for target in SGLANG_TARGETS if target not in _registered]
    for target in replaced:
        HookRegistry.register(target, SGLANG_TARGETS[target], HookType.REPLACE)
        _registered.add(target)
    return replaced
