"""`engram_hash` at its second import path."""

from tile_kernels.engram.hashing import engram_hash

__all__ = ["engram_hash"]
