"""The router of a mixture-of-experts layer: logits in float32, choices, weights, gradients.

Tokens are bfloat16, the weights of the router float32. On Hopper the three products run on tensor
cores: each float32 operand is the sum of three bfloat16 parts (`quant.split_to_bf16`), and products
of parts are summed in float32.

| product | operands | parts of weights | parts of gradients |
|---|---|---|---|
| logits | tokens, weights | 0, 1, 2 | |
| gradient of the weights | gradients, tokens | | 0, 1, 2 |
| gradient of tokens, in bfloat16 | gradients, weights | 1, 0, 0 | 0, 1, 0 |

The third leaves products of two small parts out, which are below 2^-16 of the others, where the
result has 8 bits. Logits come from `gemm.bf16_gemm_nt`, so that the bits of a token's logits, and
hence its experts, do not depend on other tokens. Elsewhere, and for other dtypes or numbers of
experts, the products are PyTorch's in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tile_kernels import gemm, moe, quant
from tile_kernels.modeling.bf16_experts import without_autocast
from tile_kernels.modeling.grouped_product import compute_capability

Routed = tuple[Tensor, Tensor, Tensor]
# Parts as they lie next to each other. The first three are all parts; the last three of one and of
# the other are factors of the same three products.
_WEIGHT_PARTS = (2, 1, 0, 0)
_GRADIENT_PARTS = (2, 0, 1, 0)


def splits_are_available(x: Tensor, router: Tensor) -> bool:
    """Whether the products of such tokens and weights run on tensor cores.

    Meta tensors stand for those of a GPU that can.
    """
    if x.dtype is not torch.bfloat16 or router.dtype is not torch.float32:
        return False
    if router.shape[0] % 8 or router.shape[1] % 8:
        return False  # rows of operands must start on 16 bytes
    if not x.is_cuda or compute_capability(x) != (9, 0):
        return x.is_meta
    return torch.compiler.is_compiling() or x.data_ptr() % 16 == 0


def split_router(router: Tensor) -> Tensor:
    """`[E, H]`, float32, as parts `[4, E, H]` in bfloat16."""
    parts = quant.split_to_bf16(router.detach().reshape(1, -1), _WEIGHT_PARTS)
    return parts.view(len(_WEIGHT_PARTS), *router.shape)


def split_logits(x: Tensor, parts: Tensor) -> Tensor:
    """The logits `[T, E]`, float32, of tokens `[T, H]` and `split_router(...)`."""
    _, num_experts, hidden = parts.shape
    products = torch.empty(len(x), 3 * num_experts, dtype=torch.float32, device=x.device)
    gemm.bf16_gemm_nt(x, parts[:3].view(-1, hidden), products)
    return products.view(-1, 3, num_experts).sum(1)


def split_gradients(
    grad_logits: Tensor, x: Tensor, parts: Tensor, needs_x: bool = True, needs_router: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of tokens, bfloat16, and of the router's weights, float32, if needed."""
    _, num_experts, hidden = parts.shape
    grads = quant.split_to_bf16(grad_logits.contiguous(), _GRADIENT_PARTS)
    grad_x = grad_router = None
    if needs_x:
        grad_x = grads[:, num_experts:] @ parts[1:].view(-1, hidden)
    if needs_router:
        products = _product_in_float32(grads[:, : 3 * num_experts].t(), x)
        grad_router = products.view(3, num_experts, hidden).sum(0)
    return grad_x, grad_router


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices, which PyTorch does not round on GPUs alone."""
    if a.is_cpu:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def routed(
    x: Tensor, router: Tensor, bias: Tensor, num_topk: int, num_topk_groups: int, num_groups: int,
    factor: float, scoring_func: str,
) -> Routed:  # fmt: skip
    """The logits in float32, the chosen experts and their weights, without gradients.

    Args:
        x: `[T, H]`: tokens.
        router: `[E, H]`.
        bias: `[E]`, float32: added to scores for the choice.
        num_topk, num_topk_groups, num_groups, factor, scoring_func: As in `moe.top2_sum_gate`.

    Returns:
        `[T, E]`, float32; `[T, num_topk]`, int64; `[T, num_topk]`, float32.
    """
    parts = split_router(router) if splits_are_available(x, router) else None
    return _routed(
        x, router, parts, bias, num_topk, num_topk_groups, num_groups, factor, scoring_func
    )


def routed_with_gradients(x: Tensor, router: Tensor, *rest: Any) -> Routed:
    """As `routed`, with gradients of tokens and of the router by logits and by weights."""
    logits, topk_idx, weights = _Route.apply(x, router, *rest)
    return logits, topk_idx, weights


def _routed(
    x: Tensor, router: Tensor, parts: Tensor | None, bias: Tensor, num_topk: int,
    num_topk_groups: int, num_groups: int, factor: float, scoring_func: str,
) -> Routed:  # fmt: skip
    if parts is not None:
        logits = split_logits(x, parts)
    else:
        with without_autocast(x):
            logits = F.linear(x.float(), router.float())
    topk_idx, weights = moe.top2_sum_gate(
        logits, bias, num_topk, num_topk_groups, num_groups,
        use_shared_as_routed=False, num_shared_experts=0, routed_scaling_factor=factor, ep_rank=0,
        num_ep_ranks=1, tp_rank=0, num_tp_ranks=1, scoring_func=scoring_func,
    )  # fmt: skip
    return logits, topk_idx, weights


class _Route(torch.autograd.Function):
    """`routed` with its gradient: keeps tokens as they are, not in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor, *rest: Any) -> Routed:
        parts = split_router(router) if splits_are_available(x, router) else None
        logits, topk_idx, weights = _routed(x, router, parts, *rest)
        ctx.save_for_backward(x, router, parts, logits, topk_idx)
        ctx.scoring_func, ctx.factor = rest[-1], rest[-2]
        ctx.mark_non_differentiable(topk_idx)
        ctx.set_materialize_grads(False)
        return logits, topk_idx, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logits: Tensor | None, _: Any, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, router, parts, logits, topk_idx = ctx.saved_tensors
        if grad_weights is not None:
            grad = moe.topk_weights_backward(
                grad_weights.contiguous(), logits, topk_idx, ctx.scoring_func, ctx.factor
            )
            grad_logits = grad if grad_logits is None else grad + grad_logits
        grad_x = grad_router = None
        if grad_logits is not None:
            needs_x, needs_router = ctx.needs_input_grad[:2]
            with without_autocast(x):
                if parts is not None:
                    grad_x, grad_router = split_gradients(
                        grad_logits, x, parts, needs_x, needs_router
                    )
                else:
                    if needs_x:
                        grad_x = (grad_logits @ router.float()).to(x.dtype)
                    if needs_router:
                        grad_router = (grad_logits.t() @ x.float()).to(router.dtype)
        return (grad_x, grad_router, *[None] * 6)
