"""Tile sizes of the kernel that computes several layers again. Needs no TileLang."""

from __future__ import annotations

import functools

from tile_kernels.mhc.tiling import MAX_THREADS, plan_mix

LAYERS = 10  # of a launch

# Smaller blocks above 4 streams, which take many registers.
plan_recompute = functools.partial(plan_mix, threads_above_4=MAX_THREADS // 2)
