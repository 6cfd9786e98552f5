"""The commands of `tile-kernels`, one file for each or for a few that share functions."""
