"""What calls cost the host, counted on a machine without a GPU.

Inside of `counting`, CPU tensors are treated like CUDA tensors and kernels do nothing: prepared
calls are found, allocate and launch as on a GPU. Counts do not depend on the machine, so that a
test can assert them, where times could not be asserted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.runtime import launch, operator, prepared, registry, tickets
from tile_kernels.runtime.device import described
from tile_kernels.runtime.operator import Operator


@dataclass
class Counts:
    """Of the calls since `clear`."""

    calls: list[str] = field(default_factory=list)  # names of operators
    slow: int = 0  # calls that were not prepared
    launches: list[str] = field(default_factory=list)  # names of kernels
    allocations: int = 0
    steps: int = 0  # views and other PyTorch functions of prepared calls

    def clear(self) -> None:
        """Starts again."""
        self.__init__()  # type: ignore[misc]


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts what operators do. Results have memory that nobody wrote."""
    counts = Counts()
    call, slow, run = Operator.__call__, Operator._slow, prepared.Plan.run
    ticket = torch.zeros(1, dtype=torch.int32), 0

    def called(self: Operator, *args: Any, **kwargs: Any) -> Any:
        counts.calls.append(self.name)
        return call(self, *args, **kwargs)

    def called_slowly(self: Operator, *args: Any) -> Any:
        counts.slow += 1
        return slow(self, *args)

    def ran(self: prepared.Plan, values: list[Any], sized: prepared.Sized) -> Any:
        counts.allocations += len(sized.allocations)
        counts.steps += len(sized.steps) + len(sized.views)
        return run(self, values, sized)

    def bound(self: launch.Kernel, problem: Any, index: int) -> Callable[..., None]:
        return lambda *_: counts.launches.append(self.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "get_device", lambda _: 0)
        patch.setattr(operator, "current_device", int)
        patch.setattr(operator.backends, "choose", lambda _: "tilelang")
        patch.setattr(config, "planned_device", lambda _: described())
        patch.setattr(launch.Kernel, "bound", bound)
        patch.setattr(prepared, "empty_strided_cuda", lambda _: _allocate)
        patch.setattr(tickets, "take", lambda _: ticket)
        patch.setattr(Operator, "__call__", called)
        patch.setattr(Operator, "_slow", called_slowly)
        patch.setattr(prepared.Plan, "run", ran)
        _forget()
        yield counts
    _forget()


def _allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch._C._dynamo.guards._empty_strided_cpu(shape, strides, dtype)


def _forget() -> None:
    for each in registry.operators():
        each.forget()


def pytorch_operators(function: Callable[[], Any]) -> Counter[str]:
    """The operators of PyTorch that one call dispatches."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    names = (event.name for event in profile.events() or ())
    return Counter(name for name in names if name.startswith("aten::"))
