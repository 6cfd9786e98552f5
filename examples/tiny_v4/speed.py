"""How fast a model trains: with the kernels, and in plain PyTorch.

Plain means the oracles of every operator, which are PyTorch and nothing else, on the same device.
`torch.compile` sees the operators of this package as whole pieces in either case.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import tile_kernels


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """The oracles instead of kernels, also in backward passes, which have threads of their own."""
    with tile_kernels.backend("torch"), torch.autograd.set_multithreading_enabled(False):
        yield


def per_second(step: Callable[[], Tensor], tokens: int, repeats: int) -> float:
    """Tokens per second of a forward and a backward pass, without the first ones."""

    def run(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            step().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    run(2)
    return repeats * tokens / run(repeats)


def compare(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
    repeats: int = 10,
    compiled: bool = True,
) -> dict[str, float]:
    """Tokens per second of each way to train `model` on a batch `[rows, length + 1]`."""
    tokens = batch.shape[0] * (batch.shape[1] - 1)
    ways: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], bool]] = {
        "kernels": (contextlib.nullcontext, False),
        "plain PyTorch": (plain, False),
        "plain PyTorch, torch.compile": (plain, True),
    }
    found = {}
    for name, (context, compile_it) in ways.items():
        if compile_it and not compiled:
            continue
        torch._dynamo.reset()
        one = torch.compile(model) if compile_it else model
        with context():
            found[name] = per_second(lambda one=one: loss_of(one, batch), tokens, repeats)
    model.zero_grad()
    return found
