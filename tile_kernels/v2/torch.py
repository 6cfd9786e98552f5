"""References with the names and arguments of TileKernels 2.1; others as in `tile_kernels.torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.torch import *  # isort: skip
from tile_kernels.engram.gate.reference import engram_gate_ref as _engram_gate_ref
from tile_kernels.engram.sinkhorn.reference import (
    engram_sinkhorn_finalize as _engram_sinkhorn_finalize,
    engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update_ref,
    engram_sinkhorn_step as _engram_sinkhorn_step,
    engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce_ref,
)
from tile_kernels.moe.moe_topk.reference import (
    moe_topk_gate_backward as moe_topk_gate_backward,
    moe_topk_gate_forward as _moe_topk_gate_forward,
)
from tile_kernels.quant.norm.reference import (
    norm_backward as _norm_backward,
    norm_forward as _norm_forward,
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


def engram_sinkhorn_step_ref(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, col_sumsq: Tensor, eps: float
) -> Tensor:
    """The norms of rows; their scales and the sums of squares of columns are written.

    >>> import torch
    >>> matrix, scale, sums = torch.tensor([[3.0, -4.0]]), torch.ones(1), torch.empty(2)
    >>> engram_sinkhorn_step_ref(matrix, scale, torch.ones(2), sums, 0.0), scale, sums
    (tensor([5.]), tensor([0.2000]), tensor([0.3600, 0.6400]))
    """
    norms, partial = _engram_sinkhorn_step(matrix, row_scale, col_scale, eps, 1)
    engram_sinkhorn_step_reduce_ref(partial, col_sumsq)
    return norms


def engram_sinkhorn_finalize_ref(
    matrix: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    eps: float,
    alpha: float,
    out: Tensor | None = None,
) -> Tensor:
    """`tile_kernels.torch.engram_sinkhorn_finalize` with a buffer for the result.

    >>> import torch
    >>> matrix = torch.tensor([[3.0, -4.0]])
    >>> engram_sinkhorn_finalize_ref(matrix, torch.ones(1), torch.ones(2), 0.0, 10.0, matrix)
    tensor([[ 6., -8.]])
    """
    result = _engram_sinkhorn_finalize(matrix, row_scale, col_scale, eps, alpha)
    return result if out is None else out.copy_(result)


def moe_topk_gate_forward(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`tile_kernels.torch.moe_topk_gate_forward` with buffers for the results.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    >>> out = torch.empty(1, 2, dtype=torch.int64), torch.empty(1, 2)
    >>> moe_topk_gate_forward(logits, 2, False, 0, 1.5, 0, out=out)[0] is out[0], out
    (True, (tensor([[2, 3]]), tensor([[0.7500, 0.7500]])))
    """
    idx, weights, *scores = _moe_topk_gate_forward(
        logits, num_topk, use_shared_as_routed, num_shared_experts, routed_scaling_factor, ep_rank,
        scoring_func, mask, bias, image_bias, image_token_mask, fix_routing_mask, to_physical_map,
        logical_count, unmapped_topk_idx, **options,
    )  # fmt: skip
    if out is not None:
        idx, weights = out[0].copy_(idx), out[1].copy_(weights)
    return idx, weights, *scores


def norm_forward_ref(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, rstd, norm_input)` of `tile_kernels.torch.norm_forward`.

    >>> import torch
    >>> norm_forward_ref(torch.tensor([[2.0, 2.0]]), None, 0.0)
    (tensor([[1., 1.]]), tensor([0.5000]), tensor([[2., 2.]]))
    """
    result: Any = _norm_forward(x, weight, eps, residual, out_scale, with_rstd=True)
    return result


def norm_backward_ref(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """`tile_kernels.torch.norm_backward` with the gradient of the weight in float32.

    >>> import torch
    >>> one = torch.ones(1, 2)
    >>> norm_backward_ref(one, one, torch.ones(2).bfloat16(), torch.ones(1))
    (tensor([[0., 0.]]), tensor([1., 1.]))
    """
    total = None if weight is None else torch.zeros_like(weight, dtype=torch.float32)
    return _norm_backward(out_grad, x, weight, rstd, residual_out_grad, out_scale, total)


def get_mapping_from_psum(
    x: Tensor, psum_num_tokens_per_expert: Tensor, *, alignment: int | None = None
) -> Tensor:
    """Which rows of `x` belong to an expert, bool; the alignment is the setting by default.

    >>> import torch
    >>> get_mapping_from_psum(torch.zeros(6, 1), torch.tensor([2, 4, 5]), alignment=4).tolist()
    [True, True, False, False, True, False]
    """
    return rows_in_ranges(psum_num_tokens_per_expert, alignment, x.shape[0])


def swiglu_forward(
    x: Tensor,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    *,
    alignment: int | None = None,
) -> Tensor:
    """`tile_kernels.quant.swiglu_forward` to float32; the alignment is the setting by default.

    >>> import torch
    >>> swiglu_forward(torch.tensor([[1.0, 3.0]]), None, torch.tensor([2.0]))
    tensor([[4.3864]])
    """
    return swiglu_rows_forward(
        x, "fp32", psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value,
        clamped_count, alignment=alignment,
    )  # fmt: skip


def swiglu_backward(
    x: Tensor,
    grad_out: Tensor,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    alignment: int | None = None,
) -> tuple[Tensor, ...]:
    """`(x_grad, out)`, with weights `(x_grad, weight_grad, out)`, in float32.

    `out` is what `swiglu_forward` returns. The alignment is the setting by default.

    >>> import torch
    >>> swiglu_backward(torch.tensor([[1.0, 3.0]]), torch.ones(1, 1), None, torch.tensor([2.0]))
    (tensor([[5.5660, 1.4621]]), tensor([2.1932]), tensor([[4.3864]]))
    """
    return swiglu_rows_backward(
        x, grad_out, "fp32", psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
        clamp_value, True, alignment=alignment,
    )  # fmt: skip


def mhc_pre_norm_fn_partials_ref(
    residual: Tensor, fn: Tensor, n_splits: int
) -> tuple[Tensor, Tensor]:
    """Partial products `[s, n, 1, q]` and sums of squares `[s, n, 1]` of a residual's projection.

    The streams of each of the `n` tokens of `residual` `[..., m, h]`, as one row, are cut into
    `n_splits` equal parts.

    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]]])
    >>> mul, squares = mhc_pre_norm_fn_partials_ref(x, torch.ones(1, 4), 2)
    >>> mul.shape, mul.flatten().tolist()
    (torch.Size([2, 1, 1, 1]), [3.0, -0.5])
    >>> squares.shape, squares.flatten().tolist()
    (torch.Size([2, 1, 1]), [5.0, 1.25])
    """
    parts = residual.flatten(-2).flatten(0, -2).float().chunk(n_splits, dim=1)
    weights = fn.chunk(n_splits, dim=1)
    mul = torch.stack([part @ weight.T for part, weight in zip(parts, weights)])
    return mul[:, :, None], torch.stack([part.square().sum(1, keepdim=True) for part in parts])


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
