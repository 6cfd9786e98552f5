"""Products of groups whose sizes are known on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gemm.operands import TILES, each_ground, on, set_tile
from tile_kernels import gemm
from tile_kernels.gemm.masked.cases import fp8

product = gemm.m_grouped_fp8_gemm_nt_masked


def case(sizes: list[int], max_m: int, n: int, k: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return fp8(sizes, max_m, n, k)(torch.device(device))


@each_ground
def test_bits_are_those_of_the_dense_product(
    ground: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any hint and any tile; rows behind the sizes are NaN in `a`."""
    small = ground[1] == "cpu"
    sizes, max_m, n, k = (
        ([20, 0, 130], 130, 264, 256) if small else ([0, 1, 20, 64, 65, 192, 512], 512, 4096, 2048)
    )
    given = case(sizes, max_m, n, k, ground[1])
    expected = []
    with on(ground):
        for g, size in enumerate(sizes):
            a, b = (tuple(part[g] for part in given[name]) for name in ("a", "b"))
            rows = tuple(part[:size].contiguous() for part in a)
            d = torch.empty(size, n, dtype=torch.bfloat16, device=ground[1])
            expected.append(gemm.fp8_gemm_nt(rows, b, d))
        for hint in (1, 65, 10_000):
            d = product(
                **{**given, "d": torch.full_like(given["d"], torch.nan), "expected_m": hint}
            )
            assert all(torch.equal(d[g, :size], expected[g]) for g, size in enumerate(sizes))
        for tile in TILES[4:5] if small else TILES:
            set_tile(monkeypatch, tile)
            d = product(**{**given, "d": torch.full_like(given["d"], torch.nan)})
            assert all(torch.equal(d[g, :size], expected[g]) for g, size in enumerate(sizes))


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_sizes() -> None:
    given = case([40, 3, 64, 0], 64, 1024, 1024, "cuda")
    given["a"][0].view(torch.uint8).bitwise_and_(0xBF)  # no NaN
    given["a"][1].nan_to_num_(1.0)
    graph = torch.cuda.CUDAGraph()
    product(**given)
    with torch.cuda.graph(graph):
        product(**given)
    for sizes in ([0, 0, 0, 64], [1, 2, 3, 4], [100, -5, 7, 0]):
        given["masked_m"].copy_(torch.tensor(sizes))
        given["d"].zero_()
        graph.replay()
        expected = product(**{**given, "d": torch.zeros_like(given["d"])})
        torch.cuda.synchronize()
        assert torch.equal(given["d"], expected)
