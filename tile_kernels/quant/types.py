"""Types of the quantizing operators."""

import torch

# Quantised data and its scale factors.
QuantTensor = tuple[torch.Tensor, torch.Tensor]

__all__ = ["QuantTensor"]
