"""Attention over long contexts: keys and values compressed by windows, and choosing among them."""

__all__: list[str] = []
