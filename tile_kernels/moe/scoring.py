"""How a gate turns logits into scores; defined beside the oracles."""

from tile_kernels.torch.scoring import ScoringFunc

__all__ = ["ScoringFunc"]
