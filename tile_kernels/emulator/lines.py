"""From a line of the generated source to the line of the Python kernel it came from.

TileLang stamps every statement with its Python line and can write these as `#line` directives. The
directives are taken out of the source again, so that what is compiled is the shipped text, and kept
as a `LineMap`, which `places.find` reads. The text of this file is part of the key of all cached
lowerings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = -1  # file index of TileLang's own Python files
DIRECTIVES = "tl.emit_line_directives"
_DIRECTIVE = re.compile(r'\s*#line (\d+) "(.*)"\s*$')


@dataclass(frozen=True)
class LineMap:
    """`marks`: (generated line from 0, index into `files` or LIBRARY, Python line)."""

    files: tuple[str, ...] = ()
    marks: tuple[tuple[int, int, int], ...] = ()
    statements: tuple[tuple[int, int], ...] = ()  # of the prim_func: index into `files`, line

    def shifted(self, files: Sequence[str], by: Sequence[int]) -> LineMap:
        """The same marks in files of other names, with all lines of a file moved."""
        moved = tuple((g, f, n if f == LIBRARY else n + by[f]) for g, f, n in self.marks)
        return LineMap(tuple(files), moved, tuple((f, n + by[f]) for f, n in self.statements))


NOTHING = LineMap()


def supported() -> bool:
    """Whether the installed TileLang writes line directives."""
    import tilelang

    return hasattr(tilelang.PassConfigKey, "TL_EMIT_LINE_DIRECTIVES")


def python_lines(prim_func: Any) -> dict[str, list[int]]:
    """The Python files of a prim_func, with the lines of its statements in order."""
    if not supported():
        return {}
    from tilelang import tvm
    from tilelang.ir import get_prim_func_span, get_stmt_span

    found: dict[str, list[int]] = {}

    def note(span: Any) -> None:
        if span is not None:
            found.setdefault(str(span.source_name.name), []).append(int(span.line))

    def visit(node: Any) -> None:
        if isinstance(node, tvm.tirx.Stmt):
            note(get_stmt_span(node))

    note(get_prim_func_span(prim_func))
    tvm.tirx.stmt_functor.post_order_visit(prim_func.body, visit)
    library = _library()
    return {f: lines for f, lines in found.items() if not f.startswith(library)}


def take_out(source: str, python: Mapping[str, Sequence[int]]) -> tuple[str, LineMap]:
    """The source without its line directives, and what they said.

    `python` are the `python_lines` of the prim_func.
    """
    files = list(python)
    kept: list[str] = []
    marks: list[tuple[int, int, int]] = []
    for line in source.splitlines(keepends=True):
        m = _DIRECTIVE.match(line)
        if m is None:
            kept.append(line)
            continue
        mark = (len(kept), files.index(m[2]) if m[2] in files else LIBRARY, int(m[1]))
        if marks and marks[-1][0] == mark[0]:
            marks.pop()
        marks.append(mark)
    statements = tuple((f, n) for f, file in enumerate(files) for n in sorted(set(python[file])))
    return "".join(kept), LineMap(tuple(files), tuple(marks), statements)


@functools.lru_cache(maxsize=1)
def _library() -> str:
    import tilelang

    return str(Path(tilelang.__file__).parent)
