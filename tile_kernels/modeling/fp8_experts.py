"""The experts of a mixture-of-experts layer with all six matrix products in FP8.

`fp8_experts` takes tokens, their choice of experts and the experts' weights. Operands are e4m3 with
a scale for every 128 values along the dimension that is summed:

| product | operands | scales |
|---|---|---|
| forward, first and second | rows, weights | 1x128 along channels, 128x128 |
| input gradients | rows of gradients, the same weights transposed | the same |
| weight gradients | both transposed, `[channels, rows]` | 1x128 along rows |

Everything between is fused with casts. The number of rows is an upper bound that the host knows, so
the host does not wait for the GPU, and forward and backward can be captured in a CUDA graph.

`fp8_experts_masked` is the forward pass alone for few tokens: decoding.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tile_kernels import gemm, moe, quant, transpose
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.moe.mapping.reference import max_expanded_tokens
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import backends

FMT = "e4m3"

# Tokens up to which the layer uses the masked layout where it needs no gradients. That layout has
# `tokens * experts` rows, the contiguous one at most `tokens * topk + 127 * experts`: up to 127
# tokens the masked one is smaller, and its products use tiles of few rows. Not measured.
MAX_MASKED_TOKENS = BLOCK


class ExpertWeights(NamedTuple):
    """Quantized weights of experts.

    Attributes:
        forward: `[E, out, in]`: for the forward products.
        transposed: `[E, in, out]`: for the gradients of inputs.
    """

    forward: QuantTensor
    transposed: QuantTensor


def quantize_weights(weight: Tensor) -> ExpertWeights:
    """Quantizes the weights of experts in blocks of 128x128, once for both directions.

    A block that is transposed has the same scale, so the transposed copy holds the same numbers.

    Args:
        weight: `[E, out, in]`, or `[out, in]` for one expert, bfloat16 or float32; `out` and `in`
            are multiples of 128.

    Returns:
        Codes `[E, out, in]` with scales `[E, out / 128, in / 128]`, and both transposed.
    """
    rows, channels = weight.shape[-2:]
    flat = weight.detach().reshape(-1, channels)
    codes, scales = quant.per_block_cast(flat, FMT, (BLOCK, BLOCK))
    codes = codes.view(-1, rows, channels)
    scales = scales.view(-1, rows // BLOCK, channels // BLOCK)
    turned = transpose.batched_transpose(codes)
    return ExpertWeights((codes, scales), (turned, scales.transpose(1, 2)))


class WeightCache:
    """Keeps the quantized copy of a parameter until the parameter changes.

    A change is noticed by the version counter of the tensor, which operations of PyTorch increment
    when they write in place, or by another tensor or address. What bypasses the counter is not
    noticed: writes through `.data` and code that preserves versions or writes through raw
    pointers. Call `clear()` after those. In CUDA graph capture and under `torch.compile` weights
    are quantized at every call, so that a replay uses the weights current at that time; for
    captures `freeze` changes that.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int] | None = None
        self._weights: ExpertWeights | None = None
        self._frozen = False

    def __call__(self, weight: Tensor) -> ExpertWeights:
        """The quantized copy of `weight`."""
        if torch.compiler.is_compiling() or weight.is_inference():
            return quantize_weights(weight)
        capturing = _is_capturing(weight)
        if capturing and not self._frozen:
            return quantize_weights(weight)
        source = None if self._source is None else self._source()
        key = weight._version, weight.data_ptr()
        if self._weights is None or source is not weight or key != self._key:
            if capturing:
                raise RuntimeError(
                    "weights have changed since they were frozen; call freeze_quantized_weights() "
                    "again before the capture"
                )
            self._weights = self._quantized(weight)
            self._source, self._key = weakref.ref(weight), key
        return self._weights

    def _quantized(self, weight: Tensor) -> ExpertWeights:
        """A new copy, or the frozen one with new contents."""
        with torch.inference_mode(False), torch.no_grad():  # a later call may need gradients
            fresh, kept = quantize_weights(weight), self._weights
            if not self._frozen or kept is None:
                return fresh
            # Codes are copied as bytes. The transposed scales are a view of the others.
            for old, new in ((kept.forward, fresh.forward), (kept.transposed, fresh.transposed)):
                old[0].view(torch.uint8).copy_(new[0].view(torch.uint8))
            kept.forward[1].copy_(fresh.forward[1])
            return kept

    def freeze(self, weight: Tensor) -> None:
        """Lets CUDA graphs that are captured later read the copy instead of quantizing in every
        replay.

        When the weight changes, the next call outside a capture, or `freeze` again, writes the new
        codes to the same memory, where the graphs read them. A replay alone does not detect a
        change. A capture with an outdated copy raises an error.

        Args:
            weight: The parameter whose copy is kept.

        Raises:
            ValueError: If `weight` is an inference tensor, whose changes PyTorch does not count.
        """
        if weight.is_inference():
            raise ValueError("weights must not be inference tensors to be frozen")
        self(weight)
        self._frozen = True

    def unfreeze(self) -> None:
        """Graphs captured from now on quantize; those that read the copy need it no longer."""
        self._frozen = False
        self.clear()

    def clear(self) -> None:
        """Forgets whether the copy is current; the next call quantizes."""
        self._source = self._key = None
        if not self._frozen:
            self._weights = None

    def __getstate__(self) -> dict[str, Any]:
        """An empty cache: a copy of a layer quantizes its own weights."""
        return {"_source": None, "_key": None, "_weights": None, "_frozen": False}


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Rows(NamedTuple):
    """The origin of the rows of experts: results of `moe.get_fused_mapping`.

    Attributes:
        pos_to_expert: `[num_rows]`, int32: the expert of each row, -1 for padding.
        pos_to_token: `[num_rows]`, int32: the token of each row, -1 for padding.
        pos_to_token_topk: `[num_rows]`, int32: index of token and selection of each row, -1 for
            padding.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32: the row of each selection.
        num_rows_per_expert: `[num_experts]`, int32: the rows of each expert.
    """

    pos_to_expert: Tensor
    pos_to_token: Tensor
    pos_to_token_topk: Tensor
    token_topk_to_pos: Tensor
    num_rows_per_expert: Tensor


def map_rows(topk_idx: Tensor, num_experts: int) -> Rows:
    """Assigns rows to the selections of tokens: groups of 128 rows, as many as can be needed.

    The host does not wait for the GPU.

    Args:
        topk_idx: `[num_tokens, num_topk]`, int64 or int32: the experts of each token.
        num_experts: The number of experts.

    Returns:
        The `Rows`.
    """
    num_rows = max_expanded_tokens(topk_idx.numel(), num_experts, BLOCK)
    expert, token, slot, position, _, _, counts, _ = moe.get_fused_mapping(
        topk_idx, num_experts, num_expanded_tokens=num_rows, alignment=BLOCK, force_no_sync=True
    )
    return Rows(expert, token, slot, position, counts)


def fp8_experts(
    x: Tensor,
    weights: Tensor,
    topk_idx: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    quantized: tuple[ExpertWeights, ExpertWeights] | None = None,
) -> Tensor:
    """Applies the chosen experts to each token, all products in FP8, with gradients in FP8.

    An expert is `w_out @ (silu(gate) * value)` with `gate, value = w_in @ x`. The weighted results
    of a token are added in the order of its choices.

    If a weight has the attribute `main_grad` (float32, of its shape), its gradient is added to that
    and the weight itself gets none, as frameworks that accumulate over micro-batches expect.

    Args:
        x: `[num_tokens, hidden]`, bfloat16, contiguous.
        weights: `[num_tokens, num_topk]`, float32: the weight of each choice.
        topk_idx: `[num_tokens, num_topk]`, int64: the chosen experts, -1 for none.
        w_in: `[E, 2 * intermediate, hidden]`, bfloat16 or float32.
        w_out: `[E, hidden, intermediate]`, bfloat16 or float32.
        quantized: `quantize_weights` of both, if they are known already.

    Returns:
        `[num_tokens, hidden]`, bfloat16.
    """
    if quantized is None:
        quantized = quantize_weights(w_in), quantize_weights(w_out)
    (in_forward, in_transposed), (out_forward, out_transposed) = quantized
    if not needs_gradients(x, weights, w_in, w_out):
        rows = map_rows(topk_idx, len(w_in))
        return _forward(x, weights, rows, in_forward, out_forward)[0]
    y: Tensor = _FP8Experts.apply(
        x, weights, topk_idx, w_in, w_out, *in_forward, *in_transposed, *out_forward,
        *out_transposed,
    )  # fmt: skip
    return y


def needs_gradients(*tensors: Tensor) -> bool:
    """Returns whether autograd records an operation on these tensors.

    Args:
        tensors: The inputs of the operation.
    """
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _forward(
    x: Tensor, weights: Tensor, rows: Rows, w_in: QuantTensor, w_out: QuantTensor
) -> tuple[Tensor, QuantTensor, Tensor]:
    """The result, and for the backward pass the cast of `x` and the first product."""
    xq = quant.per_token_cast(x, FMT, BLOCK)
    h = _product(_expanded(xq, rows), w_in, rows.pos_to_expert)
    z = quant.swiglu_forward_and_per_token_cast(
        h, FMT, BLOCK, rows.pos_to_token_topk, weights, rows.pos_to_expert,
        use_tma_aligned_col_major_sf=True,
    )  # fmt: skip
    o = _product(z, w_out, rows.pos_to_expert)
    return moe.reduce_fused(o, None, rows.token_topk_to_pos), xq, h


class _FP8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, topk_idx: Tensor, w_in: Tensor, w_out: Tensor,
        *quantized: Tensor,
    ) -> Tensor:  # fmt: skip
        in_codes, in_sf, *in_transposed = quantized[0:4]
        out_codes, out_sf, *out_transposed = quantized[4:8]
        rows = map_rows(topk_idx, len(w_in))
        y, xq, h = _forward(x, weights, rows, (in_codes, in_sf), (out_codes, out_sf))
        hq = quant.per_token_cast(h, FMT, BLOCK)
        ctx.save_for_backward(*xq, *hq, weights, *in_transposed, *out_transposed, *rows)
        # Not among the saved tensors: recomputed ones would lack the attribute.
        ctx.main_grads = [getattr(w, "main_grad", None) for w in (w_in, w_out)]
        ctx.dtypes = w_in.dtype, w_out.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_sf, h_codes, h_sf, weights, *others = ctx.saved_tensors
        in_transposed, out_transposed = tuple(others[0:2]), tuple(others[2:4])
        rows, (main_in, main_out) = Rows(*others[4:9]), ctx.main_grads
        # An empty expanded tensor counts as contiguous whatever its strides are.
        grad_y = grad_y.contiguous() if grad_y.numel() else grad_y.new_empty(grad_y.shape)
        gq = quant.per_token_cast(grad_y, FMT, BLOCK)
        grad_z = _product(_expanded(gq, rows), out_transposed, rows.pos_to_expert)
        z, grad_hq, grad_h, grad_weights = quant.swiglu_backward_and_per_token_cast(
            (h_codes, h_sf), grad_z, weights, rows.pos_to_token_topk, rows.token_topk_to_pos, BLOCK
        )
        needs_x, needs_weights, _, needs_in, needs_out = ctx.needs_input_grad[:5]
        grad_x = grad_in = grad_out = None
        if needs_x:
            grad_rows = _product(grad_hq, in_transposed, rows.pos_to_expert)
            grad_x = moe.reduce_fused(grad_rows, None, rows.token_topk_to_pos)
        if needs_out:
            grad_by_rows = _gathered_by_rows(grad_y, rows)
            grad_out = _weight_gradient(main_out, ctx.dtypes[1], grad_by_rows, _by_rows(z), rows)
        if needs_in:
            x_by_rows = _gathered_by_rows((x_codes, x_sf), rows)
            grad_in = _weight_gradient(main_in, ctx.dtypes[0], _by_rows(grad_h), x_by_rows, rows)
        return (
            grad_x, grad_weights if needs_weights else None, None, grad_in, grad_out, *[None] * 8
        )  # fmt: skip


def _expanded(x: QuantTensor, rows: Rows) -> QuantTensor:
    """Rows of experts from tokens, scales as the products read them."""
    return moe.expand_to_fused_with_sf(
        x, BLOCK, rows.token_topk_to_pos, rows.pos_to_expert, use_tma_aligned_col_major_sf=True
    )


def _product(a: QuantTensor, b: Any, pos_to_expert: Tensor) -> Tensor:
    """Each row times the matrix of its expert, in bfloat16."""
    d = torch.empty(len(a[0]), b[0].shape[1], dtype=torch.bfloat16, device=a[0].device)
    return gemm.m_grouped_fp8_gemm_nt_contiguous(a, tuple(b), d, pos_to_expert)


def _by_rows(x: Tensor) -> QuantTensor:
    """Scales along rows, data transposed."""
    return quant.per_channel_cast_and_transpose(x, FMT, BLOCK)


def _gathered_by_rows(x: Tensor | QuantTensor, rows: Rows) -> QuantTensor:
    """The rows of experts from tokens, scales along rows, data transposed."""
    group = BLOCK if isinstance(x, tuple) else None
    return quant.per_channel_cast_fused_and_transpose(
        x, FMT, BLOCK, num_per_channels=group, pos_to_token=rows.pos_to_token
    )


def _weight_gradient(
    main: Tensor | None, dtype: torch.dtype, a: QuantTensor, b: QuantTensor, rows: Rows
) -> Tensor | None:
    """The sum over an expert's rows of `a b^T`, added to the `main_grad` if there is one."""
    sizes = rows.num_rows_per_expert
    if main is not None:
        gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, main, None, sizes, c=main)
        return None
    shape = len(sizes), len(a[0]), len(b[0])
    grad = torch.empty(shape, dtype=dtype, device=sizes.device)
    return gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, grad, None, sizes)


# ---- few tokens ---------------------------------------------------------------------------------


class MaskedRows(NamedTuple):
    """Rows of experts in the masked layout: each expert has as many rows as there are tokens.

    Only the first `num_rows_per_expert` rows of an expert are used; the later ones are -1 in the
    two tables by row.

    Attributes:
        pos_to_expert: `[num_rows]`, int32: the expert of each row, -1 for unused rows.
        pos_to_token_topk: `[num_rows]`, int32: index of token and selection, -1 for unused rows.
        token_topk_to_pos: `[num_tokens, num_topk]`, int32: the row of each selection.
        num_rows_per_expert: `[num_experts]`, int32: the used rows of each expert.
    """

    pos_to_expert: Tensor
    pos_to_token_topk: Tensor
    token_topk_to_pos: Tensor
    num_rows_per_expert: Tensor


def map_masked_rows(topk_idx: Tensor, num_experts: int) -> MaskedRows:
    """Lays rows out in the masked layout, in the order of tokens. The host does not synchronize.

    Args:
        topk_idx: `[num_tokens, num_topk]`, int64, at least one token: the chosen experts, -1 for
            none. The choices of a token differ, so that no expert has more rows than tokens; rows
            beyond that are dropped, and the checked mode raises.
        num_experts: The number of experts.
    """
    max_rows, num_slots = len(topk_idx), topk_idx.numel()
    _, _, slots, position, start, _, counts, _ = moe.get_fused_mapping(
        topk_idx, num_experts, num_expanded_tokens=num_slots, alignment=1
    )
    row = torch.arange(max_rows, device=topk_idx.device, dtype=torch.int32)
    expert = torch.arange(num_experts, device=topk_idx.device, dtype=torch.int32)[:, None]
    is_row = row < counts[:, None]
    slot = slots[(start[:, None] + row).clamp(max=num_slots - 1)]
    known = topk_idx.clamp(0, num_experts - 1)
    index = position - start[known]
    fits = (position >= 0) & (index < max_rows)
    if not torch.compiler.is_compiling() and backends.is_checked() and (counts > max_rows).any():
        raise ValueError("topk_idx must have different experts for each token in the masked layout")
    moved = known.int() * max_rows + index
    return MaskedRows(
        torch.where(is_row, expert, -1).flatten(),
        torch.where(is_row, slot, -1).flatten(),
        torch.where(fits, moved, -1),
        counts.clamp(max=max_rows),
    )


def fp8_experts_masked(
    x: Tensor, weights: Tensor, topk_idx: Tensor, w_in: QuantTensor, w_out: QuantTensor
) -> Tensor:
    """The result of `fp8_experts` for few tokens, without gradients.

    The products take the masked layout `[E, num_tokens, channels]` with the number of rows of each
    expert on the device. The bits are those of `fp8_experts`: an element of a product does not
    depend on the layout.

    Args:
        x: `[num_tokens, hidden]`, bfloat16, contiguous; at least one token.
        weights: `[num_tokens, num_topk]`, float32: the weight of each choice.
        topk_idx: `[num_tokens, num_topk]`, int64: the chosen experts, -1 for none. The choices of a
            token must differ.
        w_in: `quantize_weights(...).forward` of `[E, 2 * intermediate, hidden]`.
        w_out: `quantize_weights(...).forward` of `[E, hidden, intermediate]`.

    Returns:
        `[num_tokens, hidden]`, bfloat16.
    """
    rows = map_masked_rows(topk_idx, len(w_in[0]))
    expected = max(1, topk_idx.numel() // len(w_in[0]))
    a = moe.expand_to_fused_with_sf(
        quant.per_token_cast(x, FMT, BLOCK), BLOCK, rows.token_topk_to_pos, rows.pos_to_expert
    )
    h = _masked_product(a, w_in, rows.num_rows_per_expert, expected)
    z = quant.swiglu_forward_and_per_token_cast(
        h, FMT, BLOCK, rows.pos_to_token_topk, weights, rows.pos_to_expert
    )
    o = _masked_product(z, w_out, rows.num_rows_per_expert, expected)
    return moe.reduce_fused(o, None, rows.token_topk_to_pos)


def _masked_product(a: QuantTensor, b: QuantTensor, num_rows: Tensor, expected: int) -> Tensor:
    """The rows of each expert times its matrix, in bfloat16; other rows are undefined."""
    codes, scales = (x.view(len(num_rows), -1, x.shape[-1]) for x in a)
    d = torch.empty(*codes.shape[:2], b[0].shape[1], dtype=torch.bfloat16, device=codes.device)
    gemm.m_grouped_fp8_gemm_nt_masked((codes, scales), b, d, num_rows, expected)
    return d.flatten(0, 1)
