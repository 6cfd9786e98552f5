"""What the plans of several kernels of the family share. Needs no TileLang."""

from __future__ import annotations

import math
from typing import NamedTuple

from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.runtime.device import WARP, Device

ACCESS_BYTES = 16  # the widest global access

# ---- gates --------------------------------------------------------------------------------------

SIGMOID, SOFTMAX = int(ScoringFunc.SIGMOID), int(ScoringFunc.SOFTMAX)
REPLICA_STEP = 23333  # from a token's replica of an expert to the next token's
MAX_SLOTS = 32  # chosen experts of a token: one per lane
MAX_GROUPS = 64  # two per lane of a warp


class Gate(NamedTuple):
    """What the code of a gate depends on."""

    num_experts: int
    num_topk: int
    num_groups: int  # 0: not grouped
    num_topk_groups: int
    num_shared: int
    scoring: int
    has_mask: bool
    has_fixed: bool
    has_map: bool
    has_unmapped: bool
    vector: int
    has_bias: bool = True
    has_image: bool = False  # a second bias for some of the tokens
    has_random: bool = False  # tokens with random experts
    has_scores: bool = False  # the scores of all experts are a result
    index_dtype: str = "int64"


def row_vector(num_experts: int, alignment: int) -> int:
    """Scores per load: 16 bytes where every row of a tensor aligned like that starts on one."""
    return math.gcd(num_experts, 4, max(alignment // 4, 1))


# ---- rows of the fused layout -------------------------------------------------------------------

MAX_LANES = 256
MAX_STEPS = 4
FEW_LANES = 128  # a row's part, where there are too few tokens to fill the machine


class Split(NamedTuple):
    """How a row is cut: `parts` blocks of `lanes` threads with `steps` vectors each."""

    lanes: int
    steps: int
    parts: int


def split(vectors: int, num_tokens: int, device: Device) -> Split:
    """As few parts as possible, then as few idle threads, then as few threads.

    With few tokens a row is spread over as many threads as it has vectors instead.
    """
    if num_tokens < 2 * device.num_sms:
        lanes = min(FEW_LANES, -(-vectors // WARP) * WARP)
        return Split(lanes, 1, -(-vectors // lanes))
    cuts = [
        Split(lanes, steps, -(-vectors // (lanes * steps)))
        for lanes in range(WARP, MAX_LANES + 1, WARP)
        for steps in range(1, MAX_STEPS + 1)
    ]
    return min(cuts, key=lambda cut: (cut.parts, cut.parts * cut.lanes * cut.steps, cut.lanes))
