"""Tile sizes of the kernel between the projection and a sublayer. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.mhc.tiling import access, columns_of, cut_row, whole_row
from tile_kernels.runtime.device import Device


class ReadPlan(NamedTuple):
    """`padded` columns of the products; `near` as in `sinkhorn`.

    With `saving`, what gradients need is written too. With `splits`, the products are partial sums
    that were computed elsewhere. `norm` is the dtype of the weight of an RMS norm of the result, if
    there is one, `norm_vector` of it per access; with `group`, the result is cast to e4m3 with a
    scale for so many channels.
    """

    streams: int
    hidden: int
    vector: int
    threads: int
    steps: int
    parts: int
    padded: int
    near: bool
    saving: bool
    splits: bool = False
    norm: str = ""
    norm_vector: int = 1
    group: int = 0
    round_sf: bool = False


def plan_read_splits(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    near: bool,
    device: Device,
) -> ReadPlan:
    """As `plan_read`, for products without columns that are not used."""
    count = streams * (streams + 2)
    plan = plan_read(streams, hidden, num_tokens, alignment, count, near, False, device)
    return plan._replace(splits=True)


def plan_read(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    padded: int,
    near: bool,
    saving: bool,
    device: Device,
) -> ReadPlan:
    """A block per token, which computes its mixes; a part of one, if there are few."""
    if num_tokens < 2 * device.num_sms:
        (threads, parts), steps = cut_row(hidden, num_tokens, device), 1
    else:
        (threads, steps), parts = whole_row(hidden), 1
    vector = access(columns_of(hidden), 2, alignment)
    return ReadPlan(streams, hidden, vector, threads, steps, parts, padded, near, saving)


def plan_read_normed(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    padded: int,
    near: bool,
    norm: str,
    norm_alignment: int,
    group: int,
    round_sf: bool,
    device: Device,
) -> ReadPlan:
    """A block per token, which has the whole row for its norm."""
    (threads, steps), columns = whole_row(hidden), columns_of(hidden)
    vector = access(columns, 2, alignment)
    norm_vector = access(columns, 4 if norm == "float32" else 2, norm_alignment) if norm else 1
    return ReadPlan(
        streams, hidden, vector, threads, steps, 1, padded, near, False, False, norm, norm_vector,
        group, round_sf,
    )  # fmt: skip
