"""`split_to_bf16`: float32 values as sums of bfloat16 values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant.split import reference
from tile_kernels.quant.split.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_SPLIT = Kernel("tile_kernels.quant.split.kernel", "split", plan)
NUM_LEVELS = 3  # 3 x 8 bits are the 24 bits of a float32
MAX_PARTS = 8


class Arguments(NamedTuple):
    x: Tensor
    parts: list[int]

    def check(self) -> None:
        checks.tensor("x", self.x, ("rows", "columns"), torch.float32, contiguous=True)
        parts: Any = self.parts
        valid = isinstance(parts, list | tuple) and 1 <= len(parts) <= MAX_PARTS
        if not valid or any(type(i) is not int or not 0 <= i < NUM_LEVELS for i in parts):
            raise ValueError(
                f"parts must be 1..{MAX_PARTS} integers of 0..{NUM_LEVELS - 1}, got {parts!r}"
            )

    def outputs(self) -> Out:
        rows, columns = self.x.shape
        return Out("out", (rows, len(self.parts) * columns), torch.bfloat16)

    def launches(self, out: Spec) -> Launch | None:
        if out.numel() == 0:
            return None
        problem = (self.x.shape[1], "".join(map(str, self.parts)), alignment(self.x, out))
        return Launch(_SPLIT, problem, (self.x, out))


def cost(x: Tensor, parts: Any = (0, 1, 2)) -> Cost:
    return Cost(x.numel() * (4 + 2 * len(parts)))


SPLIT_TO_BF16 = Operator(
    "quant.split_to_bf16",
    Arguments,
    reference=reference.split_to_bf16,
    cost=cost,
    dynamic={"x": 1},
)


@SPLIT_TO_BF16.public()
def split_to_bf16(x: Tensor, parts: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    """Splits float32 values into sums of bfloat16 values, for products on tensor cores.

    Part 0 is the value rounded to bfloat16, part 1 what is left of it, rounded, part 2 what is left
    then. The sum of the three is the value, if its last bit is not below 2^-133, the smallest
    bfloat16 number. Parts 1 and 2 of infinities, NaN and values that round to infinity are zero.

    Args:
        x: `[rows, columns]`, float32, contiguous.
        parts: Which parts are returned, in this order: up to 8 of 0, 1 and 2, also repeatedly.

    Returns:
        `[rows, len(parts) * columns]`, bfloat16, contiguous: the parts side by side.

    Raises:
        TypeError: If `x` has another dtype.
        ValueError: If `x` has another shape or layout, or `parts` other elements.

    Example:
        >>> split_to_bf16(torch.tensor([[1.001953125 + 2**-20]])).tolist()
        [[1.0, 0.001953125, 9.5367431640625e-07]]
    """
    return SPLIT_TO_BF16(x, parts)
