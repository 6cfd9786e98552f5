"""Plans of the indexer's logits and of their gradients. Needs no TileLang."""

from __future__ import annotations

from typing import Any, NamedTuple

from tile_kernels.attention.indexer_plan import MARKED, Tile, flat, pipelined_tile, tile_plan
from tile_kernels.runtime.device import Device

MAX_QUERIES = 16  # of a block


class Plan(NamedTuple):
    """A tile, the dtype of logits, and which blocks a launch computes."""

    tile: Tile
    out_dtype: str
    role: str


def plan(
    source: str,
    key_format: str,
    heads: int,
    depth: int,
    out_dtype: str,
    many_queries: bool,
    role: str,
    device: Device,
) -> tuple[Any, ...]:
    """The fields of a `Plan`, those of its tile one by one; with `many_queries` see `pipelined`."""
    tile = pipelined_tile(source, key_format, heads, depth, device) if many_queries else None
    if tile is None:
        tile, _ = tile_plan(source, key_format, role == MARKED, heads, depth, MAX_QUERIES, device)
    return flat(*Plan(tile, out_dtype, role))


# ---- gradients ----------------------------------------------------------------------------------

MAX_SCALE_BLOCKS = 512  # that look for the largest share of a key's gradient


class GradientPlan(NamedTuple):
    """`padded`: heads, at least as many as rows of a matrix instruction."""

    source: str
    heads: int
    padded: int
    depth: int
    fenced: bool


def plan_gradients(source: str, heads: int, depth: int, device: Device) -> GradientPlan:
    return GradientPlan(source, heads, padded_heads(heads), depth, device.arch == "sm_90a")


def padded_heads(heads: int) -> int:
    return 64 if heads <= 64 else 128


class ScalePlan(NamedTuple):
    source: str
    heads: int
    depth: int


def plan_scale(source: str, heads: int, depth: int, device: Device) -> ScalePlan:
    return ScalePlan(source, heads, depth)


def plan_counted(depth: int, device: Device) -> tuple[int]:
    return (depth,)
