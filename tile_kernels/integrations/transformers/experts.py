"""The experts of transformers' models, under its registry of experts implementations."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tile_kernels.modeling.bf16_experts import bf16_experts, in_autocast_dtype

EXPERTS = "tile_kernels"  # the name of the implementation

# What a class of experts may say of itself that these operators do not compute.
_REFUSED = (
    ("has_bias", True, "projections with a bias"),
    ("has_gate", False, "no gate"),
    ("is_transposed", True, "transposed weights"),
    ("is_concatenated", False, "gate and value interleaved"),
    ("has_post_expert_norm", True, "a norm behind each expert"),
)
# Classes that limit gate and value by their attribute `limit` in a method `_apply_gate`.
_CLAMPED = ("DeepseekV4Experts",)
_SILU = ("SiLU", "SiLUActivation")


def is_silu(activation: Any) -> bool:
    """Whether an activation of transformers is `x * sigmoid(x)`."""
    return type(activation).__name__ in _SILU


def why_not(experts: nn.Module) -> str | None:
    """Why a module of experts cannot be computed by these operators, or None if it can."""
    for name, value, meaning in _REFUSED:
        if getattr(experts, name, not value) is value:
            return f"its experts have {meaning} ({name}={value})"
    if not is_silu(getattr(experts, "act_fn", None)):
        return f"its activation is {type(getattr(experts, 'act_fn', None)).__name__}, not SiLU"
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name, None)
        if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.is_floating_point():
            return f"{name} is not a tensor of 3 dimensions"
        if weight.element_size() == 1:
            return f"{name} is {weight.dtype}"
    from transformers.integrations import moe

    gate = getattr(type(experts), "_apply_gate", None)
    if gate is not moe._default_apply_gate and type(experts).__name__ not in _CLAMPED:
        return "its class has a gate of its own (_apply_gate)"
    return None


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Applies the chosen experts to each token, for a module without a reason of `why_not`.

    Args:
        self: A module of experts: `gate_up_proj` `[E, 2 * intermediate, hidden]`, `down_proj`
            `[E, hidden, intermediate]`.
        hidden_states: `[num_tokens, hidden]`, bfloat16, float32 or float16.
        top_k_index: `[num_tokens, num_topk]`, int64; an index of `E` or more means an expert on
            another rank, which adds nothing.
        top_k_weights: `[num_tokens, num_topk]`, a floating-point dtype.

    Returns:
        `[num_tokens, hidden]`, dtype of `hidden_states`.
    """
    x, w_in, w_out = in_autocast_dtype(hidden_states, self.gate_up_proj, self.down_proj)
    clamp_value = float(self.limit) if type(self).__name__ in _CLAMPED else None
    weights, topk_idx = top_k_weights.float().contiguous(), top_k_index.contiguous()
    y = bf16_experts(x.contiguous(), weights, topk_idx, w_in, w_out, clamp_value=clamp_value)
    return y.to(hidden_states.dtype)


def _checked_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` of a module that may be of any model."""
    reason = why_not(self)
    if reason is not None:
        raise ValueError(
            f"experts implementation {EXPERTS!r}: {type(self).__name__} is not supported: {reason}"
        )
    return experts_forward(self, hidden_states, top_k_index, top_k_weights)


def register_experts() -> str:
    """Registers the experts of this package as an experts implementation of transformers.

    Any mixture-of-experts model of transformers whose experts are SwiGLU without biases can then be
    loaded with `experts_implementation="tile_kernels"`, or be told so by
    `model.set_experts_implementation("tile_kernels")`. A model whose experts differ raises
    `ValueError` in its first call. `apply` does not need this.

    Returns:
        The name, `"tile_kernels"`.

    Raises:
        ImportError: If transformers is not installed.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "transformers":
            raise
        raise ImportError(
            "register_experts: needs transformers 5.17 or later: pip install transformers"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _checked_forward)
    return EXPERTS
