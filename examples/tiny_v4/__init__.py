"""A small language model made of everything in this library; `make demo` trains it."""
