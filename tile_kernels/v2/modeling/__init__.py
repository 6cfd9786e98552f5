"""Autograd functions with the arguments of TileKernels 2.1."""

from tile_kernels.v2.modeling import engram as engram
