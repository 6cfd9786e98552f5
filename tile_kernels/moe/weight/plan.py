"""Vector widths of the weight kernels. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.plan import SOFTMAX, row_vector
from tile_kernels.runtime.device import Device

MAX_IN_REGISTERS = 64  # weights of a token that a thread keeps between its two passes


class TopkPlan(NamedTuple):
    num_experts: int
    num_topk: int
    scoring: int
    vector: int


def plan_topk(
    num_experts: int, num_topk: int, scoring: int, alignment: int, device: Device
) -> TopkPlan:
    vector = row_vector(num_experts, alignment) if scoring == SOFTMAX else 1
    return TopkPlan(num_experts, num_topk, scoring, vector)


def plan_topk_backward(
    num_experts: int, num_topk: int, scoring: int, alignment: int, device: Device
) -> TopkPlan:
    """Every row of the result is written, whatever the scoring function."""
    return TopkPlan(num_experts, num_topk, scoring, row_vector(num_experts, alignment))


class NormalizePlan(NamedTuple):
    num_topk: int
    vector: int
    threads: int


def plan_normalize(num_topk: int, alignment: int, device: Device) -> NormalizePlan:
    return NormalizePlan(num_topk, math.gcd(num_topk, 4, max(alignment // 4, 1)), threads=128)
