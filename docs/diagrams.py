"""Drawings: the path of a call, the package, the data flow of FP8 experts and of attention.

python docs/diagrams.py        writes call_path.svg, layout.svg, fp8_flow.svg, attention_flow.svg
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
    ax: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    title: str,
    text: str,
    colour: str,
    title_size: float = 9,
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
    ax.text(x + 1.4, y + h - 1.6, title, fontsize=title_size, fontweight="bold", va="top")
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


def step(ax: Axes, x: float, top: float, text: str, colour: str, width: float = 48) -> None:
    """An operator of the data flow: its name, then what it does."""
    title, _, rest = text.partition("\n")
    box(ax, x, top - FLOW_HEIGHT, width, FLOW_HEIGHT, title, rest, colour, title_size=8)


def flow(ax: Axes, x: float, top: float, label: str) -> None:
    """A tensor that goes from one operator down to the next, named beside the arrow."""
    ax.annotate(
        "", (x, top - FLOW_GAP), (x, top), arrowprops={"arrowstyle": "-|>", "color": "#333333"}
    )
    ax.text(x + 1.2, top - FLOW_GAP / 2, label, fontsize=7.4, va="center", linespacing=1.35)


FLOW_HEIGHT, FLOW_GAP = 10.5, 9.0
E4M3, BF16 = "e4m3, 1 byte", "bfloat16, 2 bytes"


def chain(ax: Axes, x: float, top: float, parts: list[tuple[str, str]]) -> None:
    """Operators and tensors in turn, downwards; a tensor has the colour ""."""
    for text, colour in parts:
        if colour:
            step(ax, x, top, text, colour)
            top -= FLOW_HEIGHT
        else:
            flow(ax, x + 6, top, text)
            top -= FLOW_GAP


def fp8_flow() -> None:
    """The FP8 experts: which operator makes which operand, forward and backward."""
    ax = canvas(190, 152)
    for x, title in ((2, "forward"), (57, "input gradients"), (112, "weight gradients")):
        ax.text(x, 149, title, fontsize=11, fontweight="bold", va="top")
    forward = [
        (f"x [T, H]   {BF16}", ""),
        ("quant.per_token_cast\ncodes and scales are kept for backward", BLUE),
        (f"[T, H]   {E4M3}\nscales 1x128 along H", ""),
        ("moe.expand_to_fused_with_sf\ncopies tokens to the rows of their experts", BLUE),
        (f"[R, H]   {E4M3}\nscales 1x128 along H", ""),
        ("gemm.m_grouped_fp8_gemm_nt_contiguous\n1   times w_in [E, 2I, H], scales 128x128", GREEN),
        (f"h [R, 2I]   {BF16};\nkept as e4m3 (quant.per_token_cast)", ""),
        (
            "quant.swiglu_forward_and_per_token_cast\nsilu(gate) * value * weight of the choice",
            BLUE,
        ),
        (f"z [R, I]   {E4M3}\nscales 1x128 along I", ""),
        ("gemm.m_grouped_fp8_gemm_nt_contiguous\n2   times w_out [E, H, I], scales 128x128", GREEN),
        (f"[R, H]   {BF16}", ""),
        ("moe.reduce_fused\nadds the rows of a token in order", BLUE),
        (f"y [T, H]   {BF16}", ""),
    ]
    chain(ax, 2, 145, forward)
    backward = [
        (f"dy [T, H]   {BF16}", ""),
        ("quant.per_token_cast\nthen moe.expand_to_fused_with_sf", BLUE),
        (f"[R, H]   {E4M3}\nscales 1x128 along H", ""),
        (
            "gemm.m_grouped_fp8_gemm_nt_contiguous\n3   times w_out transposed [E, I, H], 128x128",
            GREEN,
        ),
        (f"dz [R, I]   {BF16}", ""),
        (
            "quant.swiglu_backward_and_per_token_cast\n"
            "also z, dh in bfloat16, gradients of weights",
            BLUE,
        ),
        (f"dh [R, 2I]   {E4M3}\nscales 1x128 along 2I", ""),
        (
            "gemm.m_grouped_fp8_gemm_nt_contiguous\n4   times w_in transposed [E, H, 2I], 128x128",
            GREEN,
        ),
        (f"[R, H]   {BF16}", ""),
        ("moe.reduce_fused\nadds the rows of a token in order", BLUE),
        (f"dx [T, H]   {BF16}", ""),
    ]
    chain(ax, 57, 145, backward)
    gathered = "per_channel_cast_fused_and_transpose\nof quant: gathers rows, in one pass"
    turned = "per_channel_cast_and_transpose\nof quant: both in one pass"
    by_rows = f"{E4M3}\nscales 1x128 along R"
    weight_gradient(
        ax, 145, (f"dy [T, H]   {BF16}", gathered, f"[H, R]   {by_rows}"),
        (f"z [R, I]   {BF16}", turned, f"[I, R]   {by_rows}"),
        "5", "dw_out [E, H, I]   dtype of the weight,\nor added to main_grad, float32, 4 bytes",
    )  # fmt: skip
    weight_gradient(
        ax, 93, (f"dh [R, 2I]   {BF16}", turned, f"[2I, R]   {by_rows}"),
        ("x [T, H]   e4m3, as kept", gathered, f"[H, R]   {by_rows}"),
        "6", "dw_in [E, 2I, H]   dtype of the weight,\nor added to main_grad, float32, 4 bytes",
    )  # fmt: skip
    box(
        ax, 57, 11, 131, 22,
        "weights [E, out, in], once per optimizer step",
        "quant.per_block_cast: e4m3, 1 byte, one scale for 128x128, for products 1 and 2;\n"
        "transpose.batched_transpose of the codes: the same numbers, for products 3 and 4\n\n"
        "T tokens, H hidden, I intermediate, E experts; R rows of experts, each padded to\n"
        "a multiple of 128. A scale is a float32 for 128 values: 0.03 bytes per element.\n"
        "Scales always run along the dimension that the product sums.",
        ORANGE,
    )  # fmt: skip
    save("fp8_flow.svg")


def weight_gradient(
    ax: Axes,
    top: float,
    first: tuple[str, str, str],
    second: tuple[str, str, str],
    number: str,
    result: str,
) -> None:
    """Two operands made of activations, then their product."""
    for x, (source, operator, operand) in ((112, first), (151, second)):
        flow(ax, x + 6, top, source)
        step(ax, x, top - FLOW_GAP, operator, BLUE, width=37)
        flow(ax, x + 6, top - FLOW_GAP - FLOW_HEIGHT, operand)
    below = top - 2 * FLOW_GAP - FLOW_HEIGHT
    text = f"gemm.k_grouped_fp8_gemm_nt_contiguous\n{number}   sums over the rows of each expert"
    step(ax, 112, below, text, GREEN, width=76)
    flow(ax, 118, below - FLOW_HEIGHT, result)


def attention_flow() -> None:
    """Compressed sparse attention, from hidden states to hidden states."""
    ax = canvas(150, 96)
    ax.text(75, 92, "x [T, hidden]", fontsize=9, ha="center", fontweight="bold")
    columns = (
        (
            0,
            "queries",
            "wq_a, RMS norm, wq_b;\neach head by its own RMS;\nlast 64 channels rotated",
            GREEN,
        ),
        (
            38,
            "rows of tokens",
            "wkv, RMS norm; last 64 channels\nrotated, the others through e4m3",
            GREEN,
        ),
        (
            76,
            "entries of 4 tokens",
            "kv_compress, RMS norm; rotated at\nthe first token, through e4m3",
            BLUE,
        ),
        (
            114,
            "keys of the indexer",
            "kv_compress, RMS norm; rotated,\nHadamard matrix, e2m1",
            BLUE,
        ),
    )
    for x, title, text, colour in columns:
        box(ax, x, 68, 35, 16, title, text, colour)
        arrow(ax, (75, 90), (x + 17.5, 84))
    box(
        ax, 94, 43, 55, 17, "indexer_select: the 512 best entries",
        "64 heads of 128 channels in e2m1, made of the\ncompressed queries;\n"
        "score = sum over heads of weight * relu(q . k)", BLUE,
    )  # fmt: skip
    arrow(ax, (131.5, 68), (131.5, 60), "k [T / 4, 128]")
    box(
        ax, 0, 24, 149, 13, "sparse_attention: one softmax over window, chosen entries and sink",
        "out = sum exp(s) row / (sum exp(s) + exp(sink)), s = q . row / sqrt(512); a row of 512 "
        "channels is key and value, the same for all heads;\n"
        "a token sees the last 128 rows and up to 512 entries that are complete", BLUE,
    )  # fmt: skip
    arrow(ax, (17.5, 68), (17.5, 37), "q [T, 64, 512]")
    arrow(ax, (55.5, 68), (55.5, 37), "window")
    arrow(ax, (82, 68), (82, 37), "entries")
    arrow(ax, (121, 43), (121, 37), "attention_indices")
    box(
        ax, 38, 6, 73, 11, "output",
        "last 64 channels rotated back by the query's position; wo_a by groups, wo_b",
        GREEN,
    )  # fmt: skip
    arrow(ax, (74, 24), (74, 17), "[T, 64, 512]")
    arrow(ax, (74, 6), (74, 1), "y [T, hidden]")
    save("attention_flow.svg")


if __name__ == "__main__":
    call_path()
    layout()
    fp8_flow()
    attention_flow()
