"""Reference of rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.runtime.arithmetic import fused_multiply_add


def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The rotated query, or the query and the key.

    On a CPU a position that the cache does not have raises; elsewhere its token is not rotated.

    >>> cache = torch.tensor([[0.0, 1.0]])  # a quarter
    >>> rotary_embedding(torch.tensor([[[1.0, 2.0]]]), cache).tolist()
    [[[-2.0, 1.0]]]
    """
    tokens = query.shape[:-2]
    if positions is None:
        rows = torch.arange(tokens[-1], device=query.device).expand(tokens)
    else:
        rows = positions.long()
    rows = rows + seqlen_offset
    known = (rows >= 0) & (rows < cos_sin_cache.shape[0])
    if rows.is_cpu and not known.all():
        where = (~known).nonzero()[0].tolist()
        raise ValueError(
            f"positions must be in 0..{cos_sin_cache.shape[0] - 1} with seqlen_offset, but element "
            f"{where} is {rows[tuple(where)].item()}"
        )
    if cos_sin_cache.shape[0] == 0:
        table = cos_sin_cache.new_zeros((*rows.shape, cos_sin_cache.shape[1]), dtype=torch.float32)
    else:
        table = cos_sin_cache[rows.where(known, 0)].float()
    cos, sin = (part[..., None, :] for part in table.chunk(2, -1))
    if conjugate:
        sin = -sin

    def rotated(x: Tensor) -> Tensor:
        values = x.float()
        if interleaved:
            a, b = values[..., 0::2], values[..., 1::2]
        else:
            a, b = values.chunk(2, -1)
        first = fused_multiply_add(a, cos, -(b * sin))
        second = fused_multiply_add(a, sin, b * cos)
        if interleaved:
            result = torch.stack((first, second), -1).flatten(-2)
        else:
            result = torch.cat((first, second), -1)
        result = torch.where(known[..., None, None], result, values)
        return result.to(x.dtype).contiguous()

    return rotated(query) if key is None else (rotated(query), rotated(key))


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """`rotary_embedding` in place.

    >>> x = torch.tensor([[[1.0, 2.0]]])
    >>> apply_rotary(x, torch.tensor([[0.0, 1.0]]), conjugate=True)
    >>> x.tolist()
    [[[2.0, -1.0]]]
    """
    rest = (cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
    results = rotary_embedding(query, *rest)
    if key is None:
        query.copy_(results)  # type: ignore[arg-type]
    else:
        query.copy_(results[0])
        key.copy_(results[1])
