"""Tile sizes of the kernel that computes several layers again. Needs no TileLang."""

from __future__ import annotations

from tile_kernels.mhc.tiling import MAX_THREADS, MixPlan, cut_row, plan_mix
from tile_kernels.runtime.device import Device

LAYERS = 10  # of a launch


def plan_recompute(
    streams: int,
    hidden: int,
    num_tokens: int,
    alignment: int,
    mix_alignment: int,
    device: Device,
) -> MixPlan:
    """As `plan_mix`, with smaller blocks above 4 streams, which take many registers."""
    plan = plan_mix(streams, hidden, num_tokens, alignment, mix_alignment, device)
    if streams <= 4:
        return plan
    threads, parts = cut_row(hidden, num_tokens, device, MAX_THREADS // 2)
    return plan._replace(threads=threads, parts=parts)
