"""Types of the quantising operators."""

from tile_kernels.torch.scales import QuantTensor

__all__ = ["QuantTensor"]
