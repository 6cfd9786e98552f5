"""Plain language: homemade words stay out of documents, docstrings, comments and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks", "docs", "examples", "tile_kernels", "tools")
SOURCES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))

# Words and what to write instead. Identifiers are not looked at.
WORDS = {
    r"roads?": "path",
    r"(?<!this )(?<!same )ways?": "path, dispatch, variant, or name the mechanism",
    r"journeys?": "pipeline",
    r"(?<!hugging )faces?": "public wrapper",
    r"look of": "cache key",
    r"written down": "recorded",
    r"watch(es|ed)?": "record, trace",
    r"in words": "with a clear error message",
    r"says it better": "with a clear error message",
    r"mend(s|ed|ing)?": "fix",
    r"oracles?": "reference",
    r"behind its back": "name the mechanism",
    r"quickest": "fastest",
    r"in (fours|eights|sixteens)": "4, 8, 16 values at a time",
    r"not to be had": "not available",
    r"of no more use": "cannot be used",
    r"comparing notes": "exchange of descriptors",
    r"very same": "same",
}
PATTERN = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), flags=re.I)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and messages of a module, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def prose(text: str) -> str:
    """A text on one line, with blanks in the place of code between backquotes."""
    return re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), re.sub(r"\s", " ", text))


def found(path: Path) -> list[str]:
    """Where a document or a module uses one of the words, also across the end of a line."""
    text = path.read_text()
    parts = texts(text) if path.suffix == ".py" else [(1, text)]
    return [
        f"{path.relative_to(ROOT)}:{line + part.count(chr(10), 0, match.start())}: {match[0]!r}"
        for line, part in parts
        for match in PATTERN.finditer(prose(part))
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_use_plain_words(path: Path) -> None:
    assert not found(path), found(path)


def test_sources_use_plain_words() -> None:
    assert len(SOURCES) > 500
    uses = [use for path in SOURCES for use in found(path)]
    assert not uses, "\n".join(uses)


def test_words_are_found() -> None:
    """In every kind of text, and in no identifier."""
    source = """way = 1  # a road
'''Refused in
words; `way` is code.'''
raise ValueError(f"of no more use: {way}")
"""
    hits = [(line, PATTERN.findall(prose(text))) for line, text in texts(source)]
    assert [(line, len(words)) for line, words in hits] == [(1, 1), (2, 1), (4, 1)]
    assert not PATTERN.search("Hugging Face, away, always, surfaces, recommended, in this way")
