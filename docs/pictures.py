"""Draw what the results files hold, for the documents: `python docs/pictures.py`."""

from pathlib import Path

from matplotlib import pyplot
from tables import RESULTS, compared  # beside this file

from tile_kernels.testing import benchmark

FOLDER = Path(__file__).parent / "measured"


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


def main() -> None:
    """Write all pictures of measured times."""
    benchmark.plot_families(benchmark.load_all(RESULTS), FOLDER, ["svg"])
    draw_comparison(FOLDER / f"{RESULTS.name}.tilekernels.svg")


if __name__ == "__main__":
    main()
