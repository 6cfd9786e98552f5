"""Kernels that write rows into the memory of other ranks, through a table of their addresses."""
