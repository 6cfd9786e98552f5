"""A failure as one HTML page: the Python source with the faulty lines, barriers, shared memory.

The page needs nothing else: no scripts, no network. `Emulated` writes it for the option `report`.
"""

from __future__ import annotations

import html
import linecache
from collections.abc import Sequence
from pathlib import Path

from . import places
from .errors import BarrierEvent, EmulationError, SharedPart

AROUND = 14  # lines shown before and after a marked one
_SHOWN_EVENTS = 46  # fit the width of the page
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2230; --soft: #5d6678; --paper: #fff; --line: #d8dce5;
  --code: #f6f7fa; --bad: #c62828; --bad-back: #fde8e6; --other: #a05a00; --other-back: #fdf0d8;
  --good: #2e6fb7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ee; --soft: #9aa3b5; --paper: #171a21;
  --line: #343a47; --code: #1e222b; --bad: #ff8a80; --bad-back: #46211f; --other: #ffc46b;
  --other-back: #40331a; --good: #7db4f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 68rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.kind { color: var(--bad); }
.soft { color: var(--soft); }
.box { border: 1px solid var(--line); border-radius: 6px; overflow-x: auto;
  background: var(--code); }
table.code { border-collapse: collapse; width: 100%; font: 13px/1.55 ui-monospace, monospace; }
table.code td { padding: 0 .6rem; white-space: pre; }
table.code td:first-child { color: var(--soft); text-align: right; user-select: none; width: 1%; }
tr.bad td { background: var(--bad-back); }
tr.bad td:first-child { color: var(--bad); font-weight: 700; box-shadow: inset 3px 0 var(--bad); }
tr.other td { background: var(--other-back); }
tr.other td:first-child { color: var(--other); font-weight: 700;
  box-shadow: inset 3px 0 var(--other); }
tr.gap td { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .6rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.bad-text { color: var(--bad); font-weight: 600; }
.other-text { color: var(--other); font-weight: 600; }
svg { display: block; overflow: visible; }
svg svg { overflow: hidden; }
.map { padding: 0 .7rem; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .small { fill: var(--soft); font-size: 11px; }
pre { margin: 0; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12px/1.5 ui-monospace, monospace; }
"""


def write(error: EmulationError, path: Path) -> Path:
    """Write the page of a failure; `html` stands for a name from the kernel and the failure."""
    if path == Path("html"):
        path = Path(f"{error.kernel}-{error.kind.replace(' ', '-')}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(error))
    return path


def render(error: EmulationError) -> str:
    """The page of a failure, as HTML."""
    sentence = error.message.splitlines()[0]
    kind, kernel = _text(error.kind), _text(error.kernel or "a kernel")
    sections = [
        f"<h1><span class='kind'>{kind}</span> in {kernel}</h1>",
        f"<p>{_text(sentence)}</p>",
        _facts(error),
        _source(error),
        _timeline(error),
        _shared(error),
        _generated(error),
    ]
    return (
        "<!doctype html>\n<html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{kind} in {kernel}</title>"
        f"<style>{_STYLE}</style>\n<body>\n"
        + "\n".join(s for s in sections if s)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _where(file: str | None, line: int | None, text: str | None, style: str) -> str:
    if file is None:
        return ""
    name = f"{Path(file).name}:{line}"
    return f"<span class='{style}'>{_text(name)}</span> <code>{_text(text)}</code>"


def _facts(e: EmulationError) -> str:
    """The two accesses, and who, where."""
    facts = [
        ("this access", _where(e.python_file, e.python_line, e.python_text, "bad-text")),
        (
            "the other access",
            _where(e.other_python_file, e.other_python_line, e.other_python_text, "other-text"),
        ),
        ("block", _text(e.block) if e.block else ""),
        ("thread", _text(e.thread) if e.thread else ""),
    ]
    if e.buffer is not None:
        facts.append(("buffer", f"{_text(e.buffer)}, element {e.element}, byte {e.byte_offset}"))
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in facts if v) + "</dl>"


# ---- the Python source -------------------------------------------------------------------------


def _source(e: EmulationError) -> str:
    if e.python_file is None or e.python_line is None:
        return ""
    parts = [_listing(e, e.python_file, e.python_line)]
    if e.other_python_file not in {None, e.python_file} and e.other_python_line is not None:
        parts.append(_listing(e, str(e.other_python_file), e.other_python_line))
    return "".join(parts)


def _listing(e: EmulationError, file: str, line: int) -> str:
    text = linecache.getlines(file)
    first, last = places.kernel_range(file, line) or (line - AROUND, line + AROUND)
    marks = {
        n: style
        for f, n, style in (
            (e.other_python_file, e.other_python_line, "other"),
            (e.python_file, e.python_line, "bad"),
        )
        if f == file and n is not None
    }
    shown = [
        n
        for n in range(max(1, first), min(last, len(text)) + 1)
        if last - first < 4 * AROUND or any(abs(n - m) <= AROUND for m in marks) or n == first
    ]
    rows, before = [], None
    for n in shown:
        if before is not None and n != before + 1:
            rows.append("<tr class='gap'><td>⋮</td><td></td></tr>")
        style = f" class='{marks[n]}'" if n in marks else ""
        rows.append(f"<tr{style}><td>{n}</td><td>{_text(text[n - 1].rstrip())}</td></tr>")
        before = n
    return (
        f"<h2>{_text(Path(file).name)}</h2><p class='soft'>{_text(file)}</p>"
        f"<div class='box'><table class='code'>{''.join(rows)}</table></div>"
    )


def _generated(e: EmulationError) -> str:
    if e.source_file is None:
        return ""
    text = f"{e.source_file}:{e.source_line}\n{e.source_text}"
    if e.other_text:
        text += f"\n\nconflicts with line {e.other_line}\n{e.other_text}"
    return (
        f"<h2>Generated source</h2><div class='box'><pre>{_text(text)}</pre></div>"
        f"<details><summary>Full message</summary><pre>{_text(e.message)}</pre></details>"
    )


# ---- barriers ----------------------------------------------------------------------------------


def _timeline(e: EmulationError) -> str:
    """Warps downwards, barriers to the right in the order in which they happened."""
    events = e.barriers[-_SHOWN_EVENTS:]
    if not events:
        return (
            "<h2>Barriers</h2><p class='soft'>No thread of this block had met a barrier.</p>"
            if e.block is not None
            else ""
        )
    warps = sorted({v.warp for v in events if v.warp >= 0})
    own = None if e.thread is None else e.warp
    if own is not None and own not in warps:
        warps = sorted([*warps, own])
    step, left, top, row = 20, 70, 34, 24
    width = left + step * (len(events) + 1) + 20
    bottom = top + row * len(warps)
    rows = [(w, top + row * i + 10) for i, w in enumerate(warps)]
    out = [
        f"<line x1='{left - 8}' x2='{width - 10}' y1='{y}' y2='{y}' stroke='var(--line)'/>"
        f"<text x='4' y='{y + 4}'>warp {w}</text>"
        for w, y in rows
    ]
    for i, v in enumerate(events):
        out.append(_event(v, left + step * i + 8, top, bottom, row, warps))
    if own is not None:
        x, y = left + step * len(events) + 8, top + row * warps.index(own) + 10
        out.append(
            f"<path d='M{x - 5},{y - 5} l10,10 m0,-10 l-10,10' stroke='var(--bad)' "
            "stroke-width='2.5'><title>the reported access</title></path>"
        )
    skipped = len(e.barriers) - len(events)
    note = f" The first {skipped} events are left out." if skipped else ""
    return (
        "<h2>Barriers of this block</h2><p class='soft'>Dots: a warp arrives; rings: it waits; "
        "vertical lines: the barrier completes; the cross: the reported access. "
        f"Point at one to see its line.{note}</p><div class='box'>"
        f"<svg width='{width}' height='{bottom + 8}' role='img' aria-label='timeline of barriers'>"
        + "".join(out)
        + "</svg></div>"
    )


def _event(v: BarrierEvent, x: int, top: int, bottom: int, row: int, warps: Sequence[int]) -> str:
    title = f"<title>{_text(v)}</title>"
    if v.what == "completes":
        return (
            f"<g><line x1='{x}' x2='{x}' y1='{top - 6}' y2='{bottom}' stroke='var(--good)' "
            f"stroke-width='2'/><text class='small' x='{x}' y='{top - 12}' text-anchor='middle'>"
            f"{_text(v.barrier)}</text>{title}</g>"
        )
    y = top + row * warps.index(v.warp) + 10
    fill = "var(--paper)" if v.what == "waits" else "var(--good)"
    return (
        f"<circle cx='{x}' cy='{y}' r='5' fill='{fill}' stroke='var(--good)' stroke-width='2'>"
        f"{title}</circle>"
    )


# ---- shared memory -----------------------------------------------------------------------------


def _shared(e: EmulationError) -> str:
    """Where TileLang has put the buffers; those that overlap are drawn below each other."""
    if not e.shared:
        return ""
    end = max(p.offset + p.size for p in e.shared)
    row = 38
    lanes: list[int] = []  # where each lane is free from
    out = []
    for part in sorted(e.shared, key=lambda p: (p.offset, -p.size)):
        lane = next((i for i, free in enumerate(lanes) if free <= part.offset), len(lanes))
        lanes[lane : lane + 1] = [part.offset + part.size]
        out.append(_part(part, e, end, 8 + row * lane))
    height = 8 + row * len(lanes) + 18
    out.append(f"<text class='small' y='{height - 6}'>byte 0</text>")
    out.append(f"<text class='small' x='100%' y='{height - 6}' text-anchor='end'>byte {end}</text>")
    return (
        "<h2>Shared memory</h2><p class='soft'>Buffers at the places TileLang gives them; what is "
        "below each other shares its bytes over time.</p><div class='box map'>"
        f"<svg width='100%' height='{height}' role='img' aria-label='map of shared memory'>"
        + "".join(out)
        + "</svg></div>"
    )


def _part(part: SharedPart, e: EmulationError, end: int, y: int) -> str:
    """A buffer, at its share of the page's width. Its name is cut off where it does not fit."""
    named = e.buffer is not None and part.name in e.buffer.split("/")
    colour = "var(--bad)" if named else "var(--good)"
    label = f"{part.name} ({part.size} bytes)"
    x, width = (f"{100 * n / max(end, 1):.2f}%" for n in (part.offset, part.size))
    out = (
        f"<g><title>{_text(label)}: bytes {part.offset} to {part.offset + part.size - 1}</title>"
        f"<rect x='{x}' y='{y}' width='{width}' height='28' fill='var(--code)' "
        f"stroke='{colour}' stroke-width='1.5'/>"
        f"<svg x='{x}' y='{y}' width='{width}' height='28'><text x='6' y='18'>{_text(label)}</text>"
        "</svg>"
    )
    if named and e.byte_offset is not None and 0 <= e.byte_offset < part.size:
        at = f"{100 * (part.offset + e.byte_offset) / max(end, 1):.2f}%"
        out += (
            f"<line x1='{at}' x2='{at}' y1='{y - 4}' y2='{y + 32}' stroke='{colour}' "
            "stroke-width='3'/>"
        )
    return out + "</g>"
