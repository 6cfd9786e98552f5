"""References with the names and arguments of TileKernels 2.1; others as in `tile_kernels.torch`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.torch import *  # isort: skip
from tile_kernels.config import get_token_alignment
from tile_kernels.engram.gate.reference import engram_gate_ref as _engram_gate_ref
from tile_kernels.engram.sinkhorn.reference import (
    engram_sinkhorn_finalize as engram_sinkhorn_finalize_ref,
    engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update_ref,
    engram_sinkhorn_step as engram_sinkhorn_step_ref,
    engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce_ref,
)
from tile_kernels.moe.moe_topk.reference import moe_topk_gate_backward, moe_topk_gate_forward
from tile_kernels.quant.norm.reference import (
    norm_backward as norm_backward_ref,
    norm_forward as norm_forward_ref,
)
from tile_kernels.quant.swiglu.reference import (
    rows_in_ranges,
    swiglu_rows_backward,
    swiglu_rows_forward,
)
from tile_kernels.quant.weight_scales import (
    batched_transpose_weight_sf as batched_transpose_weight_sf,
)
from tile_kernels.transform.rotary.reference import rotary_embedding


def engram_gate_ref(
    hidden_states: Tensor,
    kv: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
    image_token_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`tile_kernels.torch.engram_gate_ref` with `kv` `[*, m + 1, H]`; image tokens pass.

    >>> import torch
    >>> x, kv = torch.zeros(1, 1, 4), torch.ones(1, 2, 4)
    >>> engram_gate_ref(x, kv, torch.ones(1, 4), torch.ones(1, 4), 1e-6, 1e-20)
    tensor([[[0.5000, 0.5000, 0.5000, 0.5000]]])
    """
    output, *saved = _engram_gate_ref(
        hidden_states, kv[..., :-1, :], kv[..., -1, :], weight_hidden, weight_embed, clamp_value,
        eps, True,
    )  # fmt: skip
    if image_token_mask is not None:
        output = torch.where(image_token_mask[..., None, None], hidden_states, output)
        saved = [x.masked_fill(image_token_mask[..., None], 0) for x in saved]
    return (output, *saved) if save_for_backward else output


def get_mapping_from_psum(x: Tensor, psum: Tensor, alignment: int | None = None) -> Tensor:
    """Which rows of `x` belong to an expert, bool; the alignment is the setting by default.

    >>> import torch
    >>> get_mapping_from_psum(torch.zeros(6, 1), torch.tensor([2, 4, 5]), 4).tolist()
    [True, True, False, False, True, False]
    """
    return rows_in_ranges(psum, alignment or get_token_alignment(), x.shape[0])


def _aligned_by_setting(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference with rows of experts whose alignment is the setting unless it is given."""

    @functools.wraps(reference)
    def call(*args: Any, alignment: int | None = None, **named: Any) -> Any:
        return reference(*args, alignment=alignment or get_token_alignment(), **named)

    return call


swiglu_forward = _aligned_by_setting(swiglu_rows_forward)
swiglu_backward = _aligned_by_setting(swiglu_rows_backward)


def mhc_pre_norm_fn_partials_ref(
    residual: Tensor, fn: Tensor, n_splits: int
) -> tuple[Tensor, Tensor]:
    """Partial products `[s, n, q]` and sums of squares `[s, n]` of the projection of a residual.

    The streams of a token, as one row, are cut into `n_splits` equal parts.

    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]]])
    >>> mhc_pre_norm_fn_partials_ref(x, torch.ones(1, 4), 2)
    (tensor([[[ 3.0000]],
    <BLANKLINE>
            [[-0.5000]]]), tensor([[5.0000],
            [1.2500]]))
    """
    parts = residual.flatten(1).float().chunk(n_splits, dim=1)
    weights = fn.chunk(n_splits, dim=1)
    mul = torch.stack([part @ weight.T for part, weight in zip(parts, weights)])
    return mul, torch.stack([part.square().sum(1) for part in parts])


def rotary_embedding_ref(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    seqlen_offsets: int = 0,
    interleaved: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`tile_kernels.torch.rotary_embedding` with cosines and sines `[P, D / 2]` apart.

    >>> import torch
    >>> x, one, zero = torch.ones(1, 1, 2), torch.ones(1, 1), torch.zeros(1, 1)
    >>> rotary_embedding_ref(x, one, zero).tolist()
    [[[1.0, 1.0]]]
    """
    cache = torch.cat((cos, sin), dim=-1)
    result: Any = rotary_embedding(
        x, cache, None, positions, interleaved, conjugate, seqlen_offsets
    )
    return result
