"""Random tensors: those of `tile_kernels.rand`."""

from tile_kernels.rand import randn as randn, randn_like as randn_like, set_seed as set_seed
