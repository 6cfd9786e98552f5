"""Small helpers: those of `tile_kernels.utils`."""

from tile_kernels.utils import (
    align as align,
    ceil_div as ceil_div,
    dtype_to_str as dtype_to_str,
    is_power_of_two as is_power_of_two,
    next_power_of_two as next_power_of_two,
    str_to_dtype as str_to_dtype,
)
