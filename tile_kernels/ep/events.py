"""Completion of communication: events on CUDA streams; on a CPU, where calls return when done,
the same objects without effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_streams: dict[int, torch.cuda.Stream] = {}
_lock = threading.Lock()


def comm_stream(device: torch.device) -> torch.cuda.Stream:
    """The communication stream of a device, shared by all buffers of the process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:  # ranks may be threads
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(index, priority=-1)
        return _streams[index]


class EventHandle:
    """A point in the work of the current stream, recorded when the object is created.

    Args:
        tensors: Tensors that are kept alive as long as the event.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.tensors = tuple(tensors)
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for that point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The end of an asynchronous call, for which a stream can wait.

    Args:
        event: The event; None if there is nothing to wait for.
        extra_tensors: Tensors that are kept alive until the wait.

    Example:
        >>> done = EventOverlap(EventHandle())
        >>> done.register_hook_after_wait(lambda: print("arrived"))
        >>> with done:
        ...     print("meanwhile")
        meanwhile
        arrived
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: Iterable[Tensor] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = None if extra_tensors is None else tuple(extra_tensors)
        self._hook: Callable[[], object] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, then runs the hook.

        Args:
            release_handle: Whether the event is released afterwards.
        """
        if self.event is None:
            raise RuntimeError(
                "EventOverlap.current_stream_wait: there is no event to wait for (it was released, "
                "or the call was made without async_with_compute_stream)"
            )
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None

    def register_hook_after_wait(self, hook: Callable[[], object]) -> None:
        """Registers a function that runs once, after the next wait. There can be one.

        Args:
            hook: The function.
        """
        if self._hook is not None:
            raise RuntimeError("EventOverlap.register_hook_after_wait: there is a hook already")
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Say whether the next `with` releases the event."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        release, self._release = self._release, False
        if self.event is not None:
            self.current_stream_wait(release)


@contextmanager
def reading_after(event: object, x: object) -> Iterator[None]:
    """What the host reads inside waits for `event`, not for what the current stream does since.

    Without an event, or where `x` is not on a GPU, nothing is different.
    """
    if not isinstance(event, EventHandle) or not isinstance(x, Tensor) or not x.is_cuda:
        yield
        return
    with torch.cuda.device(x.device), torch.cuda.stream(comm_stream(x.device)):
        event.current_stream_wait()
        yield


Finish = Callable[[Iterable["Tensor | None"], bool], EventOverlap]


@contextmanager
def on_comm_stream(
    device: torch.device,
    previous_event: EventHandle | None,
    keep_tensors: bool = False,
) -> Iterator[Finish]:
    """Work inside runs on the communication stream of a CUDA device.

    It begins after `previous_event`, or, without one, after what the current stream has been given
    so far. The yielded function `finish(tensors, is_async)` ends it: an
    asynchronous call gets an event, otherwise the current stream waits. `settle` waits on the host,
    after the stream, and raises the errors of ranks that do not answer. With `keep_tensors` an
    asynchronous event keeps the tensors alive; otherwise they are recorded on both streams.
    """
    if device.type != "cuda":
        yield lambda _, is_async: EventOverlap(EventHandle() if is_async else None)
        return
    caller, own = torch.cuda.current_stream(device), comm_stream(device)
    if previous_event is None:
        own.wait_stream(caller)
    with torch.cuda.device(device), torch.cuda.stream(own):
        if previous_event is not None:
            previous_event.current_stream_wait()

        def finish(tensors: Iterable[Tensor | None], is_async: bool) -> EventOverlap:
            used = [tensor for tensor in tensors if tensor is not None]
            if is_async and keep_tensors:
                return EventOverlap(EventHandle(used))
            for tensor in used:
                tensor.record_stream(caller)
                tensor.record_stream(own)
            event = EventHandle()
            if is_async:
                return EventOverlap(event)
            with torch.cuda.stream(caller):
                event.current_stream_wait()
            return EventOverlap()

        yield finish
