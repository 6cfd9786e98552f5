"""Types of the quantizing operators."""

from tile_kernels.torch.scales import QuantTensor

__all__ = ["QuantTensor"]
