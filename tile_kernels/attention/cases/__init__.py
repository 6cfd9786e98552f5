"""Argument sets of the attention operators, for tests, benchmarks and warm-up."""
