"""Tiling of the gate with image bias and of its gradient. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.moe.plan import SOFTMAX, Gate, row_vector
from tile_kernels.runtime.device import WARP, Device

MAX_ROW_REGISTERS = 16  # scores of a token that a lane keeps between two passes over the row


def plan(
    num_experts: int,
    num_topk: int,
    num_shared: int,
    scoring: int,
    has_mask: bool,
    has_fixed: bool,
    has_map: bool,
    has_unmapped: bool,
    has_bias: bool,
    has_image: bool,
    has_random: bool,
    has_scores: bool,
    index_dtype: str,
    alignment: int,
    device: Device,
) -> Gate:
    """The scored gate without groups."""
    return Gate(
        num_experts, num_topk, 0, 0, num_shared, scoring, has_mask, has_fixed, has_map,
        has_unmapped, row_vector(num_experts, alignment), has_bias, has_image, has_random,
        has_scores, index_dtype,
    )  # fmt: skip


class BackwardPlan(NamedTuple):
    """`has_sums` and `has_scores`: gradients of normalized scores, and of scores."""

    num_experts: int
    num_topk: int
    scoring: int
    has_mask: bool
    has_sums: bool
    has_scores: bool
    index_dtype: str
    vector: int

    @property
    def reads_row(self) -> bool:
        """Whether a gradient depends on other scores than those of the chosen experts."""
        return self.scoring == SOFTMAX or self.has_sums or self.has_scores

    @property
    def steps(self) -> int:
        """Accesses of a lane to a row."""
        return -(-self.num_experts // (WARP * self.vector))

    @property
    def keeps_row(self) -> bool:
        """Whether a lane's scores stay in registers between the two passes."""
        return self.steps * self.vector <= MAX_ROW_REGISTERS


def plan_backward(
    num_experts: int,
    num_topk: int,
    scoring: int,
    has_mask: bool,
    has_sums: bool,
    has_scores: bool,
    index_dtype: str,
    alignment: int,
    device: Device,
) -> BackwardPlan:
    return BackwardPlan(
        num_experts, num_topk, scoring, has_mask, has_sums, has_scores, index_dtype,
        row_vector(num_experts, alignment),
    )  # fmt: skip
