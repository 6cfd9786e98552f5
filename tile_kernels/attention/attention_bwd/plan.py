"""Plans of the gradients of sparse attention. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.attention.softmax_plan import require_hopper
from tile_kernels.runtime.device import Device

VALUE_DIM = 512  # channels of a value
DIMS = (512, 576)  # channels of a key
HEADS = 64  # of a block: the rows of a wgmma
TILE = 64  # keys of a step
VECTOR = 8  # bfloat16 values per 16-byte access


def padded_slots(num_slots: int) -> int:
    """Slots of a query in the buffer of pieces: whole tiles."""
    return -(-num_slots // TILE) * TILE


MAX_PIECE_BYTES = 2**30  # of the pieces that are in memory at a time


def chunk_tokens(num_tokens: int, groups: int, num_slots: int, dim: int) -> int:
    """Queries whose pieces are in memory at a time. It does not change the results."""
    one = groups * padded_slots(num_slots) * dim * 2
    return max(1, min(num_tokens, MAX_PIECE_BYTES // max(one, 1)))


class GradientPlan(NamedTuple):
    """`with_length`: only the first indices of a query count."""

    dim: int
    heads: int
    with_length: bool


def plan_gradients(dim: int, heads: int, with_length: bool, device: Device) -> GradientPlan:
    require_hopper("sparse_attention_bwd", device)
    return GradientPlan(dim, heads, with_length)


class PreparePlan(NamedTuple):
    heads: int
    with_sink: bool


def plan_prepare(heads: int, with_sink: bool, device: Device) -> PreparePlan:
    return PreparePlan(heads, with_sink)


def plan_sink(heads: int, device: Device) -> tuple[int]:
    return (heads,)


class RowsPlan(NamedTuple):
    """`groups`: blocks of heads, each with a separate piece."""

    dim: int
    groups: int


def plan_rows(dim: int, groups: int, device: Device) -> RowsPlan:
    return RowsPlan(dim, groups)
