"""`engram_hash` at its second import path."""

from tile_kernels.engram.hash.op import engram_hash

__all__ = ["engram_hash"]
