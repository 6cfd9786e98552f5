"""Paged caches: their bytes, written and read back; slots; allocation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tile_kernels
from tests.attention.helpers import each_ground
from tile_kernels import attention
from tile_kernels.quant import per_token_cast


def write_v4(page: torch.Tensor, offset: int, row: torch.Tensor) -> None:
    """The bytes of a token, from the description of the layout, with the library's least scale."""
    size = page.numel() // 584
    groups = row[:448].reshape(7, 64)
    scale = 2.0 ** (groups.abs().amax(1).clamp(min=1e-4) / 448).log2().ceil()
    codes = (groups / scale[:, None]).to(torch.float8_e4m3fn)
    page[576 * offset : 576 * offset + 448] = codes.flatten().view(torch.uint8)
    page[576 * offset + 448 : 576 * offset + 576] = row[448:].bfloat16().view(torch.uint8)
    first = 576 * size + 8 * offset
    page[first : first + 7] = (scale.log2() + 127).to(torch.uint8)


def write_v32(page: torch.Tensor, offset: int, row: torch.Tensor) -> None:
    """The same for "v3.2", whose tokens have their scales with them, as float32."""
    groups = row[:512].reshape(4, 128)
    scale = 2.0 ** (groups.abs().amax(1).clamp(min=1e-4) / 448).log2().ceil()
    codes = (groups / scale[:, None]).to(torch.float8_e4m3fn)
    token = page[656 * offset : 656 * offset + 656]
    token[:512] = codes.flatten().view(torch.uint8)
    token[512:528] = scale.view(torch.uint8)
    token[528:] = row[512:].bfloat16().view(torch.uint8)


def read_v4(page: torch.Tensor, offset: int) -> torch.Tensor:
    """The channels of a token, in float32."""
    size = page.numel() // 584
    codes = page[576 * offset : 576 * offset + 448].view(torch.float8_e4m3fn).float()
    first = 576 * size + 8 * offset
    scale = 2.0 ** (page[first : first + 7].float() - 127)
    rotated = page[576 * offset + 448 : 576 * offset + 576].view(torch.bfloat16).float()
    return torch.cat(((codes.reshape(7, 64) * scale[:, None]).flatten(), rotated))


def read_v32(page: torch.Tensor, offset: int) -> torch.Tensor:
    """The channels of a token in "v3.2", in float32."""
    token = page[656 * offset : 656 * offset + 656]
    codes = token[:512].view(torch.float8_e4m3fn).float().reshape(4, 128)
    scale = token[512:528].clone().view(torch.float32)
    rotated = token[528:].clone().view(torch.bfloat16).float()
    return torch.cat(((codes * scale[:, None]).flatten(), rotated))


@each_ground
@pytest.mark.parametrize("page_size", [2, 61])
@pytest.mark.parametrize(
    ("layout", "channels", "write_row", "read_row"),
    [("v4", 512, write_v4, read_v4), ("v3.2", 576, write_v32, read_v32)],
)
def test_bytes_of_a_page(
    layout: str,
    channels: int,
    write_row: Callable[[torch.Tensor, int, torch.Tensor], None],
    read_row: Callable[[torch.Tensor, int], torch.Tensor],
    page_size: int,
    ground: tuple[str, str],
) -> None:
    backend, device = ground
    cache = attention.kv_cache_empty(2, page_size, layout, device=device)
    cache.zero_()
    rows = torch.randn(2 * page_size, channels).bfloat16()
    slots = torch.randperm(2 * page_size)[: page_size + 1].int()
    expected = torch.zeros(2, cache[0].numel(), dtype=torch.uint8)
    for slot in slots.tolist():
        write_row(expected[slot // page_size], slot % page_size, rows[slot].float())
    with tile_kernels.backend(backend):
        given = (cache, slots.to(device), rows[slots.long()].to(device))
        attention.kv_cache_append(*given)
        back = attention.kv_cache_gather(cache, slots.to(device)).cpu()
    assert torch.equal(cache.cpu().reshape(2, -1), expected)
    for slot, row in zip(slots.tolist(), back):
        read = read_row(expected[slot // page_size], slot % page_size)
        assert torch.equal(read, row.float())
        assert (read - rows[slot].float()).abs().max() < 0.07 * rows[slot].float().abs().max()


@each_ground
def test_rows_are_cast_as_quant_casts_them(ground: tuple[str, str]) -> None:
    """Rows in one call, and codes, scales and rotated channels in another, give equal bytes."""
    backend, device = ground
    rows = torch.randn(5, 512, device=device).bfloat16()
    slots = torch.tensor([4, 0, -1, 7, 2], device=device).int()
    caches = [attention.kv_cache_empty(4, 2, device=device) for _ in range(2)]
    with tile_kernels.backend(backend):
        for cache in caches:
            cache.fill_(7)
        attention.kv_cache_append(caches[0], slots, rows)
        codes, sf = per_token_cast(rows[:, :448], "e4m3", 64, round_sf=True)
        attention.kv_cache_append(caches[1], slots, codes, sf, rows[:, 448:])
    assert torch.equal(*caches)


def test_padding_between_pages_is_not_touched() -> None:
    memory = torch.full((3, 600 * 4), 9, dtype=torch.uint8)
    cache = memory[:, : 4 * 584].unflatten(1, (4, 584))
    with tile_kernels.backend("emulate"):
        slots = torch.arange(12).int()
        attention.kv_cache_append(cache, slots, torch.randn(12, 512).bfloat16())
    assert (memory[:, 4 * 584 :] == 9).all()


@pytest.mark.parametrize(
    ("layout", "row_bytes", "page"),
    [("v4", 584, 37440), ("v3.2", 656, 41984), ("bf16", 1024, 65536)],
)
def test_allocation(layout: str, row_bytes: int, page: int) -> None:
    cache = attention.kv_cache_empty(3, 64, layout)
    assert cache.shape[:3] == (3, 64, 1)
    assert cache[0, 0].numel() * cache.element_size() == row_bytes
    assert attention.kv_cache_bytes(3, 64, layout) == 3 * page
    assert cache.untyped_storage().nbytes() == 3 * page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0), "page_size must be"),
        ((-1, 64), "num_pages must be"),
        ((1, 64, "v5"), "layout must be one of"),
        ((True, 64), "num_pages must be an int"),
    ],
)
def test_bad_allocations(arguments: tuple[object, ...], message: str) -> None:
    for function in (attention.kv_cache_empty, attention.kv_cache_bytes):
        with pytest.raises((TypeError, ValueError), match=f"^{function.__name__}: {message}"):
            function(*arguments)  # type: ignore[arg-type]


def test_bytes_in_either_dtype() -> None:
    """float8_e4m3fn and uint8 are the same bytes, with and without the dimension of size 1."""
    cache = attention.kv_cache_empty(2, 2)
    slots = torch.tensor([3]).int()
    attention.kv_cache_append(cache, slots, torch.ones(1, 512).bfloat16())
    for view in (cache.view(torch.float8_e4m3fn), cache[:, :, 0]):
        assert torch.equal(
            attention.kv_cache_gather(view, slots), attention.kv_cache_gather(cache, slots)
        )
