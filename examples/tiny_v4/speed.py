"""How fast a model trains: with the kernels, and without them.

Without them means `plain`: the same model and parameters in ordinary operations of PyTorch, as it
is and with `torch.compile`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.tiny_v4.model import TinyV4
from examples.tiny_v4.plain import PlainTinyV4

COMPILED = "plain PyTorch, torch.compile"


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
    model: TinyV4,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
    repeats: int = 10,
    compiled: bool = True,
) -> dict[str, float | str]:
    """Tokens per second of each way to train `model` on a batch `[rows, length + 1]`.

    Where `torch.compile` fails, which needs compilers that not every machine has, the reason stands
    in the place of the number.
    """
    tokens = batch.shape[0] * (batch.shape[1] - 1)
    plain = PlainTinyV4(model)

    def of(way: nn.Module) -> float:
        return per_second(lambda: loss_of(way, batch), tokens, repeats)

    found: dict[str, float | str] = {"kernels": of(model), "plain PyTorch": of(plain)}
    if compiled:
        torch._dynamo.reset()
        try:
            found[COMPILED] = of(torch.compile(plain))
        except Exception as error:  # whatever a compiler has to say
            found[COMPILED] = f"failed: {type(error).__name__}: {first_line(error)}"
    model.zero_grad()
    return found


def first_line(error: Exception) -> str:
    """What an error says before it goes into details."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def in_words(speed: float | str) -> str:
    """A number of `compare` for a reader, or why there is none."""
    return speed if isinstance(speed, str) else f"{speed:.0f} letters per second"
