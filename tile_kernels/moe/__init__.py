"""Expert gating and token routing."""

from tile_kernels.runtime.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
