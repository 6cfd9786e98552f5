"""The Python line behind a line of the compiled text.

Not every generated line has a mark in its `LineMap`: barriers that TileLang inserted, guards, the
conditions of loops, and the bodies of library operations such as `T.gemm` or `T.reduce_sum` are
attributed here by the code around them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import linecache
import re
from dataclasses import dataclass

from .lines import LIBRARY, LineMap

_STATEMENT = re.compile(r"(__sync|tl::|if \(|for \(|while \(|#pragma|}|\w+\[\d+\]\.\w+\()")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Place:
    """A Python line. `exact` is False when the generated line only follows code from it."""

    file: str
    line: int
    text: str
    exact: bool

    def __str__(self) -> str:
        return f"{'' if self.exact else 'after '}{self.file}:{self.line}: {self.text}"


def find(line_map: LineMap, source: str, edited: str, number: int) -> Place | None:
    """The Python line behind a line of the compiled text.

    Args:
        line_map: of `source`.
        source: generated source, without directives.
        edited: the text that was compiled: `source` with other declarations, perhaps mutated.
        number: line of `edited`, from 1.
    """
    if not line_map.marks:
        return None
    index = _original(source.splitlines(), edited.splitlines(), number - 1)
    if index is None or not 0 <= index < len(source.splitlines()):
        return None
    return _Finder(line_map, source).find(index)


def _original(before: list[str], after: list[str], index: int) -> int | None:
    """Which line of `before` is line `index` of `after`, or stands in its place."""
    tail = 0
    while tail < min(len(before), len(after)) and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    if len(after) - index <= tail:
        return index + len(before) - len(after)
    head, rest = before[: len(before) - tail], after[: len(after) - tail]
    matcher = difflib.SequenceMatcher(None, head, rest, autojunk=False)
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        if b0 <= index < b1:
            if tag == "equal":
                return a0 + index - b0
            return min(a0 + index - b0, max(a0, a1 - 1)) if a1 > a0 else max(0, a0 - 1)
    return None


class _Finder:
    """Attribution inside one generated source."""

    def __init__(self, line_map: LineMap, source: str) -> None:
        self.files, self.lines = line_map.files, source.splitlines()
        self.marks = {g: (f, n) for g, f, n in line_map.marks}
        # A directive before `#pragma unroll` is one for the loop below it, too.
        for g, f, n in line_map.marks:
            if g + 1 < len(self.lines) and self.lines[g].strip().startswith("#pragma"):
                self.marks.setdefault(g + 1, (f, n))
        self.heads = {  # a kernel's first mark is that of the whole function
            next((g for g in sorted(self.marks) if g > i), -1)
            for i, text in enumerate(self.lines)
            if "__global__" in text and text.rstrip().endswith("{")
        }
        self.user = sorted(g for g, (f, _) in self.marks.items() if f != LIBRARY)
        marked = {self.marks[g] for g in self.marks if g not in self.heads}
        self.unmarked = [place for place in line_map.statements if place not in marked]

    def find(self, index: int) -> Place | None:
        if index in self.marks and index not in self.heads:
            return self._at(index, exact=True)
        text = self.lines[index].strip()
        loop = self._loop(index)
        if loop is not None:
            return loop
        if text.startswith("if ("):
            inner = self._next_in_block(index)
            if inner is not None:
                return self._condition(index, inner)
        previous = max((g for g in self.marks if g < index), default=-1)
        lost = index in self.heads or previous in self.heads
        if not _STATEMENT.match(text) and not lost:
            return self._before(index, exact=True)  # a further line of one statement
        named = self._by_names(index)
        if named is not None:
            return named
        opener = self._opener(index)
        if opener is not None:
            if opener in self.marks:
                return self._at(opener, exact=True)
            inner = self._next_in_block(opener)
            if inner is not None and not any(opener < g < index for g in self.marks):
                return self._at(inner, exact=True)
        return self._before(index)

    def _at(self, index: int, *, exact: bool) -> Place | None:
        f, line = self.marks[index]
        if f == LIBRARY:
            return self._library_call(index, exact)
        return _place(self.files[f], line, exact)

    def _by_names(self, index: int) -> Place | None:
        """For a line whose mark was lost: the statement without a mark that shares its names."""
        words = {re.sub(r"(_desc|_\d+)$", "", w) for w in _NAME.findall(self.lines[index])}
        best, found = 0, None
        for f, line in self.unmarked:
            place = _place(self.files[f], line, True)
            names = set(_NAME.findall(place.text)) - {"T", "if", "for", "in"}
            if place.text and len(names & words) > best and not place.text.startswith("def "):
                best, found = len(names & words), place
        return found

    def _indent(self, index: int) -> int:
        return len(self.lines[index]) - len(self.lines[index].lstrip())

    def _before(self, index: int, *, exact: bool = False) -> Place | None:
        mark = max((g for g in self.marks if g < index), default=None)
        return None if mark is None else self._at(mark, exact=exact)

    def _opener(self, index: int) -> int | None:
        """The line that opens the block around a line."""
        own = self._indent(index)
        for i in range(index - 1, -1, -1):
            if self.lines[i].rstrip().endswith("{") and self._indent(i) < own:
                return i
        return None

    def _next_in_block(self, opener: int) -> int | None:
        for i in range(opener + 1, len(self.lines)):
            if i in self.marks:
                return i
            if self.lines[i].strip() and self._indent(i) <= self._indent(opener):
                return None
        return None

    def _loop(self, index: int) -> Place | None:
        """A line between the head of a `while` and its body: the Python line of the loop.

        TileLang writes a condition that needs statements as the first part of an endless loop.
        """
        head: int | None = index
        while head is not None and not self.lines[head].strip().startswith("while ("):
            head = self._opener(head)
        if head is None:
            return None
        inner = self._next_in_block(head)
        body = None if inner is None or inner < index else self._at(inner, exact=True)
        return None if body is None else self._around(body, ast.While)

    def _condition(self, index: int, inner: int) -> Place | None:
        """A branch: the Python `if` around its body, where that reads what the condition reads."""
        body = self._at(inner, exact=True)
        read = {m[1] for m in re.finditer(r"(\w+)\[", self.lines[index])}
        return body and (self._around(body, ast.If, read) or body)

    def _around(
        self, body: Place, kind: type[ast.If | ast.While], read: set[str] | None = None
    ) -> Place | None:
        """The innermost statement around a line, one whose condition reads some of the names."""
        tree = _parsed(body.file)
        around = [
            node.lineno
            for node in (ast.walk(tree) if tree else ())
            if isinstance(node, kind)
            and node.body[0].lineno <= body.line <= (node.body[-1].end_lineno or 0)
            and (
                read is None
                or read & {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
            )
        ]
        return _place(body.file, max(around), True) if around else None

    def _library_call(self, index: int, exact: bool) -> Place | None:
        """The Python statement that called the library operation which wrote this line."""
        before = max((g for g in self.user if g < index), default=None)
        after = min((g for g in self.user if g > index), default=None)
        anchor = before if before is not None else after
        if anchor is None:
            return None
        f, line = self.marks[anchor]
        calls = _calls(self.files[f], line)
        marked = {self.marks[g] for g in self.user if not self.lines[g].strip().startswith("for")}
        calls = [c for c in calls if (f, c[0]) not in marked] or calls
        if not calls:
            return self._at(anchor, exact=False)
        first = 0 if before is None else before + 1
        region = self.lines[first : len(self.lines) if after is None else after]
        words = {re.sub(r"_\d+$", "", w) for text in region for w in _NAME.findall(text)}
        here = {re.sub(r"_\d+$", "", w) for w in _NAME.findall(self.lines[index])}

        def score(call: tuple[int, frozenset[str]]) -> tuple[int, int, int]:
            number, names = call
            distance = abs(number - line) + (1000 if number < line else 0)
            return 2 * len(names & here) + len(names & words), -len(names - words), -distance

        return _place(self.files[f], max(calls, key=score)[0], exact)


def _place(file: str, line: int, exact: bool) -> Place:
    return Place(file, line, linecache.getline(file, line).strip(), exact)


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _parsed(file: str) -> ast.Module | None:
    return _parse("".join(linecache.getlines(file)))


def kernel_range(file: str, line: int) -> tuple[int, int] | None:
    """First and last line of the outermost function around a line."""
    tree = _parsed(file)
    around = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not around:
        return None
    outer = min(around, key=lambda node: node.lineno)
    first = min([outer.lineno, *(d.lineno for d in outer.decorator_list)])
    return first, outer.end_lineno or first


def _calls(file: str, line: int) -> list[tuple[int, frozenset[str]]]:
    """Lines of the statements with a call in the innermost function around a line, and names."""
    tree = _parsed(file)
    functions = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not functions:
        return []
    inner = max(functions, key=lambda node: node.lineno)
    found = []
    for node in ast.walk(inner):
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and any(
            isinstance(n, ast.Call) for n in ast.walk(node)
        ):
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"T"}
            found.append((node.lineno, frozenset(names)))
    return found
