"""The two drawings of docs/architecture.md: the path of a call, and the layout of the package.

python docs/diagrams.py        writes docs/call_path.svg and docs/layout.svg
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

mpl.use("svg")
mpl.rcParams.update({"font.family": "sans-serif", "svg.fonttype": "path", "svg.hashsalt": "docs"})

FOLDER = Path(__file__).parent
BLUE, GREEN, GREY, ORANGE = "#dbe9f6", "#dff0d8", "#eeeeee", "#fde5cd"


def box(
    ax: Axes, x: float, y: float, w: float, h: float, title: str, text: str, colour: str
) -> None:
    """A box with a bold title and lines of text below it."""
    shape = FancyBboxPatch(
        (x, y),
        w,
        h,
        boxstyle="round,pad=0,rounding_size=1.2",
        facecolor=colour,
        edgecolor="#555555",
    )
    ax.add_patch(shape)
    ax.text(x + 1.4, y + h - 1.6, title, fontsize=9, fontweight="bold", va="top")
    ax.text(x + 1.4, y + h - 5.2, text, fontsize=7.6, va="top", linespacing=1.45)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], label: str = "") -> None:
    """An arrow with a label beside its middle."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#333333", "lw": 1.1})
    if label:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        ax.text(x + 0.8, y + 0.5, label, fontsize=7.4, color="#333333", style="italic")


def canvas(width: float, height: float) -> Axes:
    """An empty drawing, `width` units wide."""
    _, ax = plt.subplots(figsize=(width / 12, height / 12))
    ax.set_xlim(0, width)
    ax.set_ylim(0, height)
    ax.axis("off")
    return ax


def save(name: str) -> None:
    """Writes the current drawing."""
    plt.savefig(FOLDER / name, bbox_inches="tight", metadata={"Date": None})
    plt.close()


def call_path() -> None:
    """A call of an operator, from Python to the launch."""
    ax = canvas(112, 82)
    box(
        ax,
        2,
        70,
        44,
        11,
        'per_token_cast(x, "e4m3", 128)',
        "quant/per_token/op.py: signature, docstring;\nunpacks tuples, calls the operator",
        BLUE,
    )
    box(
        ax,
        2,
        51,
        44,
        13,
        "Operator.__call__",
        "runtime/operator.py: the key of the call: dtypes,\n"
        "devices, strides, alignment, scalars, static sizes;\n"
        "dynamic sizes (the token count) apart",
        BLUE,
    )
    box(
        ax,
        2,
        33,
        44,
        12,
        "Call.run",
        "runtime/prepared.py: allocates the results,\nmakes views, launches",
        GREEN,
    )
    box(ax, 2, 19, 44, 8, "compiled handle", "on the current stream of the tensor's device", GREEN)
    arrow(ax, (24, 70), (24, 64))
    arrow(ax, (24, 51), (24, 45), "plan and sizes known: a hit")
    arrow(ax, (24, 33), (24, 27))
    box(
        ax,
        62,
        57,
        48,
        13,
        "new sizes, known plan",
        "check and outputs are evaluated,\nlaunches are reused; nothing is compiled",
        ORANGE,
    )
    box(
        ax,
        62,
        36,
        48,
        17,
        "new plan",
        "check, outputs and launches are evaluated;\n"
        "plan.py chooses the static arguments; kernel.py is\n"
        "imported and compiled, unless it was before",
        ORANGE,
    )
    arrow(ax, (46, 60), (62, 63))
    arrow(ax, (46, 55), (62, 47))
    arrow(ax, (62, 60), (46, 42))
    arrow(ax, (62, 40), (46, 38))
    box(
        ax,
        62,
        8,
        48,
        24,
        "never cached",
        "torch.compile, autograd, subclasses, modes:\n"
        "    the custom op, which calls back with plain tensors\n"
        'CPU tensors: reference.py\nbackend("emulate"): the generated CUDA on the CPU\n'
        "meta tensors: outputs alone\nlogging, the checked mode",
        GREY,
    )
    arrow(ax, (46, 52), (62, 26))
    ax.text(
        2,
        10,
        "A hit passes three Python frames: the public function,\nOperator.__call__ and Call.run.",
        fontsize=8,
        va="top",
    )
    save("call_path.svg")


def layout() -> None:
    """Folders and which of them may import which."""
    ax = canvas(136, 66)
    box(
        ax,
        2,
        41,
        99,
        24,
        "tile_kernels/<family>/<name>/        one folder per operator",
        "",
        "#ffffff",
    )
    files = (
        ("op.py", "public functions,\ncheck, outputs,\nlaunches, cost"),
        ("plan.py", "problem to static\narguments;\nno TileLang"),
        ("kernel.py", "TileLang only;\nimported at the\nfirst launch"),
        ("reference.py", "the definition\nin PyTorch"),
        ("cases.py", "argument sets\nfor tests and\nbenchmarks"),
    )
    for i, (name, text) in enumerate(files):
        box(ax, 4 + 19.2 * i, 43, 18.2, 16.5, name, text, BLUE)
    box(
        ax,
        105,
        41,
        30,
        24,
        "tile_kernels/<family>/",
        "__init__.py: exports\nprimitives.py: TileLang\n    macros of several kernels\n"
        "other files: what several\n    folders share",
        BLUE,
    )
    box(
        ax,
        2,
        22,
        40,
        13,
        "runtime/",
        "declarations, cache of calls, launch,\ncustom ops, backends, warm-up",
        GREEN,
    )
    box(
        ax,
        48,
        22,
        40,
        13,
        "emulator/",
        "runs TileLang's CUDA on a CPU;\ndepends on nothing else here",
        GREEN,
    )
    box(
        ax,
        94,
        22,
        41,
        13,
        "torch/, compat/",
        "references under their public names;\nimport paths of other packages",
        GREY,
    )
    box(
        ax,
        2,
        3,
        40,
        13,
        "modeling/, ep/",
        "layers with gradients; expert-parallel\ncommunication",
        ORANGE,
    )
    box(
        ax,
        48,
        3,
        40,
        13,
        "commands/, testing/",
        "command line; comparison, timing,\npytest plugin",
        ORANGE,
    )
    box(ax, 94, 3, 41, 13, "tests/", "mirrors the package", ORANGE)
    arrow(ax, (22, 41), (22, 35), "imports")
    arrow(ax, (42, 28.5), (48, 28.5))
    arrow(ax, (22, 16), (22, 22))
    arrow(ax, (60, 16), (42, 22.5))
    save("layout.svg")


if __name__ == "__main__":
    call_path()
    layout()
