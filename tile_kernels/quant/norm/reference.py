"""References of RMS norm, with a cast of its result, and of its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.quant.casting import cast, quantize
from tile_kernels.quant.formats import E2M1, E4M3, encode_ue8m0
from tile_kernels.quant.types import QuantTensor, ScaleFlags
from tile_kernels.utils import align

_FORMATS = {"e4m3": E4M3, "e2m1": E2M1}


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`(out, rstd, norm_input)`: `x * rstd * (weight * out_scale)`, after adding the residual.

    >>> out, _, total = norm_forward(torch.ones(1, 4), None, 0.0, residual=torch.ones(1, 4))
    >>> out.tolist(), total.tolist()
    ([[1.0, 1.0, 1.0, 1.0]], [[2.0, 2.0, 2.0, 2.0]])
    """
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = total.float()
    rstd = torch.rsqrt(values.square().sum(-1) / x.shape[-1] + eps)
    factor = out_scale if weight is None else weight.float() * out_scale
    result = ((values * rstd[..., None]) * factor).to(x.dtype)
    if residual is not None:
        total = _placed(total, residual_out)
    return _placed(result, out), rstd if with_rstd else None, total


def _placed(result: Tensor, buffer: Tensor | None) -> Tensor:
    """A result in the caller's buffer, or contiguous."""
    return result.contiguous() if buffer is None else buffer.copy_(result)


def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
    out_bf16: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_moe_sf: Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
    amax_min: float | None = None,
) -> tuple[QuantTensor, Tensor | None, Tensor | None, Tensor]:
    """`((data, sf), out_bf16, rstd, norm_input)`: the cast of what `norm_forward` returns.

    >>> (data, sf), *_ = norm_forward_and_per_token_cast(torch.ones(1, 32), None, 0.0, "e4m3", 32)
    >>> data[0, 0].item(), round(1 / sf.item(), 3)
    (448.0, 448.0)
    """
    normed, rstd, total = norm_forward(
        x, weight, eps, residual, out_scale, None, residual_out, with_rstd
    )
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    block = (1, num_per_channels)
    target = _FORMATS[fmt]
    if x.dim() == 2:
        data, sf = quantize(normed.float(), target, block, flags, amax_min)
    else:
        pairs = [quantize(each.float(), target, block, flags, amax_min) for each in normed]
        data, sf = stack_batches(pairs, x, fmt, num_per_channels, flags)
    if mega_moe_sf is not None:
        _, plain = quantize(normed.float(), target, block, ScaleFlags(True), amax_min)
        write_mega_moe_sf(plain, mega_moe_sf, mega_moe_block_m)
    if out is not None:
        data, sf = (x if given is None else given.copy_(x) for x, given in zip((data, sf), out))
    plain_out = _placed(normed.bfloat16(), out_bf16) if with_out_bf16 else None
    return (data, sf), plain_out, rstd, total


def stack_batches(
    pairs: list[QuantTensor], x: Tensor, fmt: str, group: int, flags: ScaleFlags
) -> QuantTensor:
    """Data and scales of batches as 3-D tensors; each batch has its own padded columns.

    >>> pair = cast(torch.ones(5, 192), "e4m3", (1, 32), None, None, False, True)
    >>> x, flags = torch.empty(2, 5, 192), ScaleFlags(False, True)
    >>> data, sf = stack_batches([pair] * 2, x, "e4m3", 32, flags)
    >>> tuple(sf.shape), sf.stride()
    ((2, 5, 6), (48, 1, 8))
    """
    if not pairs:  # one token tells shapes and dtypes
        one = cast(x.new_ones((1, x.shape[-1])), fmt, (1, group), None, None, *flags)
        tokens = x.shape[1]
        data = one[0].new_empty((0, tokens, one[0].shape[1]))
        padded = align(tokens, 4)
        sf = one[1].new_empty((0, one[1].shape[1], padded)).transpose(1, 2)[:, :tokens]
        if not flags.use_tma_aligned_col_major_sf:
            sf = one[1].new_empty((0, tokens, one[1].shape[1]))
        return data, sf
    data = torch.stack([each[0].view(torch.uint8) for each in pairs]).view(pairs[0][0].dtype)
    if not flags.use_tma_aligned_col_major_sf:
        return data, torch.stack([each[1] for each in pairs])
    tokens, columns = pairs[0][1].shape
    sf = pairs[0][1].new_zeros((len(pairs), columns, align(tokens, 4)))
    for plane, (_, each) in zip(sf, pairs):
        plane[:, :tokens] = each.T
    return data, sf.transpose(1, 2)[:, :tokens]


def mega_moe_rows(num_tokens: int, block_m: int) -> Tensor:
    """The row of the mega-MoE layout that holds the scales of each token.

    >>> mega_moe_rows(193, 192)[[0, 1, 32, 128, 160, 192]].tolist()
    [0, 4, 1, 128, 129, 256]
    """
    token = torch.arange(num_tokens)
    j = token % block_m
    return token // block_m * align(block_m, 128) + j // 128 * 128 + j % 32 * 4 + j % 128 // 32


def write_mega_moe_sf(sf: Tensor, mega_moe_sf: Tensor, block_m: int) -> None:
    """Writes powers of two `[T, G]` to `[G / 4, rows]` words; other words stay as they are."""
    num_tokens, groups = sf.shape
    words = encode_ue8m0(sf).view(num_tokens, groups // 4, 4).contiguous().view(torch.int32)
    rows = mega_moe_rows(num_tokens, block_m).to(sf.device)
    mega_moe_sf[:, rows] = words.squeeze(-1).T


def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(x_grad, weight_grad)`; a given `weight_grad` is added to, in place.

    >>> x_grad, _ = norm_backward(torch.ones(1, 2), torch.ones(1, 2), None, torch.ones(1))
    >>> x_grad.tolist()
    [[0.0, 0.0]]
    """
    normed = x.float() * rstd[..., None]
    scaled = out_grad.float() * out_scale
    inner = scaled if weight is None else scaled * weight.float()
    mean = (normed * inner).sum(-1, keepdim=True) / x.shape[-1]
    x_grad = (inner - normed * mean) * rstd[..., None]
    if residual_out_grad is not None:
        x_grad = x_grad + residual_out_grad.float()
    if weight is None:
        return x_grad.to(x.dtype).contiguous(), None
    total = (normed * scaled).flatten(0, -2).sum(0)
    if weight_grad is None:
        return x_grad.to(x.dtype).contiguous(), total.to(weight.dtype)
    weight_grad.copy_(total + weight_grad.float())
    return x_grad.to(x.dtype).contiguous(), weight_grad
