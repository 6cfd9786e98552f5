"""The definition of dispatch and combine: plain loops over the tensors of all ranks.

Each argument is a list with one entry for each rank. Nothing is sent; what a rank would receive is
picked from what the others hold. Engines are compared with this bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tile_kernels.ep.topology import Topology
from tile_kernels.utils import align

Payloads = tuple[Tensor, ...]


@dataclass
class Received:
    """What one rank holds after dispatch. `N` tokens arrived, `L` experts are local.

    | field | shape | meaning |
    |---|---|---|
    | `sources` | `[N]` | `source rank * num_max_tokens_per_rank + token`, ascending |
    | `payloads` | `[N, ...]` or `[rows, ...]` | compact, or expanded with zeros as padding |
    | `topk_idx` | `[N, K]` | local expert of a slot, -1: none or elsewhere |
    | `topk_weights` | `[N, K]` or `[rows]` | as sent, or of each row |
    | `topk_to_pos` | `[N, K]` | expanded row of a slot, -1: none |
    | `counts` | `[L]` | tokens of each expert |
    """

    sources: Tensor
    payloads: Payloads
    topk_idx: Tensor
    topk_weights: Tensor | None
    topk_to_pos: Tensor
    counts: list[int]


def dispatch(
    payloads: list[Payloads],
    topk_idx: list[Tensor],
    topk_weights: list[Tensor] | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    expand: bool = False,
    alignment: int = 1,
) -> list[Received]:
    """What each rank receives: tokens that chose one of its experts, by source rank and token.

    `payloads[r]` are tensors `[T_r, ...]` of any dtypes, `topk_idx[r]` and `topk_weights[r]` are
    `[T_r, K]`. Expanded, the rows of an expert are consecutive, in the order of their tokens, and
    begin at a multiple of `alignment`.
    """
    num_ranks = len(topk_idx)
    num_local = num_experts // num_ranks
    received = []
    for rank in range(num_ranks):
        first = rank * num_local
        found: list[tuple[int, int]] = []
        ids: list[list[int]] = []
        for source in range(num_ranks):
            for token, chosen in enumerate(topk_idx[source].tolist()):
                local = [e - first if first <= e < first + num_local else -1 for e in chosen]
                if max(local) >= 0:
                    found.append((source, token))
                    ids.append(local)
        received.append(
            _received(
                found,
                ids,
                num_local,
                payloads,
                topk_idx[0].shape[1],
                topk_weights,
                num_max_tokens_per_rank,
                expand,
                alignment,
            )
        )
    return received


def _received(
    found: list[tuple[int, int]],
    ids: list[list[int]],
    num_local: int,
    payloads: list[Payloads],
    num_topk: int,
    topk_weights: list[Tensor] | None,
    max_tokens: int,
    expand: bool,
    alignment: int,
) -> Received:
    counts = [sum(row.count(expert) for row in ids) for expert in range(num_local)]
    starts = [sum(align(n, alignment) for n in counts[:expert]) for expert in range(num_local)]
    num_rows = sum(align(n, alignment) for n in counts)
    filled = list(starts)
    topk_to_pos = torch.full((len(found), num_topk), -1)
    for row, local in enumerate(ids):
        for slot, expert in enumerate(local):
            if expert >= 0:
                topk_to_pos[row, slot] = filled[expert]
                filled[expert] += 1

    def compact(parts: list[Tensor]) -> Tensor:
        rows = [parts[source][token] for source, token in found]
        return torch.stack(rows) if rows else parts[0].new_empty((0, *parts[0].shape[1:]))

    def expanded(rows: Tensor) -> Tensor:
        out = torch.zeros((num_rows, *rows.shape[1:]), dtype=rows.dtype)
        for row, slot in (topk_to_pos >= 0).nonzero().tolist():
            out[topk_to_pos[row, slot]] = rows[row]
        return out

    each = [compact([parts[i] for parts in payloads]) for i in range(len(payloads[0]))]
    weights = None if topk_weights is None else compact(topk_weights)
    if expand:
        each = [expanded(rows) for rows in each]
        if weights is not None:
            row_weights = torch.zeros(num_rows)
            row_weights[topk_to_pos[topk_to_pos >= 0]] = weights[topk_to_pos >= 0]
            weights = row_weights
    return Received(
        sources=torch.tensor([s * max_tokens + t for s, t in found], dtype=torch.int64),
        payloads=tuple(each),
        topk_idx=torch.tensor(ids, dtype=torch.int64).view(len(ids), num_topk),
        topk_weights=weights,
        topk_to_pos=topk_to_pos,
        counts=counts,
    )


def ordered_sum(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of vectors in float32, in the order given, beginning with +0.0; rounded once."""
    total = torch.zeros(values[0].shape, dtype=torch.float32)
    for value in values:
        total = total + value.float()
    return total.to(dtype)


def combine(
    rows: list[Tensor],
    received: list[Received],
    topk_idx: list[Tensor],
    num_experts: int,
    num_max_tokens_per_rank: int,
    topology: Topology,
    expanded: bool,
    multiple_reduction: bool = True,
    bias: list[list[Tensor]] | None = None,
) -> list[Tensor]:
    """The sum of the expert outputs of each token, in the order of its slots.

    `rows[r]` are those of rank `r`, in the layout of the dispatch. Values of a rank are added
    first, then of a node, then all; each sum is in float32 and rounded to the dtype of the rows.
    Inside a sum the order is that of the largest slot of each rank or node. `bias[r]` are tensors
    `[T_r, H]`, which the last sum begins with. Without `multiple_reduction` there is only the last.
    """
    num_local = num_experts // topology.num_ranks
    hidden, dtype = rows[0].shape[1], rows[0].dtype
    where = [{int(g): i for i, g in enumerate(each.sources)} for each in received]
    combined = []
    for source in range(topology.num_ranks):
        out = torch.zeros((topk_idx[source].shape[0], hidden), dtype=dtype)
        for token, chosen in enumerate(topk_idx[source].tolist()):
            slots_of: dict[int, list[int]] = {}
            for slot, expert in enumerate(chosen):
                if expert >= 0:
                    slots_of.setdefault(expert // num_local, []).append(slot)
            items: list[tuple[int, int, Tensor]] = []  # largest slot, rank, value
            for rank, slots in slots_of.items():
                row = where[rank][source * num_max_tokens_per_rank + token]
                if not expanded:
                    items.append((slots[-1], rank, rows[rank][row]))
                    continue
                values = [rows[rank][received[rank].topk_to_pos[row, slot]] for slot in slots]
                if multiple_reduction:
                    items.append((slots[-1], rank, ordered_sum(values, dtype)))
                else:
                    items += [(slot, rank, value) for slot, value in zip(slots, values)]
            items.sort(key=lambda item: item[0])
            if multiple_reduction and topology.is_hybrid:
                nodes: dict[int, list[tuple[int, int, Tensor]]] = {}
                for item in items:
                    nodes.setdefault(topology.node_of(item[1]), []).append(item)
                items = [
                    (group[-1][0], node, ordered_sum([value for *_, value in group], dtype))
                    for node, group in nodes.items()
                ]
                items.sort(key=lambda item: item[0])
            begin = [] if bias is None else [each[token] for each in bias[source]]
            values = begin + [value for *_, value in items]
            if values:
                out[token] = ordered_sum(values, dtype)
        combined.append(out)
    return combined
