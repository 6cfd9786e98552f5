"""Vector widths of the hash gate. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.plan import ACCESS_BYTES, SOFTMAX, Gate
from tile_kernels.runtime.device import Device

BITS = {"bfloat16": 16, "float32": 32, "int32": 32, "int64": 64}


class Plan(NamedTuple):
    num_experts: int
    num_topk: int
    num_shared: int
    scoring: int
    has_mask: bool
    has_map: bool
    logit_dtype: str
    id_dtype: str
    table_dtype: str
    vector: int

    @property
    def gate(self) -> Gate:
        """What the parts that it shares with the scored gate depend on."""
        return Gate(
            self.num_experts, self.num_topk, 0, 0, self.num_shared, self.scoring, self.has_mask,
            False, self.has_map, False, self.vector,
        )  # fmt: skip


def plan(
    num_experts: int,
    num_topk: int,
    num_shared: int,
    scoring: int,
    has_mask: bool,
    has_map: bool,
    logit_dtype: str,
    id_dtype: str,
    table_dtype: str,
    alignment: int,
    device: Device,
) -> Plan:
    """`alignment`, in bytes, is that of every row. Only softmax reads more than single logits."""
    size = BITS[logit_dtype] // 8
    vector = math.gcd(num_experts, ACCESS_BYTES // size, max(alignment // size, 1))
    return Plan(
        num_experts, num_topk, num_shared, scoring, has_mask, has_map, logit_dtype, id_dtype,
        table_dtype, vector if scoring == SOFTMAX else 1,
    )  # fmt: skip
