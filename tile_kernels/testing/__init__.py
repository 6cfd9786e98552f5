"""What tests and benchmarks of kernels need: inputs, comparison, labels, poison and timing.

Importing this needs neither pytest nor a compiler; `tile_kernels.testing.pytest_plugin` is the
pytest side (`-p tile_kernels.testing.pytest_plugin`).
"""

from __future__ import annotations

from tile_kernels.testing import bench, generator, numeric, poison, quant, timing
from tile_kernels.testing.quant import clear_unused_sf, clear_unused_sf_col_pack

__all__ = [
    "bench",
    "clear_unused_sf",
    "clear_unused_sf_col_pack",
    "generator",
    "numeric",
    "poison",
    "quant",
    "timing",
]
