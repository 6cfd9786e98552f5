"""FP8 experts that are spread over ranks: tokens travel as e4m3 with scales.

Tokens are quantized where they are and sent with their scales, half the bytes of bfloat16; the
first product reads the rows as they arrive. Results and gradients travel as bfloat16. The numbers
of each row are those of `fp8_experts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tile_kernels import quant
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.modeling.fp8_experts import (
    FMT,
    ExpertWeights,
    Rows,
    _by_rows,
    _gathered_by_rows,
    _product,
    _weight_gradient,
    needs_gradients,
)
from tile_kernels.quant.types import QuantTensor

if TYPE_CHECKING:
    from tile_kernels.ep import ElasticBuffer
    from tile_kernels.ep.handle import EPHandle


def fp8_experts_over_ranks(
    ep: ElasticBuffer,
    num_experts: int,
    x: Tensor,
    weights: Tensor,
    topk_idx: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    quantized: tuple[ExpertWeights, ExpertWeights],
) -> Tensor:
    """Applies the chosen experts, wherever they are, to each token of this rank. Collective.

    On a buffer that can, the host does not wait for the GPU; then there are as many rows as could
    arrive.

    Args:
        ep: The buffer of the ranks.
        num_experts: Experts of all ranks.
        x: `[num_tokens, hidden]`, bfloat16, contiguous.
        weights, topk_idx: As in `fp8_experts`, with experts of all ranks.
        w_in, w_out: As in `fp8_experts`: those of this rank.
        quantized: `quantize_weights` of both.

    Returns:
        `[num_tokens, hidden]`, bfloat16.
    """
    (in_forward, in_transposed), (out_forward, out_transposed) = quantized
    if not needs_gradients(x, weights, w_in, w_out):
        return _forward(ep, num_experts, x, weights, topk_idx, in_forward, out_forward)[0]
    y: Tensor = _FP8ExpertsOverRanks.apply(
        ep, num_experts, x, weights, topk_idx, w_in, w_out, *in_forward, *in_transposed,
        *out_forward, *out_transposed,
    )  # fmt: skip
    return y


def _rows_of(handle: EPHandle) -> Rows:
    """The rows that arrived, as if each were a token with one choice."""
    expert = handle.routing.pos_to_expert
    if expert is None:
        raise RuntimeError("unreachable: the layout is expanded")
    row = torch.arange(len(expert), dtype=torch.int32, device=expert.device)
    index = torch.where(expert >= 0, row, -1)
    last = handle.psum_num_recv_tokens_per_expert
    ends = (last + (BLOCK - 1)).div(BLOCK, rounding_mode="floor") * BLOCK
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return Rows(expert, index, index, index[:, None], sizes.int())


def _forward(
    ep: ElasticBuffer,
    num_experts: int,
    x: Tensor,
    weights: Tensor,
    topk_idx: Tensor,
    w_in: QuantTensor,
    w_out: QuantTensor,
) -> tuple[Tensor, Any, Tensor, Tensor, Rows, EPHandle]:
    """The result; the rows, their weights, the first product, the maps and the handle."""
    xq, row_weights, handle = send(ep, quant.per_token_cast(x, FMT, BLOCK), topk_idx, weights,
                                   num_experts, BLOCK, may_wait=False)  # fmt: skip
    rows = _rows_of(handle)
    h = _product(xq, w_in, rows.pos_to_expert)
    z = quant.swiglu_forward_and_per_token_cast(
        h, FMT, BLOCK, rows.pos_to_token_topk, row_weights[:, None], rows.pos_to_expert,
        use_tma_aligned_col_major_sf=True,
    )  # fmt: skip
    o = _product(z, w_out, rows.pos_to_expert)
    return ep.combine(o, handle)[0], xq, row_weights, h, rows, handle


def send(
    ep: ElasticBuffer, x: Any, topk_idx: Tensor, weights: Tensor, num_experts: int, alignment: int,
    may_wait: bool,
) -> tuple[Any, Tensor, EPHandle]:  # fmt: skip
    """Tokens to the ranks of their experts: the rows of experts, their weights and the handle.

    Args:
        ep, x, topk_idx, weights, num_experts: As in `ElasticBuffer.dispatch`; scales of a pair come
            with columns in a row.
        alignment: The rows of an expert start at its multiples.
        may_wait: Whether the caller needs the numbers of rows on the host. Else the host does not
            wait where the buffer can do without. Compiled functions get as many rows as could
            arrive, a number that the compiler knows.
    """
    sync = may_wait or not (ep.can_avoid_host_waits or torch.compiler.is_compiling())
    rows, _, row_weights, handle, _ = ep.dispatch(
        x, topk_idx, weights, num_experts=num_experts, expert_alignment=alignment, do_expand=True,
        do_cpu_sync=sync, use_tma_aligned_col_major_sf=isinstance(x, tuple),
    )  # fmt: skip
    if row_weights is None:
        raise RuntimeError("unreachable: weights were sent")
    return rows, row_weights, handle


class _FP8ExpertsOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ep: ElasticBuffer, num_experts: int, x: Tensor, weights: Tensor, topk_idx: Tensor,
        w_in: Tensor, w_out: Tensor, *quantized: Tensor,
    ) -> Tensor:  # fmt: skip
        in_codes, in_sf, *in_transposed = quantized[0:4]
        out_codes, out_sf, *out_transposed = quantized[4:8]
        y, xq, row_weights, h, rows, handle = _forward(
            ep, num_experts, x, weights, topk_idx, (in_codes, in_sf), (out_codes, out_sf)
        )
        hq = quant.per_token_cast(h, FMT, BLOCK)
        ctx.save_for_backward(*xq, *hq, row_weights, *in_transposed, *out_transposed, *rows)
        ctx.main_grads = [getattr(w, "main_grad", None) for w in (w_in, w_out)]
        ctx.dtypes, ctx.ep, ctx.handle = (w_in.dtype, w_out.dtype), ep, handle
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_sf, h_codes, h_sf, row_weights, *others = ctx.saved_tensors
        in_transposed, out_transposed = tuple(others[0:2]), tuple(others[2:4])
        rows, (main_in, main_out) = Rows(*others[4:9]), ctx.main_grads
        grad_rows = ctx.ep.dispatch(grad_y.contiguous(), handle=ctx.handle)[0]
        gq = quant.per_token_cast(grad_rows, FMT, BLOCK, use_tma_aligned_col_major_sf=True)
        grad_z = _product(gq, out_transposed, rows.pos_to_expert)
        z, grad_hq, grad_h, row_grads = quant.swiglu_backward_and_per_token_cast(
            (h_codes, h_sf), grad_z, row_weights[:, None], rows.pos_to_token_topk,
            rows.token_topk_to_pos, BLOCK,
        )  # fmt: skip
        needs_x, needs_weights, _, needs_in, needs_out = ctx.needs_input_grad[2:7]
        grad_x = grad_weights = grad_in = grad_out = None
        if needs_x or needs_weights:
            back = (
                _product(grad_hq, in_transposed, rows.pos_to_expert) if needs_x else grad_h[:, :0]
            )
            grad_x, grad_weights, _ = ctx.ep.combine(
                back.contiguous(),
                ctx.handle,
                topk_weights=row_grads.flatten() if needs_weights else None,
            )
        if needs_out:
            grad_out = _weight_gradient(
                main_out, ctx.dtypes[1], _by_rows(grad_rows), _by_rows(z), rows
            )
        if needs_in:
            x_by_rows = _gathered_by_rows((x_codes, x_sf), rows)
            grad_in = _weight_gradient(main_in, ctx.dtypes[0], _by_rows(grad_h), x_by_rows, rows)
        return (
            None, None, grad_x if needs_x else None, grad_weights if needs_weights else None, None,
            grad_in, grad_out, *[None] * 8,
        )  # fmt: skip
