"""A sublayer among residual streams, and the head that leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.mhc.norm_fn.plan import VECTOR
from tile_kernels.mhc.shapes import MAX_STREAMS
from tile_kernels.mhc.sinkhorn.plan import MAX_REPEAT
from tile_kernels.modeling.mhc.functional import Read, Settings, mhc_head, mhc_post, read
from tile_kernels.runtime import checks

_SCALE = 0.01  # of the part that depends on the token, at the start
_STAYS = 0.99  # of a stream, at the start
_MAX_SHARE = 0.999  # of a sigmoid: one has no logit


def _logit(share: float) -> float:
    share = min(share, _MAX_SHARE)
    return math.log(share / (1 - share))


def _check_sizes(hidden_size: Any, mhc_mult: Any) -> tuple[int, int]:
    """Columns and streams that the operators take."""
    hidden_size = checks.integer("hidden_size", hidden_size, 1, checks.MOST_SIZE)
    if hidden_size % VECTOR:
        raise ValueError(f"hidden_size must be a multiple of {VECTOR}, got {hidden_size}")
    return hidden_size, checks.integer("mhc_mult", mhc_mult, 1, MAX_STREAMS)


class _Streams(nn.Module):
    """The parameters that make mixes of a residual."""

    def __init__(
        self,
        num_mixes: int,
        num_scales: int,
        hidden_size: int,
        mhc_mult: int,
        norm_weight: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        with checks.named(type(self).__name__):
            norm_weight = checks.boolean("norm_weight", norm_weight)
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype)
        self.hidden_size, self.mhc_mult = hidden_size, mhc_mult
        size = mhc_mult * hidden_size
        self.fn = nn.Parameter(torch.empty(num_mixes, size, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty(num_scales, device=device, dtype=dtype))
        self.base = nn.Parameter(torch.empty(num_mixes, device=device, dtype=dtype))
        self.norm_weight = (
            nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if norm_weight else None
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projections of about one, scaled down; the mean of the streams is read."""
        nn.init.normal_(self.fn, std=self.fn.shape[1] ** -0.5)
        nn.init.constant_(self.scale, _SCALE)
        nn.init.constant_(self.base[: self.mhc_mult], _logit(1 / self.mhc_mult))
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)

    def _check_residual(self, residual: Tensor) -> None:
        sizes = (self.mhc_mult, self.hidden_size)
        fits = isinstance(residual, Tensor) and residual.shape[-2:] == sizes
        if fits and residual.dtype is torch.bfloat16 and residual.device == self.fn.device:
            return
        name = type(self).__name__
        checks.tensor_on(f"{name}: residual", residual, self.fn.device, (torch.bfloat16,))
        if not fits:
            raise ValueError(
                f"{name}: residual must be [..., {sizes[0]}, {sizes[1]}], got "
                f"{list(residual.shape)}"
            )

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        return (
            f"hidden={self.hidden_size}, streams={self.mhc_mult}, "
            f"norm_weight={self.norm_weight is not None}"
        )


class HyperConnection(_Streams):
    """Applies a block to residual streams, in the place of `x + block(x)`.

    With `pre`, `post` and `comb` the mixes of a token (see `mhc_pre`), it computes

        x = sum_i pre[i] residual[i]      out[j] = post[j] block(x) + sum_i comb[i, j] residual[i]

    A new layer approximately reads the mean of the streams and adds the output to each: for streams
    that are all equal to `x`, the result is about `x + block(x)` in every stream. How much this
    depends on the token is small at first, and random, so that the streams become different.

    Args:
        block: A module or function, bfloat16 `[..., h]` to `[..., h]`.
        hidden_size: The channels `h`, a multiple of 8.
        mhc_mult: The number of streams `m`, 1 to 8.
        norm_weight: Whether the norm before the projection has a weight.
        post_mult_value: The largest factor with which the output of the block is added to a stream.
        sinkhorn_repeat: How often rows and columns are normalized.
        norm_eps: As in `mhc_pre`.
        pre_eps: As in `mhc_pre`.
        sinkhorn_eps: As in `mhc_pre`.
        block_dtype: The dtype of the input of the block; None: bfloat16. The output of the block is
            rounded to bfloat16.
        device: The device of the parameters.
        dtype: The dtype of the parameters, which are used in float32.

    Example:
        >>> layer = HyperConnection(nn.Identity(), hidden_size=16, mhc_mult=2)
        >>> layer(torch.ones(3, 2, 16).bfloat16()).shape
        torch.Size([3, 2, 16])
    """

    def __init__(
        self,
        block: Callable[..., Tensor],
        hidden_size: int,
        mhc_mult: int = 4,
        *,
        norm_weight: bool = False,
        post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        block_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        with checks.named("HyperConnection"):
            if not callable(block):
                raise TypeError(f"block must be callable, got {type(block).__name__}")
            hidden_size, mhc_mult = _check_sizes(hidden_size, mhc_mult)
            post_mult_value = checks.finite("post_mult_value", post_mult_value)
            sinkhorn_repeat = checks.integer("sinkhorn_repeat", sinkhorn_repeat, 1, MAX_REPEAT)
            norm_eps = checks.epsilon("norm_eps", norm_eps)
            pre_eps = checks.epsilon("pre_eps", pre_eps)
            sinkhorn_eps = checks.epsilon("sinkhorn_eps", sinkhorn_eps)
            checks.parameter_dtype("block_dtype", block_dtype)
        num_mixes = mhc_mult * (mhc_mult + 2)
        super().__init__(num_mixes, 3, hidden_size, mhc_mult, norm_weight, device, dtype)
        self.block, self.block_dtype = block, block_dtype
        self.settings = Settings(norm_eps, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Read the mean, write the output once to each stream, keep the streams nearly apart."""
        super().reset_parameters()
        m = self.mhc_mult
        nn.init.constant_(self.base[m : 2 * m], _logit(1 / max(1.0, self.settings.post_mult_value)))
        stays = math.log(_STAYS / (1 - _STAYS) * max(1, m - 1))
        self.base[2 * m :] = stays * torch.eye(m, device=self.base.device).flatten()

    def read(self, residual: Tensor, with_pre: bool = False) -> Read:
        """Computes the input of the block and the mixes.

        Args:
            residual: `[..., m, h]`, bfloat16, contiguous.
            with_pre: Whether the weights with which the streams are read are returned as well.
        """
        self._check_residual(residual)
        return read(
            residual, self.fn, self.scale, self.base, self.norm_weight, self.settings, carry=True,
            with_pre=with_pre,
        )  # fmt: skip

    def run_block(self, layer_input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the block, and returns its output as `mhc_post` takes it: bfloat16, contiguous.

        Args:
            layer_input: `[..., h]`, bfloat16: the input of the block.
            args: Further arguments of the block.
            kwargs: Further keyword arguments of the block.
        """
        given = layer_input if self.block_dtype is None else layer_input.to(self.block_dtype)
        output = self.block(given, *args, **kwargs)
        if not isinstance(output, Tensor) or output.shape != layer_input.shape:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                "HyperConnection: the block must return a tensor like its input, "
                f"{list(layer_input.shape)}, got {got}"
            )
        if output.dtype is not layer_input.dtype:
            output = output.to(layer_input.dtype)
        return output.contiguous()

    def forward(self, residual: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Applies the layer.

        Args:
            residual: `[..., m, h]`, bfloat16, contiguous.
            args: Further arguments of the block.
            kwargs: Further keyword arguments of the block.

        Returns:
            The next residual, `[..., m, h]`, bfloat16.
        """
        got = self.read(residual)
        output = self.run_block(got.layer_input, *args, **kwargs)
        return mhc_post(output, residual, got.post, got.comb, got.carried)

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        return (
            f"{super().extra_repr()}, post_mult_value={self.settings.post_mult_value}, "
            f"sinkhorn_repeat={self.settings.sinkhorn_repeat}"
        )


class HyperHead(_Streams):
    """Combines the streams into one at the end of a model, with mixes computed from the streams.

    A new head approximately computes the mean of the streams.

    Args:
        hidden_size: The channels `h`, a multiple of 8.
        mhc_mult: The number of streams `m`, 1 to 8.
        norm_weight: Whether the norm before the projection has a weight.
        norm_eps: As in `mhc_pre`.
        pre_eps: As in `mhc_pre`.
        device: The device of the parameters.
        dtype: The dtype of the parameters, which are used in float32.

    Example:
        >>> HyperHead(hidden_size=16, mhc_mult=2)(torch.ones(3, 2, 16).bfloat16()).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        mhc_mult: int = 4,
        *,
        norm_weight: bool = False,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        with checks.named("HyperHead"):
            hidden_size, mhc_mult = _check_sizes(hidden_size, mhc_mult)
            norm_eps = checks.epsilon("norm_eps", norm_eps)
            pre_eps = checks.epsilon("pre_eps", pre_eps)
        super().__init__(mhc_mult, 1, hidden_size, mhc_mult, norm_weight, device, dtype)
        self.norm_eps, self.pre_eps = norm_eps, pre_eps
        self.reset_parameters()

    def forward(self, residual: Tensor) -> Tensor:
        """Applies the head.

        Args:
            residual: `[..., m, h]`, bfloat16, contiguous.

        Returns:
            `[..., h]`, bfloat16.
        """
        self._check_residual(residual)
        return mhc_head(
            residual, self.fn, self.scale, self.base, norm_weight=self.norm_weight,
            norm_eps=self.norm_eps, mhc_mult=self.mhc_mult, pre_eps=self.pre_eps,
        )  # fmt: skip
