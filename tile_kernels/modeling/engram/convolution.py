"""A short causal convolution along the tokens, each channel by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels.engram import engram_convolution_fwd
from tile_kernels.engram.convolution.op import MAX_DILATION, MAX_STREAMS, WEIGHT_DTYPES
from tile_kernels.engram.convolution.plan import MAX_TAPS, VECTOR
from tile_kernels.runtime import checks


class CausalConvolution(nn.Module):
    """Computes `silu(convolution(norm(y)))`: RMSNorm of each stream, then a causal convolution.

    Token `t` reads the tokens `t - j * dilation` for `j < kernel_size` of its row, and with
    `cu_seqlens` only those of its document. The taps start at zero, so that a new layer adds
    nothing. For bfloat16 `y` one operator computes everything (`engram.engram_convolution_fwd`),
    including the addition to the residual; other dtypes and sizes use PyTorch's operations.

    Args:
        num_streams: The number of streams `hc`.
        hidden_size: The channels `H` of a stream.
        kernel_size: The number of taps.
        dilation: The distance of neighbouring taps in tokens.
        eps: The epsilon of the norm.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> CausalConvolution(num_streams=2, hidden_size=8)(torch.ones(5, 2, 8)).abs().max().item()
        0.0
    """

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        kernel_size: int = 4,
        dilation: int = 1,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with checks.named("CausalConvolution"):
            num_streams = checks.integer("num_streams", num_streams, 1, checks.MOST_SIZE)
            hidden_size = checks.integer("hidden_size", hidden_size, 1, checks.MOST_SIZE)
            kernel_size = checks.integer("kernel_size", kernel_size, 1, checks.MOST_SIZE)
            dilation = checks.integer("dilation", dilation, 1, checks.MOST_SIZE)
            eps = checks.epsilon("eps", eps)
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype)
        self.dilation, self.eps = dilation, eps
        shape = num_streams, hidden_size
        self.norm_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.taps = nn.Parameter(torch.empty(kernel_size, *shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norms of weight one, taps of zero."""
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.taps)

    def forward(
        self, y: Tensor, cu_seqlens: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Applies the convolution, in float32, rounded to the dtype of `y` at the end.

        Args:
            y: `[B, S, hc, H]`, or `[S, hc, H]` for one text.
            cu_seqlens: `[num_documents + 1]`: the starts of documents in the flattened tokens, or
                None.
            residual: A tensor of the shape of `y`, or None.

        Returns:
            The result of the convolution; with a residual, `residual + (y + convolution)` in the
            dtype of the residual.
        """
        if self._has_kernel(y):
            return self._fused(y, cu_seqlens, residual)
        return _added(y, self._composed(y, cu_seqlens), residual)

    def _has_kernel(self, y: Tensor) -> bool:
        num_taps, num_streams, hidden_size = self.taps.shape
        return (
            y.dtype is torch.bfloat16
            and self.taps.dtype == self.norm_weight.dtype
            and self.taps.dtype in WEIGHT_DTYPES
            and num_taps <= MAX_TAPS
            and num_streams <= MAX_STREAMS
            and hidden_size % VECTOR == 0
            and self.dilation <= MAX_DILATION
        )

    def _fused(self, y: Tensor, cu_seqlens: Tensor | None, residual: Tensor | None) -> Tensor:
        """By the operator, which adds a residual of bfloat16 too."""
        rows = y.flatten(0, -3).contiguous()
        given = None
        if residual is not None and residual.dtype is torch.bfloat16:
            given = residual.reshape(rows.shape).contiguous()
        starts = starts_of_tokens(y.shape[:-2], cu_seqlens, y.device)
        result, _ = engram_convolution_fwd(
            rows, self.norm_weight, self.taps, starts, self.dilation, self.eps, given
        )
        result = result.view(y.shape)
        return result if given is not None else _added(y, result, residual)

    def _composed(self, y: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        normed = F.rms_norm(y.float(), y.shape[-1:], eps=self.eps) * self.norm_weight
        document = None if cu_seqlens is None else document_of_tokens(y.shape[:-2], cu_seqlens)
        total = normed * self.taps[0]
        for tap in range(1, self.taps.shape[0]):
            distance = tap * self.dilation
            past = _earlier(normed, distance, dim=-3)
            if document is not None:
                other = document != _earlier(document, distance, dim=-1)
                past = past.masked_fill(other[..., None, None], 0)
            total = total + past * self.taps[tap]
        return F.silu(total).to(y.dtype)

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        kernel_size, num_streams, hidden_size = self.taps.shape
        return (
            f"streams={num_streams}, hidden={hidden_size}, kernel_size={kernel_size}, "
            f"dilation={self.dilation}"
        )


def document_of_tokens(shape: torch.Size, cu_seqlens: Tensor) -> Tensor:
    """The number of the document that each token of `shape` belongs to, int64.

    >>> document_of_tokens(torch.Size([2, 3]), torch.tensor([0, 2, 5])).tolist()
    [[1, 1, 2], [2, 2, 3]]
    """
    position = torch.arange(shape.numel(), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, position, right=True).view(shape)


def starts_of_tokens(shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """The first token of the text of each token of `shape`, flattened: int32.

    >>> starts_of_tokens(torch.Size([2, 3]), torch.tensor([0, 2, 5]), torch.device("cpu")).tolist()
    [0, 0, 2, 3, 3, 5]
    """
    token = torch.arange(shape.numel(), device=device, dtype=torch.int32)
    starts = token - token % max(1, shape[-1])
    if cu_seqlens is None:
        return starts
    document = document_of_tokens(shape, cu_seqlens).flatten()
    begins = torch.cat((cu_seqlens.new_zeros(1), cu_seqlens))[document]
    return torch.maximum(starts, begins.to(torch.int32))


def _added(y: Tensor, convolved: Tensor, residual: Tensor | None) -> Tensor:
    """The convolution, or with a residual the sum of all three in its dtype."""
    if residual is None:
        return convolved
    return residual + (y.to(residual.dtype) + convolved.to(residual.dtype))


def _earlier(x: Tensor, distance: int, dim: int) -> Tensor:
    """What stood `distance` positions before along a dimension, zeros before the start."""
    distance = min(distance, x.shape[dim])
    kept = x.narrow(dim, 0, x.shape[dim] - distance)
    after_dim = -1 - dim
    return F.pad(kept, (0, 0) * after_dim + (distance, 0))
