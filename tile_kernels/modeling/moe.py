"""A mixture-of-experts layer on the routing operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels import moe, quant
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.modeling.bf16_experts import (
    ENGINES,
    ROWS,
    Groups,
    bf16_experts,
    bf16_experts_of_rows,
    in_autocast_dtype,
    map_rows,
    received_rows,
    uses_grouped_mm,
)
from tile_kernels.modeling.fp8_experts import (
    MAX_MASKED_TOKENS,
    WeightCache,
    fp8_experts,
    fp8_experts_masked,
    needs_gradients,
)
from tile_kernels.modeling.fp8_experts_ep import fp8_experts_over_ranks, send
from tile_kernels.modeling.quant import swiglu_cast
from tile_kernels.modeling.router import routed, routed_with_gradients
from tile_kernels.moe.gates import check_groups
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.topk.plan import MAX_EXPERTS
from tile_kernels.runtime import checks

if TYPE_CHECKING:
    from tile_kernels.ep import ElasticBuffer

SCORING_FUNCTIONS = ("sigmoid", "sqrtsoftplus", "softmax")
BALANCING = ("bias", "loss", "none")
PRECISIONS = ("bf16", "fp8")
PARAMETER_DTYPES = (torch.bfloat16, torch.float32)  # of experts in FP8
_EXPERT_WEIGHTS = ("w_in", "w_out", "shared_in", "shared_out")


# ---- products of all experts --------------------------------------------------------------------


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: list[int], ends: Tensor, engine: str = "auto"
) -> Tensor:
    """Multiplies the rows of each expert by the weight of the expert.

    Args:
        rows: `[N, in_features]`, sorted by expert.
        weight: `[num_experts, out_features, in_features]`.
        counts: The number of rows of each expert, on the host.
        ends: `[num_experts]`, int32: where the rows of each expert end, on the device.
        engine: `"grouped_mm"` (one launch of PyTorch's grouped product, bfloat16 on Hopper and
            later), `"loop"` (one product per expert, on any device), or `"auto"` (the first where
            it is available).

    Returns:
        `[N, out_features]`.

    Example:
        >>> rows, weight = torch.ones(3, 2), torch.tensor([[[1.0, 1.0]], [[2.0, 0.0]]])
        >>> grouped_linear(rows, weight, [1, 2], torch.tensor([1, 3]).int()).tolist()
        [[2.0], [2.0], [2.0]]
    """
    groups = Groups(ends, None if uses_grouped_mm(rows, engine) else counts)
    return groups.multiply(rows, weight.transpose(1, 2))


def _as_one_expert(weight: Tensor) -> Tensor:
    """`[out, in]` as `[1, out, in]`, and so the buffer of its gradient, if it has one."""
    view = weight[None]
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        view.main_grad = main_grad[None]  # type: ignore[attr-defined]
    return view


# ---- the layer ----------------------------------------------------------------------------------


class MoELayer(nn.Module):
    """A feed-forward layer of experts, of which each token uses `num_topk`.

    An expert computes `w_out . (silu(gate) * value)` with `gate, value = w_in . x`. Tokens are
    sorted by expert (`moe.get_fused_mapping`) without a limit per expert, so that none is dropped.
    Gradients reach the input, the experts and, through the weights, the router. After a call,
    `load` contains how often each expert was selected in it.

    With `precision="fp8"` forward, input gradients and weight gradients are FP8 products
    (`modeling.fp8_experts`), also for the shared experts. The weights keep their dtype; their
    quantized copies are kept until the weights change. `hidden` and `intermediate` must be
    multiples of 128, and a GPU must be a Hopper one. `fp8=True` only rounds activations. Up to 128
    tokens without gradients (decoding) use the masked layout, with the same bits.

    The host does not wait for the GPU with `precision="fp8"`, and with `"bf16"` where PyTorch has a
    grouped product (bfloat16 on Hopper and later); then forward and backward can be captured in a
    CUDA graph. Other devices and `engine="loop"` need the number of rows on the host.

    With `ep`, each rank has its own tokens and `num_experts / num_ranks` of the experts: `w_in` and
    `w_out` are those of this rank, and everything else is the same on all ranks. All ranks must
    call the layer together and run backward together. The gradients of the router and of shared
    experts are those of the tokens of this rank; add them up over ranks as in data parallelism.

    Args:
        hidden: Channels of a token.
        intermediate: Channels inside an expert.
        num_experts: The number of experts, up to 8192.
        num_topk: Experts per token, up to 32.
        scoring_func: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"` of the logits of the router.
        num_groups: Groups of experts; 0: no groups.
        num_topk_groups: Groups from which experts are selected; 0: no groups.
        routed_scaling_factor: Factor of the normalized weights.
        num_shared_experts: Experts that every token uses in addition.
        balancing: `"bias"` (see `update_bias`), `"loss"` (see `balance_loss`) or `"none"`.
        precision: `"bf16"`: products in the dtype of the weights; `"fp8"`: all products in e4m3.
        fp8: Whether activations inside the experts are rounded to e4m3
            (`modeling.quant.swiglu_cast`).
        engine: Implementation of the products: `"auto"`, `"loop"`, `"grouped_mm"` or `"m_grouped"`;
            see `bf16_experts`.
        ep: An `ep.ElasticBuffer` over whose ranks the experts are distributed, or None.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> layer = MoELayer(16, 32, num_experts=4, num_topk=2)
        >>> y = layer(torch.randn(2, 3, 16))
        >>> y.shape, int(layer.load.sum())
        (torch.Size([2, 3, 16]), 12)
    """

    load: Tensor
    expert_bias: Tensor

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        num_topk: int,
        *,
        scoring_func: str = "sigmoid",
        num_groups: int = 0,
        num_topk_groups: int = 0,
        routed_scaling_factor: float = 1.0,
        num_shared_experts: int = 0,
        balancing: str = "bias",
        precision: str = "bf16",
        fp8: bool = False,
        engine: str = "auto",
        ep: ElasticBuffer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with checks.named("MoELayer"):
            hidden = checks.integer("hidden", hidden, 1, checks.MOST_SIZE)
            intermediate = checks.integer("intermediate", intermediate, 1, checks.MOST_SIZE // 2)
            num_experts = checks.integer("num_experts", num_experts, 1, MAX_EXPERTS)
            limit = min(num_experts, MAX_SLOTS)
            because = f"(experts, and at most {MAX_SLOTS})"
            num_topk = checks.integer("num_topk", num_topk, 1, limit, because=because)
            checks.one_of("scoring_func", scoring_func, SCORING_FUNCTIONS)
            num_groups = checks.integer("num_groups", num_groups, 0)
            if num_groups and num_experts % num_groups:
                raise ValueError(
                    f"num_groups must divide the {num_experts} experts, got {num_groups}"
                )
            num_topk_groups = checks.integer("num_topk_groups", num_topk_groups, 0)
            check_groups(num_experts, num_topk, num_topk_groups, num_groups)
            routed_scaling_factor = checks.finite("routed_scaling_factor", routed_scaling_factor)
            limit = checks.MOST_SIZE // (2 * intermediate)
            num_shared_experts = checks.integer("num_shared_experts", num_shared_experts, 0, limit)
            checks.one_of("balancing", balancing, BALANCING)
            fp8 = checks.boolean("fp8", fp8)
            if fp8 and intermediate % 32:
                raise ValueError(
                    f"intermediate must be a multiple of 32 with fp8, got {intermediate}"
                )
            checks.one_of("precision", precision, PRECISIONS)
            if precision == "fp8":
                if fp8:
                    raise ValueError('fp8 must be False with precision="fp8", which includes it')
                for name, size in (("hidden", hidden), ("intermediate", intermediate)):
                    if size % BLOCK:
                        raise ValueError(
                            f'{name} must be a multiple of {BLOCK} with precision="fp8", got {size}'
                        )
            checks.one_of("engine", engine, ENGINES)
            if ep is not None and not isinstance(getattr(ep, "num_ranks", None), int):
                raise TypeError(f"ep must be an ElasticBuffer or None, got {type(ep).__name__}")
            if ep is not None and num_experts % ep.num_ranks:
                raise ValueError(
                    f"num_experts must be a multiple of the {ep.num_ranks} ranks of ep, got "
                    f"{num_experts}"
                )
            checks.device("device", device)
            allowed = PARAMETER_DTYPES if precision == "fp8" else checks.PARAMETER_DTYPES
            checks.parameter_dtype("dtype", dtype, allowed)
        self.hidden, self.intermediate = hidden, intermediate
        self.num_experts, self.num_topk = num_experts, num_topk
        self.scoring_func, self.routed_scaling_factor = scoring_func, routed_scaling_factor
        self.num_groups, self.num_topk_groups = num_groups, num_topk_groups
        self.num_shared_experts, self.balancing = num_shared_experts, balancing
        self.precision, self.fp8, self.engine, self.ep = precision, fp8, engine, ep
        self._quantized = {name: WeightCache() for name in _EXPERT_WEIGHTS}
        num_local = num_experts if ep is None else num_experts // ep.num_ranks

        empty = functools.partial(torch.empty, device=device, dtype=dtype)
        in_float32 = functools.partial(torch.empty, device=device, dtype=torch.float32)
        self.router = nn.Parameter(in_float32(num_experts, hidden))
        self.w_in = nn.Parameter(empty(num_local, 2 * intermediate, hidden))
        self.w_out = nn.Parameter(empty(num_local, hidden, intermediate))
        shared = num_shared_experts * intermediate
        self.shared_in = nn.Parameter(empty(2 * shared, hidden)) if shared else None
        self.shared_out = nn.Parameter(empty(hidden, shared)) if shared else None
        self.register_buffer("expert_bias", in_float32(num_experts))
        counts = torch.empty(num_experts, dtype=torch.int32, device=device)
        self.register_buffer("load", counts, persistent=False)
        self._balance_loss: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights whose products keep the size of their input; no bias, no load."""
        for weight in self.parameters(recurse=False):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        nn.init.zeros_(self.expert_bias)
        self.load.zero_()

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MoELayer:
        """Move or convert; the bias stays float32, for its small steps vanish in fewer bits."""
        bias = self.expert_bias
        super()._apply(fn, *args, **kwargs)
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def freeze_quantized_weights(self, frozen: bool = True) -> None:
        """Lets CUDA graphs use quantized weights as they are now: with `precision="fp8"`.

        Without it a captured graph quantizes the weights at every replay. With it, graphs captured
        afterwards read copies that this call brings up to date; after a change of the weights, call
        it again (or the layer, outside of a graph), which updates what those graphs read. A replay
        by itself does not notice changes, a capture with copies that are not current raises.

        Args:
            frozen: False for graphs captured afterwards to quantize again; those that read the
                copies must not be replayed any more.
        """
        if self.precision != "fp8":
            raise ValueError(
                f'MoELayer: freeze_quantized_weights needs precision="fp8", got {self.precision!r}'
            )
        for name, cache in self._quantized.items():
            weight = getattr(self, name)
            if not frozen:
                cache.unfreeze()
            elif weight is not None:
                cache.freeze(weight)

    def extra_repr(self) -> str:
        """What the layer is made of."""
        shared = f", {self.num_shared_experts} shared" if self.num_shared_experts else ""
        local = "" if self.ep is None else f" ({len(self.w_in)} here)"
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, {self.num_topk} of "
            f"{self.num_experts} experts{local}{shared}, scoring_func={self.scoring_func}, "
            f"balancing={self.balancing}, precision={self.precision}, fp8={self.fp8}"
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Selects the experts of each token.

        Args:
            x: `[num_tokens, hidden]`.

        Returns:
            The experts, int64 `[num_tokens, num_topk]`, and their weights, float32 of the same
            shape.
        """
        settings = (
            self.num_topk, self.num_topk_groups, self.num_groups, self.routed_scaling_factor,
            self.scoring_func,
        )  # fmt: skip
        router, bias = self.router, self.expert_bias.float()
        route = routed_with_gradients if needs_gradients(x, router) else routed
        logits, topk_idx, weights = route(x, router, bias, *settings)
        # As `self.load = ...`, which spends microseconds on finding out that it is a buffer.
        self._buffers["load"] = moe.group_count(topk_idx, self.num_experts)
        if self.balancing == "loss":
            self._balance_loss = self._loss_of(logits, topk_idx)
        return topk_idx, weights

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer.

        Args:
            x: `[..., hidden]`.

        Returns:
            `[..., hidden]`, with the dtype of `x`.
        """
        checks.tensor_for("MoELayer: x", x, self.w_in)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(
                f"MoELayer: x must have {self.hidden} channels, got shape {tuple(x.shape)}"
            )
        # A view, and its node in the graph of gradients, only where one is needed.
        tokens = x if x.dim() == 2 else x.reshape(-1, self.hidden)
        tokens = tokens.contiguous()
        topk_idx, weights = self.route(tokens)
        if self.ep is not None:
            y = self._over_ranks(self.ep, tokens, topk_idx, weights)
        elif self.precision == "fp8":
            y = self._fp8_experts(tokens, weights, topk_idx, "w_in", "w_out")
        elif self.fp8:
            on_device = uses_grouped_mm(tokens, self.engine)
            rows, groups = map_rows(topk_idx, self.num_experts, on_device)
            results = self._rounded_experts(rows.expand(tokens), groups)
            y = rows.reduce(results, weights)
        else:
            x_in, w_in, w_out = in_autocast_dtype(tokens, self.w_in, self.w_out)
            y = bf16_experts(x_in, weights, topk_idx, w_in, w_out, self.engine)
        if self.shared_in is not None and self.shared_out is not None:
            y = y + self._shared(tokens, self.shared_in, self.shared_out)
        return y if x.dim() == 2 else y.view(x.shape)

    def _fp8_experts(
        self, tokens: Tensor, weights: Tensor, topk_idx: Tensor, first: str, second: str
    ) -> Tensor:
        """All products of the experts with these weights in FP8."""
        w_in, w_out = getattr(self, first), getattr(self, second)
        quantized = self._quantized[first](w_in), self._quantized[second](w_out)
        if w_in.dim() == 2:  # shared experts are one wide expert
            w_in, w_out = _as_one_expert(w_in), _as_one_expert(w_out)
        rows = tokens.bfloat16()
        few = 0 < len(tokens) <= MAX_MASKED_TOKENS
        if few and not needs_gradients(tokens, weights, w_in, w_out):
            copies = (weight.forward for weight in quantized)
            y = fp8_experts_masked(rows, weights, topk_idx, *copies)
        else:
            y = fp8_experts(rows, weights, topk_idx, w_in, w_out, quantized)
        return y.to(tokens.dtype)

    def _shared(self, tokens: Tensor, shared_in: Tensor, shared_out: Tensor) -> Tensor:
        """The experts that every token takes."""
        if self.precision != "fp8":
            return F.linear(self._activated(F.linear(tokens, shared_in)), shared_out)
        weights = tokens.new_ones(len(tokens), 1, dtype=torch.float32)
        choice = tokens.new_zeros(len(tokens), 1, dtype=torch.int64)
        return self._fp8_experts(tokens, weights, choice, "shared_in", "shared_out")

    def _rounded_experts(self, rows: Tensor, groups: Groups) -> Tensor:
        """The experts with activations in e4m3 and everything else in the dtype of the weights."""
        rows, w_in, w_out = in_autocast_dtype(rows, self.w_in, self.w_out)
        h = groups.multiply(rows, w_in.transpose(1, 2))
        return groups.multiply(self._activated(h), w_out.transpose(1, 2))

    def _over_ranks(
        self, ep: ElasticBuffer, tokens: Tensor, topk_idx: Tensor, weights: Tensor
    ) -> Tensor:
        """Tokens to the ranks of their experts and back; each result is weighted where it is."""
        if self.precision == "fp8":
            quantized = self._quantized["w_in"](self.w_in), self._quantized["w_out"](self.w_out)
            y = fp8_experts_over_ranks(
                ep, self.num_experts, tokens.bfloat16(), weights, topk_idx, self.w_in, self.w_out,
                quantized,
            )  # fmt: skip
            return y.to(tokens.dtype)
        on_device = uses_grouped_mm(tokens, self.engine)
        rows, row_weights, handle = send(
            ep, tokens, topk_idx, weights, self.num_experts, ROWS, may_wait=not on_device
        )
        counts = handle.num_recv_tokens_per_expert_list
        last = handle.psum_num_recv_tokens_per_expert
        if self.fp8:
            _, groups = received_rows(last, None if on_device else counts)
            results = self._rounded_experts(rows, groups)
            weighted = (results.float() * row_weights[:, None]).to(results.dtype)
            return ep.combine(weighted, handle)[0]
        x_in, w_in, w_out = in_autocast_dtype(rows, self.w_in, self.w_out)
        results = bf16_experts_of_rows(x_in, row_weights, last, counts, w_in, w_out, self.engine)
        return ep.combine(results, handle)[0]

    def _activated(self, rows: Tensor) -> Tensor:
        if self.fp8:
            group = 128 if rows.shape[-1] % 256 == 0 else 32
            return swiglu_cast(rows.bfloat16(), num_per_channels=group)[0].to(rows.dtype)
        if rows.dtype in (torch.bfloat16, torch.float32):
            return quant.swiglu_forward(rows, "bf16" if rows.dtype == torch.bfloat16 else "fp32")
        gate, value = rows.chunk(2, dim=-1)
        return F.silu(gate) * value

    # ---- balance ----

    def balance_loss(self) -> Tensor:
        """Of the last call, with `balancing="loss"`: 1 if all experts are chosen alike, else more.

        The sum over experts of their share of choices (`moe.aux_fi`) and their mean share of the
        scores; add it to the loss, times a small factor.
        """
        if self._balance_loss is None:
            raise ValueError('MoELayer: balance_loss needs a call first, with balancing="loss"')
        return self._balance_loss

    def _loss_of(self, logits: Tensor, topk_idx: Tensor) -> Tensor:
        if self.scoring_func == "softmax":
            shares = logits.softmax(-1)
        else:
            scores = (
                logits.sigmoid() if self.scoring_func == "sigmoid" else F.softplus(logits).sqrt()
            )
            shares = scores / scores.sum(-1, keepdim=True)
        mean = shares.sum(0) / max(1, len(shares))  # without tokens 0
        return (moe.aux_fi(topk_idx, self.num_experts, self.num_topk) * mean).sum()

    def __getstate__(self) -> dict[str, Any]:
        """Without the loss of the last call, whose graph cannot be copied."""
        return {**super().__getstate__(), "_balance_loss": None}

    @torch.no_grad()
    def update_bias(self, step: float = 1e-3) -> None:
        """Increases the bias of experts that were selected less than the average in the last call.

        Call it after each training step with `balancing="bias"`. The bias affects which experts are
        selected, not their weights, so it has no gradient. With `ep` the load is that of all ranks,
        which must all call this.

        Args:
            step: By how much the bias increases, or decreases for experts above the average.
        """
        if self.balancing != "bias":
            raise ValueError(
                f'MoELayer: update_bias needs balancing="bias", got {self.balancing!r}'
            )
        load = (self.load if self.ep is None else self.ep.sum_over_ranks(self.load)).float()
        step = checks.finite("MoELayer: step", step)
        self.expert_bias += step * torch.sign(load.mean() - load)
