"""`cast`: single values to another dtype, to the nearest or stochastically rounded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.plain import reference
from tile_kernels.quant.plain.plan import plan
from tile_kernels.quant.storage import HASHED, NEAREST, SEEDED
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel

_CAST = Kernel("tile_kernels.quant.plain.kernel", "cast_values", plan)

_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
# What can be rounded stochastically, and to what.
_STOCHASTIC = {
    torch.float32: (torch.bfloat16, torch.float8_e4m3fn),
    torch.bfloat16: (torch.float8_e4m3fn,),
}
_CODES = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


class Arguments(NamedTuple):
    x: Tensor
    dtype: torch.dtype
    stochastic_rounding: bool
    seed: Tensor | None

    def check(self) -> None:
        x = self.x
        dims = ("...",) * (x.dim() if isinstance(x, Tensor) else 1)
        checks.tensor("x", x, dims, _DTYPES, contiguous=True)
        checks.one_of("dtype", self.dtype, _DTYPES)
        checks.boolean("stochastic_rounding", self.stochastic_rounding)
        if self.seed is not None:
            if not self.stochastic_rounding:
                raise ValueError("seed needs stochastic_rounding")
            layout.check_seed(self.seed)
        if self.stochastic_rounding and self.dtype not in _STOCHASTIC.get(x.dtype, ()):
            raise ValueError(
                "stochastic_rounding casts from float32 to bfloat16 and to float8_e4m3fn, and from "
                f"bfloat16 to float8_e4m3fn, got {dtype_name(x)} and dtype {self.dtype}"
            )

    def outputs(self) -> Out:
        return Out("out", self.x.shape, self.dtype)

    def launches(self, out: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        rounding = NEAREST
        x: Any = self.x
        x, target = x.view(-1), dtype_name(out)
        out = out.view(-1)
        if self.stochastic_rounding:
            rounding = HASHED if self.seed is None else SEEDED
            out = out.view(_CODES[self.dtype])
        problem = (dtype_name(x), target, rounding, alignment(x), alignment(out))
        return Launch(_CAST, problem, (x, out, layout.flat_scalar(self.seed)))


def cost(x: Tensor, dtype: torch.dtype, **_: Any) -> Cost:
    return Cost(bytes=x.numel() * (x.element_size() + dtype.itemsize))


def _by_fields(*fields: Any) -> Tensor:
    return reference.plain_cast(**Arguments(*fields)._asdict())


PLAIN_CAST = layout.cast_operator(
    reference.plain_cast, Arguments, cost, by_fields=_by_fields, dynamic={}
)


@PLAIN_CAST.public(reference=reference.plain_cast)
def plain_cast(
    x: Tensor,
    dtype: torch.dtype,
    stochastic_rounding: bool = False,
    out: Tensor | None = None,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Converts values to another dtype without scales; `cast` is the same function.

    To the nearest, ties to even; e4m3 saturates at 448, infinities included. With
    `stochastic_rounding` as `per_token_cast` has it: up or down with probabilities whose mean is
    the value, in steps of `2**-16`, for example for the weights of an optimizer that are kept in
    bfloat16. Then infinities become the largest finite number. NaN stays NaN. Not differentiable.

    Args:
        x: Any shape, float32, bfloat16 or float8_e4m3fn, contiguous.
        dtype: One of these.
        stochastic_rounding: Rounds stochastically: from float32 to bfloat16 or float8_e4m3fn, from
            bfloat16 to float8_e4m3fn.
        out: A buffer for the result that is filled and returned.
        seed: An int, or an int64 tensor with one element. The same seed gives the same bits on
            every device. By default the random bits are a hash of four neighbouring values and
            their index, as TileKernels has it: a value that stays is always rounded alike.

    Returns:
        A tensor like `x` in that dtype, contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If `x` is not contiguous, or the dtypes cannot be rounded stochastically.

    Example:
        >>> plain_cast(torch.tensor([1.0, -17.0, 1e9]), torch.float8_e4m3fn).float().tolist()
        [1.0, -16.0, 448.0]
    """
    seed = layout.as_scalar(seed, x, torch.int64)
    return PLAIN_CAST(x, dtype, stochastic_rounding, seed, out=out)


@checks.named_errors
def cast(
    x: Tensor,
    dtype: torch.dtype,
    stochastic_rounding: bool = False,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Calls `plain_cast`, by the name that TileKernels has for it.

    Args:
        x, dtype, stochastic_rounding, seed: As in `plain_cast`.

    Returns:
        A tensor like `x` in that dtype, contiguous.

    Example:
        >>> cast(torch.tensor([1.25]), torch.bfloat16, stochastic_rounding=True).tolist()
        [1.25]
    """
    return plain_cast(x, dtype, stochastic_rounding, seed=seed)
