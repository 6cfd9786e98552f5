"""Reference of `mhc_multilayer_recompute`."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.mhc.apply.reference import mhc_pre_apply_mix
from tile_kernels.mhc.post.reference import mhc_post


def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    """Layer by layer, `mhc_pre_apply_mix` and `mhc_post`, written to the last two lists."""
    residual = initial_residual
    for i, pre in enumerate(pre_mix_list):
        layer_input_list[i].copy_(mhc_pre_apply_mix(residual, pre))
        if i < len(layer_output_list):
            residual = mhc_post(layer_output_list[i], residual, post_mix_list[i], comb_mix_list[i])
            residual_list[i].copy_(residual)
