"""Draw what the results files hold, for the documents: `python docs/pictures.py`."""

import json
from pathlib import Path

from matplotlib import pyplot
from tables import RESULTS, compared  # beside this file

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


def main() -> None:
    """Write all pictures of measured times and errors."""
    benchmark.plot_families(benchmark.load_all(RESULTS), FOLDER, ["svg"])
    draw_comparison(FOLDER / f"{RESULTS.name}.tilekernels.svg")
    draw_accumulation(FOLDER / "accumulation_error.json", FOLDER / "accumulation_error.svg")


if __name__ == "__main__":
    main()
