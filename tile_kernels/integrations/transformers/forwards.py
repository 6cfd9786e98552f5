"""The forwards that `apply` gives to modules of transformers; each is bound to one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tile_kernels import attention, moe
from tile_kernels.modeling.fp8_experts import needs_gradients
from tile_kernels.modeling.mhc.functional import CarriedResidual, mhc_head, mhc_post, mhc_pre
from tile_kernels.modeling.mlp import swiglu_mlp
from tile_kernels.modeling.norm import rms_norm
from tile_kernels.modeling.router import routed, routed_with_gradients

Routing = tuple[Tensor, Tensor, Tensor]
Streams = tuple[Tensor, Tensor, Tensor, CarriedResidual | None]


# ---- routers ------------------------------------------------------------------------------------


def _route(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_topk: int, num_topk_groups: int,
    num_groups: int, factor: float, scoring_func: str,
) -> Routing:  # fmt: skip
    """Logits in float32, weights and experts, in the order in which transformers has them."""
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    weight = weight.float()
    bias = weight.new_zeros(len(weight)) if bias is None else bias.float()
    route = routed_with_gradients if needs_gradients(tokens, weight) else routed
    logits, topk_idx, weights = route(
        tokens, weight, bias, num_topk, num_topk_groups, num_groups, factor, scoring_func
    )
    return logits, weights, topk_idx


def sigmoid_router(self: Any, hidden_states: Tensor) -> Routing:
    """Sigmoid scores, a bias for the choice, groups: that of DeepSeek-V3."""
    return _route(
        hidden_states, self.weight, self.e_score_correction_bias, self.top_k, self.topk_group,
        self.num_group, self.routed_scaling_factor, "sigmoid",
    )  # fmt: skip


def sqrtsoftplus_router(self: Any, hidden_states: Tensor) -> Routing:
    """Scores `sqrt(softplus(logit))` and a bias for the choice: that of DeepSeek-V4."""
    logits, weights, topk_idx = _route(
        hidden_states, self.weight, self.e_score_correction_bias, self.top_k, 0, 0,
        self.routed_scaling_factor, "sqrtsoftplus",
    )  # fmt: skip
    return logits.to(hidden_states.dtype), weights, topk_idx


def softmax_router(self: Any, hidden_states: Tensor) -> Routing:
    """Softmax scores, normalized over the chosen experts: that of Qwen3-MoE and Mixtral."""
    logits, weights, topk_idx = _route(
        hidden_states, self.weight, None, self.top_k, 0, 0, 1.0, "softmax"
    )
    return logits.to(hidden_states.dtype), weights, topk_idx


def hash_router(self: Any, hidden_states: Tensor, input_ids: Tensor) -> Routing:
    """Experts by the token's id, weights by scores: that of DeepSeek-V4's first layers."""
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    topk_idx, weights = moe.hash_gate(
        logits, input_ids.reshape(-1).contiguous(), self.tid2eid, self.routed_scaling_factor,
        "sqrtsoftplus",
    )  # fmt: skip
    return logits, weights, topk_idx


# ---- SwiGLU and norms ---------------------------------------------------------------------------


def _weights_of(self: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the three projections, which must still be what `apply` found."""
    projections = self.gate_proj, self.up_proj, self.down_proj
    for projection in projections:
        if type(projection) is not torch.nn.Linear:
            raise RuntimeError(
                f"{type(self).__name__}: a projection became a {type(projection).__name__} after "
                "tile_kernels' apply: call revert(model) before such changes, and apply(model) "
                "again afterwards"
            )
    gate, value, down = (projection.weight for projection in projections)
    return gate, value, down


def mlp(self: Any, x: Tensor) -> Tensor:
    """A dense feed-forward layer, or the shared experts of a mixture.

    What `torch.compile` traces is the module's own formula, which it fuses just as well.
    """
    if torch.compiler.is_compiling():
        result: Tensor = type(self).forward(self, x)
        return result
    return swiglu_mlp(x, *_weights_of(self), getattr(self, "limit", None))


def rms(self: Any, hidden_states: Tensor) -> Tensor:
    """An RMS norm, rounded once."""
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def rms_promoted(self: Any, hidden_states: Tensor) -> Tensor:
    """`rms` of classes that return float32 for bfloat16 rows and a float32 weight."""
    return rms(self, hidden_states).to(torch.promote_types(self.weight.dtype, hidden_states.dtype))


def rms_of(norm: type) -> Callable[[Any, Tensor], Tensor]:
    """Which of the two a class of norms is: some multiply by the weight after rounding."""
    result: Tensor = norm(1)(torch.ones(1, dtype=torch.bfloat16))
    return rms if result.dtype is torch.bfloat16 else rms_promoted


# ---- the indexer --------------------------------------------------------------------------------


def indexer_scorer(self: Any, q: Tensor, compressed_kv: Tensor, hidden_states: Tensor) -> Tensor:
    """Scores `[batch, length, keys]` of all keys, in float32, without those of single heads."""
    if q.dtype is not torch.bfloat16 or compressed_kv.dtype is not torch.bfloat16:
        result: Tensor = type(self).forward(self, q, compressed_kv, hidden_states)
        return result
    factor = self.softmax_scale * self.weights_scaling
    weights = (self.weights_proj(hidden_states).float() * factor).contiguous()
    start = torch.zeros(q.shape[1], dtype=torch.int32, device=q.device)
    end = torch.full_like(start, compressed_kv.shape[1])
    scores = [
        attention.indexer_logits(*sequence, start, end)
        for sequence in zip(q.contiguous(), compressed_kv.contiguous(), weights)
    ]
    return torch.stack(scores)


# ---- hyper-connections --------------------------------------------------------------------------


def _read(connection: Any, streams: Tensor) -> Streams:
    """A block's input, `post`, `comb`, and the streams for `mhc_post`."""
    x, mixes = mhc_pre(
        streams, connection.fn, connection.scale, connection.base,
        norm_eps=connection.input_norm.eps, mhc_mult=connection.hc_mult, post_mult_value=2.0,
        pre_eps=connection.hc_eps, sinkhorn_eps=connection.hc_eps,
        sinkhorn_repeat=connection.hc_sinkhorn_iters, fuse_grad_acc=True,
    )  # fmt: skip
    post, comb, carried = mixes  # type: ignore[misc]
    return x, post, comb, carried


def hyper_connection(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(post, comb, collapsed)` of streams `[batch, length, m, hidden]`."""
    x, post, comb, _ = _read(self, hidden_streams.contiguous())
    return post.squeeze(-1), comb, x


def hyper_head(self: Any, x: Tensor) -> Tensor:
    """The weighted sum of the streams behind the last layer."""
    return mhc_head(
        x.contiguous(), self.hc_fn, self.hc_scale, self.hc_base, norm_eps=self.input_norm.eps,
        mhc_mult=self.hc_mult, pre_eps=self.eps,
    )  # fmt: skip


def hyper_layer(
    self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """A decoder layer whose blocks read and write streams."""
    streams = hidden_states.contiguous()
    x, post, comb, carried = _read(self.attn_hc, streams)
    out, _ = self.self_attn(self.input_layernorm(x), **kwargs)
    streams = mhc_post(out.to(streams.dtype).contiguous(), streams, post, comb, carried)
    x, post, comb, carried = _read(self.ffn_hc, streams)
    out = self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)
    return mhc_post(out.to(streams.dtype).contiguous(), streams, post, comb, carried)
