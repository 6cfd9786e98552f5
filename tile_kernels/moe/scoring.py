"""How a gate turns logits into scores; defined beside the references."""

from tile_kernels.torch.scoring import ScoringFunc

__all__ = ["ScoringFunc"]
