"""Runs and models of the demo that are small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from examples.tiny_v4 import train
from examples.tiny_v4.model import Config, TinyV4

QUIET = Console(quiet=True)
# The parts of a report that have a picture.
HEADINGS = ("Loss", "Load of the experts", "How streams are mixed", "The gate of the memory")
SMALL = ["--hidden", "32", "--layers", "1", "--rows", "2", "--length", "24", "--no-emulation"]


def run(out: Path, *more: str) -> dict[str, Any]:
    return train.train(train.arguments([*SMALL, "--out", str(out), *more]), QUIET)


def model_of(**changes: Any) -> TinyV4:
    """One layer with everything, for a vocabulary of 20."""
    torch.manual_seed(0)
    return TinyV4(Config(20, **{"hidden": 64, "layers": 1, "engram_layers": (0,), **changes}))


def ids_of(rows: int, length: int) -> Tensor:
    return torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of the loss, by the names of the parameters, on the CPU."""
    model.zero_grad()
    train.loss_of(model, ids.to(next(model.parameters()).device)).backward()
    named = model.named_parameters()
    return {name: p.grad.cpu().clone() for name, p in named if p.grad is not None}


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / one.norm().clamp(min=1e-6)).item()
