"""Measuring operators: device time against the machine's copy bandwidth, host time, the reference.

`tile-kernels bench` calls it; `docs/benchmarks.md` says how to read the numbers.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Arguments, Benchmark
from tile_kernels.runtime.operator import Operator
from tile_kernels.testing import timing

DEFAULT_FOLDER = Path("benchmarks/results")


@dataclass(frozen=True)
class Result:
    """One benchmark case. Times are microseconds; None where this machine cannot measure it."""

    case: str
    bytes: int
    device_us: float | None
    device_min_us: float | None
    goal_us: float | None
    host_us: float
    reference_us: float | None
    reference_compiled_us: float | None
    copy_fraction: float | None
    method: str
    host_new_size_us: float | None = None  # of a call with a token count that was never seen

    @property
    def op(self) -> str:
        """The operator's name, in front of the case's."""
        return ".".join(self.case.split(".")[:2])

    @property
    def family(self) -> str:
        """The operator's family."""
        return self.case.split(".")[0]

    @property
    def gb_per_s(self) -> float | None:
        """Bytes that must move over device time."""
        return None if self.device_us is None else self.bytes / self.device_us / 1e3


@dataclass(frozen=True)
class Report:
    """A benchmark run: the machine, the yardstick and the results."""

    machine: dict[str, Any]
    copy_gb_per_s: float | None
    results: list[Result]

    def as_json(self) -> str:
        """The text of a results file."""
        results = [
            {**asdict(r), "gb_per_s": r.gb_per_s and round(r.gb_per_s, 1)} for r in self.results
        ]
        content = {
            "machine": self.machine,
            "copy_gb_per_s": self.copy_gb_per_s,
            "results": results,
        }
        return json.dumps(content, indent=2) + "\n"


def machine() -> dict[str, Any]:
    """What a result must be read with: hardware, versions, date."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "cpu": _cpu(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilelang": installed("tilelang"),
        "tile_kernels": tile_kernels.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def installed(package: str) -> str | None:
    """The version of a package, if there is one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name where Linux tells it: host times mean nothing without."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(
    ops: Sequence[Operator],
    *,
    reference: bool = True,
    compile_reference: bool = True,
    on_case: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure every benchmark case of `ops` on this machine; `on_case` is told each name.

    On a GPU also their references, and those under `torch.compile`, unless that is not wanted.
    """
    # Host times come first: once the profiler has run, launches stay slower in this process.
    host = {op.name: host_times(op) for op in ops}
    bandwidth = timing.copy_bandwidth() if torch.cuda.is_available() else None
    results = []
    for op in ops:
        for case in op.cases.benchmarks:
            on_case(f"{op.name}.{case.label}")
            beside = (reference, reference and compile_reference)
            results.append(_measure(op, case, host[op.name], bandwidth, *beside))
    return Report(machine(), bandwidth and round(bandwidth, 1), results)


def host_times(op: Operator) -> tuple[float, float]:
    """Host time of a repeated call, and of one with a token count that was never seen."""
    call = _host_call(op)
    repeated = timing.time_host(call, calls=400)
    for each in registry.operators():
        each.remember_sizes(False)
    new_size = timing.time_host(call, calls=400)
    for each in registry.operators():
        each.remember_sizes(True)
    return _us(repeated), _us(new_size)


def _measure(
    op: Operator,
    case: Benchmark,
    host: tuple[float, float],
    bandwidth: float | None,
    eager: bool,
    compiled: bool,
) -> Result:
    arguments = case.build("cuda" if bandwidth else "cpu")
    must_move = op.cost(**arguments).bytes
    name = f"{op.name}.{case.label}"
    if bandwidth is None:
        reference = timing.time_host(lambda: op.public_reference(**arguments), calls=1)
        return Result(
            name,
            must_move,
            None,
            None,
            case.goal_us,
            host[0],
            _us(reference),
            None,
            None,
            "host",
            host[1],
        )
    device = timing.time_device(lambda: op.function(**arguments))
    reference_us = (
        timing.time_device(lambda: op.public_reference(**arguments), repeats=5).us
        if eager
        else None
    )
    compiled_us = _compiled_time(op, arguments) if compiled and case.goal_us else None
    return Result(
        case=name,
        bytes=must_move,
        device_us=_us(device.us),
        device_min_us=_us(device.min_us),
        goal_us=case.goal_us,
        host_us=host[0],
        reference_us=reference_us and _us(reference_us),
        reference_compiled_us=compiled_us,
        copy_fraction=round(must_move / device.us / 1e3 / bandwidth, 4),
        method=device.method,
        host_new_size_us=host[1],
    )


def _host_call(op: Operator) -> Callable[[], Any]:
    """The operator on a small input of its kind: what the host spends, the device hardly working.

    Without a GPU the launch is recorded instead of made, so that only our host code is timed.
    """
    device = "cuda" if torch.cuda.is_available() else "meta"
    arguments = op.cases.ordinary().build(device)
    return lambda: op.function(**arguments)


def _compiled_time(op: Operator, arguments: Arguments) -> float | None:
    """Device time of the reference under `torch.compile`; None where that fails to compile it."""
    torch._dynamo.reset()
    compiled = torch.compile(op.public_reference)
    try:
        return _us(timing.time_device(lambda: compiled(**arguments), repeats=5).us)
    except torch._dynamo.exc.TorchDynamoException:
        return None


def _us(value: float) -> float:
    return round(value, 2)


# ---- files and pictures -------------------------------------------------------------------------


def slug(device: str) -> str:
    """A device's name as a folder's.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def save(report: Report, folder: Path = DEFAULT_FOLDER) -> list[Path]:
    """Write one file per operator, `FOLDER/DEVICE/FAMILY.OP.json`, over what was there."""
    target = folder / slug(report.machine["device"])
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name in dict.fromkeys(result.op for result in report.results):
        results = [result for result in report.results if result.op == name]
        path = target / f"{name}.json"
        path.write_text(Report(report.machine, report.copy_gb_per_s, results).as_json())
        written.append(path)
    return written


def load(path: Path) -> Report:
    """A report as `save` wrote it."""
    try:
        content = json.loads(path.read_text())
        results = [
            Result(**{key: value for key, value in result.items() if key != "gb_per_s"})
            for result in content["results"]
        ]
        return Report(content["machine"], content["copy_gb_per_s"], results)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path} is not a file of results") from None


def load_all(folder: Path) -> Report:
    """All reports of one device's folder as one; machine and yardstick are the newest one's."""
    reports = [load(path) for path in sorted(folder.glob("*.json"))]
    if not reports:
        raise FileNotFoundError(f"no results in {folder}")
    newest = max(reports, key=lambda report: report.machine["date"])
    results = [result for report in reports for result in report.results]
    return Report(newest.machine, newest.copy_gb_per_s, results)


def plot_families(
    report: Report, folder: Path, endings: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """A picture for each family, `FOLDER/DEVICE.FAMILY.ENDING`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for family in dict.fromkeys(result.family for result in report.results):
        results = [result for result in report.results if result.family == family]
        for ending in endings:
            written.append(folder / f"{slug(report.machine['device'])}.{family}.{ending}")
            plot(Report(report.machine, report.copy_gb_per_s, results), written[-1])
    return written


def plot(report: Report, path: Path) -> None:
    """A roofline by case: device time over what a copy of the same bytes takes; 1 is the roof.

    For cases of one family. At the right: device time, and the goal where one is missed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not its outlines
    matplotlib.rcParams["svg.hashsalt"] = "tile_kernels"  # the same picture, the same file
    from matplotlib import pyplot

    measured = [r for r in report.results if r.device_us is not None]
    if not measured or report.copy_gb_per_s is None:
        raise ValueError("plot: the report holds no device times")
    floors = [r.bytes / report.copy_gb_per_s / 1e3 for r in measured]
    rows = list(range(len(measured), 0, -1))
    series = [
        ("reference, eager", "x", "#b55d4c", [r.reference_us for r in measured]),
        ("reference, torch.compile", "+", "#c9a227", [r.reference_compiled_us for r in measured]),
        ("goal", "|", "#4c956c", [r.goal_us for r in measured]),
        ("tile_kernels", "o", "#2c5f8a", [r.device_us for r in measured]),
    ]
    height = 1.3 + 0.19 * len(measured)
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    roof = f"copy, {report.copy_gb_per_s / 1e3:.2f} TB/s"
    axes.axvline(1, color="0.4", linewidth=1, label=roof)
    for name, marker, color, times in series:
        points = [(t / f, row) for t, f, row in zip(times, floors, rows) if t is not None]
        if points:
            size = 90 if marker == "|" else 26
            axes.scatter(*zip(*points), marker=marker, color=color, s=size, label=name, zorder=3)
    axes.set_yticks(rows, [r.case.partition(".")[2] for r in measured], fontsize=7)
    axes.set(xscale="log", xlabel="device time / time of a copy of the same bytes")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_ylim(0.3, len(measured) + 0.7)
    axes.set_title(f"{measured[0].family}: {report.machine['device']}", fontsize=10)
    axes.grid(True, axis="x", which="both", linewidth=0.3, alpha=0.5)
    axes.grid(True, axis="y", linewidth=0.3, alpha=0.5)
    beside = axes.twinx()
    beside.set_ylim(axes.get_ylim())
    beside.set_yticks(rows, [_with_goal(r) for r in measured], fontsize=7)
    beside.tick_params(length=0)
    figure.legend(fontsize=8, loc="outside lower center", ncols=5)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=110, metadata=metadata)
    pyplot.close(figure)


def _with_goal(result: Result) -> str:
    """A device time, and the goal that it missed."""
    time = f"{result.device_us:.1f} us"
    missed = result.goal_us and result.device_us and result.device_us > result.goal_us
    return f"{time} (goal {result.goal_us:g})" if missed else time
