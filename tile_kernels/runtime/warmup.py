"""Compiling ahead of time: the kernels of a list of calls, in parallel, on any machine.

A call is described, not made: its operator runs on meta tensors with its launches recorded, which
gives exactly the kernels that the real call would ask for. They land in TileLang's disk cache
(`TILELANG_CACHE_DIR`, by default `~/.tilelang/cache`), also on a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.runtime import registry, terminal
from tile_kernels.runtime.device import Device, current_device, described
from tile_kernels.runtime.launch import Kernel, recording
from tile_kernels.runtime.registry import Registered

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Compilation:
    """One kernel to compile: its static arguments for one architecture."""

    kernel: Kernel
    static: tuple[Any, ...]
    arch: str

    @property
    def label(self) -> str:
        """The kernel's name with its static arguments."""
        return f"{self.kernel.name}({', '.join(str(value) for value in self.static)})"


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did: the kernels by label, seconds of each and in all."""

    arch: str
    kernels: dict[str, float]
    seconds: float


def tensor_of(text: str) -> torch.Tensor:
    """A meta tensor from words: `float32[8192,256]`, strides behind a colon if not contiguous.

    >>> tensor_of("bfloat16[8,16:32,1]").stride()
    (32, 1)
    """
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)(?::([\d,\s]*))?\]", text.strip())
    dtype = getattr(torch, match[1], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor is written like float32[8192,256], got {text!r}")
    shape, strides = (
        [int(number) for number in (part or "").split(",") if number.strip()]
        for part in (match[2], match[3])
    )
    if strides:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return torch.empty(shape, dtype=dtype, device="meta")


def compilations(calls: Iterable[Call], device: Device) -> list[Compilation]:
    """The distinct kernels that `calls` would launch on `device`."""
    found: dict[Compilation, None] = {}
    for name, arguments in calls:
        declared = registry.get(name)
        with recording() as requests:
            declared.function(**{k: _argument(declared, k, v) for k, v in arguments.items()})
        for request in requests:
            static = request.kernel.static_arguments(request.problem, device)
            found[Compilation(request.kernel, static, device.arch)] = None
    return list(found)


def _argument(declared: Registered, name: str, value: Any) -> Any:
    if name in declared.tensor_parameters:
        if isinstance(value, str):
            return tensor_of(value)
        if isinstance(value, torch.Tensor):
            return value.to("meta")
    return value


def benchmark_calls() -> list[Call]:
    """The calls that the operators' benchmarks make: a sensible default set."""
    return [
        (declared.name, sample.build("meta"))
        for declared in registry.all_ops()
        for sample in declared.cases.benchmarks
    ]


def warmup(
    calls: Iterable[Call] | None = None,
    *,
    arch: str | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> WarmupReport:
    """Compile the kernels of `calls` ahead of time.

    | argument | meaning |
    |---|---|
    | `calls` | pairs of an operator's name and its arguments; tensors as meta tensors, real ones |
    |         | (only their shapes count) or words like `"float32[8192,256]"`; default: the |
    |         | operators' benchmark shapes |
    | `arch` | `sm_80`, `sm_89`, `sm_90a`, `sm_100a` or `sm_120a`; default: this machine's GPU |
    | `jobs` | compiles at a time; default: the number of cores |
    | `progress` | show a progress bar |

    Needs nvcc, but no GPU. An error in one kernel is raised after the others are done.

    ```python
    tile_kernels.warmup([("moe.topk_gate", {"scores": "float32[8192,256]", "num_topk": 8})],
                        arch="sm_90a")
    ```
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"warmup: jobs must be at least 1, got {jobs}")
    device = current_device() if arch is None else described(arch)
    work = compilations(benchmark_calls() if calls is None else calls, device)
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    errors: list[BaseException] = []
    bar = terminal.progress_bar(len(work), "compiling") if progress else _no_bar()
    with bar as advance, ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        futures = {pool.submit(_compile, item): item for item in work}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                errors.append(error)
            else:
                seconds[futures[future].label] = future.result()
            advance(futures[future].label)
    if errors:
        raise errors[0]
    return WarmupReport(device.arch, seconds, time.perf_counter() - started)


def _compile(item: Compilation) -> float:
    started = time.perf_counter()
    item.kernel.handle(item.static, item.arch)
    return time.perf_counter() - started


def _no_bar() -> AbstractContextManager[Callable[[str], None]]:
    return nullcontext(lambda _: None)
