"""The `emulate` backend: a launch on CPU tensors runs the kernel's generated CUDA on the CPU.

Same plan, same builder, same pass configs as on a GPU; only the hardware is described instead of
present (`runtime/device.py`) and the compiler is g++ (`emulator`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tile_kernels import config
from tile_kernels.runtime import checks
from tile_kernels.runtime.device import DEFAULT_ARCH, DESCRIBED, Device, described

if TYPE_CHECKING:
    from tile_kernels.emulator import Report
    from tile_kernels.runtime.launch import Kernel

MODES = ("fast", "check")
ORDERS = ("forward", "reverse", "random")


@dataclass(frozen=True)
class Options:
    """How kernels are emulated.

    | option | values |
    |---|---|
    | `arch` | the architecture whose source runs: `sm_80`, `sm_89`, `sm_90a` (default), ... |
    | `mode` | `check` (default): every memory access checked; `fast`: only results |
    | `order` | in which threads and blocks take turns: `forward`, `reverse`, `random` |
    | `seed` | of the random order |
    | `split_shared` | True: a region per shared buffer (overruns show); False: TileLang's merged |
    |  | layout (hazards of reused memory show) |
    | `contract` | True: `a * b + c` fuses about as nvcc does it |
    | `keep` | a folder in which each kernel leaves its source, inputs and a script for gdb |
    | `report` | a file for an HTML page about a failure; `"html"`: one named after the kernel |
    """

    arch: str = DEFAULT_ARCH
    mode: str = "check"
    order: str = "forward"
    seed: int = 0
    split_shared: bool = True
    contract: bool = False
    keep: str | Path | None = None
    report: str | Path | None = None

    def __post_init__(self) -> None:
        checks.one_of("arch", self.arch, tuple(DESCRIBED))
        checks.one_of("mode", self.mode, MODES)
        checks.one_of("order", self.order, ORDERS)


_options: contextvars.ContextVar[Options] = contextvars.ContextVar(
    "tile_kernels_emulation",
    default=Options(),  # noqa: B039 - frozen
)
_reports: contextvars.ContextVar[list[Report] | None] = contextvars.ContextVar(
    "tile_kernels_reports", default=None
)


@contextlib.contextmanager
def emulating(**options: Any) -> Iterator[Options]:
    """Emulate with these options inside; those not named stay as they are."""
    known = [field.name for field in dataclasses.fields(Options)]
    for name in options:
        checks.one_of("an emulation option", name, known)
    changed = dataclasses.replace(_options.get(), **options)
    token = _options.set(changed)
    try:
        yield changed
    finally:
        _options.reset(token)


@contextlib.contextmanager
def reports() -> Iterator[list[Report]]:
    """Collect what each emulated launch inside did: blocks, barriers, bytes per tensor."""
    collected: list[Report] = []
    token = _reports.set(collected)
    try:
        yield collected
    finally:
        _reports.reset(token)


def device() -> Device:
    """The GPU that kernels are planned for."""
    return config.with_budget(described(_options.get().arch))


def run(kernel: Kernel, problem: tuple[Any, ...], *arguments: Any) -> None:
    """Launch `kernel` on CPU tensors."""
    options = _options.get()
    static = kernel.static_arguments(problem, device())
    build_options = dataclasses.replace(options, order="forward", seed=0)
    emulated = kernel.once(
        ("emulate", build_options, static), lambda: _build(kernel, static, options)
    )
    report = emulated(*arguments, order=options.order, seed=options.seed)
    collected = _reports.get()
    if collected is not None:
        collected.append(report)


def missing() -> str:
    """Describes what this machine lacks to emulate kernels; empty if nothing is missing."""
    from tile_kernels.emulator import build

    if importlib.util.find_spec("tilelang") is None:
        return "missing: TileLang"
    try:
        build.compiler()
        build.cuda_include()
    except (OSError, RuntimeError) as error:
        return f"missing: {error}"
    return ""


def _build(kernel: Kernel, static: tuple[Any, ...], options: Options) -> Any:
    from tile_kernels.emulator import Emulated

    definition = kernel.definition
    return Emulated.build(
        definition.prim_func(static),
        arch=options.arch,
        pass_configs=definition.pass_configs,
        mode=options.mode,
        split_shared=options.split_shared,
        contract=options.contract,
        keep=options.keep and Path(options.keep) / kernel.name,
        report=options.report,
    )
