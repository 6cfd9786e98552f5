"""How pages of a key-value cache are laid out, and what allocates them. Needs no TileLang.

A cache is a tensor `[num_pages, page_size, 1, row]`, or without the dimension of size 1. A row of a
token has

| layout | dtype, row | contents |
|---|---|---|
| `"v4"` | uint8, 584 | 448 e4m3 and 64 bfloat16; 7 exponents of scales and an unused byte |
| `"v3.2"` | uint8, 656 | 512 e4m3, 4 float32 scales, 64 bfloat16 |
| `"bf16"` | bfloat16, 512 | the channels as they are |

In a page of `"v4"` the data of all tokens (576 bytes each) come first, then the scales of all
tokens (8 bytes each): the shape of the tensor only counts bytes. Pages may be any multiple of 16
bytes apart. float8_e4m3fn in place of uint8 means the same bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import Spec

WORD = 4  # bytes: kernels see pages of bytes as int32
PAGE_ALIGNMENT = 576  # bytes: pages of "v4" start at multiples, as serving engines allocate them
BYTES = (torch.uint8, torch.float8_e4m3fn)


class Layout(NamedTuple):
    """Sizes of a token's row. `plain` channels have codes, `group` of them a scale."""

    name: str
    row: int
    channels: int
    plain: int
    group: int

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.plain // self.group if self.group else 0

    @property
    def rotated(self) -> int:
        """Channels that are stored in bfloat16."""
        return self.channels - self.plain

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, scales included."""
        return self.row if self.plain else 2 * self.row


LAYOUTS = {
    "v4": Layout("v4", 584, 512, 448, 64),
    "v3.2": Layout("v3.2", 656, 576, 512, 128),
    "bf16": Layout("bf16", 512, 512, 0, 0),
}


def layout_of(cache: Any) -> Layout:
    """The layout of a cache that passed `check_cache`."""
    if cache.dtype is torch.bfloat16:
        return LAYOUTS["bf16"]
    return LAYOUTS["v4" if cache.shape[-1] == LAYOUTS["v4"].row else "v3.2"]


def check_cache(name: str, cache: Tensor) -> Layout:
    """`cache` has one of the layouts, in pages that kernels can address."""
    dims: tuple[str, ...] = ("num_pages", "page_size", "row")
    if isinstance(cache, Tensor) and cache.dim() == 4:
        dims = ("num_pages", "page_size", "1", "row")
    checks.tensor(name, cache, dims, (*BYTES, torch.bfloat16), unit_inner_stride=True)
    page_size, row = cache.shape[1], cache.shape[-1]
    rows = (512,) if cache.dtype is torch.bfloat16 else (584, 656)
    if page_size < 1 or cache.shape[2:-1].numel() != 1 or row not in rows:
        raise ValueError(
            f"{name} must have shape [num_pages, page_size, 1, {' or '.join(map(str, rows))}] in "
            f"{str(cache.dtype).removeprefix('torch.')}, got {tuple(cache.shape)}"
        )
    if page_size > 1 and cache.stride(1) != row:
        raise ValueError(f"{name} must have stride {row} between tokens, got {cache.stride(1)}")
    size = cache.element_size()
    if cache.shape[0] > 1 and (cache.stride(0) * size % 16 or cache.stride(0) < page_size * row):
        raise ValueError(
            f"{name} must have pages that are a multiple of 16 bytes apart and do not overlap, got "
            f"{cache.stride(0) * size} bytes for pages of {page_size * row * size}"
        )
    start = cache.storage_offset()
    if isinstance(start, int) and start * size % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes, got {start * size}")
    return layout_of(cache)


def num_slots(cache: Any) -> int:
    """Slots of a cache, as far as int32 can number them."""
    return min(cache.shape[0] * cache.shape[1], 2**31 - 1)


def _flat(cache: Tensor, dtype: torch.dtype, shape: tuple[int, int], stride: int) -> Tensor:
    cells = cache if cache.dtype is dtype else cache.view(dtype)
    return cells.as_strided((cells.shape[0], shape[1]), (stride, 1))


def flat_pages(cache: Any) -> Any:
    """The spec of a cache as `[num_pages, cells]`: int32, or bfloat16 of `"bf16"`."""
    pages, page_size, row = cache.shape[0], cache.shape[1], cache.shape[-1]
    bf16 = cache.dtype is torch.bfloat16
    dtype, per_cell = (torch.bfloat16, 1) if bf16 else (torch.int32, WORD)
    cells = page_size * row // per_cell
    unit = 16 // dtype.itemsize
    stride = cache.stride(0) // per_cell if pages > 1 else -(-cells // unit) * unit
    like = Spec((pages, cells), (stride, 1), dtype, cache.device, cache.alignment)
    return cache.apply(_flat, dtype, (pages, cells), stride, like=like)


# ---- allocation ---------------------------------------------------------------------------------


def kv_cache_bytes(num_pages: int, page_size: int, layout: str = "v4") -> int:
    """Bytes that `kv_cache_empty` allocates.

    Args:
        num_pages: Pages, at least 0.
        page_size: Tokens of a page, at least 1.
        layout: `"v4"` (584 bytes for a token), `"v3.2"` (656) or `"bf16"` (1024). Pages of `"v4"`
            are padded to a multiple of 576 bytes.

    Returns:
        The number of bytes.

    Raises:
        TypeError: If a number is no int.
        ValueError: If an argument is out of its range.

    Example:
        >>> kv_cache_bytes(1, 64, "v4"), kv_cache_bytes(1, 64, "bf16")
        (37440, 65536)
    """
    with checks.named("kv_cache_bytes"):
        return num_pages * _page_bytes(num_pages, page_size, layout)


def _page_bytes(num_pages: int, page_size: int, layout: str) -> int:
    checks.one_of("layout", layout, tuple(LAYOUTS))
    checks.integer("num_pages", num_pages, 0, checks.MOST_SIZE)
    checks.integer("page_size", page_size, 1, checks.MOST_SIZE // 1024)
    size = page_size * LAYOUTS[layout].row_bytes
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT if layout == "v4" else size


def kv_cache_empty(
    num_pages: int,
    page_size: int = 64,
    layout: str = "v4",
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Allocates pages of a key-value cache, not initialised.

    Slots that nobody wrote do not matter to `sparse_attention_decode`, whatever their bytes.

    Args:
        num_pages: Pages, at least 0.
        page_size: Tokens of a page, at least 1. Any number will do; 64 and 256 are common.
        layout: `"v4"`: 448 channels in e4m3 with a power-of-two scale for 64 of them, 64 rotated
            channels in bfloat16. `"v3.2"`: 512 channels in e4m3 with a float32 scale for 128 of
            them, 64 rotated channels. `"bf16"`: 512 channels in bfloat16.
        device: As in `torch.empty`.

    Returns:
        `[num_pages, page_size, 1, 584]` (`"v4"`) or `[num_pages, page_size, 1, 656]` (`"v3.2"`) in
        uint8, `[num_pages, page_size, 1, 512]` in bfloat16 (`"bf16"`), of `kv_cache_bytes` bytes.

    Raises:
        TypeError: If a number is no int.
        ValueError: If an argument is out of its range.

    Example:
        >>> kv_cache_empty(2, 61).shape, kv_cache_empty(2, 61).stride(0)
        (torch.Size([2, 61, 1, 584]), 35712)
    """
    with checks.named("kv_cache_empty"):
        size = _page_bytes(num_pages, page_size, layout)
        checks.device("device", device)
    row = LAYOUTS[layout].row
    if layout == "bf16":
        return torch.empty(num_pages, page_size, 1, row, dtype=torch.bfloat16, device=device)
    pages = torch.empty(num_pages, size, dtype=torch.uint8, device=device)
    return pages[:, : page_size * row].unflatten(1, (page_size, 1, row))
