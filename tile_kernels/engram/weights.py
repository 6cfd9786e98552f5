"""What the operators on the weights of the two norms share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import alignment

DTYPES = (torch.bfloat16, torch.float32)


def check_weights(weight_hidden: Tensor, weight_embed: Tensor) -> None:
    """Two weights of one shape and dtype."""
    dims = ("hc", "hidden")
    checks.tensor("weight_hidden", weight_hidden, dims, DTYPES, contiguous=True)
    checks.tensor(
        "weight_embed", weight_embed, dims, weight_hidden.dtype, shape=tuple(weight_hidden.shape),
        contiguous=True,
    )  # fmt: skip
    checks.countable("weight_hidden", weight_hidden)


def access_width(max_width: int, count: int, *specs: Any) -> int:
    """Elements per access: what the tensors' addresses and their number of elements allow."""
    return math.gcd(max_width, count, *[alignment(x) // x.element_size() for x in specs])
