"""A run on disk: parameters, moments, what was measured so far, and the options it was begun with.

All of it is one safetensors file. A run that goes on from it must have the options that its next
steps depend on: with others it would be neither the old run nor a new one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

# Options that a step depends on. `steps`, by which the learning rate falls, is not among them: a
# run may be made longer than planned.
FIXED = (
    "seed", "rows", "length", "hidden", "intermediate", "layers", "learning_rate", "no_engram",
    "attention", "no_mhc", "dense", "fp8", "precision",
)  # fmt: skip


class ResumeError(Exception):
    """Why a run cannot be resumed, with a clear error message."""


@dataclasses.dataclass
class History:
    """What was measured of the steps so far."""

    losses: list[float] = dataclasses.field(default_factory=list)
    loads: list[list[list[int]]] = dataclasses.field(default_factory=list)  # step, layer, expert
    seconds: float = 0.0


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    history: History,
    options: argparse.Namespace,
) -> None:
    """Everything that the next step and the report depend on; written whole or not at all."""
    tensors = {f"model.{name}": x.contiguous() for name, x in _tensors_of(model).items()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value).contiguous()
    said = {"history": dataclasses.asdict(history), "options": vars(options)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    in_words = {name: json.dumps(value, default=str) for name, value in said.items()}
    save_file(tensors, partial, metadata=in_words)
    partial.replace(path)


def restore(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> tuple[History, int]:
    """Put the state of a run with these options into `model` and `optimizer`.

    Returns what was measured, and how many steps the run was planned to have.
    """
    tensors, said = _read(path)
    _check_options(path, said["options"], options)
    state = model.state_dict()
    for name in _tensors_of(model):
        state[name] = tensors[f"model.{name}"]
    model.load_state_dict(state)
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, kind = name.split(".")
            moments.setdefault(int(index), {})[kind] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return History(**said["history"]), said["options"]["steps"]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, and what it says of its run."""
    if not path.is_file():
        raise ResumeError(f"--resume: there is no checkpoint {path}; start without --resume")
    try:
        with safe_open(path, framework="pt") as file:
            said = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ResumeError(f"--resume: {path} cannot be read: {error}") from error
    if not {"history", "options"} <= said.keys():
        raise ResumeError(f"--resume: {path} does not say which run it is of")
    return tensors, said


def _check_options(path: Path, then: dict[str, Any], options: argparse.Namespace) -> None:
    """Name every option that is not what it was, with both values."""
    changed = [
        f"--{name.replace('_', '-')} was {_shown(then.get(name))}, "
        f"now it is {_shown(getattr(options, name))}"
        for name in FIXED
        if then.get(name) != getattr(options, name)
    ]
    if changed:
        raise ResumeError(f"--resume: {path} is of another run: {'; '.join(changed)}")


def _shown(value: object) -> str:
    return {True: "given", False: "not given"}[value] if isinstance(value, bool) else str(value)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's state without what is no tensor of numbers."""
    return {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
