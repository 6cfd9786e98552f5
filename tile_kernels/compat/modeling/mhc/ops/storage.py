"""One gradient of a residual, shared by three functions through an attribute of its storage.

`mhc_post`, `mhc_pre_apply_mix` and `mhc_pre_norm_fn` all read the residual. Backward, the first of
them to run makes the gradient and leaves it on the storage of the residual; the others add to it in
place. Autograd sees one gradient, which is complete before anyone reads it, as long as no one else
reads the residual. `tile_kernels.modeling.mhc` does not need that condition.
"""

from __future__ import annotations

import torch
from torch import Tensor

ATTRIBUTE = "grad_from_mhc_post"


def leave(residual: Tensor, grad: Tensor) -> None:
    """Put `grad` where the others will look for it; a compiled graph leaves nothing."""
    if not torch.compiler.is_compiling():
        setattr(residual.untyped_storage(), ATTRIBUTE, grad.view(-1, *residual.shape[-2:]))


def find(residual: Tensor) -> Tensor | None:
    """The gradient that was left, with the shape of `residual`, or None."""
    if torch.compiler.is_compiling():
        return None
    grad = getattr(residual.untyped_storage(), ATTRIBUTE, None)
    if grad is None:
        return None
    fits = grad.numel() == residual.numel() and grad.dtype == residual.dtype
    if not (fits and grad.is_contiguous() and grad.device == residual.device):
        raise ValueError(
            f"{ATTRIBUTE}, on the storage of the residual, must be packed {residual.dtype} of "
            f"{residual.numel()} elements on {residual.device}, got {grad.dtype} "
            f"{list(grad.shape)} with strides {grad.stride()} on {grad.device}"
        )
    return grad.view(residual.shape)


def remove(residual: Tensor) -> None:
    """The gradient is complete: no one adds to it any more."""
    delattr(residual.untyped_storage(), ATTRIBUTE)
