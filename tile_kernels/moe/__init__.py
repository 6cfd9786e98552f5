"""Expert gating and token routing."""

from tile_kernels.moe.gating import topk_gate

__all__ = ["topk_gate"]
