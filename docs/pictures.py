"""Draw what the results files hold, for the documents: `python docs/pictures.py`."""

import gzip
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from tables import RESULTS, compared, operator_report, rival_results, rivals  # beside this file

from tile_kernels.testing import benchmark

FOLDER = Path(__file__).parent / "measured"
ROUNDING = 0.037  # relative error of a product of normal values that are rounded to e4m3


def draw_comparison(path: Path) -> None:
    """How many times faster each case is than TileKernels'; at the right both times."""
    cases = compared()
    rows = list(range(len(cases), 0, -1))
    ratios = [there / here for _, there, here in cases]
    figure, axes = pyplot.subplots(figsize=(9, 1.3 + 0.19 * len(cases)), layout="constrained")
    colors = ["#2c5f8a" if ratio >= 1 else "#b55d4c" for ratio in ratios]
    axes.barh(rows, [ratio - 1 for ratio in ratios], left=1, height=0.6, color=colors)
    axes.axvline(1, color="0.4", linewidth=1)
    axes.set_yticks(rows, [case for case, _, _ in cases], fontsize=7)
    axes.set(xscale="log", xlabel="time of TileKernels / time here; right of 1x: faster here")
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1x", "1.5x", "2x", "3x", "4x"], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0.3, len(cases) + 0.7)
    axes.grid(True, axis="x", linewidth=0.3, alpha=0.5)
    beside = axes.twinx()
    beside.set_ylim(axes.get_ylim())
    times = [f"{there:.1f} → {here:.1f} us" for _, there, here in cases]
    beside.set_yticks(rows, times, fontsize=7)
    beside.tick_params(length=0)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


RIVAL_COLORS = {
    "torch.compile": "#b55d4c",
    "liger_kernel": "#6fa36f",
    "torchao": "#7a5c8f",
    "torch": "#d9a441",  # its own functions
}


def draw_rivals(path: Path) -> None:
    """How many times longer other libraries take, one bar for each library and case."""
    run = rival_results()
    if run is None:
        return
    bars = rivals()
    rows = list(range(len(bars), 0, -1))
    figure, axes = pyplot.subplots(figsize=(9, 1.1 + 0.22 * len(bars)), layout="constrained")
    for row, bar in zip(rows, bars):
        ratio = bar.other_us / bar.us
        color = next(color for name, color in RIVAL_COLORS.items() if bar.name.startswith(name))
        axes.barh(row, ratio - 1, left=1, height=0.66, color=color)
        name = bar.name.replace("nn.functional.", "")
        axes.text(max(ratio, 1) * 1.03, row, f"{name} {ratio:.2f}x", va="center", fontsize=7)
    axes.axvline(1, color="0.3", linewidth=1)
    shown = [
        "" if i and bar.case == bars[i - 1].case else f"{bar.case} ({bar.us:.3g} us)"
        for i, bar in enumerate(bars)
    ]
    axes.set_yticks(rows, shown, fontsize=7)
    axes.tick_params(axis="y", length=0)
    for row, title in zip(rows, shown):
        if title:
            axes.axhline(row + 0.5, color="0.85", linewidth=0.5)
    largest = max(bar.other_us / bar.us for bar in bars)
    axes.set(xscale="log", xlim=(0.7, 2.8 * largest), ylim=(0.3, len(bars) + 0.7))
    axes.set_xlabel(
        "time of the other library / time of tile_kernels; right of 1x: tile_kernels is faster",
        fontsize=8,
    )
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick < 2.8 * largest]
    axes.set_xticks(ticks, [f"{tick}x" for tick in ticks], fontsize=7)
    axes.minorticks_off()
    axes.set_axisbelow(True)
    axes.grid(True, axis="x", linewidth=0.3, alpha=0.5)
    machine = run["machine"]
    axes.set_title(
        f"{machine['device']}, one run on {machine['date'][:10]}; "
        "in parentheses: time of tile_kernels",
        fontsize=8,
        loc="left",
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_accumulation(numbers: Path, path: Path) -> None:
    """The error of FP8 products by the length of the sum, from `examples/accumulation_error.py`."""
    found = json.loads(numbers.read_text())
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    colors = {"normal": "#2c5f8a", "positive": "#b55d4c"}
    for kind, by_level in found["errors"].items():
        for (name, values), style in zip(by_level.items(), ("o--", "o-")):
            label = f"{kind} values, {name}"
            axes.plot(found["sizes"], values, style, color=colors[kind], label=label, markersize=4)
    axes.axhline(ROUNDING, color="0.5", linewidth=1, linestyle=":")
    axes.text(found["sizes"][0], 1.1 * ROUNDING, "rounding of normal values to e4m3", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(found["sizes"], [str(size) for size in found["sizes"]])
    axes.set(xlabel="channels that are summed, K", ylabel="|found - float64| / |float64|")
    axes.grid(True, linewidth=0.3, alpha=0.5)
    axes.legend(fontsize=7, handlelength=3.5, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# Colors of what runs on the device, by a part of the kernel's name; the first that fits.
KINDS = {
    "matrix products": ("#2c5f8a", ("gemm", "cutlass", "nvjet", "xmma", "grouped")),
    "copies, fills": ("#999999", ("memcpy", "memset", "fill", "copy", "cat")),
    "PyTorch, element by element": ("#b55d4c", ("at::native", "triton")),
    "other kernels": ("#6fa36f", ("",)),
}


def events_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The outermost operators of the host, and the work of the device, of a Chrome trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    timed = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    host: list[dict[str, Any]] = []
    ends: dict[int, float] = {}
    for event in timed:
        on_host = event["cat"] in ("cpu_op", "cuda_runtime", "cuda_driver")
        outermost = event["ts"] >= ends.get(event["tid"], -1)
        if on_host and outermost and "Synchronize" not in event["name"]:
            host.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return host, [e for e in timed if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]


def draw_traces(traces: dict[str, Path], path: Path) -> None:
    """The host and the device of training steps on one time axis, in milliseconds."""
    figure, all_axes = pyplot.subplots(
        len(traces), figsize=(9, 0.6 + 1.2 * len(traces)), layout="constrained", sharex=True,
        squeeze=False,
    )  # fmt: skip
    for axes, (title, trace) in zip(all_axes[:, 0], traces.items()):
        host, device = events_of(trace)
        first = device[0]["ts"]
        bars: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
        for event in device:
            name = event["name"].lower()
            kind = next(k for k, (_, parts) in KINDS.items() if any(p in name for p in parts))
            bars[kind].append(((event["ts"] - first) / 1e3, event["dur"] / 1e3))
        on_host = [((event["ts"] - first) / 1e3, event["dur"] / 1e3) for event in host]
        axes.broken_barh(on_host, (1.1, 0.8), color="0.3", linewidth=0)
        for kind, (color, _) in KINDS.items():
            axes.broken_barh(bars[kind], (0.1, 0.8), color=color, linewidth=0, label=kind)
        end = max(e["ts"] + e["dur"] - first for e in device) / 1e3
        axes.set_yticks([0.5, 1.5], ["device", "host"], fontsize=8)
        axes.set_title(f"{title}: {end:.2f} ms", fontsize=8, loc="left")
        axes.set(ylim=(0, 2), xlim=(-0.5, None))
        axes.grid(True, axis="x", linewidth=0.3, alpha=0.5)
    all_axes[-1, 0].set_xlabel("milliseconds")
    figure.legend(
        *all_axes[0, 0].get_legend_handles_labels(), fontsize=7, ncol=4, loc="outside upper right"
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Write all pictures of measured times and errors."""
    benchmark.plot_families(operator_report(), FOLDER, ["svg"])
    draw_comparison(FOLDER / f"{RESULTS.name}.tilekernels.svg")
    draw_rivals(FOLDER / f"{RESULTS.name}.rivals.svg")
    for name in ("moe.4096.bf16", "moe.4096.fp8", "mhc.7168.kernels"):
        traces = {
            f"{name}, {when}": FOLDER / "traces" / f"{when}.{name}.json.gz"
            for when in ("before", "after")
        }
        found = {title: trace for title, trace in traces.items() if trace.exists()}
        if found:
            draw_traces(found, FOLDER / f"trace.{name}.svg")
    draw_accumulation(FOLDER / "accumulation_error.json", FOLDER / "accumulation_error.svg")


if __name__ == "__main__":
    main()
