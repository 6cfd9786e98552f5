"""Whole layers against plain PyTorch: `python -m benchmarks.layers [CASE ...]`.

Each case is a layer in plain PyTorch (`benchmarks.plain_layers`) and with the kernels, with the
same parameters and inputs. Results and gradients are compared first. Then both are timed, without
gradients and in training (forward and backward): as they are, under `torch.compile`, and captured
in a CUDA graph. All in one process, written to one file, whose name has the cases if it is not all.

`--prepare` only compiles, one process per case, so that a run after it finds compiled kernels.
`--trace FOLDER` writes Chrome traces of a training step instead of timing.

Without a GPU sizes are tiny and nothing is compiled.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import preparation
from benchmarks.plain_layers import (
    OneStream,
    PlainCompressor,
    PlainConnection,
    PlainEngram,
    PlainIndexer,
    PlainMoE,
)
from examples.tiny_v4.model import Attention, Config, TinyV4
from examples.tiny_v4.plain import PlainTinyV4, attended
from examples.tiny_v4.speed import captured
from tile_kernels import attention
from tile_kernels.modeling.attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    KVCompressor,
)
from tile_kernels.modeling.engram import EngramHasher, EngramModule
from tile_kernels.modeling.mhc import HyperConnection
from tile_kernels.modeling.moe import MoELayer
from tile_kernels.testing import benchmark

BF16 = torch.bfloat16
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEPS = ("forward", "training")
MAX_BATCHES, TARGET_US = 7, 60_000  # of a measurement: repeats, and microseconds of one
CYCLES_PER_US = 2000  # of the GPU at about its highest clock
GRAPH = ", CUDA graph"
COMPILED, REDUCED = "compiled", "compiled, reduce-overhead"


@dataclass
class Forms:
    """A layer in plain PyTorch and with the kernels, and what they are given.

    `off` is the largest relative distance between results, and between gradients, of each form
    with kernels and the plain one. `others` are forms that compute something else.
    """

    plain: nn.Module
    ours: dict[str, nn.Module]
    inputs: tuple[Tensor, ...]
    off: dict[str, float]
    others: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = field(default_factory=dict)
    distance: Callable[[Tensor, Tensor], float] | None = None


class Case(NamedTuple):
    """A layer with its sizes and those without a GPU.

    Small models, whose steps are mostly launches, are timed in more modes: `modes` of
    `torch.compile` for the layer with kernels too, and a CUDA graph of the plain one. The plain
    layer is always compiled.
    """

    build: Callable[..., Forms]
    sizes: dict[str, Any]
    small: dict[str, Any]
    modes: tuple[str, ...] = ()
    steps: tuple[str, ...] = STEPS


def streams(*shape: int) -> Tensor:
    """A residual that is trained."""
    return torch.randn(*shape, device=DEVICE).to(BF16).requires_grad_()


# ---- the layers ---------------------------------------------------------------------------------


def mhc(tokens: int, mult: int, hidden: int) -> Forms:
    """Streams around an RMS norm, which stands for a block that costs nothing else."""
    block = nn.RMSNorm(hidden, device=DEVICE, dtype=BF16)
    ours = HyperConnection(block, hidden, mult, device=DEVICE)
    return Forms(
        PlainConnection(ours, block), {"kernels": ours}, (streams(tokens, mult, hidden),),
        {"kernels": 0.02}, {"one stream, plain": (OneStream(block), (streams(tokens, hidden),))},
    )  # fmt: skip


def moe(tokens: int, hidden: int, intermediate: int, experts: int, topk: int) -> Forms:
    """A mixture of experts in bfloat16 and FP8."""
    make = functools.partial(
        MoELayer, hidden, intermediate, experts, topk, device=DEVICE, dtype=BF16
    )
    ours = {"bf16": make(), "fp8": make(precision="fp8")}
    ours["fp8"].load_state_dict(ours["bf16"].state_dict())
    off = {"bf16": 0.02, "fp8": 0.12}
    return Forms(PlainMoE(ours["bf16"]), ours, (streams(tokens, hidden),), off)


def engram(tokens: int, mult: int, hidden: int, vocab: int, rows: int) -> Forms:
    """An n-gram memory: two orders of n-grams, 8 tables each, 64 channels of a table."""
    hasher = EngramHasher(1, vocab, table_rows=rows, num_tables=8, max_ngram_size=3)
    ours = EngramModule(hasher, 0, hidden, mult, embed_dim=64, device=DEVICE, dtype=BF16)
    nn.init.normal_(ours.convolution.taps, std=0.3)
    ids = torch.randint(1, vocab, (1, tokens), device=DEVICE)
    inputs = (streams(1, tokens, mult, hidden), ids)
    return Forms(PlainEngram(ours), {"kernels": ours}, inputs, {"kernels": 0.02})


def compressor(tokens: int, hidden: int, channels: int, window: int) -> Forms:
    """Hidden states to compressed keys and values, with overlapping windows."""
    ours = KVCompressor(hidden, channels, window, device=DEVICE, dtype=BF16)
    inputs = (streams(1, tokens, hidden),)
    return Forms(PlainCompressor(ours), {"kernels": ours}, inputs, {"kernels": 0.02})


class Indexer(nn.Module):
    """`attention.indexer_select`."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self.topk = topk

    def forward(self, q: Tensor, k: Tensor, weights: Tensor, end: Tensor) -> Tensor:
        """As `PlainIndexer`."""
        start = torch.zeros_like(end)
        return attention.indexer_select(q, k, weights, start, end, topk=self.topk)


def indexer(tokens: int, keys: int, heads: int, depth: int, topk: int) -> Forms:
    """The choice of `topk` keys for each query, all of which see at least so many."""
    q, k = (
        torch.randn(*s, device=DEVICE).to(BF16) for s in ((tokens, heads, depth), (keys, depth))
    )
    weights = torch.randn(tokens, heads, device=DEVICE)
    end = torch.linspace(topk, keys, tokens, device=DEVICE).int()
    return Forms(
        PlainIndexer(topk), {"kernels": Indexer(topk)}, (q, k, weights, end), {"kernels": 0.05},
        distance=share_of_other_indices,
    )  # fmt: skip


def share_of_other_indices(found: Tensor, expected: Tensor) -> float:
    """The share of chosen keys that only one of two choices has."""
    one, other = found.sort().values.cpu(), expected.sort().values.cpu()
    place = torch.searchsorted(other, one).clamp(max=other.shape[1] - 1)
    return (other.gather(1, place) != one).double().mean().item()


class Normed(nn.Module):
    """`block(norm(x))`."""

    def __init__(self, norm: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.block = norm, block

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        return self.block(self.norm(x))


def block(
    tokens: int, mult: int, hidden: int, heads: int, intermediate: int, experts: int, topk: int
) -> Forms:
    """Attention and a mixture of experts, both between residual streams."""
    attend = Attention(Config(1, hidden, heads)).to(DEVICE, BF16)
    attend.norm.float()  # as its input is
    norm = nn.RMSNorm(hidden, device=DEVICE, dtype=BF16)
    first = HyperConnection(attend, hidden, mult, device=DEVICE)
    sizes = (hidden, intermediate, experts, topk)
    ours: dict[str, nn.Module] = {}
    for precision in ("bf16", "fp8"):
        layer = MoELayer(
            *sizes, num_shared_experts=1, precision=precision, device=DEVICE, dtype=BF16
        )
        second = HyperConnection(Normed(norm, layer), hidden, mult, device=DEVICE)
        ours[precision] = nn.Sequential(first, second)
    ours["fp8"].load_state_dict(ours["bf16"].state_dict())
    inner = ours["bf16"][1]  # type: ignore[index]
    plain = nn.Sequential(
        PlainConnection(first, attend),
        PlainConnection(inner, Normed(norm, PlainMoE(inner.block.block))),
    )
    inputs = (streams(1, tokens, mult, hidden),)
    return Forms(plain, ours, inputs, {"bf16": 0.05, "fp8": 0.1})


class PlainAttention(nn.Module):
    """A layer of attention over compressed entries, over all rows with a mask."""

    def __init__(self, layer: CompressedSparseAttention | HeavilyCompressedAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        return attended(self.layer, x)


def attention_layer(
    hidden: int, heads: int, rank: int, groups: int, ratio: int, topk: int, index_heads: int
) -> CompressedSparseAttention | HeavilyCompressedAttention:
    """Compressed sparse attention; with `topk` 0 over all entries."""
    sizes: dict[str, Any] = {
        "heads": heads, "q_rank": rank, "out_groups": groups, "out_rank": rank, "ratio": ratio,
        "device": DEVICE, "dtype": BF16,
    }  # fmt: skip
    if not topk:
        return HeavilyCompressedAttention(hidden, **sizes)
    return CompressedSparseAttention(hidden, topk=topk, index_heads=index_heads, **sizes)


def sparse(tokens: int, hidden: int, **sizes: int) -> Forms:
    """Attention over a window and compressed entries; the loss of the indexer is not part of it."""
    ours = attention_layer(hidden, **sizes)
    inputs = (streams(1, tokens, hidden),)
    return Forms(PlainAttention(ours), {"kernels": ours}, inputs, {"kernels": 0.05})


def v4_block(
    tokens: int, mult: int, hidden: int, intermediate: int, experts: int, topk: int,
    attention: dict[str, int],
) -> Forms:  # fmt: skip
    """Compressed sparse attention and a mixture of experts, both between residual streams."""
    norms = [nn.RMSNorm(hidden, device=DEVICE, dtype=BF16) for _ in range(2)]
    attend = attention_layer(hidden, **attention)
    first = HyperConnection(Normed(norms[0], attend), hidden, mult, device=DEVICE)
    ours: dict[str, nn.Module] = {}
    for precision in ("bf16", "fp8"):
        layer = MoELayer(
            hidden, intermediate, experts, topk, num_shared_experts=1, precision=precision,
            device=DEVICE, dtype=BF16,
        )  # fmt: skip
        second = HyperConnection(Normed(norms[1], layer), hidden, mult, device=DEVICE)
        ours[precision] = nn.Sequential(first, second)
    ours["fp8"].load_state_dict(ours["bf16"].state_dict())
    inner = ours["bf16"][1]  # type: ignore[index]
    plain = nn.Sequential(
        PlainConnection(first, Normed(norms[0], PlainAttention(attend))),
        PlainConnection(inner, Normed(norms[1], PlainMoE(inner.block.block))),
    )
    inputs = (streams(1, tokens, mult, hidden),)
    return Forms(plain, ours, inputs, {"bf16": 0.05, "fp8": 0.1})


class Loss(nn.Module):
    """The loss of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """int64 `[rows, length + 1]` to nats per token."""
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def demo(hidden: int, rows: int, length: int, vocab: int = 60) -> Forms:
    """The demo's model and its loss."""
    dtype = BF16 if CUDA else torch.float32
    model = TinyV4(Config(vocab, hidden=hidden, intermediate=hidden, dtype=dtype)).to(DEVICE)
    ids = torch.randint(1, vocab, (rows, length + 1), device=DEVICE)
    return Forms(Loss(PlainTinyV4(model)), {"kernels": Loss(model)}, (ids,), {"kernels": 0.2})


CASES = {
    "mhc.4096": Case(
        mhc, {"tokens": 4096, "mult": 4, "hidden": 4096}, {"tokens": 5, "mult": 2, "hidden": 32}
    ),
    "mhc.7168": Case(
        mhc, {"tokens": 4096, "mult": 4, "hidden": 7168}, {"tokens": 5, "mult": 2, "hidden": 64}
    ),
    "moe.4096": Case(
        moe,
        {"tokens": 4096, "hidden": 4096, "intermediate": 1536, "experts": 64, "topk": 6},
        {"tokens": 40, "hidden": 128, "intermediate": 128, "experts": 4, "topk": 2},
    ),
    # What a rank of 8 computes that has 32 of 256 experts: top 8, 8192 tokens per rank.
    "moe.7168": Case(
        moe,
        {"tokens": 8192, "hidden": 7168, "intermediate": 2048, "experts": 32, "topk": 8},
        {"tokens": 40, "hidden": 256, "intermediate": 128, "experts": 4, "topk": 2},
    ),
    "engram.7168": Case(
        engram,
        {"tokens": 4096, "mult": 4, "hidden": 7168, "vocab": 129_280, "rows": 16_384},
        {"tokens": 24, "mult": 2, "hidden": 32, "vocab": 50, "rows": 64},
    ),
    "attention.compressor": Case(
        compressor,
        {"tokens": 16_384, "hidden": 4096, "channels": 512, "window": 4},
        {"tokens": 24, "hidden": 32, "channels": 16, "window": 4},
    ),
    "attention.indexer": Case(
        indexer,
        {"tokens": 4096, "keys": 8192, "heads": 64, "depth": 128, "topk": 512},
        {"tokens": 8, "keys": 32, "heads": 2, "depth": 32, "topk": 4},
        steps=("forward",),
    ),
    # The sizes of V4's smaller model, a prompt in which the window and 1024 entries are visible.
    "attention.csa": Case(
        sparse,
        {"tokens": 4096, "hidden": 4096, "heads": 64, "rank": 1024, "groups": 8, "ratio": 4,
         "topk": 512, "index_heads": 64},
        {"tokens": 40, "hidden": 32, "heads": 2, "rank": 16, "groups": 1, "ratio": 4, "topk": 4,
         "index_heads": 2},
    ),
    "attention.hca": Case(
        sparse,
        {"tokens": 4096, "hidden": 4096, "heads": 64, "rank": 1024, "groups": 8, "ratio": 128,
         "topk": 0, "index_heads": 0},
        {"tokens": 40, "hidden": 32, "heads": 2, "rank": 16, "groups": 1, "ratio": 8, "topk": 0,
         "index_heads": 0},
    ),
    "block.v4": Case(
        v4_block,
        {"tokens": 4096, "mult": 4, "hidden": 4096, "intermediate": 1536, "experts": 64, "topk": 6,
         "attention": {"heads": 64, "rank": 1024, "groups": 8, "ratio": 4, "topk": 512,
                       "index_heads": 64}},
        {"tokens": 40, "mult": 2, "hidden": 128, "intermediate": 128, "experts": 4, "topk": 2,
         "attention": {"heads": 2, "rank": 32, "groups": 1, "ratio": 4, "topk": 4,
                       "index_heads": 2}},
    ),
    "block.4096": Case(
        block,
        {"tokens": 4096, "mult": 4, "hidden": 4096, "heads": 32, "intermediate": 1536,
         "experts": 64, "topk": 6},
        {"tokens": 16, "mult": 2, "hidden": 128, "heads": 2, "intermediate": 128, "experts": 4,
         "topk": 2},
    ),
    "demo": Case(
        demo, {"hidden": 64, "rows": 8, "length": 64}, {"hidden": 32, "rows": 2, "length": 8},
        modes=(COMPILED, REDUCED), steps=("training",),
    ),
    "demo.x8": Case(
        demo, {"hidden": 512, "rows": 8, "length": 64}, {"hidden": 64, "rows": 2, "length": 8},
        modes=(COMPILED,), steps=("training",),
    ),
}  # fmt: skip
TRACED = {"moe.4096": ("bf16", "fp8"), "mhc.7168": ("kernels",)}


# ---- steps --------------------------------------------------------------------------------------


def step_of(function: Callable[..., Tensor], kind: str, inputs: Sequence[Tensor]) -> Any:
    """A call without gradients, or one that returns its result and all gradients."""
    trained = [x for x in inputs if x.requires_grad]
    if isinstance(function, nn.Module):
        trained += [p for p in function.parameters() if p.requires_grad]
    grads: list[Tensor] = []

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    def training() -> Any:
        y = function(*inputs)
        if not grads:
            grads.append(direction(y))
        return y, *torch.autograd.grad(y, trained, grads[0], allow_unused=True)

    return forward if kind == "forward" else training


def direction(y: Tensor) -> Tensor:
    """The gradient of a result, the same for equal shapes; that of a loss is one."""
    if not y.dim():
        return torch.ones_like(y)
    draw = torch.Generator(y.device).manual_seed(1)
    return torch.randn(y.shape, device=y.device, generator=draw).to(y.dtype)


def functions(case: Case, forms: Forms) -> Iterator[tuple[str, Any, tuple[Tensor, ...]]]:
    """What is timed: name, function and arguments."""
    for name, (other, inputs) in forms.others.items():
        yield name, other, inputs
    yield "plain", forms.plain, forms.inputs
    if CUDA:
        for mode in dict.fromkeys((COMPILED, *case.modes)):
            yield mode, compiled(forms.plain, mode), forms.inputs
    for name, ours in forms.ours.items():
        # Graphs of `reduce-overhead` keep results alive, and so the nodes that accumulate gradients
        # of the parameters, which belong to another stream than that of a capture.
        torch._dynamo.reset()
        yield name, ours, forms.inputs
        if CUDA:
            for mode in case.modes:
                yield f"{name}, {mode}", compiled(ours, mode), forms.inputs


def compiled(layer: nn.Module, mode: str) -> nn.Module:
    """One graph of a layer; `REDUCED` replays it as CUDA graphs."""
    torch._dynamo.reset()
    chosen = "reduce-overhead" if mode == REDUCED else None
    result: nn.Module = torch.compile(layer, fullgraph=True, mode=chosen)  # type: ignore[assignment]
    return result


def compare(case: Case, forms: Forms) -> dict[str, list[float]]:
    """The distances of results and gradients from those of the plain form; raises if too far."""
    found: dict[str, list[float]] = {}
    kind = case.steps[-1]
    expected = flat(step_of(forms.plain, kind, forms.inputs)())
    for name, ours in forms.ours.items():
        given = flat(step_of(ours, kind, forms.inputs)())
        near = forms.distance or relative
        found[name] = [near(given[0], expected[0])]
        if kind == "training" and given[0].dim():
            found[name].append(relative(given[1], expected[1]))
        if max(found[name]) > forms.off[name]:
            raise ValueError(f"{name} is off by {found[name]}, allowed is {forms.off[name]}")
    return found


def flat(results: Any) -> list[Tensor]:
    """The tensors of a step, detached."""
    results = results if isinstance(results, tuple) else (results,)
    return [x.detach().clone() for x in results if x is not None]


def relative(found: Tensor, expected: Tensor) -> float:
    """`|found - expected| / |expected|`."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# ---- measuring ----------------------------------------------------------------------------------


def wait() -> None:
    """Until the GPU has nothing to do."""
    if CUDA:
        torch.cuda.synchronize()


def measure(step: Callable[[], Any], graph: bool) -> dict[str, float | None]:
    """Medians of wall, host and device time of a step in microseconds; the most memory in MiB.

    The device time is that between two events, with launches queued behind a kernel that only
    waits: as long as the host does not wait for the device, it is not part of it.
    """
    for _ in range(2):
        step()
    wait()
    begun = time.perf_counter()
    step()
    wait()
    once = (time.perf_counter() - begun) * 1e6
    memory = None
    if CUDA and not graph:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        wait()
        memory = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    batch = max(1, min(20, int(TARGET_US / once))) if CUDA else 1
    walls, hosts = [], []
    for _ in range(MAX_BATCHES if CUDA else 1):
        wait()
        begun = time.perf_counter()
        for _ in range(batch):
            step()
        hosts.append((time.perf_counter() - begun) * 1e6 / batch)
        wait()
        walls.append((time.perf_counter() - begun) * 1e6 / batch)
    wall, host = statistics.median(walls), statistics.median(hosts)
    device = None if not CUDA else round(device_time(step, host), 1)
    found = {"wall_us": round(wall, 1), "host_us": round(host, 1)}
    return {**found, "device_us": device, "memory_mib": memory}


def device_time(step: Callable[[], Any], host_us: float) -> float:
    """Median microseconds of a step on the device."""
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CYCLES_PER_US * (1.5 * host_us + 100)))
        begin.record()
        step()
        end.record()
        wait()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graphs_are_timed(case: Case, form: str, prepare: bool) -> bool:
    """Whether a form is also captured in a CUDA graph; the plain one is in small models only."""
    if not CUDA or prepare or REDUCED in form:
        return False
    return "plain" not in form or bool(case.modes)


def run(name: str, case: Case, prepare: bool = False) -> list[dict[str, Any]]:
    """All forms of a case; a form that fails has its error in the place of numbers."""
    sizes = case.sizes if CUDA else case.small
    torch.manual_seed(0)
    forms = case.build(**sizes)
    start = {"case": name, "sizes": sizes}
    results = [{**start, "form": form, "off": off} for form, off in compare(case, forms).items()]
    for form, function, inputs in functions(case, forms):
        for kind in case.steps:
            for graph in (False, True) if graphs_are_timed(case, form, prepare) else (False,):
                label = {**start, "form": form + GRAPH * graph, "step": kind}
                try:
                    step = step_of(function, kind, inputs)
                    if prepare:
                        step()
                        step()
                        continue
                    found: dict[str, Any] = measure(
                        captured(step)[0].replay if graph else step, graph
                    )
                except Exception as error:
                    if not CUDA:
                        raise
                    lines = str(error).strip().splitlines() or [""]
                    found = {"failed": f"{type(error).__name__}: {lines[0]}"}
                results.append({**label, **found})
                print(shown(results[-1]), flush=True)
                step = None
    return results


def shown(result: dict[str, Any]) -> str:
    """A line of the log."""
    head = f"{result['case']:20} {result['form']:26} {result['step']:8}"
    if "failed" in result:
        return f"{head} {result['failed'][:200]}"
    times = (f"{key[:-3]} {result[key]}" for key in ("wall_us", "host_us", "device_us"))
    return f"{head} {', '.join(times)} us, {result['memory_mib']} MiB"


# ---- traces -------------------------------------------------------------------------------------

# Kinds of events that a trace keeps: operators and launches of the host, work of the device.
TRACED_STEP = "traced step"
KEPT = {"cpu_op", "cuda_runtime", "cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "ac2g"}


def trace(name: str, folder: Path) -> list[Path]:
    """Chrome traces of a training step of each form with kernels."""
    from torch.profiler import ProfilerActivity, profile, record_function

    case = CASES[name]
    torch.manual_seed(0)
    forms = case.build(**(case.sizes if CUDA else case.small))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in TRACED[name]:
        step = step_of(forms.ours[form], "training", forms.inputs)
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * CUDA]
        for _ in range(3):
            step()
        wait()
        with profile(activities=activities) as profiler:
            for _ in range(2):  # the profiler makes the first one slower
                step()
                wait()
            with record_function(TRACED_STEP):
                step()
                wait()
        paths.append(folder / f"{name}.{form}.json.gz")
        with tempfile.TemporaryDirectory() as temporary:
            whole = Path(temporary) / "trace.json"
            profiler.export_chrome_trace(str(whole))
            write_short(json.loads(whole.read_text()), paths[-1])
    return paths


def write_short(content: dict[str, Any], path: Path) -> None:
    """The traced step without what a timeline does not need, from time zero, packed."""
    every = content["traceEvents"]
    first = next(e["ts"] for e in every if e.get("name") == TRACED_STEP and e["ph"] == "X")
    events = [e for e in every if e.get("ph") == "M" or (e.get("cat") in KEPT and e["ts"] >= first)]
    for event in events:
        if event["ph"] == "M":
            event.pop("ts", None)
        else:
            event["ts"] = round(event["ts"] - first, 3)
            event.pop("args", None)
            event["name"] = event["name"][:120]
    text = json.dumps({"traceEvents": events}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


# ---- command line -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Measures or traces; returns the files that were written."""
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write traces, do not time")
    options = parser.parse_args(arguments)
    if options.trace:
        names = [name for name in names_of(parser, options, CASES) if name in TRACED]
        return [path for name in names for path in trace(name, options.trace)]
    # Some cases alone do not replace the results of all.
    stem = "_".join(("layers", *options.cases))
    return run_all("benchmarks.layers", stem, CASES, parser, options)


def parser_of(description: str | None, cases: Mapping[str, Case]) -> argparse.ArgumentParser:
    """The command line of a benchmark of cases."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}")
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    parser.add_argument("--prepare", action="store_true", help="compile only, cases in parallel")
    return parser


def names_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, cases: Mapping[str, Case]
) -> list[str]:
    """The cases that were asked for; says which there are if one is unknown."""
    unknown = [name for name in options.cases if name not in cases]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; cases are {', '.join(cases)}")
    if CUDA:  # TF32, to which the kernels of streams round too
        torch.set_float32_matmul_precision("high")
    return options.cases or list(cases)


def run_all(
    module: str, stem: str, cases: Mapping[str, Case], parser: argparse.ArgumentParser,
    options: argparse.Namespace, **versions: str,
) -> list[Path]:  # fmt: skip
    """Measures the cases of a module to `STEM.DEVICE.json`, or prepares them.

    `versions` are those of other packages, for the file.
    """
    names = names_of(parser, options, cases)
    if options.prepare:
        prepare(names, cases, module)
        return []
    machine = {**benchmark.machine(), **versions}
    path: Path = options.output / f"{stem}.{benchmark.slug(machine['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for name in names:
        results += run(name, cases[name])
        path.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    return [path]


def prepare(names: Sequence[str], cases: Mapping[str, Case], module: str) -> None:
    """Runs each case once; several cases run in separate processes."""
    if len(names) == 1:
        run(names[0], cases[names[0]], prepare=True)
        return
    preparation.in_processes(module, [[name] for name in names])


if __name__ == "__main__":
    for written_path in main():
        print(written_path)
