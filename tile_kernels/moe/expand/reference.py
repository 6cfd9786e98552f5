"""References of the fused layout: tokens expanded to one row per chosen expert."""

from __future__ import annotations

import torch


def expand_to_fused(
    x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor
) -> torch.Tensor:
    """Row `token_topk_to_pos[t, k]` of the result is `x[t]`; rows that no slot names are zero.

    `x` is `[num_tokens, hidden]`; the result has a row for each element of `pos_to_expert`. Slots
    outside of it name nothing.

    >>> expand_to_fused(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2], [0]]), torch.zeros(3))
    tensor([[3, 4],
            [0, 0],
            [1, 2]])
    """
    num_positions = pos_to_expert.shape[0]
    valid = (token_topk_to_pos >= 0) & (token_topk_to_pos < num_positions)
    tokens = valid.nonzero()[:, 0]
    out = x.new_zeros((num_positions, x.shape[1]))
    out[token_topk_to_pos[valid].long()] = x[tokens]
    return out


def expand_to_fused_with_sf(
    x: tuple[torch.Tensor, torch.Tensor],
    num_per_channels: int,  # noqa: ARG001 - follows from the shapes
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_to_fused` of data and of its scales `[num_tokens, num_scales]`.

    With `use_tma_aligned_col_major_sf` the scales are the transpose of a matrix whose rows have
    room for a multiple of 4 positions; that room is zero.

    >>> x = torch.ones(1, 2), torch.tensor([[0.5]])
    >>> data, sf = expand_to_fused_with_sf(x, 2, torch.tensor([[2]]), torch.zeros(3), True)
    >>> sf.tolist(), sf.stride()
    ([[0.0], [0.0], [0.5]], (1, 4))
    """
    data, sf = x
    out = expand_to_fused(data, token_topk_to_pos, pos_to_expert)
    out_sf = expand_to_fused(sf, token_topk_to_pos, pos_to_expert)
    if use_tma_aligned_col_major_sf:
        num_positions, num_scales = out_sf.shape
        columns = sf.new_zeros((num_scales, (num_positions + 3) // 4 * 4))
        out_sf = columns.T[:num_positions].copy_(out_sf)
    return out, out_sf
