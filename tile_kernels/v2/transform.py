"""Rotary embedding: that of `tile_kernels.transform`."""

from tile_kernels.transform.rotary.op import apply_rotary as apply_rotary
