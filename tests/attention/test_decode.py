"""Attention while decoding: page sizes, splits, plans, what must not matter, and conversions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.attention.helpers import each_ground
from tile_kernels import attention
from tile_kernels.attention.decode.cases import SPARSE_ATTENTION_DECODE
from tile_kernels.attention.decode.plan import fixed_split

SCALE = 512**-0.5
compare = SPARSE_ATTENTION_DECODE.compare


def cache_of(rows: Tensor, page_size: int, layout: str = "v4") -> tuple[Tensor, Tensor]:
    """A cache with the rows at random slots, NaN elsewhere, and these slots."""
    pages = -(-2 * len(rows) // page_size)
    cache = attention.kv_cache_empty(pages, page_size, layout, rows.device)
    cache.view(torch.uint8).fill_(0xFF)
    slots = torch.randperm(pages * page_size)[: len(rows)].int().to(rows.device)
    attention.kv_cache_append(cache, slots, rows)
    return cache, slots


def exact(q: Tensor, rows: list[Tensor], sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of one query over its rows, in float64."""
    keys = torch.cat(rows).double()
    s = q.double() @ keys.T * SCALE
    lse = s.logsumexp(-1)
    full = lse if sink is None else torch.logaddexp(lse, sink.double())
    return (s - full[:, None]).exp() @ keys[:, :512], lse


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [2, 61, 64, 69, 576])
@pytest.mark.parametrize("splits", ["fixed", "balanced", 128])
def test_page_sizes_and_splits(page_size: int, splits: Any) -> None:
    """Against float64, for lists of different lengths, both caches."""
    torch.manual_seed(page_size)
    rows = torch.randn(300, 512, device="cuda").bfloat16()
    cache, slots = cache_of(rows, page_size)
    more = torch.randn(700, 512, device="cuda").bfloat16()
    extra, extra_slots = cache_of(more, 64)
    q = torch.randn(3, 2, 128, 512, device="cuda").bfloat16()
    picks = torch.randint(300, (3, 2, 128), device="cuda")
    extra_picks = torch.randint(700, (3, 2, 520), device="cuda")
    sink = torch.randn(128, device="cuda")
    lengths = torch.tensor([128, 17, 0]).int().cuda()
    extra_lengths = torch.tensor([520, 0, 65]).int().cuda()
    out, lse = attention.sparse_attention_decode(
        q, cache, slots[picks], SCALE, sink=sink, topk_length=lengths, extra_cache=extra,
        extra_indices=extra_slots[extra_picks], extra_topk_length=extra_lengths, splits=splits,
    )  # fmt: skip
    for b in range(3):
        for s in range(2):
            index = slots[picks[b, s, : lengths[b]]]
            extra_index = extra_slots[extra_picks[b, s, : extra_lengths[b]]]
            keys = [
                attention.kv_cache_gather(cache, index),
                attention.kv_cache_gather(extra, extra_index),
            ]
            value, total = exact(q[b, s], keys, sink)
            assert ((out[b, s].double() - value).norm() / value.norm()).item() < 5e-3
            torch.testing.assert_close(lse[b, :, s].double(), total, rtol=3.1e-5, atol=1e-5)


@each_ground
def test_conversion_of_every_code(ground: tuple[str, str]) -> None:
    """A list of one row has that row as its result: all codes of e4m3, scales of 2**-110 to 2**118.

    Results below 2**-126 are flushed to zero, so that there is no smaller scale.
    """
    backend, device = ground
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = torch.where(codes.float().isnan(), torch.zeros(()), codes.float())
    rows = finite.to(torch.float8_e4m3fn).repeat(14)[: 8 * 448].view(8, 448)
    exponents = torch.tensor([0.0, -110, -90, -64, -7, 1, 7, 8, 9, 60, 118, 110, -100, 3])
    sf = torch.exp2(exponents.repeat(4)).view(8, 7)
    cache = attention.kv_cache_empty(4, 2, device=device)
    slots = torch.arange(8, device=device).int()
    rotated = torch.randn(8, 64).bfloat16().to(device)
    q = torch.zeros(8, 1, 2, 512, device=device).bfloat16()
    with tile_kernels.backend(backend):
        attention.kv_cache_append(cache, slots, rows.to(device), sf.to(device), rotated)
        out, _ = attention.sparse_attention_decode(q, cache, slots.view(8, 1, 1), SCALE)
        read = attention.kv_cache_gather(cache, slots)
    assert torch.equal(out[:, 0, 0].cpu(), read.cpu())
    expected = rows.float() * sf.repeat_interleave(64, 1)
    assert torch.equal(read[:, :448].cpu(), expected.bfloat16())


@pytest.mark.gpu
def test_plan_serves_other_layers_and_graphs() -> None:
    """A plan made once, for other queries and rows; recorded in a graph with new lengths."""
    cache, slots = cache_of(torch.randn(600, 512, device="cuda").bfloat16(), 64)
    index = slots[torch.randint(600, (5, 1, 512), device="cuda")]
    lengths = torch.tensor([512, 3, 100, 0, 300]).int().cuda()
    q = torch.randn(5, 1, 128, 512, device="cuda").bfloat16()
    plan = attention.decode_plan(q, index, topk_length=lengths)
    for _ in range(2):
        q = torch.randn_like(q)
        given: dict[str, Any] = {"topk_length": lengths}
        split = attention.sparse_attention_decode(q, cache, index, SCALE, plan=plan, **given)
        whole = attention.sparse_attention_decode(q, cache, index, SCALE, splits=512, **given)
        compare(tuple(x.cpu() for x in split), tuple(x.cpu() for x in whole))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = attention.decode_plan(q, index, topk_length=lengths)
        recorded = attention.sparse_attention_decode(
            q, cache, index, SCALE, plan=plan, topk_length=lengths
        )
    lengths.copy_(torch.tensor([1, 512, 512, 64, 0]))
    graph.replay()
    whole = attention.sparse_attention_decode(
        q, cache, index, SCALE, splits=512, topk_length=lengths
    )
    compare(tuple(x.cpu() for x in recorded), tuple(x.cpu() for x in whole))


def test_fixed_splits_depend_on_the_length_of_a_list() -> None:
    """Up to 2048 keys are one split; longer lists have as many splits of at most 640 as needed."""
    assert [fixed_split(pairs, 0) for pairs in (0, 1, 16)] == [(1, 1), (1, 1), (1, 16)]
    assert [fixed_split(pairs, 0) for pairs in (17, 65)] == [(4, 5), (13, 5)]
    assert fixed_split(9, 640) == (2, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1152, 2304])
def test_fixed_splits_do_not_depend_on_the_batch(k: int) -> None:
    cache, slots = cache_of(torch.randn(3000, 512, device="cuda").bfloat16(), 64)
    index = slots[torch.randint(3000, (40, 2, k), device="cuda")]
    q = torch.randn(40, 2, 64, 512, device="cuda").bfloat16()
    out, lse = attention.sparse_attention_decode(q, cache, index, SCALE)
    order = torch.randperm(40, device="cuda")
    permuted = attention.sparse_attention_decode(q[order], cache, index[order], SCALE)
    assert torch.equal(permuted[0], out[order])
    assert torch.equal(permuted[1], lse[order])
    alone = attention.sparse_attention_decode(q[7:8], cache, index[7:8], SCALE)
    assert torch.equal(alone[0][0], out[7])
    assert torch.equal(alone[1][0], lse[7])


@each_ground
@pytest.mark.parametrize(("num_pages", "k"), [(0, 3), (1, 0), (0, 0)])
def test_no_row_gives_zeros_whatever_the_query(
    ground: tuple[str, str], num_pages: int, k: int
) -> None:
    backend, device = ground
    cache = attention.kv_cache_empty(num_pages, 4, device=device)
    q = torch.full((2, 1, 3, 512), math.nan, device=device).bfloat16()
    indices = torch.full((2, 1, k), -1, dtype=torch.int32, device=device)
    with tile_kernels.backend(backend):
        out, lse = attention.sparse_attention_decode(q, cache, indices, SCALE)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == math.inf).all()


def test_alias_of_flash_mla() -> None:
    cache, slots = cache_of(torch.randn(9, 512).bfloat16(), 3)
    q, sink = torch.randn(2, 1, 4, 512).bfloat16(), torch.randn(4)
    index = slots[torch.randint(9, (2, 1, 5))]
    expected = attention.sparse_attention_decode(
        q, cache, index, SCALE, sink=sink, extra_cache=cache, extra_indices=index
    )
    got = attention.flash_mla_with_kvcache(
        q, cache, None, None, 512, None, None, None, False, True, index, sink, cache, index
    )
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"block_table": torch.zeros(1, 1).int()}, "block_table"),
        ({"cache_seqlens": torch.zeros(1).int()}, "cache_seqlens"),
        ({"num_splits": torch.zeros(2).int()}, "num_splits"),
        ({"indices": None}, "indices"),
        ({"causal": True}, "causal"),
        ({"head_dim_v": 256}, "head_dim_v"),
        ({"is_fp8_kvcache": False}, "is_fp8_kvcache"),
    ],
)
def test_dense_calls_are_refused(changes: dict[str, Any], argument: str) -> None:
    given = {
        "q": torch.zeros(1, 1, 64, 512).bfloat16(),
        "k_cache": attention.kv_cache_empty(1, 2),
        "is_fp8_kvcache": True,
        "indices": torch.zeros(1, 1, 4).int(),
        **changes,
    }
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: .*{argument}"):
        attention.flash_mla_with_kvcache(**given)


def test_arguments_of_the_alias_are_explained() -> None:
    cache, indices = attention.kv_cache_empty(1, 2), torch.zeros(1, 1, 4).int()
    given: dict[str, Any] = {"k_cache": cache, "is_fp8_kvcache": True, "indices": indices}
    for q in (None, [1.0]):
        message = f"q must be a torch.Tensor, got {type(q).__name__}"
        with pytest.raises(TypeError, match=message):
            attention.flash_mla_with_kvcache(q, **given)  # type: ignore[arg-type]
    flat = torch.zeros(512).bfloat16()
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        attention.flash_mla_with_kvcache(flat, **given)
