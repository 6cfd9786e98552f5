"""References of the operators on paged key-value caches."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.cache_layout import Layout, layout_of
from tile_kernels.quant.per_token.reference import per_token_cast


def page_bytes(cache: Tensor) -> Tensor:
    """A cache as the bytes of its pages, `[num_pages, bytes]`."""
    data = cache if cache.dtype is torch.uint8 else cache.view(torch.uint8)
    return data.as_strided((data.shape[0], data.shape[1] * data.shape[-1]), (data.stride(0), 1))


def byte_ranges(layout: Layout, page_size: int, offset: Tensor) -> tuple[Tensor, ...]:
    """Where codes, scales and rotated channels of tokens lie in their page, `[n, bytes]` each."""
    if layout.name == "v4":
        starts = ((576 * offset, 448), (576 * page_size + 8 * offset, 8), (576 * offset + 448, 128))
    elif layout.name == "v3.2":
        starts = ((656 * offset, 512), (656 * offset + 512, 16), (656 * offset + 528, 128))
    else:
        starts = ((1024 * offset, 0), (1024 * offset, 0), (1024 * offset, 1024))
    return tuple(at[:, None] + torch.arange(size, device=at.device) for at, size in starts)


def kv_cache_append(
    cache: Tensor,
    slots: Tensor,
    codes: Tensor,
    sf: Tensor | None = None,
    rotated: Tensor | None = None,
) -> None:
    """Writes rows at slots of a cache; see `tile_kernels.attention`.

    >>> cache = torch.zeros(1, 2, 1, 512, dtype=torch.bfloat16)
    >>> kv_cache_append(cache, torch.tensor([1, -1]).int(), torch.ones(2, 512).bfloat16())
    >>> cache[0, :, 0, 0].tolist()
    [0.0, 1.0]
    """
    layout, page_size = layout_of(cache), cache.shape[1]
    if sf is None:
        rows, plain = codes, layout.plain
        codes, rotated = rows[:, :plain], rows[:, plain:]
        if plain:
            codes, sf = per_token_cast(codes.contiguous(), "e4m3", layout.group, round_sf=True)
    at = slots.long()
    known = (at >= 0) & (at < cache.shape[0] * page_size)
    where = byte_ranges(layout, page_size, at[known] % page_size)
    parts: list[Tensor | None] = [codes, sf, rotated]
    if layout.name == "v4" and sf is not None:
        exponents = (sf.contiguous().view(torch.int32) >> 23 & 255).to(torch.uint8)
        parts[1] = torch.nn.functional.pad(exponents, (0, 1))
    page, data = (at[known] // page_size)[:, None], page_bytes(cache)
    for columns, part in zip(where, parts):
        if part is not None and columns.numel():
            data[page, columns] = part[known].contiguous().view(torch.uint8)


def kv_cache_gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of a cache in bfloat16; see `tile_kernels.attention`.

    >>> cache = torch.ones(1, 2, 1, 512, dtype=torch.bfloat16)
    >>> kv_cache_gather(cache, torch.tensor([1, -1]).int())[:, 0].tolist()
    [1.0, 0.0]
    """
    layout, page_size = layout_of(cache), cache.shape[1]
    at = slots.long()
    known = (at >= 0) & (at < cache.shape[0] * page_size)
    rows = torch.zeros(at.shape[0], layout.channels, dtype=torch.bfloat16, device=at.device)
    at = at[known]
    data, page = page_bytes(cache), (at // page_size)[:, None]
    codes, sf, rotated = (
        data[page, columns] for columns in byte_ranges(layout, page_size, at % page_size)
    )
    read = rotated.view(torch.bfloat16)
    if layout.plain:
        if layout.name == "v4":
            scale = torch.exp2(sf[:, : layout.groups].double() - 127).float()
        else:
            scale = sf.contiguous().view(torch.float32)
        value = codes.view(torch.float8_e4m3fn).float().unflatten(1, (layout.groups, layout.group))
        read = torch.cat(((value * scale[..., None]).flatten(1).bfloat16(), read), 1)
    rows[known] = read
    return rows


def cache_indices(logical: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Slots of logical positions; see `tile_kernels.attention`.

    >>> cache_indices(torch.tensor([[0, 3, -1]]).int(), torch.tensor([[7, 5]]).int(), 2)
    tensor([[14, 11, -1]], dtype=torch.int32)
    """
    position = logical.flatten(1).long()
    column, pages = position // page_size, block_table.shape[1]
    known = (position >= 0) & (column < pages)
    if not pages:
        return torch.full_like(logical, -1)
    page = block_table.long().gather(1, column.clamp(0, pages - 1))
    slot = page * page_size + position % page_size
    known &= (page >= 0) & (slot < 2**31)
    return slot.masked_fill(~known, -1).int().view(logical.shape)
