"""Argument sets of the MoE operators, for tests, benchmarks and warm-up."""
