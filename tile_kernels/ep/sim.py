"""The traffic of a routing for thousands of ranks: rows, bytes and times, counted on one machine.

Nothing is sent. Tokens of one node at a time are counted exactly: which ranks and nodes they reach,
and which links they use.

    python -m tile_kernels.ep.sim --nodes 32 --ranks-per-node 64 --experts 2048
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from tile_kernels.ep import model
from tile_kernels.ep.gates import get_unbalanced_scores
from tile_kernels.ep.topology import Topology
from tile_kernels.utils import ceil_div

Routing = Callable[[int], Tensor]
FP8_GROUP = 128  # channels that share a scale factor
COUNTS = (
    "tokens", "received", "expanded", "network_out", "network_in", "nvlink_out", "nvlink_in"
)  # fmt: skip


def balanced_routing(num_tokens: int, num_experts: int, num_topk: int, seed: int = 0) -> Routing:
    """For each rank, `num_tokens` choices of `num_topk` distinct experts, all equally likely."""
    if num_topk > num_experts:
        raise ValueError(f"num_topk must be at most num_experts {num_experts}, got {num_topk}")

    def topk_of(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        shape = (num_tokens, num_topk)
        if 2 * num_topk > num_experts:  # redrawing would take too long
            scores = torch.rand(num_tokens, num_experts, generator=generator)
            return scores.argsort(dim=1)[:, :num_topk]
        ids = torch.randint(num_experts, shape, generator=generator)
        while True:  # draw again what has a choice twice: all sets stay equally likely
            ordered = ids.sort(dim=1).values
            again = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1).nonzero()[:, 0]
            if again.numel() == 0:
                return ids
            fresh = torch.randint(num_experts, (again.numel(), num_topk), generator=generator)
            ids[again] = fresh

    return topk_of


def skewed_routing(
    num_tokens: int, num_experts: int, num_topk: int, num_ranks: int, ratio: float, seed: int = 0
) -> Routing:
    """The same with rank 0 receiving `ratio` times as many tokens as another."""

    def topk_of(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        scores = get_unbalanced_scores(
            num_tokens, num_experts, num_ranks, num_topk, ratio, generator=generator
        )
        return scores.topk(num_topk).indices

    return topk_of


@dataclass(frozen=True)
class Traffic:
    """Rows of a dispatch, `[R]` each; those of combine are the same in the other direction.

    | field | meaning |
    |---|---|
    | `tokens` | tokens of the rank |
    | `received` | rows of its compact layout |
    | `expanded` | rows of its expanded layout, without padding |
    | `network_out`, `network_in` | rows between nodes |
    | `nvlink_out`, `nvlink_in` | rows between ranks of a node; what stays on a rank is no traffic |
    """

    topology: Topology
    hybrid: bool
    tokens: Tensor
    received: Tensor
    expanded: Tensor
    network_out: Tensor
    network_in: Tensor
    nvlink_out: Tensor
    nvlink_in: Tensor

    def seconds(self, row_bytes: int, rdma_gbs: float, nvlink_gbs: float) -> float:
        """How long the busiest link takes, at full speed in both directions at once."""
        network = max(int(self.network_out.max()), int(self.network_in.max()))
        nvlink = max(int(self.nvlink_out.max()), int(self.nvlink_in.max()))
        return model.transfer_seconds(network, nvlink, row_bytes, rdma_gbs, nvlink_gbs)

    def imbalance(self, name: str) -> float:
        """The busiest rank's share of a count over the average one; 1 is balance."""
        rows: Tensor = getattr(self, name)
        return int(rows.max()) / max(rows.double().mean().item(), 1e-9)


def _distinct(ordered: Any) -> Any:
    """Where a row of groups, ascending and -1 for none, names one for the first time."""
    new = ordered >= 0
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return new


def simulate(
    topology: Topology, num_experts: int, routing: Routing, *, hybrid: bool = True
) -> Traffic:
    """Count the rows of one dispatch; `routing(rank)` is the `topk_idx` `[T, K]` of a rank.

    With `hybrid` tokens cross the network once for each node, otherwise once for each rank.

    >>> one_each = lambda rank: torch.tensor([[rank, (rank + 1) % 4]])
    >>> traffic = simulate(Topology(2, 2), 4, one_each)
    >>> traffic.received.tolist(), traffic.network_out.tolist(), traffic.nvlink_out.tolist()
    ([2, 2, 2, 2], [0, 1, 0, 1], [1, 1, 1, 1])
    """
    num_ranks, per_node = topology.num_ranks, topology.num_scaleup_ranks
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of the {num_ranks} ranks, got {num_experts}"
        )
    num_local = num_experts // num_ranks
    counts = {name: numpy.zeros(num_ranks, dtype=numpy.int64) for name in COUNTS}

    def add(name: str, ranks: Any) -> None:
        counts[name] += numpy.bincount(ranks, minlength=num_ranks)

    for node in range(topology.num_scaleout_ranks):  # NumPy sorts and divides faster than PyTorch
        own = topology.node(node * per_node)
        parts = [routing(rank) for rank in own]
        ids = numpy.sort(torch.cat(parts).int().numpy(), axis=1)
        row_ranks = numpy.repeat(own, [len(part) for part in parts])
        add("tokens", row_ranks)
        ranks = ids // num_local  # -1 stays -1
        add("expanded", ranks[ranks >= 0])
        new = _distinct(ranks)
        rank, source = ranks[new], numpy.repeat(row_ranks, new.sum(1))
        add("received", rank)
        if hybrid:
            nodes = ranks // per_node
            new = _distinct(nodes) & (nodes != node)
            sender = numpy.repeat(row_ranks, new.sum(1))
            add("network_out", sender)
            add("network_in", nodes[new] * per_node + sender % per_node)
            source = rank - rank % per_node + source % per_node  # who forwards
        else:
            near = rank // per_node == node
            add("network_out", source[~near])
            add("network_in", rank[~near])
            source, rank = source[near], rank[near]
        moves = source != rank
        add("nvlink_out", source[moves])
        add("nvlink_in", rank[moves])
    found = {name: torch.from_numpy(each) for name, each in counts.items()}
    return Traffic(topology, hybrid, **found)


def describe(
    traffic: Traffic,
    num_experts: int,
    num_topk: int,
    hidden: int,
    *,
    rdma_gbs: float,
    nvlink_gbs: float,
    num_device_sms: int = 132,
) -> str:
    """A table of rows per rank, then sizes and times of FP8 dispatch and bfloat16 combine."""
    topology = traffic.topology
    nodes, per_node = topology.num_scaleout_ranks, topology.num_scaleup_ranks
    max_tokens = int(traffic.tokens.max())
    lines = [f"{nodes} x {per_node} ranks, {num_experts} experts, {num_topk} per token", ""]
    lines.append(f"{'rows per rank':<16}{'mean':>12}{'max':>10}{'min':>10}")
    for name in COUNTS:
        rows: Tensor = getattr(traffic, name)
        lines.append(
            f"{name:<16}{rows.double().mean().item():>12.1f}{int(rows.max()):>10}"
            f"{int(rows.min()):>10}"
        )
    out = model.dispatch_token_bytes(hidden, 1, ceil_div(hidden, FP8_GROUP), num_topk)
    back = model.combine_token_bytes(hidden, num_topk)
    logical = (nodes, per_node) if traffic.hybrid else (1, topology.num_ranks)
    buffer = model.buffer_bytes(
        *logical, max_tokens, hidden, num_topk, use_fp8_dispatch=True, all_nvlink=nodes == 1
    )
    sms = model.num_sms(
        *logical, num_experts, num_topk, rdma_gbs=rdma_gbs, nvlink_gbs=nvlink_gbs,
        num_device_sms=num_device_sms, num_physical_nvlink_ranks=per_node,
    )  # fmt: skip
    lines += [
        "",
        f"buffer           {buffer / 2**30:.2f} GiB, workspace {model.WORKSPACE_BYTES >> 20} MiB",
        f"SMs              {sms}",
        f"dispatch         {traffic.seconds(out, rdma_gbs, nvlink_gbs) * 1e6:.0f} us at least",
        f"combine          {traffic.seconds(back, rdma_gbs, nvlink_gbs) * 1e6:.0f} us at least",
    ]
    return "\n".join(lines)


def plot(traffic: Traffic, row_bytes: int, path: Path | str) -> None:
    """Two pictures side by side, PNG or SVG by the ending: bytes of every rank, and their spread.

    Left, what each rank sends over the network and over NVLink; right, how much more than the
    average the ranks have to receive and to compute, from the least to the most loaded.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    topology = traffic.topology
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    ranks = torch.arange(topology.num_ranks)
    for name, color in (("network_out", "#b55d4c"), ("nvlink_out", "#2c5f8a")):
        sent = getattr(traffic, name).double() * row_bytes / 1e6
        left.plot(ranks, sent, color=color, linewidth=1, label=name.removesuffix("_out"))
    left.set(xlabel="rank", ylabel="MB sent", ylim=(0, None), title="traffic per level")
    shares = torch.linspace(0, 100, topology.num_ranks)
    for name, color in (("received", "#4c956c"), ("expanded", "#c9a227")):
        rows = getattr(traffic, name).double()
        spread = rows.sort().values / rows.mean().clamp(min=1e-9)
        label = f"{name}: at most {traffic.imbalance(name):.2f}"
        right.plot(shares, spread, color=color, linewidth=1.5, label=label)
    right.axhline(1, color="0.4", linewidth=0.8)
    right.set(xlabel="% of the ranks", ylabel="rows / average", title="load imbalance")
    for axes in (left, right):
        axes.grid(True, linewidth=0.3, alpha=0.5)
        axes.legend(fontsize=8)
    mode = "hybrid" if traffic.hybrid else "direct"
    nodes, per_node = topology.num_scaleout_ranks, topology.num_scaleup_ranks
    figure.suptitle(f"{nodes} x {per_node} ranks, {mode}", fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> str:
    """Describe a balanced routing from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tile_kernels.ep.sim", description=main.__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rdma-gbs", type=float, default=50.0)
    parser.add_argument("--nvlink-gbs", type=float, default=430.0)
    parser.add_argument("--direct", action="store_true", help="one row for each rank, not node")
    given = parser.parse_args(arguments)
    topology = Topology(given.nodes, given.ranks_per_node)
    routing = balanced_routing(given.tokens, given.experts, given.topk)
    traffic = simulate(topology, given.experts, routing, hybrid=not given.direct)
    return describe(
        traffic, given.experts, given.topk, given.hidden,
        rdma_gbs=given.rdma_gbs, nvlink_gbs=given.nvlink_gbs,
    )  # fmt: skip


if __name__ == "__main__":
    print(main())  # noqa: T201
