"""A new number of tokens, of windows or of keys reuses the plan of an earlier call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.test_operator import evaluated  # noqa: F401
from tile_kernels import attention, engram
from tile_kernels import torch as references
from tile_kernels.runtime import launch


def fp32(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).bfloat16()


def int32(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).int()


def rows(n: int, channels: int = 16) -> tuple[torch.Tensor, ...]:
    return bf16(n, channels), bf16(n, channels), fp32(4, channels)


CALLS: dict[str, Callable[[int], Any]] = {
    "kv_compress": lambda n: attention.kv_compress(*rows(n)),
    "kv_compress of sequences": lambda n: attention.kv_compress(
        *rows(n), *rows(n), cu_seqlens=int32(n)
    ),
    "kv_compress_packed": lambda n: attention.kv_compress_packed(*rows(n)),
    "kv_compress_bwd": lambda n: attention.kv_compress_bwd(bf16(n // 4, 16), *rows(n)),
    "kv_compress_packed_bwd": lambda n: attention.kv_compress_packed_bwd(
        bf16(n // 4, 8), *rows(n)
    ),
    "kv_compress_norm_rope_cast": lambda n: attention.kv_compress_norm_rope_cast(
        *rows(n, 80), weight=fp32(80), cos=fp32(n, 8), sin=fp32(n, 8)
    ),
    "kv_compress_step": lambda n: attention.kv_compress_step(
        attention.KVCompressorState.empty(n, 4, 16, overlap=False), *rows(n)
    ),
    "indexer_logits": lambda n: attention.indexer_logits(
        bf16(n, 4, 32), bf16(3 * n, 32), fp32(n, 4), int32(n), int32(n)
    ),
    "indexer_logits_bwd": lambda n: attention.indexer_logits_bwd(
        bf16(n, 4, 32), bf16(3 * n, 32), fp32(n, 4), int32(n, n), fp32(n, n)
    ),
    "indexer_topk": lambda n: attention.indexer_topk(fp32(n, 3 * n), 4),
    "engram_gate_fwd": lambda n: engram.engram_gate_fwd(
        bf16(n, 2, 16), bf16(n, 2, 16), bf16(n, 16), fp32(2, 16), 1e-6, 1e-6
    ),
    "engram_gate_bwd": lambda n: engram.engram_gate_bwd(
        bf16(n, 2, 16), bf16(n, 2, 16), bf16(n, 2, 16), bf16(n, 16), fp32(2, 16),
        fp32(n, 2), fp32(n, 2), fp32(n, 2), fp32(n, 2), 1e-6,
    ),
    "ngram_windows": lambda n: engram.ngram_windows(int32(n), 3, 0),
    "engram_hash": lambda n: engram.engram_hash(
        int32(n, 3), int32(2, 3).long(), int32(2, 2, 4), int32(2, 8)
    ),
    "grad_w_reduce": lambda n: engram.grad_w_reduce(
        fp32(n, 2, 8), fp32(2, 8), fp32(2, 8), fp32(2, 8), fp32(2, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_new_sizes_reuse_the_plan(
    name: str,
    evaluated: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch.Kernel, "bound", lambda *_: lambda *_: None)
    for n in (8, 20, 33, 8, 4):
        CALLS[name](n)
    assert len(evaluated) == 1


@pytest.mark.emulated
@pytest.mark.parametrize("layout", ["v4", "v3.2", "bf16"])
def test_pages_of_another_size_are_another_plan(
    layout: str,
    evaluated: list[str],  # noqa: F811
) -> None:
    """Launches contain the page size, also where the pages of both caches are contiguous."""
    channels = 576 if layout == "v3.2" else 512
    for page_size in (4, 2, 3):
        cache = attention.kv_cache_empty(1, page_size, layout)
        expected = cache.clone()
        slots = torch.arange(page_size).int()
        values = torch.randn(page_size, channels).bfloat16()
        attention.kv_cache_append(cache, slots, values)
        references.kv_cache_append(expected, slots, values)
        found = attention.kv_cache_gather(cache, slots)
        assert torch.equal(found, references.kv_cache_gather(expected, slots))
    assert len(evaluated) == 6
