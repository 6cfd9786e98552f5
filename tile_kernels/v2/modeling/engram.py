"""The Engram gate with keys and value in one tensor."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.engram.gate.op import engram_gate_packed_fwd
from tile_kernels.engram.weight.op import fused_weight


def engram_gate(
    hidden: Tensor,
    kv: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    image_token_mask: Tensor | None,
) -> Tensor:
    """Adds the value of each token, gated, to its residual streams; differentiable.

    Args:
        hidden: `[..., m, H]`, bfloat16, contiguous.
        kv: bfloat16, contiguous, any shape that can be viewed as `[..., m + 1, H]`: the keys of all
            streams, then the value.
        weight_hidden, weight_embed: `[m, H]`, bfloat16 or float32, contiguous.
        clamp_value, eps: As in `tile_kernels.engram.engram_gate`.
        image_token_mask: bool, a number for each token, True for those without a value; or None.

    Returns:
        `[..., m, H]`, bfloat16, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.
    """
    streams, columns = hidden.shape[-2:]
    mask = None if image_token_mask is None else image_token_mask.reshape(-1)
    out, *_ = engram_gate_packed_fwd(
        hidden.reshape(-1, streams, columns), kv.view(-1, streams + 1, columns),
        fused_weight(weight_hidden, weight_embed), eps, clamp_value, False, mask,
    )  # fmt: skip
    return out.view(hidden.shape)
