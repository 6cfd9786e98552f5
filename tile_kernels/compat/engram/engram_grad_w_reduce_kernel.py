"""`grad_w_reduce` at its second import path."""

from tile_kernels.engram.grad_w.op import grad_w_reduce

__all__ = ["grad_w_reduce"]
