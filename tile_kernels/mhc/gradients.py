"""What operators of mHC with a gradient share: how a call is saved, and checks of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.runtime.cases import Cost


def differentiated_by(formula: Callable[..., Any]) -> Any:
    """The `backward` and `setup_context` of an operator whose tensors come before its numbers.

    `formula(grads, tensors, numbers)` gives the gradients of all tensors from those of the results.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.numbers = inputs[len(tensors) :]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = formula(grads, ctx.saved_tensors, ctx.numbers)
        found = (found,) if isinstance(found, Tensor) else found
        return *found, *(None,) * len(ctx.numbers)

    return {"backward": backward, "setup_context": save}


def bytes_per_element(name: str, count: int) -> Callable[..., Cost]:
    """The cost of an operator that moves `count` bytes for each element of the argument `name`."""
    return lambda **given: Cost(bytes=count * given[name].numel())


def check_like(
    name: str,
    value: Tensor,
    other: tuple[str, Tensor],
    *,
    dims: tuple[str, str] = shapes.STREAMS,
    contiguous: bool = False,
) -> None:
    """Checks that `value` has the dtype and the shape of another argument, `(name, tensor)`."""
    like, tensor = other
    shapes.tensor(
        name, value, dims, tensor.dtype, like=(like, tensor.shape[:-2]),
        sizes=tuple(tensor.shape[-2:]), contiguous=contiguous,
    )  # fmt: skip
