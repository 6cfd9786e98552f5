"""The simulator counts what the reference sends, agrees with the model, and reaches EP2048."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.ep.helpers import Case
from tile_kernels.ep import model, sim
from tile_kernels.ep.gates import get_unbalanced_scores
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
    """32 nodes of 64 ranks with 1024 tokens each, in less than half a minute."""
    start = time.perf_counter()
    topology, tokens = Topology(32, 64), 1024
    traffic = sim.simulate(topology, 2048, sim.balanced_routing(tokens, 2048, 8))
    assert time.perf_counter() - start < 30
    ranks = model.expected_groups(2048, 2048, 8)
    nodes = model.expected_groups(32, 2048, 8) * 31 / 32
    assert traffic.received.double().mean() / tokens == pytest.approx(ranks, rel=0.002)
    assert traffic.network_in.double().mean() / tokens == pytest.approx(nodes, rel=0.002)
    assert traffic.expanded.sum() == 2048 * tokens * 8
    assert 1 < traffic.imbalance("received") < 1.1


def test_expected_rows_are_those_that_are_counted() -> None:
    for nodes, per_node, hybrid in ((4, 8, True), (4, 8, False), (1, 8, True)):
        topology, tokens = Topology(nodes, per_node), 500
        routing = sim.balanced_routing(tokens, 256, 8)
        traffic = sim.simulate(topology, 256, routing, hybrid=hybrid)
        logical = (nodes, per_node) if hybrid else (1, nodes * per_node)
        wanted = model.expected_rows(*logical, 256, 8, tokens, per_node)
        counts = (traffic.received, traffic.network_in, traffic.nvlink_in)
        for rows, expected in zip(counts, wanted):
            assert rows.double().mean().item() == pytest.approx(expected, rel=0.01)


def test_the_skew_is_what_was_asked_for() -> None:
    routing = sim.skewed_routing(400, 64, 4, num_ranks=8, ratio=3.0)
    traffic = sim.simulate(Topology(1, 8), 64, routing)
    others = traffic.received[1:].double()
    assert traffic.received[0] / others.mean() == pytest.approx(3.0, rel=0.1)
    assert traffic.imbalance("received") == pytest.approx(3 * 8 / 10, rel=0.1)


@pytest.mark.parametrize("precise", [False, True], ids=["by chance", "precise"])
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "num_topk", "ratio"),
    [(8, 256, 6, 1.0), (8, 256, 6, 1.5), (8, 64, 4, 2.0), (4, 64, 8, 1.1), (16, 64, 2, 5.0)],
)
def test_unbalanced_gates(
    num_ranks: int, num_experts: int, num_topk: int, ratio: float, precise: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = get_unbalanced_scores(
        3000, num_experts, num_ranks, num_topk, ratio, precise, generator=generator
    )
    assert scores.shape == (3000, num_experts)
    ranks = scores.topk(num_topk).indices // (num_experts // num_ranks)
    tokens = torch.zeros(3000, num_ranks).scatter_(1, ranks, 1.0).sum(0)
    assert tokens[0] / tokens[1:].mean() == pytest.approx(ratio, rel=0.1)
    if precise:
        assert tokens[1:].max() / tokens[1:].min() < 1.02


def test_gates_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="num_experts must be a multiple of the 3 ranks, got 8"):
        get_unbalanced_scores(4, 8, 3, 2, 1.5)
    with pytest.raises(ValueError, match=r"num_topk must be in 1..8 \(the experts\), got 9"):
        get_unbalanced_scores(4, 8, 2, 9, 1.5)
    with pytest.raises(ValueError, match=r"ratio must be at least 1, got 0.5"):
        get_unbalanced_scores(4, 8, 2, 2, 0.5)
    with pytest.raises(ValueError, match="ratio must be at most 3, since 4 experts are on 2 of 4"):
        get_unbalanced_scores(4, 8, 4, 4, 3.5, precise=True)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    traffic = sim.simulate(Topology(2, 2), 8, sim.balanced_routing(20, 8, 2))
    sim.plot(traffic, 1000, tmp_path / "traffic.png")
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_in_the_documents_is_fresh() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "ep.md").read_text()
    assert f"$ python -m tile_kernels.ep.sim --nodes 8\n{sim.main(['--nodes', '8'])}\n" in page


def test_times_need_bandwidths() -> None:
    traffic = sim.simulate(Topology(2, 1), 2, lambda rank: torch.tensor([[1 - rank]]))
    assert traffic.seconds(1000, rdma_gbs=1, nvlink_gbs=0) == pytest.approx(1e-6)
    with pytest.raises(ValueError, match="rdma_gbs must be positive and finite, got 0"):
        traffic.seconds(1000, rdma_gbs=0, nvlink_gbs=100)
    with pytest.raises(ValueError, match="num_experts must be a multiple of the 2 ranks, got 3"):
        sim.simulate(Topology(2, 1), 3, lambda _: torch.tensor([[0]]))
