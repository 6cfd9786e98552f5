"""Operators of this package in models of Hugging Face transformers.

    from tile_kernels.integrations.transformers import apply, revert

    report = apply(model)  # routers, experts, SwiGLU, RMS norms, hyper-connections
    print(report)          # what was replaced, and what was not and why
    revert(model)

`register_experts` alone offers the experts under transformers' own mechanism, for every
mixture-of-experts model: `from_pretrained(..., experts_implementation="tile_kernels")`.
`register_kernels` offers the RMS norm under its mechanism for kernels of the hub:
`from_pretrained(..., use_kernels=True)`.
"""

from tile_kernels.integrations.transformers.adapter import KINDS, Left, Report, apply, revert
from tile_kernels.integrations.transformers.experts import EXPERTS, register_experts
from tile_kernels.integrations.transformers.kernels import register_kernels

__all__ = [
    "EXPERTS",
    "KINDS",
    "Left",
    "Report",
    "apply",
    "register_experts",
    "register_kernels",
    "revert",
]
