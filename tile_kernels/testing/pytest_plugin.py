"""Pytest plugin: seeded tests, GPU and benchmark markers, timing, and a regression report.

Load it with `-p tile_kernels.testing.pytest_plugin`, or name it in `pytest_plugins` of the root
`conftest.py`.

Every test starts from a seed of its own (`--seed` shifts them all). Tests marked `gpu` are skipped
without a CUDA device; tests marked `benchmark` are skipped without `--run-benchmark`, or without a
CUDA device. Fixtures: `seed`, `benchmark_timer` and `benchmark_record`.

Benchmark records are compared at the end of the session with a file of baselines, JSON lines as
`--benchmark-output` writes them; where several lines describe the same benchmark on the same
device the last one counts. A record slower than its baseline by more than the threshold turns a
passing session into a failing one; one without a baseline is listed as new, and one whose baseline
comes from another device is listed without a comparison. All of it works under pytest-xdist, where
records travel to the controller with the test reports and each worker is bound to one GPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from tile_kernels.testing import timing
from tile_kernels.testing.bench import make_param_key

__all__ = ["benchmark_record", "benchmark_timer", "seed"]

Record = dict[str, Any]

_DEFAULT_BASELINE = Path("tests", "benchmark_baselines.jsonl")
# Records travel in `user_properties` of the test reports, which xdist sends to the controller.
_PROPERTY = "tile_kernels_benchmark"
_RESERVED_GPU_BYTES = 10 << 30


# ------------------------------------------------------------------------------------------------
# Options, markers, workers
# ------------------------------------------------------------------------------------------------


def _threshold(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"must be a non-negative number, got {text}")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tile_kernels")
    group.addoption(
        "--seed",
        type=int,
        default=0,
        help="number added to the seed that each test derives from its node id (default: 0)",
    )
    group.addoption(
        "--run-benchmark",
        action="store_true",
        help="run the tests marked 'benchmark' too (add '-m benchmark' to run only those)",
    )
    group.addoption(
        "--benchmark-output",
        metavar="PATH",
        help="append every benchmark record to this file, one JSON object per line",
    )
    group.addoption(
        "--benchmark-baseline",
        metavar="PATH",
        help=f"records to compare with (default: {_DEFAULT_BASELINE.as_posix()} in the root "
        "directory, if it exists)",
    )
    group.addoption(
        "--benchmark-regression-threshold",
        type=_threshold,
        default=0.15,
        metavar="FRACTION",
        help="relative change of time that counts as regression or improvement (default: 0.15)",
    )
    group.addoption(
        "--benchmark-verbose",
        action="store_true",
        help="report baselines, ratios, extra values and devices of all benchmark records",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    config.addinivalue_line(
        "markers", "benchmark: measures speed; runs with --run-benchmark on a CUDA device"
    )
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        _bind_worker(workerinput)
    else:
        # A stable name, so that loading the plugin under two names reports once.
        config.pluginmanager.register(_BenchmarkReport(config), "tile_kernels_benchmark_report")


def _bind_worker(workerinput: Mapping[str, Any]) -> None:
    """Give this xdist worker a GPU and its share of that GPU's memory; nothing without CUDA."""
    if not torch.cuda.is_available():
        return
    match = re.search(r"\d+$", str(workerinput["workerid"]))
    worker = int(match.group()) if match else 0
    num_gpus = torch.cuda.device_count()
    gpu = worker % num_gpus
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_device(gpu)
    torch.cuda.set_per_process_memory_fraction(
        worker_memory_fraction(gpu, int(workerinput["workercount"]), num_gpus, total), gpu
    )


def worker_memory_fraction(gpu: int, num_workers: int, num_gpus: int, total_bytes: int) -> float:
    """The fraction of GPU `gpu`'s memory that each of its workers may allocate.

    Workers share `total_bytes` less 10 GiB (for contexts, compilers and other processes), or half
    of it on a small GPU, evenly.

    >>> worker_memory_fraction(gpu=0, num_workers=4, num_gpus=2, total_bytes=100 << 30)
    0.45
    """
    workers_here = max(1, len(range(gpu, num_workers, num_gpus)))
    usable = max(total_bytes - _RESERVED_GPU_BYTES, total_bytes // 2)
    return usable / total_bytes / workers_here


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("benchmark")]
    if not config.getoption("--run-benchmark"):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="benchmark: runs with --run-benchmark"))
        marked = []
    marked += [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and there is none"))


# ------------------------------------------------------------------------------------------------
# Fixtures
# ------------------------------------------------------------------------------------------------


def seed_of(nodeid: str, base: int) -> int:
    """The seed of the test `nodeid`: `base` plus the node id's SHA-256 modulo 2**31.

    >>> seed_of("tests/test_x.py::test_y", 1) - seed_of("tests/test_x.py::test_y", 0)
    1
    """
    digest = hashlib.sha256(nodeid.encode()).hexdigest()
    return base + int(digest, 16) % 2**31


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch and Python's `random` from the test's node id and `--seed`; the number used."""
    value = seed_of(request.node.nodeid, request.config.getoption("--seed", 0))
    torch.manual_seed(value)
    random.seed(value)
    return value


class BenchmarkTimer(Protocol):
    """`timer(fn)`: device microseconds of `fn()`; overrides go to `timing.time_device`."""

    def __call__(self, fn: Callable[[], Any], **overrides: Any) -> float: ...


@pytest.fixture
def benchmark_timer() -> BenchmarkTimer:
    """`timer(fn, **overrides)`: device microseconds of everything `fn()` puts on the GPU, cold L2.

    Overrides are those of `tile_kernels.testing.timing.time_device`: `repeats`, `flush_bytes`.
    """
    if not torch.cuda.is_available():
        pytest.skip("benchmark_timer needs a CUDA device and there is none")

    def timer(fn: Callable[[], Any], **overrides: Any) -> float:
        return timing.time_device(fn, **overrides).us

    return timer


BenchmarkRecorder = Callable[..., None]  # the arguments of `make_record`, by name


@pytest.fixture
def benchmark_record(request: pytest.FixtureRequest) -> BenchmarkRecorder:
    """`record(*, kernel, operation, params, time_us, bandwidth_gbs=None, extras=None)`.

    Prints a `BENCH` line and hands the result to the report at the end of the session, and to
    `--benchmark-output`. Values of `params` and `extras` must be JSON-serializable, `time_us` is
    in microseconds and `bandwidth_gbs` in 10^9 bytes per second.
    """

    def record(**result: Any) -> None:
        entry = make_record(**result)
        line = f"BENCH {record_key(entry)} {entry['time_us']:.2f} us"
        if "bandwidth_gbs" in entry:
            line += f" {entry['bandwidth_gbs']:.1f} GB/s"
        print("".join([line, *(f" {k}={v}" for k, v in entry.get("extras", {}).items())]))
        request.node.user_properties.append((_PROPERTY, entry))

    return record


def make_record(
    kernel: str,
    operation: str,
    params: Mapping[str, Any],
    time_us: float,
    bandwidth_gbs: float | None = None,
    extras: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Record:
    """One benchmark result as plain JSON data, on `device` (default: the current one's name).

    >>> make_record("topk_gate", "fwd", {"num_tokens": 1, "hidden": 64}, 2.346, device="H200")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'kernel': 'topk_gate', 'operation': 'fwd', 'params': {'hidden': 64, 'num_tokens': 1},
     'time_us': 2.35, 'device': 'H200'}
    """
    if not (math.isfinite(time_us) and time_us > 0):
        raise ValueError(f"benchmark_record: time_us must be finite and positive, got {time_us}")
    entry: Record = {
        "kernel": kernel,
        "operation": operation,
        "params": {key: params[key] for key in sorted(params)},
        "time_us": max(round(float(time_us), 2), 0.01),
    }
    if bandwidth_gbs is not None:
        entry["bandwidth_gbs"] = round(float(bandwidth_gbs), 4)
    if extras is not None:
        entry["extras"] = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in extras.items()
        }
    entry["device"] = current_device_name() if device is None else device
    try:
        plain: Record = json.loads(json.dumps(entry))
    except TypeError as error:
        raise TypeError(
            f"benchmark_record: params and extras must hold JSON values (str, int, float, bool, "
            f"None, lists and dicts of them): {error}"
        ) from None
    return plain


def record_key(record: Mapping[str, Any]) -> str:
    """What a record is compared by, besides its device: `kernel/operation[parameters]`.

    >>> record_key({"kernel": "transpose", "operation": "fwd", "params": {"hidden": 64}})
    'transpose/fwd[hidden=  64]'
    """
    params = record["params"]
    return (
        f"{record['kernel']}/{record['operation']}"
        f"[{make_param_key({key: params[key] for key in sorted(params)})}]"
    )


def current_device_name() -> str:
    """The name of the current CUDA device, or `"cpu"`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------------------------------
# Baselines and the report
# ------------------------------------------------------------------------------------------------

Baselines = dict[str, dict[str, Record]]
"""Baseline records by key, then by device."""


def load_baselines(path: Path) -> Baselines:
    """Read baselines, JSON lines; raise `pytest.UsageError` with the line that is not one."""
    baselines: Baselines = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"cannot read benchmark baselines {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not record["time_us"] > 0:
                raise ValueError("time_us must be positive")
            # A baseline that does not say where it was measured compares with nothing.
            device = record.setdefault("device", "an unknown device")
            baselines.setdefault(record_key(record), {})[device] = record
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise pytest.UsageError(
                f"{path}:{number}: not a benchmark record: {type(error).__name__}: {error}"
            ) from None
    return baselines


@dataclass(frozen=True)
class Comparison:
    """A record beside its baseline.

    Attributes:
        record: the record.
        status: `regression`, `improvement`, `unchanged`, `new` (no baseline) or `other device`
            (baselines only from other devices).
        baseline_us: the baseline's time, where there is one from the same device.
        ratio: the record's time over the baseline's.
        baseline_devices: the devices that there are baselines from.
    """

    record: Record
    status: str
    baseline_us: float | None = None
    ratio: float | None = None
    baseline_devices: tuple[str, ...] = ()


def compare(record: Record, baselines: Baselines, threshold: float) -> Comparison:
    """Find the record's baseline; its ratio outside `1 +- threshold` is a change.

    >>> record = make_record("k", "fwd", {}, 13.0, device="H200")
    >>> compare(record, {"k/fwd[]": {"H200": {"time_us": 10.0}}}, 0.15).status
    'regression'
    """
    by_device = baselines.get(record_key(record))
    if not by_device:
        return Comparison(record, "new")
    devices = tuple(sorted(by_device))
    baseline = by_device.get(record["device"])
    if baseline is None:
        return Comparison(record, "other device", baseline_devices=devices)
    time_us, baseline_us = record["time_us"], baseline["time_us"]
    ratio = time_us / baseline_us
    if ratio > 1 + threshold:
        status = "regression"
    elif ratio < 1 - threshold:
        status = "improvement"
    else:
        status = "unchanged"
    return Comparison(record, status, baseline_us, ratio, devices)


@dataclass
class _Section:
    """Comparisons of one status and what the report says about them."""

    status: str
    title: str
    colour: dict[str, bool] = field(default_factory=dict)


_SECTIONS = (
    _Section("regression", "Regressions", {"red": True, "bold": True}),
    _Section("improvement", "Improvements", {"green": True}),
    _Section("new", "New (no baseline)", {"yellow": True}),
    _Section("other device", "Not compared (baseline from another device)", {"yellow": True}),
    _Section("unchanged", "Unchanged"),
)


class _BenchmarkReport:
    """Collects the records of a session, where its reports arrive, and judges them at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._verbose: bool = config.getoption("--benchmark-verbose")
        self._threshold: float = config.getoption("--benchmark-regression-threshold")
        self._comparisons: list[Comparison] = []
        start = config.invocation_params.dir

        output = config.getoption("--benchmark-output")
        self._output = start / output if output else None

        baseline = config.getoption("--benchmark-baseline")
        self._baseline_path = start / baseline if baseline else config.rootpath / _DEFAULT_BASELINE
        # Read before the output is appended to, as that may be the same file.
        self._baselines: Baselines = {}
        if baseline or self._baseline_path.exists():
            self._baselines = load_baselines(self._baseline_path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":  # the last report of a test lists the properties of all
            return
        records: list[Any] = [value for name, value in report.user_properties if name == _PROPERTY]
        for record in records:
            self._comparisons.append(compare(record, self._baselines, self._threshold))
        if records and self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            with self._output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def _having(self, status: str) -> list[Comparison]:
        return [c for c in self._comparisons if c.status == status]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self._having("regression"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._comparisons:
            return
        write = terminalreporter.write_line
        terminalreporter.section("benchmarks")
        where = self._baseline_path if self._baselines else f"none in {self._baseline_path}"
        write(f"baselines: {where}; threshold {self._threshold:.0%}")
        for section in _SECTIONS:
            comparisons = self._having(section.status)
            if not comparisons:
                continue
            write(f"{section.title}: {len(comparisons)}", **section.colour)
            for line in _table(comparisons, self._verbose):
                write(f"  {line}")


def _table(comparisons: Iterable[Comparison], verbose: bool) -> list[str]:
    """One aligned line per comparison."""
    rows = []
    for c in comparisons:
        record = c.record
        row = [record_key(record), f"{record['time_us']:.2f} us"]
        bandwidth = record.get("bandwidth_gbs")
        row.append("" if bandwidth is None else f"{bandwidth:.1f} GB/s")
        changed = c.status in ("regression", "improvement")
        if c.ratio is not None and (verbose or changed):
            row.append(f"baseline {c.baseline_us:.2f} us, {c.ratio:.2f}x")
        elif c.status == "other device":
            row.append(f"on {record['device']}, baseline on {', '.join(c.baseline_devices)}")
        else:
            row.append("")
        if verbose:
            extras = record.get("extras", {})
            row.append(" ".join(f"{key}={value}" for key, value in extras.items()))
            row.append(f"on {record['device']}" if c.status != "other device" else "")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for key, *numbers, note in rows:
        cells = [key.ljust(widths[0])]
        cells += [n.rjust(w) for n, w in zip(numbers[:2], widths[1:3], strict=True)]
        cells += [n.ljust(w) for n, w in zip(numbers[2:], widths[3:-1], strict=True)]
        lines.append("  ".join([*cells, note]).rstrip())
    return lines
