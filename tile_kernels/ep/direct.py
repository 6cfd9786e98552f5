"""Dispatch and combine through windows: rows are written to where they belong, by one kernel.

All hosts know what each rank sends to each other (`plan.Traffic`), so that a sender computes the
final row of a token in the memory of the receiver, in the compact and in the expanded layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.ep.engines.window import ALIGNMENT, Region, Window
from tile_kernels.ep.peers.op import put_rows, put_sums
from tile_kernels.ep.plan import Hop, Layout, Plan, Traffic, peers_of
from tile_kernels.ep.rows import field_of, pack, unpack
from tile_kernels.ep.transport import Fabric, owned_weights
from tile_kernels.utils import align

_DISPATCH, _COMBINE = "ElasticBuffer.dispatch (rows)", "ElasticBuffer.combine (rows)"  # phases
_COUNTS = "ElasticBuffer.dispatch (counts)"


@dataclass(frozen=True)
class Sections:
    """The parts of a region: rows of `row_bytes`, of `scale_bytes`, and `num_words` words."""

    row_bytes: int
    scale_bytes: int
    num_words: int

    def starts(self, num_rows: int, num_items: int) -> tuple[int, int, int, int]:
        """Where rows, scales and words begin, and where they end."""
        scales = align(num_rows * self.row_bytes, ALIGNMENT)
        words = scales + align(num_rows * self.scale_bytes, ALIGNMENT)
        return 0, scales, words, words + align(4 * num_items * self.num_words, ALIGNMENT)


@dataclass
class Transfer:
    """A transfer that fits into the windows of all ranks.

    `sizes[r]` are the rows and the items (rows of words) that rank `r` receives, `windows[r]` the
    start and the size of the free part that it announced.
    """

    window: Window
    sections: Sections
    sizes: list[tuple[int, int]]
    windows: Sequence[tuple[int, int]]
    region: Region | None = field(default=None)

    def fits(self) -> bool:
        """Whether it does: the same answer on all ranks."""
        pairs = zip(self.sizes, self.windows)
        return all(self.sections.starts(*size)[3] <= room for size, (_, room) in pairs)

    def table(self) -> list[int]:
        """The addresses `[3, num_ranks]` of the sections on each rank."""
        begins = [
            [address + start + part for part in self.sections.starts(*size)[:3]]
            for address, size, (start, _) in zip(self.window.addresses, self.sizes, self.windows)
        ]
        return [address for part in zip(*begins) for address in part]

    @property
    def capacity(self) -> int:
        """More than any row or item number."""
        return max(1, *(number for size in self.sizes for number in size))

    def begin(self, phase: str) -> None:
        """Reserves what this rank receives, and waits until peers have done so."""
        me = self.window.index
        need = self.sections.starts(*self.sizes[me])[3]
        self.region = self.window.take(self.windows[me][0], need)
        self.window.begin(phase)

    def received(self, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """What arrived: rows of a dtype, scales as bytes, words."""
        region, me = self.region, self.window.index
        if region is None:
            raise RuntimeError("a transfer that did not begin has received nothing")
        num_rows, num_items = self.sizes[me]
        rows, scales, words, _ = self.sections.starts(num_rows, num_items)
        make = self.window.tensor
        return (
            make(region, rows, (num_rows, width), dtype),
            make(region, scales, (num_rows, self.sections.scale_bytes), torch.uint8),
            make(region, words, (num_items, self.sections.num_words), torch.int32),
        )


def gather_numbers(fabric: Fabric, numbers: Sequence[int]) -> list[list[int]]:
    """Numbers of all ranks, equally many from each. Collective, on the host."""
    row = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    return fabric.world.gather(row, _COUNTS).view(torch.int64).tolist()


def traffic_of(numbers: Sequence[Sequence[int]]) -> Traffic:
    """What all ranks send, from what each of them counted: rows by rank, choices by expert."""
    size = len(numbers)
    return Traffic([list(row[:size]) for row in numbers], [list(row[size:]) for row in numbers])


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers as an int64 tensor; the host does not wait for the device."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


# ---- dispatch -----------------------------------------------------------------------------------


def layout_of(
    hop: Hop, topk_idx: Tensor, traffic: Traffic, rank: int, expand: bool, alignment: int
) -> Layout:
    """The layout of the rows that `rank` sends."""
    num_ranks, num_experts = len(traffic.rows), len(traffic.choices[0])
    num_local, peers = num_experts // num_ranks, range(num_ranks)
    item_shift = [traffic.start_at(rank, p) - traffic.item_at(rank, p) for p in peers]
    shift: list[int] = []
    expanded = [0] * num_ranks
    before = 0  # slots of this rank that name lower experts
    for expert in range(num_experts if expand else 0):
        start = expanded[expert // num_local]
        earlier = sum(row[expert] for row in traffic.choices[:rank])
        shift.append(start + earlier - before)
        before += traffic.choices[rank][expert]
        expanded[expert // num_local] = start + align(traffic.chosen(expert), alignment)
    numbers = on_device([*item_shift, *shift], topk_idx.device)
    groups = hop.groups.clamp(min=0)
    items = torch.where(hop.masters, hop.items + numbers[groups], -1).int()
    received = [traffic.num_received(peer) for peer in peers]
    if not expand:
        return Layout(groups.int(), items, items, list(zip(received, received)))
    ids, num_slots = topk_idx.contiguous(), max(1, topk_idx.numel())
    positions = moe.get_fused_mapping(ids, num_experts, num_slots, 1)[3]
    shifts = numbers[num_ranks:][topk_idx.clamp(min=0)]
    slots = torch.where(topk_idx >= 0, positions + shifts, -1).int()
    return Layout(groups.int(), slots, items, list(zip(expanded, received)))


def dispatch_transfer(
    fabric: Fabric,
    layout: Layout,
    payloads: Sequence[Tensor],
    num_words: int,
    windows: Sequence[tuple[int, int]],
) -> Transfer | None:
    """The transfer of a dispatch, or None if a window has no room for it."""
    window = fabric.window
    if window is None:
        return None
    rest = payloads[1:]
    sections = Sections(field_of(payloads[0]).num_bytes, _scale_bytes(rest), num_words)
    transfer = Transfer(window, sections, layout.sizes, windows)
    return transfer if transfer.fits() else None


def _scale_bytes(payloads: Sequence[Tensor]) -> int:
    """Bytes in each row for all payloads but the first: words of 4 bytes."""
    if len(payloads) == 1 and payloads[0].element_size() == 4:
        return field_of(payloads[0]).num_bytes
    return align(sum(field_of(each).num_bytes for each in payloads), 16)


def _scales(payloads: Sequence[Tensor], num_bytes: int) -> Tensor | None:
    """Those payloads as one tensor of words; scale factors are not copied."""
    if not num_bytes:
        return None
    if len(payloads) == 1 and payloads[0].element_size() == 4:
        return payloads[0]
    filler = torch.empty((payloads[0].shape[0], 0), dtype=torch.uint8, device=payloads[0].device)
    rows = pack([*payloads, filler])[:, :num_bytes].contiguous()
    return rows.view(torch.int32)


def send_rows(
    transfer: Transfer, layout: Layout, payloads: Sequence[Tensor], words: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """One kernel writes all rows to their receivers. Returns what arrived here: payloads, words."""
    x = payloads[0].contiguous()
    scales = _scales(payloads[1:], transfer.sections.scale_bytes)
    peers = on_device(transfer.table(), x.device).view(3, -1)
    transfer.begin(_DISPATCH)
    _put(transfer, peers, layout.ranks, (x, layout.slots), scales, (words, layout.items))
    transfer.window.end(_DISPATCH)
    first, rest, arrived_words = transfer.received(x.dtype, x.shape[1])
    fields = [field_of(each) for each in payloads[1:]]
    return [first, *unpack(rest, fields)], arrived_words


def _put(
    transfer: Transfer,
    peers: Tensor,
    ranks: Tensor,
    rows: tuple[Tensor, Tensor],
    scales: Tensor | None,
    words: tuple[Tensor | None, Tensor],
) -> None:
    """Writes rows with their slots, scales to the same slots, and words with theirs.

    Each of the three may be missing; rows that have no columns are.
    """
    (x, slots), (numbers, items) = rows, words
    if not x.shape[1] and scales is not None:
        x, scales, peers = scales.contiguous(), None, peers[[1, 1, 2]]
    if not x.shape[1] and numbers is not None:
        x, slots, numbers, peers = numbers, items, None, peers[[2, 1, 2]]
    if x.shape[1]:
        capacity = transfer.capacity
        wide = slots is not items  # a row for each choice of an expert
        put_rows(x, ranks, slots, peers, ALIGNMENT, capacity, scales, items, numbers, wide)


def routing_words(topk_idx: Tensor, topk_weights: Tensor | None, first: int) -> Tensor:
    """What a receiver must know of each token: its source, its experts, and its weights.

    `first` is the number of the first token. `[T, 1 + K]` or `[T, 1 + 2 K]` int32.
    """
    sources = torch.arange(first, first + topk_idx.shape[0], device=topk_idx.device)
    parts = [sources[:, None].int(), topk_idx.int()]
    if topk_weights is not None:
        parts.append(topk_weights.contiguous().view(torch.int32))
    return torch.cat(parts, 1)


def plan_of(hop: Hop, topk_idx: Tensor, words: Tensor, traffic: Traffic, rank: int) -> Plan:
    """The plan of a dispatch from the words that arrived."""
    num_ranks, num_topk = len(traffic.rows), topk_idx.shape[1]
    hop.recv_counts = [row[rank] for row in traffic.rows]
    counts = on_device(hop.recv_counts, words.device)
    experts_per_rank = len(traffic.choices[0]) // num_ranks
    ranks = peers_of(topk_idx, experts_per_rank, 0, num_ranks)
    sources, ids = words[:, 0].long(), words[:, 1 : 1 + num_topk].long()
    return Plan([hop], None, ranks, sources, ids, counts, traffic)


def zero_padding(rows: Tensor, traffic: Traffic, rank: int, alignment: int) -> None:
    """Zeroes the rows between those of one expert and the next, in place."""
    num_local = len(traffic.choices[0]) // len(traffic.rows)
    padding: list[int] = []
    end = 0
    for expert in range(rank * num_local, (rank + 1) * num_local):
        start, end = end + traffic.chosen(expert), end + align(traffic.chosen(expert), alignment)
        padding.extend(range(start, end))
    if padding and rows.numel():
        index = on_device(padding, rows.device)
        rows.view(torch.uint8).index_fill_(0, index, 0)


def settled(tensors: list[Tensor], transfer: Transfer) -> list[Tensor]:
    """Results as they are, in the window, if it still has room for a transfer of this size.

    Otherwise copies, so that a caller who keeps results does not use up the window.
    """
    region = transfer.region
    if region is None or transfer.window.announced()[1] >= region.num_bytes:
        return tensors
    transfer.region = None
    return [each.clone() for each in tensors]


# ---- combine ------------------------------------------------------------------------------------


def combine_transfer(
    fabric: Fabric, plan: Plan, x: Tensor, num_weights: int, windows: Sequence[tuple[int, int]]
) -> Transfer | None:
    """The transfer of a combine, or None if a window has no room for it."""
    window, traffic = fabric.window, plan.traffic
    if window is None or traffic is None or not windows:
        return None
    sections = Sections(field_of(x).num_bytes, 0, num_weights)
    sizes = [(sum(row), sum(row)) for row in traffic.rows]
    transfer = Transfer(window, sections, sizes, windows)
    return transfer if transfer.fits() else None


def return_slots(plan: Plan, traffic: Traffic, rank: int) -> tuple[Tensor, Tensor]:
    """For each received row the rank that sent it, and its number among the rows that one sent."""
    if plan.returns is None:
        device = plan.sources.device
        sources = range(len(traffic.rows))
        shift = [traffic.item_at(s, rank) - traffic.start_at(s, rank) for s in sources]
        ends = [traffic.start_at(s + 1, rank) for s in sources]
        numbers = on_device([*shift, *ends], device)
        rows = torch.arange(plan.num_arrived, device=device)
        ranks = torch.bucketize(rows, numbers[len(sources) :], right=True)
        slots = rows + numbers[ranks]
        plan.returns = ranks.int(), slots.int()
    return plan.returns


def return_rows(
    fabric: Fabric,
    plan: Plan,
    transfer: Transfer,
    x: Tensor,
    weights: Tensor | None,
    topk_to_pos: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One kernel sends each received row back, or the sum of its expanded rows (`topk_to_pos`).

    Returns what came back to this rank: a row for each item of the hop, and the weights `[T, K]`.
    """
    traffic = plan.traffic
    if traffic is None:
        raise RuntimeError("rows are returned along the traffic of a plan")
    ranks, slots = return_slots(plan, traffic, fabric.rank)
    peers = on_device(transfer.table(), x.device).view(3, -1)
    words = None if weights is None else weights.contiguous().view(torch.int32)
    transfer.begin(_COMBINE)
    if topk_to_pos is not None and x.shape[1]:
        put_sums(x, topk_to_pos, ranks, slots, peers, ALIGNMENT, transfer.capacity, words)
    else:
        one = slots[:, None]
        _put(transfer, peers, ranks[:, None], (x[: len(one)], one), None, (words, one))
    transfer.window.end(_COMBINE)
    values, _, arrived = transfer.received(x.dtype, x.shape[1])
    back = None if weights is None else owned_weights(
        arrived.view(torch.float32), plan.hops[0].owners
    )  # fmt: skip
    return values, back
