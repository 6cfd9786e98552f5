"""Kernels: their definition, their compiled handles, and the launch.

A kernel file defines kernels with `@kernel`; host files name them with `Kernel(module, name,
plan)`, which imports that file (and with it TileLang) at the first compilation:

    problem -> plan(*problem, device) -> static arguments -> handle (compiled once)

`problem` is what the host knows (sizes, flags); the plan turns it into the static arguments of the
builder, so that one compiled handle serves many problems.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tile_kernels import config
from tile_kernels.runtime import compilation
from tile_kernels.runtime.device import Device

if TYPE_CHECKING:
    from tile_kernels.runtime.launcher import Binary

Handle = Callable[..., Any]
Widths = int | tuple[int, ...]
_MAX_PLANNED = 4096
# Set for every kernel. Warp specialisation only pays for TMA-fed matrix products; lowering vector
# accesses to PTX keeps nvcc 13.0 from splitting 16-byte stores.
COMMON_PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,
    "tl.enable_lower_ldgstg": True,
}


@dataclass(frozen=True)
class KernelDefinition:
    """One TileLang kernel: `build(*static)` gives its prim_func.

    `access_bits(*static)` is what the plan promises of its global loads and of its stores: their
    width, or their widths; tests hold the machine code to it.
    """

    build: Callable[..., Any]
    pass_configs: dict[str, Any]
    access_bits: Callable[..., tuple[Widths, Widths]] | None

    def prim_func(self, static: tuple[Any, ...]) -> Any:
        """The kernel for these static arguments, under a name that contains them."""
        words = [str(value) for value in static]
        symbol = "_".join([self.build.__name__, *words]).replace("-", "m").replace(".", "p")
        return self.build(*static).with_attr("global_symbol", symbol)

    def binary(self, static: tuple[Any, ...], arch: str) -> Binary:
        """Machine code for `arch`. Needs TileLang and nvcc, and no GPU."""
        from tile_kernels.runtime.launcher import compile_binary

        os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # our own log has it
        return compile_binary(self.prim_func(static), arch, self.pass_configs)

    def compile(self, static: tuple[Any, ...], arch: str) -> Handle:
        """Compile for `arch`; the result launches the kernel, see `uses_driver`."""
        if uses_driver():
            from tile_kernels.runtime.launcher import Launcher

            return Launcher(self.binary(static, arch))
        os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # our own log has it
        import tilelang

        compiled = tilelang.compile(
            self.prim_func(static),
            target={"kind": "cuda", "arch": arch},
            execution_backend="tvm_ffi",
            pass_configs=self.pass_configs,
        )
        return _bare(compiled)


def _bare(compiled: Any) -> Handle:
    """The function inside a compiled kernel. TileLang's own wrapper around it re-derives output
    shapes per call, which costs several microseconds and which we do not need."""
    executable = compiled.adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    return module["main"]


def uses_driver() -> bool:
    """Whether kernels that are compiled here are launched through the CUDA driver.

    `TILE_KERNELS_LAUNCHER` is `driver` (the default) or `tilelang`: TileLang compiles, caches and
    launches, for comparison. Kernels of a bundle are always launched through the driver.
    """
    launcher = os.environ.get("TILE_KERNELS_LAUNCHER", "driver")
    if launcher not in ("tilelang", "driver"):
        raise ValueError(f"TILE_KERNELS_LAUNCHER must be tilelang or driver, got {launcher!r}")
    return launcher == "driver"


def kernel(
    *,
    pass_configs: dict[str, Any] | None = None,
    access_bits: Callable[..., tuple[Widths, Widths]] | None = None,
) -> Callable[[Callable[..., Any]], KernelDefinition]:
    """Define a kernel: the decorated builder returns a `T.prim_func` for its static arguments."""

    def define(build: Callable[..., Any]) -> KernelDefinition:
        configs = {**COMMON_PASS_CONFIGS, **(pass_configs or {})}
        return KernelDefinition(build, configs, access_bits)

    return define


@dataclass(frozen=True)
class Request:
    """A launch that was recorded instead of made: the kernel and the problem.

    `call` is the operator, the record of its arguments, and the launch that it declared.
    """

    kernel: Kernel
    problem: tuple[Any, ...]
    call: tuple[Any, ...] = field(default=(), compare=False, repr=False)


class _Recorder(threading.local):
    """Per thread: the list that receives launches instead of the GPU, if there is one."""

    requests: list[Request] | None = None


recorder = _Recorder()


@contextlib.contextmanager
def recording() -> Iterator[list[Request]]:
    """Records the launches of calls instead of making them: for warm-up and `source`."""
    outer = recorder.requests
    requests: list[Request] = []
    recorder.requests = requests
    try:
        yield requests
    finally:
        recorder.requests = outer
        if outer is not None:
            outer.extend(requests)


@dataclass(eq=False)
class Kernel:
    """A kernel by name, imported at its first use; holds the compiled handles."""

    module: str
    name: str
    plan: Callable[..., tuple[Any, ...]]  # plan(*problem, device): the static arguments
    _planned: dict[tuple[Any, ...], Handle] = field(default_factory=dict, repr=False)
    _handles: dict[tuple[Any, ...], Handle] = field(default_factory=dict, repr=False)
    _pending: dict[tuple[Any, ...], Future[Handle]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _definition: KernelDefinition | None = field(default=None, repr=False)

    @property
    def definition(self) -> KernelDefinition:
        """What the kernel's file says; imports that file."""
        if self._definition is None:
            self._definition = getattr(importlib.import_module(self.module), self.name)
        return self._definition

    def bound(self, problem: tuple[Any, ...], index: int) -> Handle:
        """What runs the kernel for `problem` on the CUDA device `index`."""
        handle = self._planned.get((problem, index, config.generation))
        return handle or self._plan(problem, index)

    def _plan(self, problem: tuple[Any, ...], index: int) -> Handle:
        """Plan for a CUDA device and remember the handle for this very problem."""
        generation = config.generation  # before planning: a change meanwhile must not be missed
        device = config.planned_device(index)
        handle = self.handle(self.plan(*problem, device), device.arch)
        if len(self._planned) >= _MAX_PLANNED:  # token counts vary without end
            self._planned.clear()
        self._planned[problem, index, generation] = handle
        return handle

    def handle(self, static: tuple[Any, ...], arch: str) -> Handle:
        """The compiled kernel: what the process or a bundle has, or compiled now if allowed."""
        from tile_kernels.runtime import bundles
        from tile_kernels.runtime.launcher import Launcher

        def make() -> Handle:
            key = bundles.Key(self.module, self.name, static, arch)
            packed = bundles.find(key)
            if packed is not None:
                return Launcher(packed)
            compilation.begin(self.name, static, arch)
            started = time.perf_counter()
            by_driver = uses_driver() or not bundles.has_compiler()
            cached = bundles.find_cached(key) if by_driver else None
            if cached is not None:
                handle: Handle = Launcher(cached)
            else:
                bundles.need_compiler(key)
                handle = self.definition.compile(static, arch)
                if isinstance(handle, Launcher):
                    bundles.store(key, handle.binary)
            compilation.finish(self.name, static, arch, time.perf_counter() - started)
            return handle

        return self.once((arch, static), make)

    def once(self, key: tuple[Any, ...], make: Callable[[], Handle]) -> Handle:
        """Make a handle exactly once, however many threads ask; the others wait for it."""
        with self._lock:
            existing = self._handles.get(key)
            if existing is not None:
                return existing
            future = self._pending.get(key)
            mine = future is None
            if future is None:
                future = self._pending[key] = Future()
        if not mine:
            return future.result()
        try:
            handle = make()
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            future.set_exception(error)
            raise
        with self._lock:
            self._handles[key] = handle
            del self._pending[key]
        future.set_result(handle)
        return handle

    def static_arguments(self, problem: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """What the plan chooses for `problem` on `device`."""
        return self.plan(*problem, device)
