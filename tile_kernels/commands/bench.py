"""`tile-kernels bench`: measure operators, or show what was measured."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from tile_kernels.runtime import registry, terminal


def bench(options: argparse.Namespace) -> int:
    """Measure, show, save."""
    from tile_kernels.testing import benchmark

    if options.plot:
        terminal.need_matplotlib()
    report = _loaded(options) if options.load else _measure(options)
    _show(report)
    if options.save:
        for path in benchmark.save(report, options.output):
            print(f"wrote {path}")
    if options.plot:
        for path in benchmark.plot_families(report, options.output):
            print(f"wrote {path}")
    return 0


def _loaded(options: argparse.Namespace) -> Any:
    """The saved results of the operators asked for."""
    from tile_kernels.testing import benchmark

    report = benchmark.load_all(options.load)
    if not options.which:
        return report
    names = {op.name for op in registry.select(options.which)}
    results = [result for result in report.results if result.op in names]
    if not results:
        raise FileNotFoundError(f"no results of {', '.join(options.which)} in {options.load}")
    return replace(report, results=results)


def _measure(options: argparse.Namespace) -> Any:
    from tile_kernels.testing import benchmark

    selected = registry.select(options.which)
    if not torch.cuda.is_available():
        print("no GPU here: measuring the host time of a call and the references on the CPU")
    cases = sum(len(op.cases.benchmarks) for op in selected)
    with terminal.progress_bar(cases, "measuring") as advance:
        references = {
            "reference": not options.no_reference,
            "compile_reference": not options.no_compile,
        }
        return benchmark.run(selected, **references, on_case=advance)


def _show(report: Any) -> None:
    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = []
    for r in report.results:
        met = r.device_us is not None and r.goal_us is not None and r.device_us <= r.goal_us
        missed = r.device_us is not None and r.goal_us is not None and not met
        color = "green" if met else "red" if missed else "default"
        share = "-" if r.copy_fraction is None else f"{100 * r.copy_fraction:.1f} %"
        times = (r.device_us, r.goal_us, r.gb_per_s)
        others = (r.host_us, r.host_new_size_us, r.reference_us, r.reference_compiled_us)
        cells = [r.case, f"{r.bytes / 1e6:.1f}", *map(number, times), share, *map(number, others)]
        cells[2] = f"[{color}]{number(r.device_us, 2)}[/]"
        rows.append(cells)
    names = (
        "case",
        "MB",
        "us",
        "goal us",
        "GB/s",
        "of copy",
        "host us",
        "new size us",
        "reference us",
        "compiled us",
    )
    columns = [(name, "left" if name == "case" else "right") for name in names]
    copy = f", copy {report.copy_gb_per_s:.0f} GB/s" if report.copy_gb_per_s else ""
    terminal.show_table(f"{report.machine['device']}{copy}", columns, rows)
