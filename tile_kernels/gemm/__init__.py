"""FP8 matrix products with scales, dense and of groups, with the calls of DeepGEMM."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
