"""Compiling ahead of time: the kernels of a list of calls, in parallel, on any machine.

A call is described, not made: its operator runs on meta tensors with its launches recorded, which
gives exactly the kernels that the real call would ask for. A model is described by its sizes; its
layers run like this too, and give the kernels for every number of tokens (`token_counts`).

Kernels go to the disk cache (`tile_kernels.runtime.bundles`), also on a machine without a GPU, and
stay in the process, so that later calls find them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels import config
from tile_kernels.runtime import checks, compilation, registry, terminal, token_counts
from tile_kernels.runtime.device import Device, described
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
        return compilation.label(self.kernel.name, tuple(self.static))


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


def model_compilations(
    model: Any, device: Device, *, training: bool | None = None, max_tokens: int | None = None
) -> list[Compilation]:
    """The distinct kernels that the layers of a model need on `device`, for any number of tokens.

    Arguments are those of `warmup`.
    """
    from tile_kernels.modeling import models

    sizes = models.load_model(model)
    sizes = dataclasses.replace(
        sizes,
        training=sizes.training if training is None else training,
        max_tokens=sizes.max_tokens if max_tokens is None else max_tokens,
    )
    found: dict[Compilation, None] = {}
    for part in models.computations(sizes):
        for kernel, static in token_counts.variants(part.run, device, part.max_count):
            found[Compilation(kernel, static, device.arch)] = None
    return list(found)


def warmup(
    calls: Iterable[Call] | None = None,
    *,
    model: Any = None,
    training: bool | None = None,
    max_tokens: int | None = None,
    arch: str | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> WarmupReport:
    """Compiles the kernels of a model, or of some calls, ahead of time.

    Needs nvcc, but no GPU. An error in one kernel is raised after the others are done. The kernels
    stay in this process, so that later calls need not compile, nor load from the disk cache.

    Those of a model serve contiguous tensors at addresses that are multiples of 16 bytes, as
    PyTorch allocates them, on one GPU: expert parallelism has other numbers of rows.

    Args:
        calls: Pairs of an operator's name and its arguments; tensors as meta tensors, real ones
            (only their shapes count) or words like `"float32[8192,256]"`. Without calls and model:
            the operators' benchmark shapes.
        model: Instead of calls: the name of a preset (`tile_kernels.modeling.models.PRESETS`), a
            JSON or TOML file with the sizes of a model, or what such a file holds as a dict.
        training: With a model: also the backward pass; None: as the model says.
        max_tokens: With a model: the most tokens of a call; None: as the model says, by default
            16384.
        arch: `sm_80`, `sm_89`, `sm_90a`, `sm_100a` or `sm_120a`; None: this machine's GPU, with its
            SM budget.
        jobs: Compiles at a time; None: the number of cores.
        progress: Whether to show a progress bar.

    Returns:
        What was compiled: the kernels with the seconds of each.

    Raises:
        ValueError: If an argument is out of range, or the sizes of the model are not such as its
            layers take.

    Example:
        ```python
        tile_kernels.warmup(model="deepseek-v3")
        tile_kernels.warmup([("moe.topk_gate", {"scores": "float32[8192,256]", "num_topk": 8})],
                            arch="sm_90a")
        ```
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"warmup: jobs must be at least 1, got {jobs}")
    device = planned_device() if arch is None else described(arch)
    if model is not None:
        if calls is not None:
            raise ValueError("warmup: calls and model cannot both be given")
        with checks.named("warmup"):
            work = model_compilations(model, device, training=training, max_tokens=max_tokens)
    elif training is not None or max_tokens is not None:
        raise ValueError("warmup: training and max_tokens need a model")
    else:
        work = compilations(benchmark_calls() if calls is None else calls, device)
    report = compile_all(work, device, jobs, progress)
    compilation.warmed_up()
    return report


def planned_device() -> Device:
    """The GPU of this machine as plans see it, or the described default where there is none."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return config.planned_device(index)


def compile_all(
    work: list[Compilation], device: Device, jobs: int | None, progress: bool
) -> WarmupReport:
    """Compiles in threads; an error in one kernel is raised after the others are done."""
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
    with compilation.warming():  # threads of the pool have contexts that start anew
        item.kernel.handle(item.static, item.arch)
    return time.perf_counter() - started


def _no_bar() -> AbstractContextManager[Callable[[str], None]]:
    return nullcontext(lambda _: None)
