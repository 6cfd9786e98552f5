"""What residual streams cost a layer on top of a plain residual: `python -m benchmarks.mhc_layer`.

Two layers around the same block, an RMS norm, which stands for a sublayer that costs nothing else:
`x + block(x)`, and `HyperConnection(block)` on several streams. Each without gradients, and forward
and backward. The results are a file beside those of the operators, `mhc.layer.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.modeling.mhc import HyperConnection
from tile_kernels.testing import benchmark, timing


class Plain(nn.Module):
    """`x + block(x)`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The next residual."""
        return x + self.block(x)


def layers(
    tokens: int, streams: int, hidden: int, device: str
) -> dict[str, tuple[nn.Module, Tensor]]:
    """The two layers by name, each with its input."""
    torch.manual_seed(0)
    block = nn.RMSNorm(hidden, device=device, dtype=torch.bfloat16)
    plain, mixed = Plain(block), HyperConnection(block, hidden, streams, device=device)
    x, residual = (
        torch.randn(tokens, *shape, device=device).bfloat16().requires_grad_()
        for shape in ((hidden,), (streams, hidden))
    )
    return {"plain": (plain, x), "streams": (mixed, residual)}


def steps(layer: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed: the layer in inference, and its forward and backward pass in training."""
    grad, inputs = torch.ones_like(x), [x, *layer.parameters()]

    def inference() -> Any:
        with torch.no_grad():
            return layer(x)

    def training() -> Any:
        return torch.autograd.grad(layer(x), inputs, grad)

    return {"inference": inference, "training": training}


def measure(tokens: int, streams: int, sizes: Sequence[int]) -> benchmark.Report:
    """Both layers of each size."""
    cuda = torch.cuda.is_available()
    calls = [
        (f"mhc.layer.{tokens}x{streams}x{hidden}.{name}.{kind}", kind, x, call)
        for hidden in sizes
        for name, (layer, x) in layers(tokens, streams, hidden, "cuda" if cuda else "cpu").items()
        for kind, call in steps(layer, x).items()
    ]
    # Host times come first: once the profiler has run, launches stay slower in this process.
    host = [timing.time_host(call, calls=100 if cuda else 1) for *_, call in calls]
    bandwidth = timing.copy_bandwidth() if cuda else None
    results = []
    for (name, kind, x, call), host_us in zip(calls, host):
        # Streams are read and written; in training read again, and their gradient is both.
        moved = (4 if kind == "inference" else 10) * x.numel()
        device = timing.time_device(call) if cuda else None
        results.append(
            benchmark.Result(
                case=name,
                bytes=moved,
                device_us=device and round(device.us, 2),
                device_min_us=device and round(device.min_us, 2),
                goal_us=None,
                host_us=round(host_us, 2),
                oracle_us=None,
                oracle_compiled_us=None,
                copy_fraction=device
                and bandwidth
                and round(moved / device.us / 1e3 / bandwidth, 4),
                method=device.method if device else "host",
            )
        )
    return benchmark.Report(benchmark.machine(), bandwidth and round(bandwidth, 1), results)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print and save; returns the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096])
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    report = measure(options.tokens, options.streams, options.hidden)
    for result in report.results:
        print(f"{result.case:48} device {result.device_us} us, host {result.host_us} us")
    (path,) = benchmark.save(report, options.output)
    return path


if __name__ == "__main__":
    print(main())
