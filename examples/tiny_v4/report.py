"""The result of a run as one HTML file with its pictures inside."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>A tiny model</title>
<style>body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; }}
pre {{ white-space: pre-wrap; background: #f4f4f4; padding: 1em; }} svg {{ max-width: 100%; }}
td {{ padding-right: 2em; }}</style>
<h1>A tiny model</h1>
<p>{parts}. {steps} steps in {seconds:.0f} s, {speed:.0f} letters per second.</p>
<table>{rows}</table>
{figures}
<h2>What it writes</h2><pre>{sample}</pre>
</html>
"""


def write_report(result: dict[str, Any], path: Path) -> Path:
    """Write the report of `train.train` to `path`."""
    config = result["config"]
    parts = ", ".join(
        words
        for there, words in (
            (config.mhc, f"{config.streams} residual streams"),
            (not config.mhc, "a plain residual"),
            (config.engram, "an n-gram memory"),
            (config.moe, f"{config.topk} of {config.experts} experts"),
            (not config.moe, "dense"),
            (config.moe and config.fp8, "activations in e4m3"),
        )
        if there
    )
    rows = (
        ("letter frequencies alone", result["unigram"]),
        ("first step", result["losses"][0]),
        ("last step", result["losses"][-1]),
        ("text it has not seen", result["test_loss"]),
    )
    figures = [("Loss", loss_figure(result))]
    if result["loads"] and result["loads"][0]:
        figures.append(("Load of the experts", load_figure(result)))
    if result["looked_at"]["combs"]:
        figures.append(("How streams are mixed", mixing_figure(result)))
    if result["looked_at"]["gates"]:
        figures.append(("What the memory adds", memory_figure(result)))
    page = PAGE.format(
        parts=parts,
        steps=len(result["losses"]),
        seconds=result["seconds"],
        speed=result["tokens_per_second"],
        rows="".join(f"<tr><td>{name}</td><td>{value:.3f} nats</td></tr>" for name, value in rows),
        figures="".join(f"<h2>{title}</h2><figure>{svg}</figure>" for title, svg in figures),
        sample=html.escape(result["sample"]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def as_svg(figure: plt.Figure) -> str:
    """The picture as text for a page."""
    figure.tight_layout()
    file = io.StringIO()
    figure.savefig(file, format="svg")
    plt.close(figure)
    _, tag, rest = file.getvalue().partition("<svg")  # without the declarations of a file
    return tag + rest


def loss_figure(result: dict[str, Any]) -> str:
    """The loss of every step."""
    figure, axes = plt.subplots(figsize=(8, 3))
    axes.plot(result["losses"], lw=0.8)
    axes.axhline(result["unigram"], ls="--", color="gray", label="letter frequencies alone")
    axes.axhline(result["test_loss"], ls=":", color="tab:red", label="text it has not seen")
    axes.set(xlabel="step", ylabel="nats per letter")
    axes.legend()
    return as_svg(figure)


def load_figure(result: dict[str, Any]) -> str:
    """How often each expert was chosen, by step."""
    layers = list(zip(*result["loads"]))
    figure, grid = plt.subplots(len(layers), 1, figsize=(8, 1.6 * len(layers)), squeeze=False)
    for i, (axes, load) in enumerate(zip(grid[:, 0], layers)):
        axes.imshow(list(zip(*load)), aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set(ylabel=f"expert, layer {i}", xlabel="step")
    return as_svg(figure)


def mixing_figure(result: dict[str, Any]) -> str:
    """The mean mixing matrix of each part: which stream goes where."""
    combs = result["looked_at"]["combs"]
    figure, grid = plt.subplots(1, len(combs), figsize=(2 * len(combs), 2.2), squeeze=False)
    for i, (axes, comb) in enumerate(zip(grid[0], combs)):
        axes.imshow(comb.float().cpu().numpy(), vmin=0, vmax=1, cmap="magma")
        axes.set(title=f"part {i}", xticks=[], yticks=[])
    return as_svg(figure)


def memory_figure(result: dict[str, Any]) -> str:
    """How much the memory adds to each stream at each letter."""
    gates, shown = result["looked_at"]["gates"], result["shown"]
    figure, axes = plt.subplots(figsize=(10, 2.4))
    axes.imshow(gates[0][0].T.cpu().numpy(), aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(shown)), list(shown.replace("\n", " ")), fontsize=7)
    axes.set(ylabel="stream", yticks=[])
    return as_svg(figure)
