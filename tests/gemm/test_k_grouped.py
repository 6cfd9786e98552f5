"""Sums over groups of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.gemm.operands import TILES_OF_ROW_SCALES, each_ground, integers, on, powers, set_tile
from tile_kernels import gemm
from tile_kernels.gemm.k_grouped.cases import fp8
from tile_kernels.testing.numeric import calc_diff

product = gemm.k_grouped_fp8_gemm_nt_contiguous


def exact(sizes: list[int], m: int, n: int, spare: int, device: str) -> dict[str, Any]:
    """Sums that float32 has; the rows behind the groups are NaN."""
    torch.manual_seed(0)
    rows = sum(sizes) + spare
    pairs = []
    for size in (m, n):
        data = integers(size, rows, device=device)
        data.view(torch.uint8)[:, sum(sizes) :] = 0x7F
        pairs.append((data, powers(rows // 128, size, device=device)))
    layout = torch.tensor(sizes, dtype=torch.int32, device=device)
    d = torch.full((len(sizes), m, n), torch.nan, device=device)
    return {"a": pairs[0], "b": pairs[1], "d": d, "ks": None, "grouped_layout": layout}


@each_ground
def test_exact_sums(ground: tuple[str, str]) -> None:
    small = ground[1] == "cpu"
    sizes, m, n = ([256, 0, 128], 132, 136) if small else ([2048, 0, 128, 1024, 0], 1032, 2112)
    given = exact(sizes, m, n, 128, ground[1])
    c = torch.randint(-99, 99, given["d"].shape, device=ground[1]).float()
    expected, start = c.double(), 0
    for g, size in enumerate(sizes):
        left, right = (
            data[:, start : start + size].double()
            * sf[start // 128 : (start + size) // 128].double().repeat_interleave(128, 0).T
            for data, sf in (given["a"], given["b"])
        )
        expected[g] += left @ right.T
        start += size
    with on(ground):
        assert torch.equal(product(**given, c=c).double(), expected)
        assert torch.equal(product(**{**given, "d": c}, c=c).double(), expected)
        without = product(**{**given, "d": torch.empty_like(c)})
        assert torch.equal(without[sizes.index(0)], torch.zeros_like(without[0]))


@each_ground
def test_tiles_have_the_same_bits(ground: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = ground[1] == "cpu"
    sizes, m, n = ([256, 0, 128], 132, 136) if small else ([4096, 0, 128, 1024], 1032, 2112)
    torch.manual_seed(0)
    given = fp8(sizes, m, n)(torch.device(ground[1]))
    found = []
    for tile in TILES_OF_ROW_SCALES:
        set_tile(monkeypatch, tile)
        with on(ground):
            found.append(product(**{**given, "d": torch.full_like(given["d"], torch.nan)}))
    assert all(torch.equal(found[0], each) for each in found)


def test_operands_by_rows() -> None:
    given = exact([128, 256], 132, 136, 0, "cpu")
    expected = product(**given).clone()
    transposed = {name: (given[name][0].T.contiguous(), given[name][1]) for name in ("a", "b")}
    assert torch.equal(gemm.k_grouped_fp8_gemm_tn_contiguous(**{**given, **transposed}), expected)
    with pytest.raises(TypeError, match=r"^k_grouped_fp8_gemm_tn_contiguous: a must be a pair"):
        gemm.k_grouped_fp8_gemm_tn_contiguous(**{**given, "a": given["a"][0]})


def test_what_the_casts_return_fits() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(256, 136).bfloat16(), torch.randn(256, 200).bfloat16()
    cast = tile_kernels.quant.per_channel_cast_and_transpose
    sizes = torch.tensor([128, 128], dtype=torch.int32)
    pairs = [cast(each, "e4m3", 128) for each in (x, y)]
    d = product(*pairs, torch.empty(2, 136, 200), None, sizes)
    for g, part in enumerate((slice(0, 128), slice(128, 256))):
        assert calc_diff(d[g], x[part].double().T @ y[part].double()) < 1e-3


def test_sizes_of_the_host_are_checked_on_request() -> None:
    given = exact([128, 256], 132, 136, 0, "cpu")
    product(**{**given, "ks": [256, 128]})
    with tile_kernels.checked(), pytest.raises(ValueError, match=r"ks must be the sizes"):
        product(**{**given, "ks": [256, 128]})


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_sizes() -> None:
    given = exact([1024, 0, 512], 264, 520, 0, "cuda")
    product(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(**given)
    for sizes in ([0, 0, 1536], [128, 128, 128], [0, 0, 0]):
        given["grouped_layout"].copy_(torch.tensor(sizes))
        given["d"].fill_(torch.nan)
        graph.replay()
        expected = product(**{**given, "d": torch.empty_like(given["d"])})
        torch.cuda.synchronize()
        assert torch.equal(given["d"], expected)


@pytest.mark.gpu
def test_result_of_more_than_2_31_elements() -> None:
    groups, m, n = 80, 4096, 7168
    given = exact([128] * groups, m, n, 0, "cuda")
    product(**given)
    for g in (0, 73, 79):
        part = slice(128 * g, 128 * g + 128)
        left, right = (
            data[:, part].float() * sf[g][:, None] for data, sf in (given["a"], given["b"])
        )
        assert torch.equal(given["d"][g], left @ right.T)
