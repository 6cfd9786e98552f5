"""Quantization: FP8, FP4 and E5M6 with block scales, alone and fused with SwiGLU."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
