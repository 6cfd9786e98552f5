"""What a routing means for thousands of ranks: rows, bytes and times, counted on one machine.

Nothing is sent. Tokens of one node at a time are counted exactly: which ranks and nodes they reach,
and which links they use on the way.

    python -m tile_kernels.ep.sim --nodes 32 --ranks-per-node 64 --experts 2048
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels.ep import model
from tile_kernels.ep.topology import Topology
from tile_kernels.utils import ceil_div

Routing = Callable[[int], Tensor]
FP8_GROUP = 128  # channels that share a scale factor


def balanced_routing(num_tokens: int, num_experts: int, num_topk: int, seed: int = 0) -> Routing:
    """For each rank, `num_tokens` choices of `num_topk` distinct experts, all equally likely."""
    if num_topk > num_experts:
        raise ValueError(f"num_topk must be at most num_experts {num_experts}, got {num_topk}")

    def of(rank: int) -> Tensor:
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

    return of


@dataclass(frozen=True)
class Traffic:
    """Rows of a dispatch, `[R]` each; those of combine are the same, the other way.

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
        times = [0.0]
        for rows, gbs, name in (
            (network, rdma_gbs, "rdma_gbs"),
            (nvlink, nvlink_gbs, "nvlink_gbs"),
        ):
            if rows:
                if gbs <= 0:
                    raise ValueError(f"{name} must be positive, got {gbs}")
                times.append(rows * row_bytes / (gbs * 1e9))
        return max(times)


def _distinct(groups: Tensor) -> tuple[Tensor, Tensor]:
    """`(row, group)` of every group that a row names, each once; -1 is none."""
    ordered = groups.sort(dim=1).values
    new = ordered >= 0
    new[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    row, slot = new.nonzero(as_tuple=True)
    return row, ordered[row, slot]


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
    names = ("tokens", "received", "expanded", "network_out", "network_in", "nvlink_out",
             "nvlink_in")  # fmt: skip
    counts = {name: torch.zeros(num_ranks, dtype=torch.int64) for name in names}

    def add(name: str, ranks: Tensor) -> None:
        counts[name] += torch.bincount(ranks, minlength=num_ranks)

    for node in range(topology.num_scaleout_ranks):
        own = topology.node(node * per_node)
        parts = [routing(rank) for rank in own]
        ids = torch.cat(parts)
        source = torch.repeat_interleave(torch.tensor(own), torch.tensor([len(p) for p in parts]))
        add("tokens", source)
        ranks = torch.where(ids >= 0, ids.div(num_local, rounding_mode="floor"), -1)
        add("expanded", ranks[ranks >= 0])
        row, rank = _distinct(ranks)
        add("received", rank)
        if hybrid:
            of_row, to_node = _distinct(torch.where(ranks >= 0, ranks // per_node, -1))
            far = to_node != node
            add("network_out", source[of_row[far]])
            add("network_in", (to_node * per_node + source[of_row] % per_node)[far])
            sender = rank // per_node * per_node + source[row] % per_node  # who forwards
        else:
            sender = source[row]
            far = rank // per_node != node
            add("network_out", sender[far])
            add("network_in", rank[far])
            sender, rank = sender[~far], rank[~far]
        moves = sender != rank
        add("nvlink_out", sender[moves])
        add("nvlink_in", rank[moves])
    return Traffic(topology, hybrid, **counts)


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
    most_tokens = int(traffic.tokens.max())
    lines = [f"{nodes} x {per_node} ranks, {num_experts} experts, {num_topk} per token", ""]
    lines.append(f"{'rows per rank':<16}{'mean':>12}{'max':>10}{'min':>10}")
    for name in ("tokens", "received", "expanded", "network_out", "network_in", "nvlink_out",
                 "nvlink_in"):  # fmt: skip
        rows: Tensor = getattr(traffic, name)
        lines.append(
            f"{name:<16}{rows.double().mean().item():>12.1f}{int(rows.max()):>10}"
            f"{int(rows.min()):>10}"
        )
    out = model.dispatch_token_bytes(hidden, 1, ceil_div(hidden, FP8_GROUP), num_topk)
    back = model.combine_token_bytes(hidden, num_topk)
    logical = (nodes, per_node) if traffic.hybrid else (1, topology.num_ranks)
    buffer = model.buffer_bytes(
        *logical, most_tokens, hidden, num_topk, use_fp8_dispatch=True, all_nvlink=nodes == 1
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
