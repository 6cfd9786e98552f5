"""One layer of compressed sparse attention, stage by stage: `python -m benchmarks.attention_layer`.

Two steps of serving with a context of 64k tokens: the last 4096 tokens of a prompt, and one token
for each of 64 sequences. The sizes are those of V4's smaller model. Each stage is timed by itself,
then the step as a whole, for decoding also as a CUDA graph, and beside it dense attention by
`scaled_dot_product_attention`, with 64 heads of 128 channels and 8 heads of keys and values.

The context is random: rows, entries and keys of the indexer as they would be in a cache. Times do
not depend on the values, but for the selection, whose lists grow with the order of scores.

Without a GPU sizes are tiny.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import BF16, CUDA, DEVICE, GRAPH, measure
from examples.tiny_v4.speed import captured
from tile_kernels import attention
from tile_kernels.modeling.attention import CompressedSparseAttention
from tile_kernels.modeling.attention.sequences import Sequences
from tile_kernels.testing import benchmark

TOTAL, DENSE = "all stages", "dense attention, scaled_dot_product_attention"


@dataclass(frozen=True)
class Sizes:
    """Of the layer, the context and the steps."""

    hidden: int = 4096
    heads: int = 64
    rank: int = 1024
    window: int = 128
    topk: int = 512
    index_heads: int = 64
    context: int = 65536
    prompt: int = 4096
    sequences: int = 64
    dense_groups: int = 8  # heads of keys and values of dense attention


SMALL = Sizes(32, 2, 16, 4, 3, 2, 64, 16, 2, 1)
Stages = dict[str, Callable[[], Any]]


def layer_of(sizes: Sizes) -> CompressedSparseAttention:
    """The layer that is timed."""
    torch.manual_seed(0)
    return CompressedSparseAttention(
        sizes.hidden, heads=sizes.heads, q_rank=sizes.rank, out_groups=min(8, sizes.heads),
        out_rank=sizes.rank, window=sizes.window, topk=sizes.topk, index_heads=sizes.index_heads,
        cache="fp8", device=DEVICE, dtype=BF16,
    )  # fmt: skip


def random(*shape: int) -> Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(*shape, device=DEVICE).to(BF16)


# ---- the end of a prompt ------------------------------------------------------------------------


def prefill(sizes: Sizes) -> Stages:
    """The last tokens of a prompt over a context whose entries and keys are there already."""
    layer, count, before = layer_of(sizes), sizes.prompt, sizes.context - sizes.prompt
    x = random(count, sizes.hidden)
    positions = torch.arange(before, sizes.context, device=DEVICE)
    sequences = Sequences.in_rows(x, None, sizes.hidden)
    num_entries = sizes.context // layer.ratio
    # Rows of the window before, of the new tokens, and all entries.
    rows = random(sizes.window - 1 + count + num_entries, layer.head_dim)
    keys = layer.indexer.parts(torch.randn(num_entries, layer.indexer.dim, device=DEVICE))
    start = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    end = ((positions + 1) // layer.ratio).to(torch.int32)
    window = torch.arange(count, device=DEVICE)[:, None] + torch.arange(sizes.window, device=DEVICE)
    window = window.to(torch.int32)
    lengths = torch.full_like(start, sizes.window + sizes.topk)  # lists are full
    kept: dict[str, Any] = {}

    def project() -> None:
        kept["projected"] = layer.project(x, positions)
        rows[sizes.window - 1 : sizes.window - 1 + count] = kept["projected"].rows

    def compress() -> None:
        rows[-(count // layer.ratio) :] = layer._all_entries(x, sequences)

    def index() -> None:
        new = layer.indexer.parts(layer._keys(x, sequences))
        for all_keys, part in zip(keys, new):
            all_keys[-len(part) :] = part
        q, weights = layer.indexer.queries(
            x, kept["projected"].compressed, kept["projected"].angles
        )
        kept["queries"] = layer.indexer.parts(q), weights

    def select() -> None:
        q, weights = kept["queries"]
        kept["selected"] = layer.indexer.select(q, keys, weights, start, end, sizes.topk)

    def attend() -> None:
        chosen = kept["selected"] + (sizes.window - 1 + count)
        indices = torch.cat((window, chosen), 1)
        kept["out"] = attention.sparse_attention(
            kept["projected"].q, rows, indices, layer.sm_scale, sink=layer.attn_sink,
            topk_length=lengths,
        )  # fmt: skip

    def output() -> Tensor:
        return layer.output(kept["out"], kept["projected"].angles)

    return {
        "projections of q and kv": project,
        "compression": compress,
        "indexer, queries and keys": index,
        "selection": select,
        "attention": attend,
        "output": output,
    }


def dense_prefill(sizes: Sizes) -> Callable[[], Any]:
    """The same tokens with dense attention, over the whole context: no more than 4 % too much."""
    q = random(1, sizes.heads, sizes.prompt, 128)
    k, v = random(2, 1, sizes.dense_groups, sizes.context, 128)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# ---- decoding -----------------------------------------------------------------------------------


def decode(sizes: Sizes) -> Stages:
    """One token for each sequence, over a state with so many tokens."""
    layer, count = layer_of(sizes), sizes.sequences
    x = random(count, sizes.hidden)
    state = layer.state(count, sizes.context + layer.ratio)
    for cache in (state.window, state.entries):
        if cache is None:
            raise RuntimeError("unreachable: the layer has entries")
        for first in range(0, cache.shape[0], 4096):  # pages, some at a time
            pages = range(first, min(first + 4096, cache.shape[0]))
            slots = torch.arange(
                pages.start * cache.shape[1], pages.stop * cache.shape[1], dtype=torch.int32,
                device=DEVICE,
            )  # fmt: skip
            attention.kv_cache_append(cache, slots, random(len(slots), layer.head_dim))
    keys = layer.indexer.parts(torch.randn(len(state.keys[0]), layer.indexer.dim, device=DEVICE))
    for all_keys, part in zip(state.keys, keys):
        all_keys.view(torch.uint8).copy_(part.view(torch.uint8))
    length = sizes.context - 1  # so that the token completes an entry
    for lengths in (state.lengths, state.compressor.lengths, state.indexer.lengths):  # type: ignore[union-attr]
        lengths.fill_(length)
    slots = torch.arange(count, dtype=torch.int32, device=DEVICE)
    places = layer._next_places(state, slots)
    kept: dict[str, Any] = {}

    def project() -> None:
        kept["projected"] = layer.project(x, places.position)
        state.write_window(kept["projected"].rows, places)

    def compress() -> None:
        for lengths in (state.compressor.lengths, state.indexer.lengths):  # type: ignore[union-attr]
            lengths.fill_(length)  # every call is the same step
        layer._step_entries(kept["projected"], places, state, slots)

    def index() -> None:
        projected = kept["projected"]
        q, weights = layer.indexer.queries(x, projected.compressed, projected.angles)
        kept["queries"] = layer.indexer.parts(q), weights

    def select() -> None:
        q, weights = kept["queries"]
        start = layer._first_key(places, state)
        end = start + layer._num_entries(places, state)
        kept["selected"] = layer.indexer.select(q, state.keys, weights, start, end, sizes.topk)

    def attend() -> None:
        kept["out"] = layer._attend_rows(
            kept["projected"].q, places, state, kept["selected"],
            layer._num_entries(places, state).clamp(max=sizes.topk),
        )  # fmt: skip

    def output() -> Tensor:
        return layer.output(kept["out"], kept["projected"].angles)

    return {
        "projections of q and kv": project,
        "compression, entries and keys": compress,
        "indexer, queries": index,
        "selection": select,
        "attention": attend,
        "output": output,
    }


def dense_decode(sizes: Sizes) -> Callable[[], Any]:
    """The same tokens with dense attention."""
    q = random(sizes.sequences, sizes.heads, 1, 128)
    k, v = (random(sizes.sequences, sizes.dense_groups, sizes.context, 128) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# ---- measuring ----------------------------------------------------------------------------------

STEPS: dict[str, tuple[Callable[[Sizes], Stages], Callable[[Sizes], Callable[[], Any]]]] = {
    "prefill": (prefill, dense_prefill),
    "decode": (decode, dense_decode),
}


@torch.no_grad()
def run(step: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """The times of all stages of a step, of all together, and of dense attention."""
    make, make_dense = STEPS[step]
    stages = make(sizes)

    def whole() -> Any:
        return [stage() for stage in stages.values()][-1]

    whole()

    def timed(name: str, function: Callable[[], Any], graph: bool = False) -> dict[str, Any]:
        found = measure(function, graph)
        time = found["device_us"] if CUDA else found["wall_us"]
        print(f"{step:8} {name:46} {time:10.1f} us", flush=True)
        return {"step": step, "stage": name, **found}

    for name, stage in stages.items():
        yield timed(name, stage)
    yield timed(TOTAL, whole)
    if CUDA and step == "decode":
        yield timed(TOTAL + GRAPH, captured(whole)[0].replay, True)
    stages.clear()
    yield timed(DENSE, make_dense(sizes))


def markdown(content: dict[str, Any]) -> str:
    """The table of a result file for a document: microseconds on the device."""
    by_step: dict[str, list[str]] = {}
    for each in content["results"]:
        time = each["device_us"] or each["wall_us"]
        by_step.setdefault(each["step"], []).append(f"| {each['stage']} | {time:.0f} |\n")
    head = "| {}, {} | us |\n|---|---|\n"
    sizes = content["sizes"]
    titles = {
        "prefill": f"{sizes['prompt']} tokens of a prompt",
        "decode": f"a token of {sizes['sequences']} sequences",
    }
    return "\n".join(
        head.format(titles[step], f"context of {sizes['context']}") + "".join(rows)
        for step, rows in by_step.items()
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measures, prints the tables and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    unknown = [step for step in options.steps if step not in STEPS]
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}; steps are {', '.join(STEPS)}")
    if CUDA:
        torch.set_float32_matmul_precision("high")  # TF32 for the compressors' projections
    sizes, machine = Sizes() if CUDA else SMALL, benchmark.machine()
    content: dict[str, Any] = {"machine": machine, "sizes": vars(sizes), "results": []}
    path: Path = options.output / f"attention_layer.{benchmark.slug(machine['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for step in options.steps or STEPS:
        for result in run(step, sizes):
            content["results"].append(result)
            path.write_text(json.dumps(content, indent=1) + "\n")
        if CUDA:
            torch.cuda.empty_cache()
    print(markdown(content))
    return path


if __name__ == "__main__":
    print(main())
