"""The quantization error of each format, for normally distributed values with and without outliers.

    python -m examples.quant_error [PICTURE]

prints the error of each cast, and draws it if a file is named.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tile_kernels import quant

# Format, values that share a scale (None: a row), scales that are powers of two.
CASTS = (
    ("e5m6", None, False),
    ("e4m3", 128, False),
    ("e4m3", 128, True),
    ("e4m3", 32, True),
    ("e2m1", 32, True),
    ("e2m1", 16, True),
)
WIDTH = 1024


def data(outliers: bool, rows: int = 64) -> torch.Tensor:
    """Normal numbers; with outliers, one of 256 is a hundred times as large."""
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH)
    if outliers:
        x = torch.where(torch.rand_like(x) < 1 / 256, 100 * x, x)
    return x.bfloat16()


def errors(x: torch.Tensor) -> dict[str, float]:
    """By cast, the mean of `|what comes back - x| / |x|` over values that are not tiny."""
    found = {}
    for fmt, group, rounded in CASTS:
        back = quant.fake_cast(x, fmt, group or WIDTH, round_sf=rounded)
        name = f"{fmt}, {group or 'row'}" + (", 2^n" if rounded else "")
        usual = x.float().abs() > 0.1
        relative = (back.float() - x.float()).abs() / x.float().abs()
        found[name] = relative[usual].mean().item()
    return found


def draw(found: dict[str, dict[str, float]], path: str) -> None:
    """Bars for each cast, one for each kind of data."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = list(next(iter(found.values())))
    for i, (kind, of_casts) in enumerate(found.items()):
        places = [place + 0.4 * i for place in range(len(names))]
        axes.bar(places, [100 * of_casts[name] for name in names], width=0.38, label=kind)
    axes.set_xticks([place + 0.2 for place in range(len(names))], names, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("mean relative error, %")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def main(given: list[str]) -> dict[str, dict[str, float]]:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "picture", nargs="?", metavar="PICTURE", help="a file to draw, .svg or .png"
    )
    options = parser.parse_args(given)
    found = {"normal": errors(data(False)), "with outliers": errors(data(True))}
    for kind, of_casts in found.items():
        print(kind)
        for name, error in of_casts.items():
            print(f"  {name:16} {100 * error:8.3f} %")
    if options.picture:
        draw(found, options.picture)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
