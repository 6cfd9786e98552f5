"""The result of a run as one HTML file with its pictures inside."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from examples.tiny_v4.model import Config
from examples.tiny_v4.ran import Emulated

mpl.use("Agg")
import matplotlib.pyplot as plt

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>A tiny language model</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 56em; margin: 2em auto; padding: 0 1em;
  background: #fff; color: #222; }}
pre {{ white-space: pre-wrap; background: #f4f4f4; padding: 1em; }}
figure {{ margin: 0; overflow-x: auto; }} svg {{ width: 100%; height: auto; }}
figcaption, .note {{ color: #555; }} .wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 0.15em 1.5em 0.15em 0; vertical-align: top; }}
tr + tr {{ border-top: 1px solid #ddd; }} .name {{ overflow-wrap: anywhere; min-width: 9em; }}
</style>
<h1>A tiny language model</h1>
<p>This report shows how a small model learned to predict the next letter of short stories. It was
made by <code>examples/tiny_v4</code> from the layers of <code>tile_kernels</code>: {steps} steps in
{seconds:.0f} s, {speed:.0f} letters per second.</p>
<h2>Result</h2>
<p>The loss is the mean of <code>-log p</code> of the next letter, in nats. Lower is better.</p>
<table>{losses}</table>
<h2>Machine and versions</h2><table>{machine}</table>
<h2>Parts of the model</h2><div class="wide"><table>{parts}</table></div>
<h2>What ran on kernels, and what on references</h2>
<p>{ran}</p><details><summary>All operators</summary><div class="wide"><table>{operators}</table>
</div></details>
<h2>Kernels in the emulator</h2>{emulated}
{figures}
<h2>What it writes</h2>
<p>The model continues the text <q>The </q>, letter by letter.</p><pre>{sample}</pre>
</html>
"""


def write_report(result: dict[str, Any], path: Path) -> Path:
    """Write the report of `train.train` to `path`."""
    losses = (
        ("a model that knows only how often each letter occurs", result["unigram"]),
        ("the first step", result["losses"][0]),
        ("the last step", result["losses"][-1]),
        ("text that the model was not trained on", result["test_loss"]),
    )
    figures = [loss_figure(result)]
    if result["loads"] and result["loads"][0]:
        figures.append(load_figure(result))
    if result["looked_at"]["combs"]:
        figures.append(mixing_figure(result))
    if result["looked_at"]["gates"]:
        figures.append(memory_figure(result))
    ran, operators = operators_table(result)
    page = PAGE.format(
        steps=len(result["losses"]),
        seconds=result["seconds"],
        speed=result["tokens_per_second"],
        losses=table((name, f"{value:.3f} nats") for name, value in losses),
        machine=table((name, value or "not installed") for name, value in machine_rows(result)),
        parts=table(parts_of(result["config"]), ("part", "what it does")),
        ran=ran,
        operators=operators,
        emulated=emulated_section(result["emulated"]),
        figures="".join(figures),
        sample=html.escape(result["sample"]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


# ---- tables -------------------------------------------------------------------------------------


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Rows of a table in HTML."""
    lines = ["".join(f"<th>{title}</th>" for title in head)] if head else []
    lines += [
        "".join(f"<td{wraps(cell)}>{html.escape(str(cell))}</td>" for cell in row) for row in rows
    ]
    return "".join(f"<tr>{line}</tr>" for line in lines)


def wraps(cell: object) -> str:
    """The class of cells with long names, which may be broken anywhere."""
    return ' class="name"' if len(max(str(cell).split(), key=len, default="")) > 40 else ""


def machine_rows(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """Hardware and versions, without the date of the run."""
    names = {
        "device": "device", "cpu": "CPU", "cuda": "CUDA of PyTorch", "python": "Python",
        "torch": "PyTorch", "tilelang": "TileLang", "tile_kernels": "tile_kernels",
    }  # fmt: skip
    found = result["machine"]
    return [
        (title, found[key])
        for key, title in names.items()
        if key != "cuda" or found[key] is not None
    ]


def parts_of(config: Config) -> list[tuple[str, str]]:
    """What the model consists of, in the order in which a letter passes through it."""
    rows = []
    if config.engram:
        rows.append((
            "n-gram memory (Engram)",
            "looks up an embedding of the last two and three letters in a table, by their hash, "
            "and adds it to the streams where a gate lets it in",
        ))  # fmt: skip
    if config.mhc:
        rows.append((
            f"{config.streams} residual streams (hyper-connections)",
            "replace the one residual of a transformer; each letter decides how they are read, "
            "written and mixed",
        ))  # fmt: skip
    else:
        rows.append(("one residual", "as in a plain transformer"))
    if config.sparse:
        rows.append((
            "compressed sparse attention",
            "attends to a window of letters and to compressed entries, of which an indexer selects "
            "the best",
        ))  # fmt: skip
    else:
        rows.append(("dense attention", "attends to all earlier letters"))
    if config.moe:
        products = "; all products in FP8" if config.precision == "fp8" else ""
        rounded = "; activations rounded to e4m3" if config.fp8 else ""
        rows.append((
            f"{config.experts} experts",
            f"a router selects {config.topk} of them for each letter, and one more is shared by all"
            f"{products}{rounded}",
        ))  # fmt: skip
    else:
        rows.append(("feed-forward layer", "one for all letters, without experts"))
    return rows


def operators_table(result: dict[str, Any]) -> tuple[str, str]:
    """A sentence and a table: the operators of a training step, and what each ran on."""
    titles = {"tilelang": "kernel", "torch": "reference"}
    rows = [
        (operator, titles.get(backend, backend), count)
        for operator, backends in result["operators"].items()
        for backend, count in backends.items()
    ]
    on_kernels = sum(kind == "kernel" for _, kind, _ in rows)
    text = (
        f"A training step calls {len(result['operators'])} operators of <code>tile_kernels</code>. "
    )
    if on_kernels == 0:
        text += (
            "This run was on a CPU, so all of them ran their PyTorch <em>reference</em>, which "
            "defines the result. On a GPU the same operators run their kernels."
        )
    else:
        text += f"{on_kernels} of them ran their kernel."
    return text, table(rows, ("operator", "ran on", "calls in a step"))


def emulated_section(emulated: Sequence[Emulated] | str) -> str:
    """Kernels that ran on the CPU, each access checked, beside their references."""
    if isinstance(emulated, str):
        return f"<p>No kernel was emulated: {html.escape(emulated)}.</p>"
    rows = (
        (
            each.operator, each.given, each.kernel,
            f"{each.blocks} x {each.threads // each.blocks}",
            each.bytes_read, each.bytes_written,
            "equal, bit for bit" if each.is_equal else "DIFFERENT",
        )
        for each in emulated
    )  # fmt: skip
    head = (
        "operator", "applied to", "kernel", "blocks x threads", "bytes read", "bytes written",
        "result, compared with the reference",
    )  # fmt: skip
    return (
        "<p>The CUDA code of these kernels, as TileLang generates it for an H200, was compiled for "
        "this CPU and executed thread by thread. Every memory access was checked: no access out of "
        "bounds, no race and no missing barrier was found.</p>"
        f'<div class="wide"><table>{table(rows, head)}</table></div>'
    )


# ---- pictures -----------------------------------------------------------------------------------


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
    axes.plot(result["losses"], lw=0.8, label="training text of the step")
    axes.axhline(
        result["unigram"], ls="--", color="gray", label="letter frequencies alone, no model"
    )
    axes.axhline(
        result["test_loss"], ls=":", color="tab:red", label="text not trained on, at the end"
    )
    axes.set(xlabel="step", ylabel="nats per letter", ylim=(0, None))
    axes.legend()
    caption = (
        "The loss of every training step. Below the dashed line the model knows more than how "
        "often each letter occurs. The dotted line is the loss of the finished model on other text."
    )
    return shown("Loss", figure, caption)


def load_figure(result: dict[str, Any]) -> str:
    """How often each expert was chosen, by step."""
    layers = list(zip(*result["loads"]))
    figure, rows = one_below_other(len(layers))
    for i, (axes, load) in enumerate(zip(rows, layers)):
        shares = [[100 * count / sum(step) for count in step] for step in load]
        image = axes.imshow(list(zip(*shares)), aspect="auto", interpolation="nearest", vmin=0)
        axes.set(ylabel=f"layer {i}\nexpert", yticks=range(0, len(load[0]), 2))
        figure.colorbar(image, ax=axes, label="% of selections", pad=0.01)
    rows[-1].set(xlabel="step")
    even = 100 / len(layers[0][0])
    caption = (
        f"The share of letters that each expert receives, for every step. An even share is "
        f"{even:.1f} %. The router's bias increases for experts below it and decreases for others."
    )
    return shown("Load of the experts", figure, caption)


def mixing_figure(result: dict[str, Any]) -> str:
    """The mean mixing matrix of each part: which stream goes where."""
    combs = result["looked_at"]["combs"]
    size = (2.25 * len(combs), 2.7)
    figure, grid = plt.subplots(1, len(combs), figsize=size, squeeze=False, layout="constrained")
    for i, (axes, comb) in enumerate(zip(grid[0], combs)):
        values = comb.float().tolist()
        image = axes.imshow(values, vmin=0, vmax=1, cmap="magma")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                ink = "black" if value > 0.5 else "white"
                axes.text(x, y, f"{value:.2f}", color=ink, ha="center", va="center", fontsize=8)
        ticks = range(len(values))
        axes.set(title=f"part {i}", xlabel="to stream", xticks=ticks, yticks=ticks)
    grid[0, 0].set(ylabel="from stream")
    figure.colorbar(image, ax=list(grid[0]), label="weight", pad=0.01)
    caption = (
        "The matrix by which each part of the model (attention or experts, from the first layer "
        "on) mixes the residual streams, as a mean over letters. Rows and columns sum to 1. "
        "Training starts near the identity, which leaves every stream as it is."
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
        "The factor by which each stream multiplies the embedding that the n-gram memory found at "
        "each letter: 1 adds it fully, 0 not at all. It is one half where the stream and the "
        "memory have nothing in common."
    )
    return shown("The gate of the memory", figure, caption)
