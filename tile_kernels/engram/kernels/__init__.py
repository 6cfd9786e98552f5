"""TileLang kernels of the Engram operators; imported at the first launch."""
