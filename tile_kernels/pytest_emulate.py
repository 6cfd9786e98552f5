"""Pytest plugin: `pytest --emulate` runs tests of TileLang kernels on a machine without a GPU.

Installing the package registers it. Without `--emulate` it does nothing and imports nothing. With
it, tests of any project see a CUDA device that the emulator plays: kernels are executed on the CPU,
every memory access checked, and tests marked as needing a GPU are not skipped. Under pytest-xdist
each worker emulates for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest

_SESSION = pytest.StashKey[Any]()  # a tile_kernels.emulator.jit.Session
_OPEN = pytest.StashKey[contextlib.ExitStack]()
_MARKERS = ("gpu", "cuda", "tensorcore")  # that TileLang's test helpers add


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the emulator, beside `--emulate` itself."""
    group = parser.getgroup("emulate", "TileLang kernels on the CPU")
    group.addoption("--emulate", action="store_true", help="run TileLang kernels on the CPU")
    group.addoption("--emulate-mode", choices=("check", "fast"), default="check",
                    help="check every memory access (default), or results only")  # fmt: skip
    group.addoption("--emulate-arch", default="sm_90a", metavar="SM",
                    help="architecture that tests find (default: sm_90a)")  # fmt: skip
    group.addoption("--emulate-order", choices=("forward", "reverse", "random"), default="forward",
                    help="order in which threads and blocks run")  # fmt: skip
    text = "the autotuner's configuration (default: the first that compiles)"
    group.addoption("--emulate-config", type=int, metavar="N", help=text)
    group.addoption("--emulate-report", choices=("html",),
                    help="write a page about each kernel that fails")  # fmt: skip
    group.addoption("--emulate-time-limit", type=float, default=0.0, metavar="S",
                    help="seconds after which a test fails (default: none)")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Patch PyTorch and TileLang before the first test file is imported."""
    if not config.getoption("--emulate"):
        return
    from tile_kernels.emulator.jit import Settings, emulated_tilelang

    for name in _MARKERS:
        config.addinivalue_line("markers", f"{name}: needs a GPU, which the emulator plays")
    settings = Settings(
        mode=config.getoption("--emulate-mode"),
        arch=config.getoption("--emulate-arch"),
        order=config.getoption("--emulate-order"),
        config=config.getoption("--emulate-config"),
        report=config.getoption("--emulate-report"),
    )
    stack = contextlib.ExitStack()
    try:
        config.stash[_SESSION] = stack.enter_context(emulated_tilelang(settings))
    except ValueError as error:
        raise pytest.UsageError(f"--emulate: {error}") from None
    config.stash[_OPEN] = stack


def pytest_unconfigure(config: pytest.Config) -> None:
    """Put everything back."""
    stack = config.stash.get(_OPEN, None)
    if stack is not None:
        stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """The time limit of a test."""
    seconds = item.config.getoption("--emulate-time-limit")
    if not (item.config.getoption("--emulate") and seconds):
        return (yield)
    from tile_kernels.emulator.runner import time_limit

    with time_limit(seconds):
        return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was emulated, and what was left out."""
    session = config.stash.get(_SESSION, None)
    if session is not None and session.kernels:
        terminalreporter.section("emulated kernels")
        terminalreporter.write_line(session.summary())
        for note in session.notes:
            terminalreporter.write_line(f"note: {note}")
