"""Products of the rows of all experts as one operator, which `torch.compile` does not look into.

Traced by Inductor, `torch._grouped_mm` depends on what that version of PyTorch generates for it,
and a loop over experts has sizes that are known only when it runs. As a custom op both are one node
with a known shape, on every device and for every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CAPABILITIES: dict[int, tuple[int, int]] = {}


def compute_capability(x: Tensor) -> tuple[int, int]:
    """The compute capability of the GPU of `x`, which PyTorch takes some microseconds to find."""
    if torch.compiler.is_compiling():  # where a table would be part of what is traced
        return torch.cuda.get_device_capability(x.device)
    index = x.get_device()
    found = _CAPABILITIES.get(index)
    if found is None:
        found = _CAPABILITIES[index] = torch.cuda.get_device_capability(index)
    return found


def grouped_mm_is_available(x: Tensor) -> bool:
    """Whether PyTorch multiplies all experts in one launch for such rows.

    Meta tensors stand for those of a GPU that can.
    """
    if x.dtype is not torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return x.is_meta or (x.is_cuda and compute_capability(x) >= (9, 0))


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each group with its matrix, or sums products over them.

    Args:
        a: `[num_rows, K]`, or `[M, num_rows]`.
        b: `[num_groups, K, N]`, or `[num_rows, N]`.
        ends: `[num_groups]`, int32: one past the last row of each group.

    Returns:
        `[num_rows, N]`, where rows behind the last end are undefined; or `[num_groups, M, N]`.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.tile_kernels.grouped_product(a, b, ends)
        return result
    return _multiply(a, b, ends)


def _multiply(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """In one launch where PyTorch can; else group by group, for which the host reads `ends`."""
    if grouped_mm_is_available(a):
        multiply: Callable[..., Tensor] = torch._grouped_mm
        return multiply(a, b, offs=ends)
    last = ends.tolist()
    ranges = list(zip([0, *last], last))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in ranges])
    out = a.new_zeros(a.shape[0], b.shape[2])
    for (start, end), matrix in zip(ranges, b):
        torch.mm(a[start:end], matrix, out=out[start:end])
    return out


_op = torch.library.custom_op("tile_kernels::grouped_product", _multiply, mutates_args=())


@_op.register_fake
def _shape(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 2:
        return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, ends = ctx.saved_tensors
    grad = grad.contiguous()
    if b.dim() == 2:
        grad_a = _op(b, grad.transpose(1, 2), ends).t()
        grad_b = _op(a.t(), grad, ends)
    else:
        grad_a = _op(grad, b.transpose(1, 2), ends)
        grad_b = _op(a.t(), grad, ends)
    return grad_a, grad_b, None


_op.register_autograd(_gradients, setup_context=_save)
