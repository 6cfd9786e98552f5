"""Reference of `reduce_fused`: the rows of the fused layout reduced to tokens again."""

from __future__ import annotations

import torch

from tile_kernels.quant.formats import encode_e4m3
from tile_kernels.runtime.arithmetic import fused_multiply_add

_TOKENS_AT_ONCE = 128  # whose rows stay in a CPU's caches from slot to slot

# What arithmetic on the devices returns for NaN.
_NAN_BITS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}


def reduce_fused(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    fp8_format: str = "",
    sf: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum over the slots of each token of `x[position] * scale`, `[num_tokens, hidden]`.

    The scale is the slot's weight times the position's scale (the second of a tuple `x`), where
    given. The sum starts at +0.0 and takes the slots in order, each with a fused multiply-add in
    float32; the result is multiplied by `sf` and rounded once. Slots outside of `x` are skipped.
    A NaN is the one that the hardware's arithmetic returns.

    >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    >>> slots = torch.tensor([[1, 0], [0, -1]])
    >>> reduce_fused(rows, torch.tensor([[0.5, 2.0], [3.0, 9.0]]), slots).tolist()
    [[7.0, 14.0], [3.0, 6.0]]
    """
    rows, x_sf = x if isinstance(x, tuple) else (x, None)
    num_tokens, num_topk = token_topk_to_pos.shape
    total = rows.new_zeros((num_tokens, rows.shape[1]), dtype=torch.float32)
    at_once = _TOKENS_AT_ONCE if rows.is_cpu else max(num_tokens, 1)
    for first in range(0, num_tokens, at_once):
        chunk = slice(first, first + at_once)
        for k in range(num_topk):
            position = token_topk_to_pos[chunk, k].long()
            token = ((position >= 0) & (position < rows.shape[0])).nonzero()[:, 0]
            position = position[token]
            row, token = rows[position].float(), token + first
            scale = None if topk_weights is None else topk_weights[token, k]
            if x_sf is not None:
                scale = x_sf[position] if scale is None else scale * x_sf[position]
            if scale is None:
                total.index_add_(0, token, row)  # a sum has one rounding; each token comes once
            else:
                total[token] = fused_multiply_add(row, scale[:, None], total[token])
    if sf is not None:
        total = total * sf
    dtype = out_dtype or (torch.float8_e4m3fn if fp8_format == "e4m3" else rows.dtype)
    if dtype == torch.float8_e4m3fn:
        return encode_e4m3(total)
    integer, nan = _NAN_BITS[dtype]
    return total.to(dtype).view(integer).masked_fill(total.isnan(), nan).view(dtype)
