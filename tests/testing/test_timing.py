import random
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tile_kernels.testing import timing
from tile_kernels.testing.timing import DeviceEvent, Timing

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without CUDA")


def timeline(calls, flush="flush", gap=5.0):
    """The events of `calls` (lists of (name, duration)), each after a flush."""
    events, now = [], 100.0
    for call in calls:
        for name, duration in [(flush, 150.0), *call]:
            events.append(DeviceEvent(name, now, duration))
            now += duration + gap
    return events


def test_split():
    events = timeline([[("memset", 1.0), ("kernel", 2.0)], [], [("kernel", 3.0)]])
    segments = timing.split_at_flushes(events, "flush")
    assert [[(e.name, e.duration_us) for e in s] for s in segments] == [
        [("memset", 1.0), ("kernel", 2.0)],
        [],
        [("kernel", 3.0)],
    ]


def test_split_drops_what_precedes_the_first_flush():
    events = [DeviceEvent("stray", 0.0, 50.0), *timeline([[("kernel", 2.0)]])]
    segments = timing.split_at_flushes(events, "flush")
    assert [[e.name for e in s] for s in segments] == [["kernel"]]


def test_split_of_nothing():
    assert timing.split_at_flushes([], "flush") == []
    assert timing.split_at_flushes([DeviceEvent("kernel", 0.0, 1.0)], "flush") == []


durations = st.integers(1, 1000).map(float)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), durations))), st.randoms())
def test_split_recovers_the_calls_in_any_order(calls, rng: random.Random):
    events = timeline(calls)
    rng.shuffle(events)
    segments = timing.split_at_flushes(events, "flush")
    assert [[(e.name, e.duration_us) for e in s] for s in segments] == calls


def test_summary_sums_calls_and_takes_the_median():
    calls = [[("memset", 1.0), ("kernel", 2.0 + extra)] for extra in (0.0, 0.5, 40.0)]
    assert timing._summarize(timeline(calls), "flush", 3) == Timing(
        us=3.5, min_us=3.0, max_us=43.0, method="cupti", kernels=("memset", "kernel")
    )


@pytest.mark.parametrize("repeats", [2, 4])
def test_summary_refuses_an_incomplete_record(repeats):
    assert timing._summarize(timeline([[("kernel", 2.0)]] * 3), "flush", repeats) is None


def test_summary_of_calls_without_device_work():
    assert timing._summarize(timeline([[], []]), "flush", 2) == Timing(0, 0, 0, "cupti")


@pytest.fixture
def fake_cuda(monkeypatch):
    """Lets `time_device` run on the CPU; `device.record` is what the profiler would see of a run.

    The fake profiler logs flushes and calls, in the order in which they happen.
    """
    device = SimpleNamespace(log=[], record=lambda log: log, synchronized=0)
    empty = torch.empty

    class Buffer:
        def __init__(self, numel):
            self.device = torch.device("cpu")
            self.numel = lambda: numel

        def fill_(self, _value):
            device.log.append(("double fill", 150.0))

    def synchronize():
        device.synchronized += 1

    def record_device_events(run):
        device.log.clear()
        run()
        now, events = 0.0, []
        for name, duration in device.record(list(device.log)):
            events.append(DeviceEvent(name, now, duration))
            now += duration
        return events

    monkeypatch.setattr(timing, "_flush_names", {})
    monkeypatch.setattr(timing, "_record_device_events", record_device_events)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: Buffer(a[0]) if k.get("device") == "cuda" else empty(*a, **k),
    )
    monkeypatch.setattr(timing, "_time_with_events", lambda *_: Timing(9.0, 9.0, 9.0, "events"))
    return device


def test_time_device_by_profiler(fake_cuda):
    calls = []

    def fn():
        calls.append(None)
        fake_cuda.log += [("memset", 1.0), ("kernel", float(len(calls)))]

    result = timing.time_device(fn, repeats=5)
    assert result.method == "cupti"
    assert result.kernels == ("memset", "kernel")
    # One warm-up call before the five.
    assert (result.min_us, result.us, result.max_us) == (3.0, 5.0, 7.0)
    assert fake_cuda.synchronized >= 6


def test_time_device_falls_back_when_fn_looks_like_a_flush(fake_cuda):
    result = timing.time_device(lambda: fake_cuda.log.append(("double fill", 1.0)), repeats=5)
    assert result.method == "events"


def test_time_device_retries_once_when_records_are_lost(fake_cuda):
    losses = iter([False, True, False])  # finding the flush's name, then two measurements

    def lossy(log):
        return log[1:] if next(losses) else log

    fake_cuda.record = lossy
    fn = lambda: fake_cuda.log.append(("kernel", 2.0))  # noqa: E731
    assert timing.time_device(fn, repeats=3) == Timing(2.0, 2.0, 2.0, "cupti", ("kernel",))


def test_time_device_falls_back_without_a_profiler(fake_cuda):
    fake_cuda.record = lambda _: []
    assert timing.time_device(lambda: None).method == "events"


def test_time_device_passes_on_errors_of_the_callable(fake_cuda):
    def fn():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        timing.time_device(fn)


@NO_CUDA
def test_device_timing_needs_cuda():
    with pytest.raises(RuntimeError, match="needs a CUDA device and there is none"):
        timing.time_device(lambda: None)
    with pytest.raises(RuntimeError, match="needs a CUDA device and there is none"):
        timing.copy_bandwidth()


def test_bad_arguments():
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        timing.time_device(lambda: None, repeats=0)
    with pytest.raises(ValueError, match="flush_bytes must be in"):
        timing.time_device(lambda: None, flush_bytes=2 << 30)
    with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
        timing.time_host(lambda: None, calls=0)
    with pytest.raises(ValueError, match="bytes must be positive, got 0"):
        timing.copy_bandwidth(0)


def test_profiler_events_have_what_is_read():
    """The attributes that `_record_device_events` reads, on events of this version of torch."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        torch.zeros(8).add(1)
    events = list(profiler.events())
    assert events
    for event in events:
        assert event.device_type.name == "CPU"
        assert event.is_user_annotation in (True, False)
        assert event.time_range.elapsed_us() >= 0
        assert event.time_range.start >= 0


def test_device_events_are_kernels_and_copies_only(monkeypatch):
    def event(name, device="CUDA", annotation=False, activity_type="kernel"):
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=annotation,
            activity_type=activity_type,
            time_range=SimpleNamespace(start=1.0, elapsed_us=lambda: 2.0),
        )

    events = [
        event("kernel"),
        event("cudaLaunchKernel", device="CPU"),
        event("Memset (Device)", activity_type="gpu_memset"),
        event("my region", annotation=True),
        event("my region", activity_type="gpu_user_annotation"),
        event("Stream Sync", activity_type=None),
        event("wait", activity_type="cuda_sync"),
        event("Memcpy DtoD", activity_type=None),
    ]
    log = []
    profiler = SimpleNamespace(
        start=lambda: log.append("start"), stop=lambda: log.append("stop"), events=lambda: events
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    recorded = timing._record_device_events(lambda: log.append("run"))
    assert recorded == [
        DeviceEvent(name, 1.0, 2.0) for name in ("kernel", "Memset (Device)", "Memcpy DtoD")
    ]
    assert log == ["start", "run", "synchronize", "stop"]


@NO_CUDA
def test_profiler_without_cuda_records_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert timing._record_device_events(lambda: None) == []


def test_time_host_of_a_sleep():
    us = timing.time_host(lambda: time.sleep(0.002), calls=10)
    assert 2000 <= us < 20000


@pytest.mark.parametrize(("calls", "expected"), [(1, 1 + 1), (10, 10 + 10), (110, 10 + 120)])
def test_time_host_runs_whole_batches(calls, expected):
    count = []
    timing.time_host(lambda: count.append(None), calls=calls)
    assert len(count) == expected


def test_time_host_restores_garbage_collection():
    import gc

    def fail():
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        timing.time_host(fail)
    timing.time_host(lambda: None)
    assert gc.isenabled()


@pytest.mark.gpu
class TestOnTheGpu:
    def test_time_device(self):
        x = torch.randn(1 << 26, device="cuda")
        result = timing.time_device(lambda: x + 1)
        assert result.method == "cupti"
        assert len(result.kernels) == 1
        assert result.min_us <= result.us <= result.max_us
        # 512 MiB cannot move faster than 20 TB/s, nor should it take a millisecond.
        assert 25 < result.us < 1000

    def test_counts_everything(self):
        x = torch.randn(1 << 24, device="cuda")

        def fn():
            torch.zeros(1 << 20, dtype=torch.uint8, device="cuda").zero_()
            return x.clone() + 1

        result = timing.time_device(fn)
        assert result.method == "cupti"
        assert len(result.kernels) >= 3
        single = timing.time_device(lambda: x + 1)
        assert result.us > single.us

    def test_flush_makes_the_cache_cold(self):
        x = torch.randn(1 << 20, device="cuda")  # 4 MiB, fits in any L2
        cold = timing.time_device(x.sum)
        warm = timing.time_device(x.sum, flush_bytes=0)
        assert warm.us < cold.us

    def test_falls_back_to_events(self):
        x = torch.empty(1 << 20, dtype=torch.float64, device="cuda")
        result = timing.time_device(lambda: x.fill_(2.0))
        assert result.method == "events"
        assert result.kernels == ()
        assert result.us > 0

    def test_agrees_with_events(self):
        x = torch.randn(1 << 27, device="cuda")
        flush = torch.empty(1 << 20, dtype=torch.float64, device="cuda")
        by_events = timing._time_with_events(lambda: x + 1, flush, 10)
        assert timing.time_device(lambda: x + 1).us == pytest.approx(by_events.us, rel=0.3)

    def test_copy_bandwidth(self):
        assert 100 < timing.copy_bandwidth(1 << 28) < 30000

    def test_time_host_does_not_wait_for_the_device(self):
        x = torch.randn(1 << 27, device="cuda")
        device_us = timing.time_device(lambda: x.add_(1)).us
        assert timing.time_host(lambda: x.add_(1), calls=50) < device_us
