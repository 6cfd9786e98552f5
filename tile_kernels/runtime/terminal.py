"""Tables and progress bars; rich is only loaded when one is shown."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Column = tuple[str, str]  # a heading and how its cells are justified: left, right or center


def console() -> Any:
    """The terminal; wide enough for tables where the output is a file."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def show_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.show_header = any(heading for heading, _ in columns)
    for heading, justify in columns:
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    console().print(table)


@contextlib.contextmanager
def progress_bar(total: float, what: str) -> Iterator[Callable[..., None]]:
    """A progress bar with an estimate of the time left; lines on stderr where none can be drawn.

    Call what it yields with a label, and with the share of `total` that is done (default 1).
    """
    shown = console()
    if not shown.is_terminal:
        yield _progress_lines(total, what)
        return
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn(f"[bold]{what}[/]"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("left:"),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.description}"),
    )
    with rich_progress.Progress(
        *columns, console=shown, transient=True, speed_estimate_period=120
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda label, share=1: progress.update(task, advance=share, description=label)


_SECONDS_PER_LINE = 30


def _progress_lines(total: float, what: str) -> Callable[..., None]:
    started = written = time.monotonic()
    done = 0.0

    def advance(_label: str, share: float = 1) -> None:
        nonlocal written, done
        done += share
        now = time.monotonic()
        if now - written >= _SECONDS_PER_LINE:
            written, spent = now, now - started
            left = spent * (total - done) / done if done else 0.0
            text = f"{100 * done / total:.0f} % after {spent:.0f} s, about {left:.0f} s left"
            print(f"{what}: {text}", file=sys.stderr, flush=True)  # noqa: T201

    return advance


def need_matplotlib() -> None:
    """Raise before a long command whose last step would draw."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'moe-tile-kernels[bench]'")
