"""TileLang's compiler entry points, answered by the emulator.

Inside `emulated_tilelang()` everything that compiles a kernel gives one that runs on the CPU:
`tilelang.compile`, `@tilelang.jit` in both of its modes, `@tilelang.autotune`, the profiler. The
objects are TileLang's own classes with another adapter, so code that inspects them keeps working.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .call import device_asserts
from .cuda_api import Patches, cuda_on_cpu, tag
from .errors import EmulationError
from .launch import Emulated
from .lowering import DEFAULT_ARCH, Param, compile_expressions
from .report import Report


@dataclass
class Settings:
    """How the kernels of a script are emulated.

    Attributes:
        mode: `"check"` or `"fast"`.
        arch: Architecture of the generated source where the script does not name one.
        order: Order of threads and blocks: `"forward"`, `"reverse"` or `"random"`.
        seed: Seed of the random order.
        split_shared: Each shared buffer in separate memory, or TileLang's placement.
        config: Number of the autotuner's configuration; None takes the first that compiles.
        num_sms: Multiprocessors that the device reports.
        keep: Folder that receives source, inputs and a debugger script of each kernel.
        show_reports: Print the report of every launch.
        report: `"html"` writes a page about a failure.
    """

    mode: str = "check"
    arch: str = DEFAULT_ARCH
    order: str = "forward"
    seed: int = 0
    split_shared: bool = True
    config: int | None = None
    num_sms: int | None = None
    keep: Path | None = None
    show_reports: bool = False
    report: str | None = None


@dataclass
class Session:
    """What happened inside `emulated_tilelang()`."""

    settings: Settings
    kernels: list[str] = field(default_factory=list)
    launches: int = 0
    blocks: int = 0
    seconds: float = 0.0
    failures: list[EmulationError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say once that something was left out or done differently."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"emulator: {text}", file=sys.stderr, flush=True)

    def record(self, report: Report) -> None:
        """Count a launch."""
        self.launches += 1
        self.blocks += report.blocks
        self.seconds += report.seconds
        if self.settings.show_reports:
            print(report, file=sys.stderr, flush=True)

    def summary(self) -> str:
        """One line: kernels, launches, blocks, time, failures."""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return (
            f"{len(self.kernels)} kernels, {self.launches} launches, {self.blocks} blocks in "
            f"{self.seconds:.1f} s ({self.settings.mode} mode, {self.settings.arch}){failed}"
        )


# ---- kernels ------------------------------------------------------------------------------------


# What TVM writes into `Target("cuda")` where it finds no GPU. TileLang does not support it.
_NO_GPU_ARCH = "sm_50"


def _architecture(target: Any, default: str) -> str:
    """The architecture that a TileLang target names, or the default."""
    if target is None or target in ("auto", "cuda"):
        return default
    described = target if isinstance(target, Mapping) else getattr(target, "attrs", None)
    kind = getattr(getattr(target, "kind", None), "name", None)
    if isinstance(target, Mapping):
        kind = str(target.get("kind"))
    if isinstance(target, str):
        words = target.split()
        kind = words[0]
        named = [w for w in words if "arch=" in w]
        described = {"arch": named[0].split("arch=")[1]} if named else {}
    if kind != "cuda":
        raise EmulationError(f"the emulator runs kernels for CUDA, not for the target {target!r}")
    named_arch = str(dict(described or {}).get("arch", default))
    return default if named_arch == _NO_GPU_ARCH else named_arch


def _scalar(value: Any) -> Any:
    """A Python number from the number types that TileLang accepts as scalars."""
    if isinstance(value, (bool, int, float, torch.Tensor)) or value is None:
        return value
    if hasattr(value, "item"):  # NumPy's
        return value.item()
    with contextlib.suppress(TypeError):
        return operator.index(value)
    return value


class Outputs:
    """Allocates the results of a kernel from the shapes of its other arguments."""

    def __init__(self, params: Sequence[Param], indices: Sequence[int]) -> None:
        self.params, self.indices = params, list(indices)
        self.names = [params[i].name for i in self.indices]
        self._shapes = {i: compile_expressions(params[i].shape or ()) for i in self.indices}

    def allocate(self, emulated: Emulated, values: list[Any], cuda: bool) -> None:
        """Fill the places of the results in the list of arguments."""
        symbols = emulated.symbols(values)
        for i in self.indices:
            try:
                shape = list(self._shapes[i](symbols))
            except NameError as e:
                raise ValueError(
                    f"{self.params[i].name}: the size {e.name} of this result follows from no "
                    "argument"
                ) from None
            values[i] = tag(emulated.empty(i, shape), cuda)


def _make_kernel_class() -> Any:
    from tilelang.engine.param import KernelParam
    from tilelang.jit.adapter import BaseKernelAdapter
    from tilelang.jit.kernel import JITKernel

    class EmulatedAdapter(BaseKernelAdapter):
        """Calls an `Emulated` as TileLang's adapters call a compiled kernel."""

        def __init__(self, session: Session, prim_func: Any, out_idx: Any, emulated: Any) -> None:
            self.session, self.emulated, self.prim_func = session, emulated, prim_func
            self.params = [
                KernelParam.from_buffer(prim_func.buffer_map[p])
                if p in prim_func.buffer_map
                else KernelParam.from_var(p)
                for p in prim_func.params
            ]
            indices = list(out_idx) if isinstance(out_idx, (tuple, list)) else out_idx
            self.result_idx = self._legalize_result_idx(indices)
            self.outputs = Outputs(emulated.lowered.params, self.result_idx)
            self.kernel_global_source = emulated.source
            self._post_init()

        def _convert_torch_func(self) -> Callable[..., Any]:
            return self._run

        def _run(self, *inputs: Any) -> Any:
            __tracebackhide__ = True  # pytest shows the caller of the kernel
            expected = len(self.params) - len(self.result_idx)
            if len(inputs) != expected:
                raise ValueError(
                    f"Kernel expected {expected} inputs, but {len(inputs)} are provided."
                )
            values: list[Any] = [None] * len(self.params)
            rest = iter(inputs)
            for i in range(len(values)):
                if i not in self.result_idx:
                    values[i] = _scalar(next(rest))
            self.outputs.allocate(self.emulated, values, cuda=True)
            settings = self.session.settings
            try:
                report = self.emulated(
                    *values,
                    order=settings.order,
                    seed=settings.seed,
                    fresh=self.outputs.names,  # as of torch.empty
                )
            except EmulationError as error:
                self.session.failures.append(error)
                raise
            self.session.record(report)
            results = [values[i] for i in self.result_idx]
            return results[0] if len(results) == 1 else results or None

        def get_kernel_source(self, kernel_only: bool = True) -> str:  # noqa: ARG002
            return self.emulated.source

        def get_host_source(self) -> str:
            return ""

    class EmulatedKernel(JITKernel):
        """A compiled kernel of TileLang whose launches run on the CPU."""

        def __init__(
            self,
            session: Session,
            prim_func: Any,
            out_idx: Any,
            target: Any,
            pass_configs: Any,
        ) -> None:
            settings = session.settings
            arch = _architecture(target, settings.arch)
            name = str((prim_func.attrs or {}).get("global_symbol", "kernel"))
            number = len(session.kernels)
            keep = settings.keep / f"{number}_{name}" if settings.keep else None
            try:
                emulated = Emulated.build(
                    prim_func,
                    arch=arch,
                    pass_configs=pass_configs,
                    mode=settings.mode,
                    split_shared=settings.split_shared,
                    keep=keep,
                    report=settings.report,
                )
                emulated.check_static_limits()
            except EmulationError as error:
                session.failures.append(error)
                raise
            session.kernels.append(name)
            self.prim_func = prim_func
            self.pass_configs, self.compile_flags, self.verbose = pass_configs, None, False
            self.target, self.target_host, self.execution_backend = target, None, "tvm_ffi"
            self.adapter = EmulatedAdapter(session, prim_func, out_idx, emulated)
            self.torch_function = self.adapter.func

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return self.torch_function(*args, **kwargs)

    return EmulatedKernel


# ---- the patch set ------------------------------------------------------------------------------


def _bench_once(session: Session) -> Callable[..., Any]:
    def do_bench(fn: Callable[[], Any], *_args: Any, **options: Any) -> Any:
        session.note("do_bench calls the function once; the time is the emulator's, not a GPU's")
        started = time.perf_counter()
        fn()
        milliseconds = (time.perf_counter() - started) * 1e3
        quantiles = options.get("quantiles")
        if not quantiles:
            return milliseconds
        return milliseconds if len(quantiles) == 1 else [milliseconds] * len(quantiles)

    return do_bench


def _tune_nothing(session: Session, result_class: Any) -> Callable[..., Any]:
    """`AutoTuner.run` that compiles one configuration and measures nothing."""

    def configurations(tuner: Any) -> list[dict[str, Any]]:
        if callable(tuner.configs):
            args, kwargs = tuner._kernel_parameters
            tuner.configs = tuner.configs(*args, **dict(kwargs))
        found = [dict(c) for c in tuner.configs]
        if not found:
            raise ValueError("No configurations to tune, please check your `@autotune` decorator")
        return found

    def already_given(tuner: Any, config: Mapping[str, Any]) -> bool:
        if tuner._kernel_parameters is None:
            return False
        args, kwargs = tuner._kernel_parameters
        given = {*list(tuner._function_parameters)[: len(args)], *(name for name, _ in kwargs)}
        return any(name in given for name in config)

    def run(tuner: Any, *_args: Any, **_kwargs: Any) -> Any:
        configs = configurations(tuner)
        tuner.jit_compile, tuner.jit_elaborate = tuner._ensure_jit_functions()
        if already_given(tuner, configs[0]):
            kernel, config = tuner.jit_compile(), None
        else:
            kernel, config = first_that_compiles(tuner, configs)
        kernel.update_tuner_result(latency=math.nan, config=config, ref_latency=None)
        return result_class(
            latency=math.nan,
            config=config,
            ref_latency=None,
            libcode=kernel.get_kernel_source(),
            func=kernel.prim_func,
            kernel=kernel,
        )

    def first_that_compiles(tuner: Any, configs: list[dict[str, Any]]) -> tuple[Any, Any]:
        chosen = session.settings.config
        if chosen is not None and not 0 <= chosen < len(configs):
            raise ValueError(
                f"configuration {chosen} was asked for, but the autotuner has 0 to "
                f"{len(configs) - 1}"
            )
        numbers = range(len(configs)) if chosen is None else [chosen]
        failures = len(session.failures)
        for number in numbers:
            arguments = dict(configs[number])
            per_config = arguments.pop("pass_configs", None)
            if per_config is not None:
                arguments["__pass_configs__"] = per_config  # as TileLang's tuner names it
            try:
                kernel = tuner.jit_compile(**arguments)
            except Exception as error:
                if number == numbers[-1]:
                    raise
                session.note(f"configuration {number} of the autotuner does not compile: {error}")
                continue
            del session.failures[failures:]  # of configurations that a tuner would leave out
            config, count = configs[number], len(configs)
            session.note(f"the autotuner's configuration {number} of {count} is used: {config}")
            return kernel, config
        raise AssertionError("unreachable: the last configuration returns or raises")

    return run


def _patch_tilelang(patches: Patches, session: Session) -> None:
    import tilelang
    import tilelang.profiler
    from tilelang.autotuner import tuner
    from tilelang.contrib import nvcc
    from tilelang.utils import device

    kernel_class = _make_kernel_class()
    arch = session.settings.arch

    def cached(
        func: Any = None,
        out_idx: Any = None,
        *_args: Any,
        target: Any = None,
        pass_configs: Any = None,
        **_options: Any,
    ) -> Any:
        return kernel_class(session, func, out_idx, target, pass_configs)

    for module in (tilelang, sys.modules["tilelang.jit"], sys.modules["tilelang.cache"]):
        if hasattr(module, "cached"):
            patches.set(module, "cached", cached)
    patches.set(tuner.AutoTuner, "run", _tune_nothing(session, tuner.AutotuneResult))
    bench = _bench_once(session)
    for name in ("tilelang.profiler", "tilelang.profiler.bench"):
        if name in sys.modules:
            patches.set(sys.modules[name], "do_bench", bench)
    if hasattr(tilelang, "do_bench"):
        patches.set(tilelang, "do_bench", bench)
    patches.set(device, "IS_CUDA", True)
    patches.set(device, "Event", torch.cuda.Event)
    major, minor = torch.cuda.get_device_capability()
    if hasattr(nvcc, "get_target_compute_version"):
        named = nvcc.get_target_compute_version

        def compute_version(target: Any = None) -> str:
            try:
                return str(named(target))
            except ValueError:
                return f"{major}.{minor}"

        patches.set(nvcc, "get_target_compute_version", compute_version)
    with contextlib.suppress(ImportError):
        import tilelang.cuda.target as cuda_target

        patches.set(cuda_target, "check_cuda_availability", lambda: True)
        patches.set(cuda_target, "_detect_torch_cuda_arch", lambda: arch)
    _patch_device(patches)
    _patch_requirements(patches)


def _patch_device(patches: Patches) -> None:
    """The device as TVM and TileLang's carver describe it."""
    from tilelang import tvm

    device: Any = torch.cuda.get_device_properties(0)
    cuda = tvm.runtime.cuda(0).dlpack_device_type()
    known = {  # TVM's DeviceAttrKind
        0: 1,  # exists
        1: device.max_threads_per_block,
        2: device.warp_size,
        3: device.shared_memory_per_block,
        4: f"{device.major}.{device.minor}",
        5: device.name,
        7: device.multi_processor_count,
    }
    real = tvm.runtime.Device._GetDeviceAttr

    def attribute(self: Any, device_type: int, device_id: int, number: int) -> Any:
        if device_type == cuda and number in known:
            return known[number]
        return real(self, device_type, device_id, number)

    patches.set(tvm.runtime.Device, "_GetDeviceAttr", attribute)
    with contextlib.suppress(ImportError):
        from tilelang.carver.arch.driver import cuda_driver

        def properties(device_id: int = 0) -> Any:
            return torch.cuda.get_device_properties(device_id)

        patches.set(cuda_driver, "get_cuda_device_properties", properties)


def _patch_requirements(patches: Patches) -> None:
    """Tests that require CUDA are not skipped for the want of a GPU."""
    with contextlib.suppress(ImportError):
        from tvm.testing.utils import Feature

        for name in ("cuda", "gpu", "nvptx", "tensorcore"):
            feature = Feature._all_features.get(name)
            if feature is not None:
                for part in ("target_kind_enabled", "target_kind_hardware", "run_time_check",
                             "compile_time_check"):  # fmt: skip
                    patches.set(feature, part, None)


@contextlib.contextmanager
def emulated_tilelang(settings: Settings | None = None) -> Iterator[Session]:
    """Run TileLang code for a GPU, unmodified, on the CPU for the length of the block.

    Example:
        >>> with emulated_tilelang() as session:  # doctest: +SKIP
        ...     import somebodys_kernels
        ...     somebodys_kernels.main()
        >>> print(session.summary())  # doctest: +SKIP
    """
    session = Session(settings or Settings())
    patches = Patches()
    try:
        with (
            cuda_on_cpu(session.settings.arch, num_sms=session.settings.num_sms, note=session.note),
            device_asserts(),
        ):
            _patch_tilelang(patches, session)
            yield session
    finally:
        patches.restore()
