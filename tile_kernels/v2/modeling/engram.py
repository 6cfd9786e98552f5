"""The Engram gate with keys and value in one tensor."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.modeling.engram import gate


def _keys_and_value(hidden: Tensor, kv: Tensor) -> Tensor:
    """`kv` as `[..., m + 1, H]` for `hidden` `[..., m, H]`."""
    *leading, streams, columns = hidden.shape
    shape = (*leading, streams + 1, columns)
    if kv.numel() != hidden.numel() + hidden.shape[:-2].numel() * columns:
        raise ValueError(
            f"engram_gate: kv must have the elements of {list(shape)} for hidden of "
            f"{list(hidden.shape)}, got {list(kv.shape)}"
        )
    return kv.reshape(shape)


class EngramGateFn:
    """The gate with gradients; see `engram_gate`, whose arguments `apply` takes in order."""

    @staticmethod
    def apply(
        hidden_states: Tensor,
        kv: Tensor,
        weight_hidden: Tensor,
        weight_embed: Tensor,
        clamp_value: float,
        eps: float,
        image_token_mask: Tensor | None,
    ) -> Tensor:
        """The output, whose gradient is computed by kernels."""
        mask = None if image_token_mask is None else image_token_mask.reshape(-1)
        kv = _keys_and_value(hidden_states, kv)
        result: Tensor = gate.EngramGateFn.apply(
            hidden_states, kv, None, weight_hidden, weight_embed, clamp_value, eps, True, mask
        )
        return result


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

    As `tile_kernels.modeling.engram.engram_gate`, also with `main_grad` of weights.

    Args:
        hidden: `[..., m, H]`, bfloat16.
        kv: bfloat16, any shape that can be viewed as `[..., m + 1, H]`: the keys of all streams,
            then the value.
        weight_hidden, weight_embed: `[m, H]`, bfloat16 or float32, contiguous.
        clamp_value, eps: As in `tile_kernels.engram.engram_gate`.
        image_token_mask: bool, an element for each token, True for those that take no value; or
            None.

    Returns:
        `[..., m, H]`, bfloat16, contiguous.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape or layout differs, or a number is out of range.
    """
    return gate.engram_gate(
        hidden, _keys_and_value(hidden, kv), None, weight_hidden, weight_embed, clamp_value, eps,
        image_token_mask=image_token_mask,
    )  # fmt: skip
