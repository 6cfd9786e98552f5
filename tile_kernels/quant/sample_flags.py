"""Flags of the scales that the samples of quantizing operators ask for."""

from __future__ import annotations

Flags = dict[str, bool]
ROW: Flags = {}
ROUNDED: Flags = {"round_sf": True}
COLUMN: Flags = {"use_tma_aligned_col_major_sf": True}
PACKED: Flags = {"round_sf": True, "use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True}
PACKED_ROW: Flags = {"round_sf": True, "use_packed_ue8m0": True}
LAYOUTS = {"row": ROW, "rounded": ROUNDED, "column": COLUMN, "packed": PACKED}


def all_flags(given: Flags) -> Flags:
    """The flags of scales, False where they are not given."""
    return {**dict.fromkeys(PACKED, False), **given}
