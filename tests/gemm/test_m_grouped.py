"""Products of groups of rows: padding, layouts, bits, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.gemm.operands import TILES, each_ground, integers, on, powers, set_tile
from tile_kernels import gemm
from tile_kernels.gemm import samples
from tile_kernels.gemm.m_grouped.cases import fp8
from tile_kernels.testing.numeric import calc_diff

BF16 = torch.bfloat16
product = gemm.m_grouped_fp8_gemm_nt_contiguous


def case(counts: list[int], n: int, k: int, device: str, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return fp8(counts, n, k, **more)(torch.device(device))


@each_ground
def test_exact_sums_and_zero_padding(ground: tuple[str, str]) -> None:
    """NaN codes and NaN scales in the padding of `a`; results of integers below 2^8 are exact."""
    device = ground[1]
    counts = [1, 0, 129, 64] if device == "cpu" else [700, 0, 129, 64, 1, 1280]
    layout, ends = samples.rows_of_groups(counts, spare=1)
    layout, m, n, k = layout.to(device), len(layout), 264, 256
    data = integers(m, k, device=device, low=-1, high=1)
    data.view(torch.uint8)[layout < 0] = 0x7F
    a_sf = powers(m, k // 128, device=device).clamp(0.5, 1)
    a_sf[layout < 0] = torch.nan
    b = (
        integers(len(counts), n, k, device=device, low=-1, high=1),
        torch.ones(len(counts), 3, k // 128, device=device),
    )
    for psum in (False, True):
        d = torch.full((m, n), torch.nan, dtype=BF16, device=device)
        with on(ground):
            product((data, a_sf), b, d, ends.to(device) if psum else layout, use_psum_layout=psum)
        assert d[layout < 0].eq(0).all()
        for g in range(len(counts)):
            rows = layout == g
            scaled = data[rows].double() * a_sf[rows].double().repeat_interleave(128, -1)
            assert torch.equal(d[rows], (scaled @ b[0][g].double().T).to(BF16))


@each_ground
def test_groups_outside_are_padding(ground: tuple[str, str]) -> None:
    given = case([128, 128, 128], 264, 128, ground[1])
    layout = given["grouped_layout"]
    layout[128:256] = 3
    layout[256:] = -7
    with on(ground):
        d = product(**given)
    assert d[128:].eq(0).all()
    assert d[:128].ne(0).any()


@each_ground
def test_bits_are_those_of_the_dense_product(
    ground: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of groups, with any tile."""
    small = ground[1] == "cpu"
    counts, n, k = ([130, 1, 128], 264, 256) if small else ([1300, 1, 640, 0, 900], 4096, 2048)
    given = case(counts, n, k, ground[1])
    with on(ground):
        whole = product(**given).clone()
        for g in range(len(counts)):
            rows = given["grouped_layout"] == g
            a = tuple(part[rows] for part in given["a"])
            b = tuple(part[g] for part in given["b"])
            alone = gemm.fp8_gemm_nt(a, b, torch.empty(len(a[0]), n, dtype=BF16, device=ground[1]))
            assert torch.equal(alone, whole[rows])
        for tile in [tile for tile in TILES if tile.rows == 128][: 2 if small else 9]:
            set_tile(monkeypatch, tile)
            assert torch.equal(product(**{**given, "d": torch.empty_like(whole)}), whole)


def test_what_routing_returns_fits() -> None:
    """Rows of `expand_to_fused_with_sf` in the layout of `get_fused_mapping`."""
    torch.manual_seed(0)
    tokens, experts, hidden, n = 50, 4, 256, 136
    x = torch.randn(tokens, hidden).bfloat16()
    choices = torch.rand(tokens, experts).topk(2).indices
    pair = tile_kernels.quant.per_token_cast(x, "e4m3", 128)
    mapping = tile_kernels.moe.get_fused_mapping(
        choices, experts, num_expanded_tokens=768, alignment=128
    )
    pos_to_expert, pos_to_token = mapping[0], mapping[1]
    a = tile_kernels.moe.expand_to_fused_with_sf(
        pair, 128, mapping[3], pos_to_expert, use_tma_aligned_col_major_sf=True
    )
    w = torch.randn(experts, n, hidden)
    b = samples.by_blocks(w)
    d = product(a, b, torch.empty(768, n, dtype=BF16), pos_to_expert)
    kept = pos_to_expert >= 0
    chosen = x.double()[pos_to_token[kept].long()]
    exact = torch.einsum("rk,rnk->rn", chosen, w.double()[pos_to_expert[kept].long()])
    assert calc_diff(d[kept], exact) < 1e-3
    assert d[~kept].eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("psum", [False, True])
def test_a_graph_is_replayed_with_other_groups(psum: bool) -> None:
    given = case([512, 128, 384], 1024, 1024, "cuda", psum=psum)
    data = given["a"][0]
    data.view(torch.uint8).bitwise_and_(0xBF)  # no NaN
    given["a"][1].nan_to_num_(1.0)
    product(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(**given)
    for counts in ([0, 1024, 0], [1, 2, 3], [300, 300, 200]):
        layout, ends = samples.rows_of_groups(counts)
        full = torch.full((1024,), -1, dtype=torch.int32)
        full[: len(layout)] = layout
        given["grouped_layout"].copy_(ends if psum else full)
        given["d"].fill_(torch.nan)
        graph.replay()
        expected = product(**{**given, "d": torch.empty_like(given["d"])})
        torch.cuda.synchronize()
        assert torch.equal(given["d"], expected)
        assert given["d"][(full < 0).cuda()].eq(0).all()


@pytest.mark.gpu
def test_sm_budgets_have_the_same_bits() -> None:
    given = case([1300, 0, 640, 900], 4096, 2048, "cuda")
    expected = product(**given).clone()
    full = tile_kernels.get_device_num_sms()
    try:
        for budget in (1, 20, full - 1):
            tile_kernels.set_num_sms(budget)
            assert torch.equal(product(**{**given, "d": torch.empty_like(expected)}), expected)
    finally:
        tile_kernels.set_num_sms(full)
