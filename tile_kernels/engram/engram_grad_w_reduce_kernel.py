"""`grad_w_reduce` at its second import path."""

from tile_kernels.engram.weights import grad_w_reduce

__all__ = ["grad_w_reduce"]
