"""Transfers on CUDA streams, and a thread that finds those that do not end."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections import deque
from typing import Any, Protocol

import torch

_POLL_SECONDS = 100e-6  # of the host that waits
_WATCH_SECONDS = 0.05  # of the thread
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_log = logging.getLogger(__name__)


class Owner(Protocol):
    """The engine whose transfers are monitored."""

    def lost(self, phase: str, reason: str) -> RuntimeError:
        """The error that names the ranks that do not answer."""

    def give_up(self, watch: Watch, problem: str) -> None:
        """The engine cannot be used any more; streams that wait for peers may go on."""


class Watch:
    """The transfers in flight of an engine. One that takes longer than `timeout` seconds is late.

    The thread starts with the first transfer and ends with the engine.
    """

    def __init__(self, owner: Owner, timeout: float) -> None:
        self.timeout = timeout
        self.problem: str | None = None
        self._owner = weakref.ref(owner)
        self._in_flight: deque[tuple[Any, str, float]] = deque()  # event, phase, when it is late
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, event: Any, phase: str) -> None:
        """A transfer that is over when `event` is."""
        with self._lock:
            self._in_flight.append((event, phase, time.monotonic() + self.timeout))
            self._drop_finished(keep=1)
            owner = self._owner()
            if self.problem is not None and owner is not None:
                owner.give_up(self, self.problem)  # enqueued while the owner gave up
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self),), name="tile_kernels.ep", daemon=True
                )
                self._thread.start()

    def _drop_finished(self, keep: int = 0) -> None:
        while len(self._in_flight) > keep and self._in_flight[0][0].query():
            self._in_flight.popleft()

    def unfinished(self) -> bool:
        """For `give_up`: whether there are transfers in flight."""
        self._drop_finished()
        return bool(self._in_flight)

    def check(self) -> bool:
        """Whether there are transfers in flight. If one is late, the engine gives up."""
        with self._lock:
            if self.unfinished() and time.monotonic() > self._in_flight[0][2]:
                owner = self._owner()
                if owner is not None and self.problem is None:
                    reason = f"no data after {self.timeout:g} s"
                    self.problem = str(owner.lost(self._in_flight[0][1], reason))
                    _log.error("%s", self.problem)
                    owner.give_up(self, self.problem)
            return bool(self._in_flight) and self.problem is None

    def settle(self) -> None:
        """Wait on the host until the transfers so far are over."""
        while self.check():
            time.sleep(_POLL_SECONDS)
        if self.problem is not None:
            raise RuntimeError(self.problem)


def _allow_captures() -> None:
    """What this thread asks of CUDA does not disturb graphs that other threads record."""
    if torch.cuda.is_available():
        mode = ctypes.c_int(_THREAD_LOCAL)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _run(reference: weakref.ref[Watch]) -> None:
    _allow_captures()
    while True:
        time.sleep(_WATCH_SECONDS)
        watch = reference()
        if watch is None or watch.problem is not None:
            return
        watch.check()
        del watch
