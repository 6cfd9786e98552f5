"""TileLang kernels of the attention operators; imported at the first launch."""
