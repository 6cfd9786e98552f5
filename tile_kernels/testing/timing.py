"""Timing: what a call costs the GPU, what it costs the host, and how fast the memory is."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = [
    "DeviceEvent",
    "Timing",
    "copy_bandwidth",
    "split_at_flushes",
    "time_device",
    "time_host",
    "time_host_after",
]

# Kineto also lists waiting and annotations on the device's timeline; neither is work.
_NOT_WORK_TYPES = frozenset(("cuda_sync", "gpu_user_annotation", "overhead"))
_NOT_WORK_NAMES = frozenset(("Context Sync", "Event Sync", "Stream Sync", "Stream Wait Event"))

# A fill of 2 GiB and more is split into several kernels, one flush must be one.
_MAX_FLUSH_BYTES = (2 << 30) - 8

# Calls between two synchronizations when timing the host. The launch queue holds about a thousand
# kernels; a full one would make the host wait for the device. Layers launch tens of them.
_HOST_BATCH = 20


class DeviceEvent(NamedTuple):
    """One piece of work on the GPU's timeline: a kernel, a memset or a memcpy."""

    name: str
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Timing:
    """Device time of one call, in microseconds.

    Attributes:
        us: the median over the repeats.
        min_us: the fastest repeat.
        max_us: the slowest repeat.
        method: `"cupti"`: the sum of the durations of everything the call put on the GPU, without
            gaps; `"events"`: the time between two CUDA events around the call, gaps included.
        kernels: names of what one call put on the GPU, in order; empty for `"events"`.
    """

    us: float
    min_us: float
    max_us: float
    method: str
    kernels: tuple[str, ...] = ()


def split_at_flushes(events: Iterable[DeviceEvent], flush_name: str) -> list[list[DeviceEvent]]:
    """Cut a GPU's timeline at the flushes: one list per flush, of the events after it, in order.

    Events need not be sorted; what precedes the first flush is dropped.

    >>> events = [DeviceEvent("flush", 0, 9), DeviceEvent("b", 20, 2), DeviceEvent("a", 10, 1),
    ...           DeviceEvent("flush", 30, 9)]
    >>> [[event.name for event in segment] for segment in split_at_flushes(events, "flush")]
    [['a', 'b'], []]
    """
    segments: list[list[DeviceEvent]] = []
    for event in sorted(events, key=lambda event: event.start_us):
        if event.name == flush_name:
            segments.append([])
        elif segments:
            segments[-1].append(event)
    return segments


def time_device(
    fn: Callable[[], Any], *, repeats: int = 20, flush_bytes: int = 512 << 20
) -> Timing:
    """Device time of `fn()` on the current CUDA device, with a cold L2 cache.

    Every repeat fills a buffer of `flush_bytes` to flush the L2 cache, calls `fn` and
    synchronizes. What counts is the sum of the device time of all kernels, memsets and memcpys
    that `fn` launches; the fill does not. Where the profiler's record is incomplete, or `fn` fills
    float64 tensors itself so that the flushes cannot be told apart, CUDA events around the call
    are used instead; `Timing.method` says which.

    Args:
        fn: called without arguments, once for warm-up and then at least `repeats` times.
        repeats: calls measured.
        flush_bytes: should be well above the size of the L2 cache; 0 leaves the cache warm.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if repeats < 1:
        raise ValueError(f"time_device: repeats must be at least 1, got {repeats}")
    if not 0 <= flush_bytes <= _MAX_FLUSH_BYTES:
        raise ValueError(
            f"time_device: flush_bytes must be in 0..{_MAX_FLUSH_BYTES}, got {flush_bytes}"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "time_device: measuring device time needs a CUDA device and there is none; "
            "use time_host for callables that run on the CPU"
        )
    fn()
    torch.cuda.synchronize()
    # float64, because hardly any kernel under test fills that.
    flush = torch.empty(max(1, flush_bytes // 8), dtype=torch.float64, device="cuda")
    timing = _time_with_profiler(fn, flush, repeats)
    return timing if timing is not None else _time_with_events(fn, flush, repeats)


def _time_with_profiler(fn: Callable[[], Any], flush: torch.Tensor, repeats: int) -> Timing | None:
    """Time by CUPTI's record, or None if it does not show exactly one flush per repeat."""
    flush_name = _find_flush_name(flush)
    if flush_name is None:
        return None

    def run() -> None:
        for _ in range(repeats):
            flush.fill_(1.0)
            fn()
            torch.cuda.synchronize()

    for _ in range(2):  # CUPTI may drop records; rarely twice
        events = _record_device_events(run)
        timing = _summarize(events, flush_name, repeats)
        if timing is not None:
            return timing
    return None


def _summarize(events: Iterable[DeviceEvent], flush_name: str, repeats: int) -> Timing | None:
    segments = split_at_flushes(events, flush_name)
    if len(segments) != repeats:
        return None
    times = [sum(event.duration_us for event in segment) for segment in segments]
    return _timing(times, "cupti", tuple(event.name for event in segments[-1]))


def _timing(times: Sequence[float], method: str, kernels: tuple[str, ...] = ()) -> Timing:
    return Timing(statistics.median(times), min(times), max(times), method, kernels)


_flush_names: dict[tuple[int, torch.device], str] = {}


def _find_flush_name(flush: torch.Tensor) -> str | None:
    """The name CUPTI gives to the kernel that fills `flush`; None if there is not just one."""
    key = (flush.numel(), flush.device)
    if key in _flush_names:
        return _flush_names[key]

    def run() -> None:
        for _ in range(2):
            flush.fill_(1.0)
        torch.cuda.synchronize()

    run()
    for _ in range(2):
        names = [event.name for event in _record_device_events(run)]
        if len(names) == 2 and names[0] == names[1]:
            return _flush_names.setdefault(key, names[0])
    return None


def _record_device_events(run: Callable[[], None]) -> list[DeviceEvent]:
    """What `run` puts on the GPU; nothing without the profiler (in use, no CUPTI)."""
    from torch.profiler import ProfilerActivity, profile

    try:
        profiler: Any = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        profiler.start()
    except (AssertionError, RuntimeError):
        return []
    try:
        run()
        torch.cuda.synchronize()
    finally:
        profiler.stop()
    return [
        DeviceEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and getattr(event, "activity_type", None) not in _NOT_WORK_TYPES
        and event.name not in _NOT_WORK_NAMES
    ]


def _time_with_events(fn: Callable[[], Any], flush: torch.Tensor, repeats: int) -> Timing:
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        flush.fill_(1.0)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return _timing(times, "events")


def time_host(fn: Callable[[], Any], *, calls: int = 200) -> float:
    """Wall-clock microseconds that one `fn()` keeps the host busy; the GPU is not waited for.

    Calls run in batches short enough that the launch queue does not fill, with a synchronization
    between them that is not timed; the result is the median over the batches of the mean per call.
    For a callable that runs on the CPU this is its run time.

    Args:
        fn: called without arguments.
        calls: calls measured, about; a few more come before them as warm-up.

    >>> time_host(lambda: None) < 1000
    True
    """
    if calls < 1:
        raise ValueError(f"time_host: calls must be at least 1, got {calls}")
    batch = min(calls, _HOST_BATCH)
    for _ in range(min(10, batch)):
        fn()
    times = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(-(-calls // batch)):
            _synchronize_if_in_use()
            start = time.perf_counter()
            for _ in range(batch):
                fn()
            times.append((time.perf_counter() - start) / batch)
    finally:
        if collecting:
            gc.enable()
    _synchronize_if_in_use()
    return statistics.median(times) * 1e6


def time_host_after(
    prepare: Callable[[], Any], fn: Callable[[], Any], *, calls: int = 100
) -> float:
    """Median wall-clock microseconds of one `fn()` after `prepare()`, which is not timed.

    As in `time_host`, the GPU is not waited for between calls, only between batches of them.
    """
    times = []
    for i in range(calls):
        if i % _HOST_BATCH == 0:
            _synchronize_if_in_use()
            fn()
        prepare()
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    _synchronize_if_in_use()
    return statistics.median(times) * 1e6


def _synchronize_if_in_use() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def copy_bandwidth(bytes: int = 2 << 30) -> float:  # noqa: A002
    """GB/s (10^9) at which the current CUDA device copies `bytes` of its memory, read plus write.

    The yardstick of memory-bound kernels: no kernel that moves as much should be much slower.
    """
    if bytes < 1:
        raise ValueError(f"copy_bandwidth: bytes must be positive, got {bytes}")
    if not torch.cuda.is_available():
        raise RuntimeError("copy_bandwidth: needs a CUDA device and there is none")
    source = torch.zeros(bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * bytes / time_device(lambda: target.copy_(source)).us / 1e3
