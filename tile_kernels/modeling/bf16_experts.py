"""The experts of a mixture-of-experts layer in the dtype of their weights, as one function.

Forward and backward are a fixed sequence of operators and grouped products:

| pass | steps |
|---|---|
| forward | rows of tokens, first product, weighted SwiGLU, second product, sum over choices |
| backward | rows of gradients, product, gradient of SwiGLU and SwiGLU again, three products, sum |

Of what is computed only the result of the first product is kept for the backward pass; the rows of
tokens and the activations are computed again. The weight of a choice is applied to the activation,
so that the gradient of the weight needs no result of the second product.

With `grouped_mm` (one launch of PyTorch's per product, bfloat16 on Hopper and later) the number of
rows is an upper bound that the host knows: the host does not wait for the GPU, and forward and
backward can be captured in a CUDA graph. `m_grouped` (Hopper) is the same, except that the two
products of the forward pass are `gemm.m_grouped_bf16_gemm_nt_contiguous`, for which the rows of
each expert are padded to a multiple of 128. With `loop` (one product per expert, any device and
dtype) the host waits for the number of rows of each expert.

Products of the forward pass, H200, microseconds, `m_grouped` and `grouped_mm`: 24,576 rows of 64
experts, 4096 x 3072: 880 and 1078, 1536 x 4096: 469 and 576; 65,536 rows of 32 experts,
7168 x 4096: 5057 and 5045, 2048 x 7168: 2566 and 2797. Gradients of weights sum over padding too,
so `auto` chooses `m_grouped` where there are no gradients and rows enough.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tile_kernels import gemm, moe, quant
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.modeling.fp8_experts import needs_gradients
from tile_kernels.modeling.grouped_product import (
    compute_capability,
    grouped_mm_is_available,
    grouped_product,
)
from tile_kernels.moe.mapping.reference import max_expanded_tokens

ENGINES = ("auto", "loop", "grouped_mm", "m_grouped")
ROWS = 16  # each expert's rows are a multiple of this, as grouped products want it


# ---- products of all experts --------------------------------------------------------------------


def m_grouped_is_available(x: Tensor) -> bool:
    """Whether this package multiplies all experts in one launch for such rows."""
    return grouped_mm_is_available(x) and (x.is_meta or compute_capability(x) == (9, 0))


def uses_grouped_mm(x: Tensor, engine: str) -> bool:
    """Whether products are one operator that needs no counts on the host.

    Under `torch.compile` they always are: the operator counts inside where it must.

    Raises:
        ValueError: If rows like `x` cannot use the `engine`.
    """
    available = grouped_mm_is_available(x)
    if engine == "m_grouped" and not m_grouped_is_available(x):
        raise ValueError(
            "engine m_grouped needs bfloat16 on a CUDA device of capability 9.0, got "
            f"{x.dtype} on {x.device}"
        )
    if engine == "grouped_mm" and not available:
        raise ValueError(
            "engine grouped_mm needs bfloat16 on a CUDA device of capability 9.0 or more, got "
            f"{x.dtype} on {x.device}"
        )
    if engine == "auto":
        return available or torch.compiler.is_compiling()
    return engine != "loop"


def row_alignment(x: Tensor, topk_idx: Tensor, num_experts: int, engine: str, train: bool) -> int:
    """What the rows of each expert are a multiple of: 128 where `m_grouped` is used, else 16.

    `auto` uses it for forward passes alone with 128 rows per expert or more on the average, so that
    the padding is no more than the rows.
    """
    if engine == "auto":
        enough = topk_idx.numel() >= BLOCK * num_experts
        return BLOCK if enough and not train and m_grouped_is_available(x) else ROWS
    return BLOCK if engine == "m_grouped" else ROWS


class Groups(NamedTuple):
    """The rows of each expert: where they end, padding included, and for `loop` their numbers.

    With `m_grouped` also the expert of each row.
    """

    ends: Tensor
    counts: list[int] | None
    pos_to_expert: Tensor | None = None

    def multiply_nt(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Each row times the matrix of its expert: `[N, K]` by `[E, M, K]` to `[N, M]`."""
        if self.pos_to_expert is None or len(rows) == 0:
            return self.multiply(rows, weight.transpose(1, 2))
        d = rows.new_empty(len(rows), weight.shape[1])
        return gemm.m_grouped_bf16_gemm_nt_contiguous(rows, weight, d, self.pos_to_expert)

    def multiply(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Each row times the matrix of its expert: `[N, K]` by `[E, K, M]` to `[N, M]`.

        With `grouped_mm` rows behind the last end are undefined.
        """
        if self.counts is None and len(rows) == 0:
            return rows.new_empty(0, weight.shape[2])
        if rows.is_meta:  # which has no numbers of rows; shapes are enough
            return rows @ weight[0]
        if self.counts is None:
            return grouped_product(rows, weight, self.ends)
        parts = (part @ w for part, w in zip(rows.split(self.counts), weight))
        return torch.cat(list(parts))

    def multiply_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum over an expert's rows of their outer products: `[N, M]`, `[N, K]` to `[E, M, K]`.

        Padding rows must be zero.
        """
        if a.is_meta or (self.counts is None and len(a) == 0):
            return a.new_zeros(len(self.ends), a.shape[1], b.shape[1])
        if self.counts is None:
            return grouped_product(a.t(), b, self.ends)
        parts = zip(a.split(self.counts), b.split(self.counts))
        return torch.stack([left.t() @ right for left, right in parts])


# ---- rows ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Which rows exist and which tokens they belong to.

    Rows of tokens have the three maps of `moe.get_fused_mapping`. Rows that arrived from other
    ranks have `last`, one past the last row of each expert, and no maps: they are in place.
    """

    last: Tensor | None
    pos_to_expert: Tensor | None
    pos_to_token_topk: Tensor | None
    token_topk_to_pos: Tensor | None

    def expand(self, x: Tensor) -> Tensor:
        """The rows of tokens, zeros for padding."""
        if self.token_topk_to_pos is None or self.pos_to_expert is None:
            return x
        return moe.expand_to_fused(x, self.token_topk_to_pos, self.pos_to_expert)

    def reduce(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of each token's rows, weighted if there are weights, in the order of choices."""
        if self.token_topk_to_pos is None:
            return rows
        return moe.reduce_fused(rows, weights, self.token_topk_to_pos)

    def activate(self, h: Tensor, weights: Tensor, clamp_value: float | None) -> Tensor:
        """SwiGLU of rows times their weights; zeros for padding."""
        dtype = h.dtype
        h = _plain(h)
        z = quant.swiglu_forward(
            h, _FMT[h.dtype], self.last, weights, clamp_value=clamp_value, alignment=ROWS,
            pos_to_token_topk=self.pos_to_token_topk,
        )  # fmt: skip
        return z if z.dtype is dtype else z.to(dtype)

    def activate_backward(
        self, h: Tensor, grad: Tensor, weights: Tensor, clamp_value: float | None, recompute: bool
    ) -> tuple[Tensor, ...]:
        """The gradients of `h` and of the weights, and the activation if it is asked for."""
        dtype = h.dtype
        h, grad = _plain(h), _plain(grad)
        found = quant.swiglu_backward(
            h, grad, _FMT[h.dtype], self.last, weights, clamp_value=clamp_value,
            do_recompute=recompute, alignment=ROWS, pos_to_token_topk=self.pos_to_token_topk,
            token_topk_to_pos=self.token_topk_to_pos,
        )  # fmt: skip
        if h.dtype is dtype:
            return found
        grad_h, grad_weights, *z = found
        return grad_h.to(dtype), grad_weights, *(each.to(dtype) for each in z)


_FMT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _plain(x: Tensor) -> Tensor:
    """`x` in a dtype that SwiGLU takes: float32 instead of float16."""
    return x if x.dtype in _FMT else x.float()


def map_rows(
    topk_idx: Tensor, num_experts: int, on_device: bool, alignment: int = ROWS
) -> tuple[Rows, Groups]:
    """Lays rows out for the products.

    With `on_device` there are as many rows as can be needed, and the host does not wait.
    """
    on_device = on_device or topk_idx.is_meta
    num_rows = max_expanded_tokens(topk_idx.numel(), num_experts, alignment) if on_device else 0
    expert, _, slot, position, _, ends, _, counts = moe.get_fused_mapping(
        topk_idx, num_experts, num_expanded_tokens=num_rows, alignment=alignment,
        force_no_sync=on_device,
    )  # fmt: skip
    groups = Groups(ends, None if on_device else counts, expert if alignment == BLOCK else None)
    return Rows(None, expert, slot, position), groups


def received_rows(last: Tensor, counts: list[int] | None) -> tuple[Rows, Groups]:
    """Rows that are in place, expert after expert, each from a multiple of `ROWS` on.

    Args:
        last: `[E]`, int32: one past the last row of each expert.
        counts: The rows of each expert with padding on the host, or None where products take the
            ends from the device.
    """
    ends = (last + (ROWS - 1)).div(ROWS, rounding_mode="floor") * ROWS
    return Rows(last, None, None, None), Groups(ends, counts)


# ---- experts ------------------------------------------------------------------------------------


def bf16_experts(
    x: Tensor,
    weights: Tensor,
    topk_idx: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    engine: str = "auto",
    clamp_value: float | None = None,
) -> Tensor:
    """Applies the chosen experts to each token, with gradients, in the dtype of the weights.

    An expert is `w_out @ (silu(gate) * value)` with `gate, value = w_in @ x`; with a clamp value
    `c` first `gate = min(gate, c)` and `value = min(max(value, -c), c)`. The weighted results of a
    token are added in the order of its choices.

    If a weight has the attribute `main_grad` (float32, of its shape), its gradient is added to that
    and the weight itself gets none, as frameworks that accumulate over micro-batches expect.

    Args:
        x: `[num_tokens, hidden]`, bfloat16, float32 or float16, contiguous.
        weights: `[num_tokens, num_topk]`, float32: the weight of each choice.
        topk_idx: `[num_tokens, num_topk]`, int64: the chosen experts, -1 for none.
        w_in: `[E, 2 * intermediate, hidden]`, dtype of `x`.
        w_out: `[E, hidden, intermediate]`, dtype of `x`.
        engine: `"grouped_mm"`: one launch of PyTorch's for each product, bfloat16 on Hopper and
            later; `"m_grouped"`: this package's for the products of the forward pass, on Hopper;
            `"loop"`: one product per expert; `"auto"`: the fastest of those that are available.
        clamp_value: The clamp value, at least 0, or None.

    Returns:
        `[num_tokens, hidden]`, dtype of `x`.

    Raises:
        ValueError: If `engine` is `"grouped_mm"` or `"m_grouped"` and not available.
    """
    on_device = uses_grouped_mm(x, engine)
    train = needs_gradients(x, weights, w_in, w_out)
    alignment = row_alignment(x, topk_idx, len(w_in), engine, train)
    with without_autocast(x):
        if train:
            y: Tensor = _Experts.apply(
                x, weights, topk_idx, None, w_in, w_out, on_device, None, alignment, clamp_value
            )
            return y
        rows, groups = map_rows(topk_idx, len(w_in), on_device, alignment)
        return _forward(x, weights, rows, groups, w_in, w_out, clamp_value)[0]


def bf16_experts_of_rows(
    x: Tensor, weights: Tensor, last: Tensor, counts: list[int], w_in: Tensor, w_out: Tensor,
    engine: str = "auto",
) -> Tensor:  # fmt: skip
    """As `bf16_experts` for rows that are in place: the weighted result of each row.

    Args:
        x: `[num_rows, hidden]`, contiguous: the rows of experts, each from a multiple of 16 on,
            zeros for padding.
        weights: `[num_rows]`, float32: the weight of each row.
        last: `[E]`, int32: one past the last row of each expert.
        counts: The rows of each expert with padding; needed where the products are a loop.
        w_in, w_out, engine: As in `bf16_experts`; `"m_grouped"` is as `"grouped_mm"` here.

    Returns:
        `[num_rows, hidden]`, dtype of `x`; rows of padding are undefined.
    """
    given = None if uses_grouped_mm(x, engine) else counts
    with without_autocast(x):
        if needs_gradients(x, weights, w_in, w_out):
            y: Tensor = _Experts.apply(
                x, weights, None, last, w_in, w_out, given is None, given, ROWS, None
            )
            return y
        return _forward(x, weights, *received_rows(last, given), w_in, w_out, None)[0]


def uses_autocast(x: Tensor) -> bool:
    """Whether autocast changes dtypes of products with `x`."""
    return not x.is_meta and torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)


def in_autocast_dtype(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Tokens and weights in the dtype of products: autocast's where it is enabled for `x`."""
    if not uses_autocast(x):
        return x, *weights
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each.to(dtype) for each in (x, *weights))


_NO_CHANGE: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Dtypes stay as they are; entered only where autocast is enabled, for the host's sake."""
    return torch.autocast(x.device.type, enabled=False) if uses_autocast(x) else _NO_CHANGE


def _forward(
    x: Tensor, weights: Tensor, rows: Rows, groups: Groups, w_in: Tensor, w_out: Tensor,
    clamp_value: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and for the backward pass the first product."""
    h = groups.multiply_nt(rows.expand(x), w_in)
    o = groups.multiply_nt(rows.activate(h, weights, clamp_value), w_out)
    return rows.reduce(o), h


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, topk_idx: Tensor | None, last: Tensor | None,
        w_in: Tensor, w_out: Tensor, on_device: bool, counts: list[int] | None,
        alignment: int, clamp_value: float | None,
    ) -> Tensor:  # fmt: skip
        if topk_idx is not None:
            rows, groups = map_rows(topk_idx, len(w_in), on_device, alignment)
        elif last is not None:
            rows, groups = received_rows(last, counts)
        else:
            raise ValueError("topk_idx or last must be given")
        y, h = _forward(x, weights, rows, groups, w_in, w_out, clamp_value)
        ctx.save_for_backward(x, weights, h, w_in, w_out, groups.ends, *rows)
        ctx.counts, ctx.clamp_value = groups.counts, clamp_value
        # Not among the saved tensors: recomputed ones would lack the attribute.
        ctx.main_grads = [getattr(w, "main_grad", None) for w in (w_in, w_out)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, h, w_in, w_out, ends, *maps = ctx.saved_tensors
        _release_saved_tensors(ctx)
        rows, groups = Rows(*maps), Groups(ends, ctx.counts)
        needs_x, needs_weights, _, _, needs_in, needs_out = ctx.needs_input_grad[:6]
        main_in, main_out = ctx.main_grads
        grad_x = grad_in = grad_out = None
        with without_autocast(x):
            # An empty expanded tensor counts as contiguous whatever its strides are.
            grad_y = grad_y.contiguous() if grad_y.numel() else grad_y.new_empty(grad_y.shape)
            grad_rows = rows.expand(grad_y)
            grad_z = groups.multiply(grad_rows, w_out)
            grad_h, grad_weights, *z = rows.activate_backward(
                h, grad_z, weights, ctx.clamp_value, needs_out
            )
            del h, grad_z  # freed here, which bounds the memory at the largest products below
            if needs_out:
                grad_out = _added(main_out, groups.multiply_transposed(grad_rows, z[0]))
            del grad_rows
            if needs_in:
                grad_in = _added(main_in, groups.multiply_transposed(grad_h, rows.expand(x)))
            if needs_x:
                grad_x = rows.reduce(groups.multiply(grad_h, w_in))
        return (
            grad_x, grad_weights if needs_weights else None, None, None, grad_in, grad_out, None,
            None, None, None,
        )  # fmt: skip


def _release_saved_tensors(ctx: Any) -> None:
    """Lets go of the saved tensors unless the graph is retained; PyTorch 2.10 and later can."""
    if not torch.compiler.is_compiling() and hasattr(ctx, "maybe_clear_saved_tensors"):
        ctx.maybe_clear_saved_tensors()


def _added(main: Tensor | None, grad: Tensor) -> Tensor | None:
    """The gradient, or None if it was added to the `main_grad`."""
    if main is None:
        return grad
    main.add_(grad)
    return None
