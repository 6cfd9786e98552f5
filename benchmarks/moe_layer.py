"""A mixture-of-experts layer against plain PyTorch: `python -m benchmarks.moe_layer`.

The same layer in four forms: plain PyTorch (sort, gather, `torch._grouped_mm`, `index_add`), the
same under `torch.compile`, `MoELayer` in bfloat16 and in FP8. Wall time of a step with the host's
work, host time alone, peak memory; forward, and forward with backward. The two forms of `MoELayer`
are also timed as CUDA graphs. All in one process, written to one file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels.modeling.moe import MoELayer
from tile_kernels.testing import benchmark


class Shape(NamedTuple):
    """The size of a layer and of its batch."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int

    def __str__(self) -> str:
        return (
            f"{self.tokens}x{self.hidden}, intermediate {self.intermediate}, top {self.topk} of "
            f"{self.experts}"
        )


SHAPES = [Shape(4096, 4096, 1536, 64, 6), Shape(8192, 7168, 2048, 32, 8)]
SMALL = [Shape(64, 256, 128, 4, 2)]  # where there is no GPU


class PlainMoE(nn.Module):
    """The layer as one writes it with PyTorch alone, with the parameters of `layer`."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.num_topk, self.num_experts = layer.num_topk, layer.num_experts
        self.router, self.w_in, self.w_out = layer.router, layer.w_in, layer.w_out

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden]` to the same."""
        scores = F.linear(x.float(), self.router).sigmoid()
        weights, chosen = scores.topk(self.num_topk)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.num_topk
        ends = torch.bincount(chosen.flatten(), minlength=self.num_experts).cumsum(0).int()
        gate, value = self.product(x[token], self.w_in, ends).chunk(2, -1)
        rows = self.product(F.silu(gate) * value, self.w_out, ends)
        weighted = rows * weights.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)

    def product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Each expert's rows by its weight."""
        if rows.is_cuda:
            multiply: Callable[..., Tensor] = torch._grouped_mm
            return multiply(rows, weight.transpose(1, 2), offs=ends)
        starts = [0, *ends.tolist()]
        parts = [rows[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight)]
        return torch.cat(parts)


def layers(shape: Shape, device: str) -> dict[str, nn.Module]:
    """The forms of the layer by name, with equal weights."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"balancing": "none", "device": device, "dtype": torch.bfloat16}
    sizes = (shape.hidden, shape.intermediate, shape.experts, shape.topk)
    ours = MoELayer(*sizes, **settings)
    fp8 = MoELayer(*sizes, precision="fp8", **settings)
    fp8.load_state_dict(ours.state_dict())
    plain = PlainMoE(ours)
    return {"plain": plain, "compiled": plain, "bf16": ours, "fp8": fp8}


def steps(layer: nn.Module, x: Tensor, compiled: bool) -> dict[str, Callable[[], Any]]:
    """What is timed: a forward pass without gradients, and forward with backward."""
    function: Callable[..., Tensor] = torch.compile(layer) if compiled else layer
    grad = torch.randn_like(x)
    inputs = [x, *layer.parameters()]

    def forward() -> Any:
        with torch.no_grad():
            return function(x)

    def training() -> Any:
        return torch.autograd.grad(function(x), inputs, grad, allow_unused=True)

    return {"forward": forward, "training": training}


def graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    """Replays a CUDA graph of the step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(step: Callable[[], Any], batches: int, batch: int) -> dict[str, float]:
    """Median wall and host time of a step in microseconds, and the most memory, in MiB."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):
        step()
    wait()
    memory = 0.0
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        wait()
        memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    walls, hosts = [], []
    for _ in range(batches):
        wait()
        start = time.perf_counter()
        for _ in range(batch):
            step()
        hosts.append((time.perf_counter() - start) / batch)
        wait()
        walls.append((time.perf_counter() - start) / batch)
    return {
        "wall_us": round(statistics.median(walls) * 1e6, 1),
        "host_us": round(statistics.median(hosts) * 1e6, 1),
        "memory_mib": round(memory, 1),
    }


def run(shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """All forms of each shape."""
    cuda = torch.cuda.is_available()
    results = []
    for shape in shapes:
        device = "cuda" if cuda else "cpu"
        x = torch.randn(shape.tokens, shape.hidden, device=device).bfloat16().requires_grad_()
        for form, layer in layers(shape, device).items():
            for kind, step in steps(layer, x, form == "compiled").items():
                calls = {form: step}
                if cuda and form in ("bf16", "fp8"):
                    calls[f"{form}, CUDA graph"] = graphed(step)
                for name, call in calls.items():
                    times = measure(call, *((5, 4) if cuda else (1, 1)))
                    results.append({"shape": str(shape), "form": name, "step": kind, **times})
                    print(results[-1], flush=True)
                calls.clear()
        torch.cuda.empty_cache()
    return results


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measures, prints and saves; returns the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = run(SHAPES if torch.cuda.is_available() else SMALL)
    machine = benchmark.machine()
    path = options.output / f"moe_layer.{benchmark.slug(machine['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    return path


if __name__ == "__main__":
    print(main())
