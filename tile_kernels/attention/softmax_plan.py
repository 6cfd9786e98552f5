"""What plans of attention over shared rows have in common. Needs no TileLang."""

from __future__ import annotations

from typing import NamedTuple

from tile_kernels.runtime.device import Device

HOPPER = "sm_90a"


class Schedule(NamedTuple):
    """How the consumers overlap.

    With `ahead`, warpgroup 0 starts the scores of the next pair while the values of the odd tile
    are being added. With `slack`, sums are rescaled only where a maximum has grown by more than so
    many powers of two: exact, as sums and output share one reference, which is not the maximum
    then. Scores start when `chunk` channels of a tile are there. With `early`, warpgroup 1 adds the
    values of the even tile before those of the odd one, so that the even tile is free earlier. The
    blocks of a `cluster`, 1 or 2, receive the same rows.
    """

    ahead: bool = False
    slack: int = 0
    chunk: int = 128
    early: bool = True
    cluster: int = 1


def require_hopper(name: str, device: Device) -> None:
    """The kernels are written for the tensor cores of Hopper (wgmma)."""
    if device.arch != HOPPER:
        raise ValueError(f"{name} has no kernel for {device.name} ({device.arch}), needs {HOPPER}")
