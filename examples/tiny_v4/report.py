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
<meta name="viewport" content="width=device-width">
<style>body {{ font: 16px/1.5 sans-serif; max-width: 56em; margin: 2em auto; padding: 0 1em; }}
pre {{ white-space: pre-wrap; background: #f4f4f4; padding: 1em; }} figure {{ margin: 0; }}
svg {{ width: 100%; height: auto; }} figcaption {{ color: #555; }} td {{ padding-right: 2em; }}
</style>
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
            (config.sparse, "sparse attention over compressed entries"),
            (not config.sparse, "dense attention"),
            (config.mhc, f"{config.streams} residual streams"),
            (not config.mhc, "a plain residual"),
            (config.engram, "an n-gram memory"),
            (config.moe, f"{config.topk} of {config.experts} experts"),
            (not config.moe, "dense"),
            (config.moe and config.fp8, "activations in e4m3"),
            (config.moe and config.precision == "fp8", "products of experts in FP8"),
        )
        if there
    )
    rows = (
        ("letter frequencies alone", result["unigram"]),
        ("first step", result["losses"][0]),
        ("last step", result["losses"][-1]),
        ("text it has not seen", result["test_loss"]),
    )
    figures = [loss_figure(result)]
    if result["loads"] and result["loads"][0]:
        figures.append(load_figure(result))
    if result["looked_at"]["combs"]:
        figures.append(mixing_figure(result))
    if result["looked_at"]["gates"]:
        figures.append(memory_figure(result))
    page = PAGE.format(
        parts=parts,
        steps=len(result["losses"]),
        seconds=result["seconds"],
        speed=result["tokens_per_second"],
        rows="".join(f"<tr><td>{name}</td><td>{value:.3f} nats</td></tr>" for name, value in rows),
        figures="".join(figures),
        sample=html.escape(result["sample"]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def shown(title: str, figure: plt.Figure, caption: str) -> str:
    """A section of the page: the picture as text in it, and what there is to see."""
    file = io.StringIO()
    with plt.rc_context({"svg.hashsalt": title}):  # the same picture is the same text
        figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
    _, tag, rest = file.getvalue().partition("<svg")  # without the declarations of a file
    return f"<h2>{title}</h2><figure>{tag}{rest}<figcaption>{caption}</figcaption></figure>"


def one_below_other(count: int) -> tuple[plt.Figure, list[plt.Axes]]:
    """A figure of so many rows with a common horizontal axis."""
    size = (9, 0.5 + 1.5 * count)
    figure, grid = plt.subplots(
        count, 1, figsize=size, squeeze=False, sharex=True, layout="constrained"
    )
    return figure, list(grid[:, 0])


def loss_figure(result: dict[str, Any]) -> str:
    """The loss of every step."""
    figure, axes = plt.subplots(figsize=(9, 3), layout="constrained")
    axes.plot(result["losses"], lw=0.8)
    axes.axhline(result["unigram"], ls="--", color="gray", label="letter frequencies alone")
    axes.axhline(result["test_loss"], ls=":", color="tab:red", label="text it has not seen")
    axes.set(xlabel="step", ylabel="nats per letter", ylim=(0, None))
    axes.legend()
    caption = "Below the dashed line the model knows more than how often each letter comes."
    return shown("Loss", figure, caption)


def load_figure(result: dict[str, Any]) -> str:
    """How often each expert was chosen, by step."""
    layers = list(zip(*result["loads"]))
    figure, rows = one_below_other(len(layers))
    for i, (axes, load) in enumerate(zip(rows, layers)):
        shares = [[100 * count / sum(step) for count in step] for step in load]
        image = axes.imshow(list(zip(*shares)), aspect="auto", interpolation="nearest", vmin=0)
        axes.set(ylabel=f"layer {i}\nexpert", yticks=range(0, len(load[0]), 2))
        figure.colorbar(image, ax=axes, label="% of choices", pad=0.01)
    rows[-1].set(xlabel="step")
    even = 100 / len(layers[0][0])
    caption = (
        f"Each expert's share of what its layer chose. Even is {even:.1f} %: the bias of the "
        "gate goes up for experts with less, down for those with more."
    )
    return shown("Load of the experts", figure, caption)


def mixing_figure(result: dict[str, Any]) -> str:
    """The mean mixing matrix of each part: which stream goes where."""
    combs = result["looked_at"]["combs"]
    size = (2.25 * len(combs), 2.7)
    figure, grid = plt.subplots(1, len(combs), figsize=size, squeeze=False, layout="constrained")
    for i, (axes, comb) in enumerate(zip(grid[0], combs)):
        values = comb.float().tolist()
        axes.imshow(values, vmin=0, vmax=1, cmap="magma")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                ink = "black" if value > 0.5 else "white"
                axes.text(x, y, f"{value:.2f}", color=ink, ha="center", va="center", fontsize=8)
        ticks = range(len(values))
        axes.set(title=f"part {i}", xlabel="to stream", xticks=ticks, yticks=ticks)
    grid[0, 0].set(ylabel="from stream")
    caption = (
        "Mean over tokens. Rows and columns add up to 1; training starts at the identity, where "
        "every stream goes on as it is."
    )
    return shown("How streams are mixed", figure, caption)


def memory_figure(result: dict[str, Any]) -> str:
    """The gate of each stream at each letter, for every memory."""
    gates, letters = result["looked_at"]["gates"], result["shown"]
    figure, rows = one_below_other(len(gates))
    for axes, gate in zip(rows, gates):
        image = axes.imshow(gate[0].T.tolist(), aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axes.set(ylabel="stream", yticks=range(gate.shape[-1]))
        figure.colorbar(image, ax=axes, label="gate", pad=0.01)
    rows[-1].set_xticks(range(len(letters)), list(letters.replace("\n", " ")), fontsize=8)
    caption = (
        "By this number each stream multiplies what the n-gram memory found at each letter: 1 lets "
        "it in whole, 0 not at all. It is one half where stream and memory have nothing in common."
    )
    return shown("The gate of the memory", figure, caption)
