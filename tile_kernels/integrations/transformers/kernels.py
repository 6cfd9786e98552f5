"""RMS norms of this package under transformers' mechanism for kernels of its hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.integrations.transformers import forwards
from tile_kernels.quant.norm.plan import MAX_WIDTH
from tile_kernels.runtime import checks

LAYER = "RMSNorm"  # the name under which classes of transformers ask for a kernel
_DEVICES = ("cuda", "cpu")
_DTYPES = (torch.bfloat16, torch.float32)


class RMSNormLayer(nn.Module):
    """A forward for transformers' RMS norms; it has no state and no other members.

    Rows of another dtype than the weight, of float16 or with more channels than
    `quant.norm_forward` takes keep the forward of their class.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The norm, rounded once."""
        weight: Any = self.weight
        dtype = hidden_states.dtype
        taken = dtype in _DTYPES and dtype == weight.dtype and weight.shape[0] <= MAX_WIDTH
        result: Tensor = (forwards.rms if taken else type(self).forward)(self, hidden_states)
        return result


class _Repository:
    """What `kernels` loads a layer from: here without the network."""

    layer_name = LAYER

    def load(self) -> type[nn.Module]:
        return RMSNormLayer

    def __str__(self) -> str:
        return f"tile_kernels, layer `{LAYER}`"


def register_kernels(devices: Sequence[str] = ("cuda",)) -> str:
    """Registers the RMS norm of this package with transformers' mechanism for kernels.

    Any model of transformers whose norms ask the hub for `RMSNorm` uses it then where it is told to
    use kernels: `from_pretrained(..., use_kernels=True)` or `model.set_use_kernels(True)`. Nothing
    is downloaded for it; other layers of the model keep transformers' kernels. It needs the package
    `kernels`, in the version that transformers asks for. `apply` does not need this.

    Args:
        devices: The types of device, `"cuda"` or `"cpu"`.

    Returns:
        The name of the layer, `"RMSNorm"`.

    Raises:
        ImportError: If `transformers` or `kernels` is not installed.
        ValueError: If a type of device is another one.
    """
    with checks.named("register_kernels"):
        for device in devices:
            checks.one_of("devices", device, _DEVICES)
    try:
        from kernels import Mode
        from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
    except ImportError as error:
        transformers: Any = sys.modules.get("transformers")
        version = getattr(transformers, "__version__", "none")
        raise ImportError(
            "register_kernels: needs transformers and the version of kernels that it asks for, got "
            f"transformers {version}: pip install 'transformers[kernels]'"
        ) from error
    mapping = get_kernel_mapping_transformers()
    for device in devices:
        mapping.setdefault(LAYER, {})[device] = {
            Mode.TRAINING: _Repository(), Mode.INFERENCE: _Repository(),
        }  # fmt: skip
    return LAYER
