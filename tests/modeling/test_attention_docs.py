"""Numbers of the page about attention are computed, not written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.attention_layer import Sizes, markdown
from tile_kernels.modeling.attention import CompressedSparseAttention, HeavilyCompressedAttention

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "attention.md"
CONTEXTS = {"128k": 2**17, "1M": 2**20}
CHANNELS = {
    "dense, 8 heads of 128 channels for keys and values": 2 * 8 * 128,
    "dense, latent rows of 576 channels": 576,
}


def memory_table() -> str:
    """Bytes of a cache for each token of context and layer, and of one sequence."""
    head = "| one layer | " + " | ".join(
        f"bytes per token at {name}, of a sequence" for name in CONTEXTS
    )
    lines = [head + " |", "|---" * (1 + len(CONTEXTS)) + "|"]

    def add(name: str, sizes: list[int]) -> None:
        cells = [
            f"{size / length:.1f}, {size / 2**20:.1f} MiB"
            for size, length in zip(sizes, CONTEXTS.values())
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")

    for name, channels in CHANNELS.items():
        add(f"{name}, bfloat16", [2 * channels * length for length in CONTEXTS.values()])
    with torch.device("meta"):
        for cache in ("bf16", "fp8"):
            for kind, layer in (
                ("CSA", CompressedSparseAttention(4096, cache=cache)),
                ("HCA", HeavilyCompressedAttention(4096, cache=cache)),
                ("window alone", HeavilyCompressedAttention(4096, ratio=0, cache=cache)),
            ):
                sizes = [layer.state(1, length).num_bytes for length in CONTEXTS.values()]
                add(f"{kind}, `cache={cache!r}`", sizes)
    return "\n".join(lines) + "\n"


def test_times_are_those_of_the_file() -> None:
    path = ROOT / "benchmarks" / "results" / "attention_layer.nvidia-h200.json"
    content = json.loads(path.read_text())
    assert markdown(content) in PAGE.read_text()
    date = content["machine"]["date"].split()[0]
    assert f"torch {content['machine']['torch']} on {date}" in PAGE.read_text()
    assert content["sizes"] == vars(Sizes())


def test_memory_table_is_computed() -> None:
    assert memory_table() in PAGE.read_text(), memory_table()
