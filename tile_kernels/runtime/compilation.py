"""Compilations of this process: how many there were, and whether more are allowed.

A kernel that the disk cache has is loaded instead of compiled. Whether it is there depends on what
ran before, so loading it counts as a compilation here. Kernels of bundles, which are deployed on
purpose, and those that the emulator builds do not count.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tile_kernels.runtime import logs

_lock = threading.Lock()
_warming: contextvars.ContextVar[bool] = contextvars.ContextVar("warming_up", default=False)


class _State:
    """Of the process: compilations in all, those of calls since the last warm-up, prohibitions."""

    total = 0
    since_warmup = 0
    forbidden = 0


_state = _State()


class CompilationForbiddenError(RuntimeError):
    """A call needs a kernel that is not loaded, and `forbid_compilation` is active.

    Args:
        kernel: The name of the kernel.
        static: Its static arguments.
        arch: The architecture for which it would be compiled.
        call: The operator and its arguments.
    """

    def __init__(self, kernel: str, static: tuple[Any, ...], arch: str, call: str = "") -> None:
        self.kernel, self.static, self.arch = kernel, static, arch
        op = call.partition("(")[0] or "family.operator"
        super().__init__(
            f"{call + ' needs ' if call else ''}the kernel {label(kernel, static)} for {arch}, "
            "which this process has not loaded, and config.forbid_compilation() forbids to compile "
            "or load it. Warm up before that: tile_kernels.warmup(model=...) for all layers of a "
            f'model, or tile_kernels.warmup([("{op}", {{...}})]) with the arguments of this call.'
        )

    def during(self, call: str) -> CompilationForbiddenError:
        """Returns the same error with the operator and its arguments.

        Args:
            call: The operator and its arguments.
        """
        return CompilationForbiddenError(self.kernel, self.static, self.arch, call)


class Prohibition:
    """What `forbid_compilation` returns: ends with `allow()`, or with a `with` block."""

    def __init__(self) -> None:
        self._active = True
        with _lock:
            _state.forbidden += 1

    def allow(self) -> None:
        """Allows compilations again, unless another prohibition is in force."""
        with _lock:
            _state.forbidden -= self._active
            self._active = False

    def __enter__(self) -> Prohibition:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.allow()


def label(kernel: str, static: tuple[Any, ...]) -> str:
    """A kernel with its static arguments, by name where the plan has names.

    >>> label("scale", (64, True))
    'scale(64, True)'
    """
    names = getattr(static, "_fields", None)
    words = [f"{k}={v}" for k, v in zip(names, static)] if names else map(str, static)
    return f"{kernel}({', '.join(words)})"


def begin(kernel: str, static: tuple[Any, ...], arch: str) -> None:
    """Raises if a kernel must not be compiled now."""
    if _state.forbidden and not _warming.get():
        raise CompilationForbiddenError(kernel, static, arch)


def finish(kernel: str, static: tuple[Any, ...], arch: str, seconds: float) -> None:
    """Counts a kernel that was compiled, and logs it."""
    with _lock:
        _state.total += 1
        _state.since_warmup += not _warming.get()
        total, since = _state.total, _state.since_warmup
    if logs.settings.level:
        text = "compiled %s for %s in %.1f s (compilation %d of this process, %d since warm-up)"
        logs.logger.info(text, label(kernel, static), arch, seconds, total, since)


@contextlib.contextmanager
def warming() -> Iterator[None]:
    """Compilations inside are those of a warm-up: allowed, and not counted as since warm-up."""
    token = _warming.set(True)
    try:
        yield
    finally:
        _warming.reset(token)


def warmed_up() -> None:
    """Starts the count of compilations since the last warm-up anew."""
    with _lock:
        _state.since_warmup = 0


def compilation_count(*, since_warmup: bool = False) -> int:
    """How many kernels this process has compiled, or loaded from the disk cache.

    Args:
        since_warmup: Only those that calls needed since the last `warmup` ended, or since the start
            of the process if there was none: 0 if the warm-up covered everything.
    """
    return _state.since_warmup if since_warmup else _state.total


def forbid_compilation() -> Prohibition:
    """Turns compilations into errors from now on, in all threads of the process.

    A call that needs a kernel which is not loaded raises `CompilationForbiddenError` before
    anything is launched. The error names the operator, the kernel, its static arguments, and what
    to warm up. Loading a kernel from the disk cache is forbidden as well, so run `warmup` in the
    process that serves. `warmup` and bundles are still allowed, and the emulator is not affected.

    Returns:
        What ends it: `allow()`, or the end of a `with` block. Prohibitions may be nested.

    Example:
        >>> with forbid_compilation():
        ...     pass  # serve
        >>> prohibition = forbid_compilation()
        >>> prohibition.allow()
    """
    return Prohibition()
