"""Adapters for other frameworks; each module serves one, and is imported by its own name."""
