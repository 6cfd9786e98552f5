"""Comparison of tensors: that of `tile_kernels.testing.numeric`."""

from tile_kernels.testing.numeric import (
    assert_equal as assert_equal,
    calc_diff as calc_diff,
    check_bias as check_bias,
    count_bytes as count_bytes,
)
