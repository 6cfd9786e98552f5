"""Passkey retrieval in long texts: sparse attention beside dense attention.

    python -m examples.long_context            # small on a CPU, 16k tokens on a GPU

A text of random letters contains a marker that is followed by a letter. The text ends with the same
marker, and the model has to predict the letter. A model with two layers is trained on short texts
first, in which all compressed entries are selected. Each time the loss has fallen far enough, the
texts become twice as long, so that the indexer learns step by step which entries matter. A model
with dense attention is trained for comparison.

Then one layer of each kind is timed, forward and backward, for texts of several lengths; on a GPU
with 4096 channels, in which dense attention has 32 heads of 128 and sparse attention 64 of 512. The
sizes of the caches of such layers are computed for texts of up to a million tokens, on any machine.
The results are written to a picture, `long_context.svg`, and a file of numbers; on a GPU, this file
is in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_v4.model import rotated
from tile_kernels.modeling.attention import CompressedSparseAttention
from tile_kernels.testing import benchmark

mpl.use("Agg")
import matplotlib.pyplot as plt

MARKER, NUM_KEYS, VOCAB = 0, 16, 64  # keys are letters 1..16, the others fill the text
ALIGNMENT = 4  # markers begin an entry, so that the letter after one is in the same entry
KINDS = ("sparse", "dense")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the models, the texts and the measurements."""

    hidden: int
    heads: int
    rank: int
    window: int
    topk: int
    index_heads: int
    tokens: int  # of a step, unless that is less than `fewest` texts
    fewest: int
    shortest: int
    length: int
    steps: int
    timed: tuple[int, ...]  # lengths
    learning_rate: float


CPU = Sizes(64, 2, 32, 8, 8, 2, 512, 8, 32, 256, 300, (128, 256, 512, 1024), 3e-3)
GPU = Sizes(
    512, 64, 256, 128, 16, 64, 16384, 8, 64, 16384, 800,
    (1024, 2048, 4096, 8192, 16384, 32768, 65536), 1e-3,
)  # fmt: skip

LEARNED = 0.3  # nats: the mean loss of `RECENT` steps from which texts become longer
RECENT = 8
FINISHED = 0.03  # nats: as much at the greatest length ends the training


# The layer that is timed on a GPU has the sizes of V4's smaller model, and so have the caches.
LAYER = {"hidden": 4096, "rank": 1024, "topk": 512}
CACHED = tuple(1 << power for power in range(10, 21))  # lengths


class DenseAttention(nn.Module):
    """Causal attention over all tokens, with rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = max(sizes.hidden // 128, 1)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(y.transpose(-2, -3).flatten(-2))

    def cache_bytes(self, length: int) -> int:
        """A key and a value for each token, in bfloat16."""
        return 2 * self.out.in_features * 2 * length


class SparseAttention(CompressedSparseAttention):
    """Compressed sparse attention with a cache in FP8."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            sizes.hidden, heads=sizes.heads, q_rank=sizes.rank, out_groups=2, out_rank=sizes.rank,
            window=sizes.window, ratio=ALIGNMENT, topk=sizes.topk, index_heads=sizes.index_heads,
            cache="fp8",
        )  # fmt: skip

    def cache_bytes(self, length: int) -> int:
        """All that decoding keeps of one text."""
        sizes = {name: getattr(self, name) for name in ("heads", "out_groups", "window", "ratio")}
        with torch.device("meta"):  # nothing is allocated
            layer = CompressedSparseAttention(
                self.hidden, **sizes, q_rank=8, out_rank=8, index_heads=1, cache=self.cache
            )
            return layer.state(1, length).num_bytes


class Model(nn.Module):
    """Two layers of attention and a small feed-forward part."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        super().__init__()
        make = SparseAttention if kind == "sparse" else DenseAttention
        hidden = sizes.hidden
        self.letters = nn.Embedding(VOCAB, hidden)
        self.attention = nn.ModuleList(make(sizes) for _ in range(2))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))
            for _ in range(2)
        )
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """The logits after the last letter of `[batch, length]`, and the loss of indexers."""
        x, loss = self.letters(text), torch.zeros((), device=text.device)
        for attend, mix in zip(self.attention, self.mixers):
            given = F.rms_norm(x, x.shape[-1:])
            if isinstance(attend, SparseAttention):
                y, indexer_loss = attend(given, indexer_loss=True)
                loss = loss + indexer_loss
            else:
                y = attend(given)
            x = x + y
            x = x + mix(F.rms_norm(x, x.shape[-1:]))
        return self.head(F.rms_norm(x[:, -1], x.shape[-1:])), loss


def texts(batch: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """`[batch, length]` with a marker and a key somewhere and a marker at the end; and the keys."""
    text = torch.randint(NUM_KEYS + 1, VOCAB, (batch, length), generator=draw)
    keys = torch.randint(1, NUM_KEYS + 1, (batch,), generator=draw)
    place = ALIGNMENT * torch.randint((length - 1) // ALIGNMENT, (batch,), generator=draw)
    rows = torch.arange(batch)
    text[rows, place], text[rows, place + 1], text[:, -1] = MARKER, keys, MARKER
    return text, keys


def train(kind: str, sizes: Sizes, device: str, seed: int = 0) -> dict[str, Any]:
    """Losses and lengths of all steps, and how often the key is found in texts that are new."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    model = Model(kind, sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate)
    losses: list[float] = []
    lengths: list[int] = []
    length = sizes.shortest
    begun = time.perf_counter()
    while len(losses) < sizes.steps:
        text, keys = texts(batch_of(length, sizes), length, draw)
        with autocast(device):
            logits, indexer_loss = model(text.to(device))
        loss = F.cross_entropy(logits.float(), keys.to(device))
        optimizer.zero_grad()
        (loss + 0.1 * indexer_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 4))
        lengths.append(length)
        if lengths[-RECENT:] == [length] * RECENT:
            recent = statistics.fmean(losses[-RECENT:])
            if length == sizes.length and recent < FINISHED:
                break
            if length < sizes.length and recent < LEARNED:
                length *= 2
    seconds = time.perf_counter() - begun
    right: list[Tensor] = []
    draw.manual_seed(seed + 1)
    with torch.no_grad(), autocast(device):
        while sum(map(len, right)) < 64:
            text, keys = texts(batch_of(sizes.length, sizes), sizes.length, draw)
            right.append(model(text.to(device))[0].argmax(-1).cpu() == keys)
    return {
        "losses": losses,
        "lengths": lengths,
        "found": torch.cat(right).float().mean().item(),
        "seconds": round(seconds, 1),
    }


def batch_of(length: int, sizes: Sizes) -> int:
    """The number of texts of a step."""
    return max(sizes.tokens // length, sizes.fewest)


def autocast(device: str) -> torch.autocast:
    """Products in bfloat16 on a GPU."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


# ---- measurements -------------------------------------------------------------------------------


def measure(kind: str, length: int, sizes: Sizes, device: str) -> dict[str, float]:
    """Time of one layer forward and backward, memory of that, and bytes of a cache."""
    torch.manual_seed(0)
    if device == "cuda":
        sizes = dataclasses.replace(sizes, **LAYER)  # type: ignore[arg-type]
    layer: Any = (SparseAttention if kind == "sparse" else DenseAttention)(sizes).to(device)
    x = torch.randn(1, length, sizes.hidden, device=device, requires_grad=True)

    def step() -> None:
        with autocast(device):
            y = layer(x)
        torch.autograd.backward(y.float().square().mean())

    step()
    milliseconds = [timed(step, device) for _ in range(5 if device == "cuda" else 2)]
    found = {"ms": statistics.median(milliseconds), "cache_bytes": layer.cache_bytes(length)}
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["training_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def caches(lengths: tuple[int, ...] = CACHED) -> dict[str, dict[str, int]]:
    """Bytes of the cache of a layer with the sizes of V4's smaller model; nothing is allocated."""
    sizes = dataclasses.replace(GPU, **LAYER)  # type: ignore[arg-type]
    with torch.device("meta"):
        layers = {"sparse": SparseAttention(sizes), "dense": DenseAttention(sizes)}
    return {
        kind: {str(length): layer.cache_bytes(length) for length in lengths}
        for kind, layer in layers.items()
    }


def timed(step: Callable[[], None], device: str) -> float:
    """Milliseconds of a step."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


# ---- picture ------------------------------------------------------------------------------------


def picture(result: dict[str, Any], path: Path) -> Path:
    """Losses, times and caches of both kinds."""
    colors = {"sparse": "#1f77b4", "dense": "#d62728"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for kind, trained in result["trained"].items():
        losses = trained["losses"]
        smooth = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        found = f"{kind}: found in {100 * trained['found']:.0f} % of new texts"
        left.plot(smooth, color=colors[kind], label=found)
    left.set(xlabel="step", ylabel="nats", title="Loss, texts growing longer")
    if result["trained"]:
        left.legend(frameon=False, fontsize=8)
    for kind, by_length in result["measured"].items():
        lengths = [int(length) for length in by_length]
        times = [found["ms"] for found in by_length.values()]
        middle.plot(lengths, times, "o-", color=colors[kind], label=kind)
    for kind, by_length in result["caches"].items():
        lengths = [int(length) for length in by_length]
        mebibytes = [size / 2**20 for size in by_length.values()]
        right.plot(lengths, mebibytes, "o-", color=colors[kind], label=kind)
    device = result["machine"]["device"]
    middle.set(title=f"One layer, forward and backward, {device}", xlabel="tokens", ylabel="ms")
    right.set(title="Cache of one text, 4096 channels", xlabel="tokens", ylabel="MiB")
    for axes in (middle, right) if result["measured"]["dense"] else (right,):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(frameon=False)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


def main(given: list[str] | None = None) -> Path:
    """Trains, measures and draws; returns the file of numbers."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description="Passkey retrieval with sparse and with dense attention.", allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, help="of training; 0: only measure")
    parser.add_argument("--length", type=int, help="tokens of the longest texts, a power of two")
    parser.add_argument("--timed", type=int, nargs="*", help="lengths that are timed")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the picture")
    parser.add_argument("--results", type=Path, help="folder of the numbers")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(given)
    sizes = GPU if options.device == "cuda" else CPU
    changes = {
        name: value
        for name in ("steps", "length", "timed")
        if (value := getattr(options, name)) is not None
    }
    sizes = dataclasses.replace(sizes, **changes)
    if options.device == "cpu":
        torch.set_num_threads(1)  # tensors are too small for more
    result: dict[str, Any] = {
        "machine": benchmark.machine(),
        "sizes": dataclasses.asdict(sizes),
        "trained": {},
        "measured": {},
        "caches": caches(),
    }
    folder = options.results or (
        benchmark.DEFAULT_FOLDER if options.device == "cuda" else options.out
    )
    for each in (folder, options.out):
        each.mkdir(parents=True, exist_ok=True)
    path: Path = folder / f"long_context.{benchmark.slug(result['machine']['device'])}.json"

    def keep() -> None:
        path.write_text(json.dumps(result, indent=1) + "\n")

    for kind in KINDS if sizes.steps else ():
        trained = train(kind, sizes, options.device)
        result["trained"][kind] = trained
        keep()
        print(
            f"{kind}: key found in {100 * trained['found']:.0f} % of new texts of {sizes.length} "
            f"tokens; {len(trained['losses'])} steps with texts of up to {trained['lengths'][-1]} "
            f"tokens in {trained['seconds']} s",
            flush=True,
        )
    for kind in KINDS:
        result["measured"][kind] = {}
        for length in sizes.timed:
            found = measure(kind, length, sizes, options.device)
            result["measured"][kind][str(length)] = found
            keep()
            print(
                f"{kind}, {length} tokens: {found['ms']:.2f} ms, cache "
                f"{found['cache_bytes'] / 2**20:.2f} MiB",
                flush=True,
            )
    print(picture(result, options.out / "long_context.svg"))
    return path


if __name__ == "__main__":
    print(main())
