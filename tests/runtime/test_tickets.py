"""Counters of the last-block pattern: who shares one, and who must not."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tile_kernels.runtime import tickets

pytestmark = pytest.mark.filterwarnings("ignore")


def test_emulated_launches_get_their_own() -> None:
    first, index = tickets.take(torch.device("cpu"))
    second, _ = tickets.take(torch.device("cpu"))
    assert first is not second
    assert (first.tolist(), index) == ([0], 0)


@pytest.mark.gpu
def test_streams_have_different_counters_and_one_has_the_same() -> None:
    device = torch.device("cuda", 0)
    counters, mine = tickets.take(device)
    assert tickets.take(device) == (counters, mine)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert tickets.take(device)[1] != mine
    torch.cuda.synchronize()
    assert not counters.any()


@pytest.mark.gpu
def test_streams_and_graphs_at_the_same_time() -> None:
    """Eager calls on two streams beside replays of a graph: every count is right."""
    indices = torch.randint(-1, 64, (4096, 8), device="cuda")
    expected = tile_kernels.moe.group_count(indices, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [tile_kernels.moe.group_count(indices, 64) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                results.append(tile_kernels.moe.group_count(indices, 64))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in [*results, *recorded])
