"""Types of the quantizing operators."""

from typing import NamedTuple

import torch

# Quantized data and its scale factors.
QuantTensor = tuple[torch.Tensor, torch.Tensor]


class ScaleFlags(NamedTuple):
    """How the scale factors of a result are rounded and laid out."""

    round_sf: bool = False
    use_tma_aligned_col_major_sf: bool = False
    use_packed_ue8m0: bool = False


ROW_MAJOR = ScaleFlags()

__all__ = ["ROW_MAJOR", "QuantTensor", "ScaleFlags"]
