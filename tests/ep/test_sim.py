"""The simulator counts what the reference sends, agrees with the model, and reaches EP2048."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.ep.helpers import Case
from tile_kernels.ep import model, sim
from tile_kernels.ep.topology import Topology


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 3), (4, 1)])
def test_counts_by_hand(nodes: int, per_node: int, hybrid: bool) -> None:
    """Every link of every token, one by one."""
    num_ranks = nodes * per_node
    tokens = tuple(range(3, 3 + num_ranks))
    case = Case(nodes, per_node, 3, num_topk=5, tokens=tokens)
    wanted = {name: [0] * num_ranks for name in ("network_out", "network_in", "nvlink_out",
                                                 "nvlink_in")}  # fmt: skip

    def move(source: int, target: int) -> None:
        if source != target:
            kind = "nvlink" if source // per_node == target // per_node else "network"
            wanted[f"{kind}_out"][source] += 1
            wanted[f"{kind}_in"][target] += 1

    for source, ids in enumerate(case.topk_idx):
        for row in ids.tolist():
            ranks = {expert // 3 for expert in row if expert >= 0}
            if not hybrid:
                for rank in ranks:
                    move(source, rank)
                continue
            for node in {rank // per_node for rank in ranks}:
                forwarder = node * per_node + source % per_node
                move(source, forwarder)
                for rank in ranks:
                    if rank // per_node == node:
                        move(forwarder, rank)
    traffic = sim.simulate(
        case.topology, case.num_experts, lambda rank: case.topk_idx[rank], hybrid=hybrid
    )
    for name, counts in wanted.items():
        assert getattr(traffic, name).tolist() == counts, name
    received = case.expected()
    assert traffic.received.tolist() == [len(each.sources) for each in received]
    assert traffic.expanded.tolist() == [sum(each.counts) for each in received]
    assert traffic.tokens.tolist() == list(tokens)


def test_means_agree_with_the_model() -> None:
    num_tokens, topology = 1000, Topology(8, 4)
    routing = sim.balanced_routing(num_tokens, 256, 8)
    traffic = sim.simulate(topology, 256, routing)
    ranks = model.expected_groups(32, 256, 8)
    nodes = model.expected_groups(8, 256, 8) * 7 / 8
    assert traffic.received.double().mean() / num_tokens == pytest.approx(ranks, rel=0.005)
    assert traffic.network_out.double().mean() / num_tokens == pytest.approx(nodes, rel=0.005)
    assert traffic.network_out.sum() == traffic.network_in.sum()
    assert traffic.nvlink_out.sum() == traffic.nvlink_in.sum()


@pytest.mark.parametrize(("num_experts", "num_topk"), [(64, 8), (8, 6), (5, 5)])
def test_balanced_routing_is_distinct_and_balanced(num_experts: int, num_topk: int) -> None:
    ids = sim.balanced_routing(4000, num_experts, num_topk, seed=3)(1)
    assert all(len(set(row)) == num_topk for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=num_experts).double()
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_ep2048() -> None:
    start = time.perf_counter()
    text = sim.main(["--nodes", "32", "--ranks-per-node", "64", "--experts", "2048",
                     "--tokens", "16"])  # fmt: skip
    assert time.perf_counter() - start < 30
    assert text.startswith("32 x 64 ranks, 2048 experts, 8 per token")
    assert "GiB" in text


def test_the_table_in_the_documents_is_fresh() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "ep.md").read_text()
    assert f"$ python -m tile_kernels.ep.sim --nodes 8\n{sim.main(['--nodes', '8'])}\n" in page


def test_times_need_bandwidths() -> None:
    traffic = sim.simulate(Topology(2, 1), 2, lambda rank: torch.tensor([[1 - rank]]))
    assert traffic.seconds(1000, rdma_gbs=1, nvlink_gbs=0) == pytest.approx(1e-6)
    with pytest.raises(ValueError, match="rdma_gbs must be positive, got 0"):
        traffic.seconds(1000, rdma_gbs=0, nvlink_gbs=100)
    with pytest.raises(ValueError, match="num_experts must be a multiple of the 2 ranks, got 3"):
        sim.simulate(Topology(2, 1), 3, lambda _: torch.tensor([[0]]))
