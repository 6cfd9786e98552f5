"""How fast a model trains: with the kernels, and without them.

Without them means `plain`: the same model and parameters in ordinary operations of PyTorch. Both
are timed as they are and, on a GPU, in each mode by which PyTorch removes the host's work:
`torch.compile`, that with `mode="reduce-overhead"`, and a CUDA graph of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.tiny_v4.model import TinyV4
from examples.tiny_v4.plain import PlainTinyV4

PLAIN = "plain PyTorch"
COMPILED = "torch.compile"
REDUCED = "torch.compile, reduce-overhead"
GRAPH = "CUDA graph"

Step = Callable[[], Any]


def per_second(step: Step, tokens: int, repeats: int) -> float:
    """Tokens per second of a forward and a backward pass, without the first ones."""

    def run(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    run(3)
    return repeats * tokens / run(repeats)


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the step, and the results that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def compare(
    model: TinyV4,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
    repeats: int = 10,
    compiled: bool = True,
) -> dict[str, float | str]:
    """Tokens per second of each mode of training `model` on a batch `[rows, length + 1]`.

    Where a mode fails (`torch.compile` needs compilers that not every machine has), the reason
    stands in the place of the number.
    """
    tokens = batch.shape[0] * (batch.shape[1] - 1)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step_of(module: nn.Module) -> Step:
        return lambda: torch.autograd.grad(loss_of(module, batch), parameters, allow_unused=True)

    def speed(make: Callable[[], Step]) -> float | str:
        torch._dynamo.reset()
        try:
            return per_second(make(), tokens, repeats)
        except Exception as error:  # whatever a compiler has to say
            return f"failed: {type(error).__name__}: {first_line(error)}"

    found: dict[str, float | str] = {}
    for name, form in (("kernels", model), (PLAIN, PlainTinyV4(model))):
        found[name] = per_second(step_of(form), tokens, repeats)
        if compiled and (name == PLAIN or batch.is_cuda):
            found[f"{name}, {COMPILED}"] = speed(lambda: step_of(torch.compile(form)))  # noqa: B023
        if compiled and batch.is_cuda:
            found[f"{name}, {REDUCED}"] = speed(
                lambda: step_of(torch.compile(form, mode="reduce-overhead"))  # noqa: B023
            )
        if batch.is_cuda:
            found[f"{name}, {GRAPH}"] = speed(lambda: captured(step_of(form))[0].replay)  # noqa: B023
    return found


def first_line(error: Exception) -> str:
    """What an error says before it goes into details."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def in_words(speed: float | str) -> str:
    """A number of `compare` for a reader, or why there is none."""
    return speed if isinstance(speed, str) else f"{speed:.0f} letters per second"
