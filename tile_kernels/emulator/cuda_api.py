"""PyTorch's CUDA interface, answered by CPU tensors.

`cuda_on_cpu()` patches `torch` for as long as its block runs, so that a script written for a GPU
runs unmodified: `device="cuda"`, `.cuda()`, streams, events, device properties. Everything is
restored at the end of the block.

A tensor that the script put on the GPU is an ordinary CPU tensor with a tag, and results computed
from tagged tensors are tagged too. A tagged tensor reports `device == cuda:0`, and `.cuda()` and
`.cpu()` copy exactly where a GPU would copy.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_TAG = "_tile_kernels_on_cuda"
_CUDA = torch.device("cuda", 0)
_DEVICE_GETTER = torch.Tensor.device
_IS_CUDA_GETTER = torch.Tensor.is_cuda
_DATA: Any = torch.Tensor.data
_DIVISIONS = (torch.Tensor.div, torch.Tensor.true_divide, torch.div, torch.true_divide)
_MISSING = object()

# Multiprocessors and bytes of shared memory that a block may use: H200, A100, RTX 4090, B200.
_DEVICES = {"sm_80": (108, 163 << 10), "sm_89": (128, 99 << 10), "sm_90": (132, 227 << 10),
            "sm_100": (148, 227 << 10)}  # fmt: skip


class Patches:
    """Attributes replaced for a while, restored in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`; an attribute that did not exist is deleted again by `restore`."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put every replaced attribute back."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# ---- tensors ------------------------------------------------------------------------------------


def is_cuda_device(device: Any) -> bool:
    """Whether a value that PyTorch accepts as a device names a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cuda(value: Any) -> bool:
    """Whether a tensor is one that the script put on the GPU."""
    return isinstance(value, torch.Tensor) and _TAG in value.__dict__


def tag(value: Any, cuda: bool = True) -> Any:
    """Mark a tensor, or the tensors of a tuple or list, as being on the GPU or not."""
    if isinstance(value, torch.Tensor):
        if cuda:
            value.__dict__[_TAG] = True
        else:
            value.__dict__.pop(_TAG, None)
    elif isinstance(value, (tuple, list)):
        for item in value:
            tag(item, cuda)
    return value


def _any_on_cuda(values: Any) -> bool:
    return any(
        on_cuda(v) or (isinstance(v, (tuple, list)) and any(map(on_cuda, v))) for v in values
    )


class _DeviceMode(TorchFunctionMode):
    """Redirects what PyTorch is asked to do on a GPU to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        getter = getattr(func, "__self__", None)
        if getter is _DEVICE_GETTER:
            return _CUDA if on_cuda(args[0]) else func(*args, **kwargs)
        if getter is _IS_CUDA_GETTER:
            return on_cuda(args[0])
        if func == _DATA.__set__:
            func(*args)
            tag(args[0], on_cuda(args[1]))
            return None
        if func is torch.Tensor.cuda:
            return _moved(args[0], args[0], True)
        if func is torch.Tensor.cpu:
            return _moved(args[0], args[0], False)
        if func is torch.Tensor.to:
            return _to(args, kwargs)
        if func is torch.Tensor.get_device:
            return 0 if on_cuda(args[0]) else -1
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (*_DIVISIONS, torch.Tensor.div_) and not kwargs and on_cuda(args[0]):
            quotient = _divided(*args)
            if quotient is not None and func in _DIVISIONS:
                return quotient
            if quotient is not None and quotient.dtype == args[0].dtype:
                return args[0].copy_(quotient)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        cuda = _any_on_cuda(args) if device is None else is_cuda_device(device)
        if cuda and device is not None:
            kwargs["device"] = "cpu"
        with _random_state(func, cuda and "generator" not in kwargs):
            result = func(*args, **kwargs)
        return result if device is None and not cuda else tag(result, cuda)


@contextlib.contextmanager
def _device_mode() -> Iterator[None]:
    """`_DeviceMode`, unless it is active: PyTorch disables it in new threads and in `backward`."""
    active = any(isinstance(m, _DeviceMode) for m in _get_current_function_mode_stack())
    with contextlib.nullcontext() if active else _DeviceMode():
        yield


def _divided(tensor: torch.Tensor, number: Any) -> torch.Tensor | None:
    """A tensor divided by a number with PyTorch's roundings on a GPU: times the reciprocal."""
    if type(number) not in (int, float) or tensor.is_complex():
        return None
    dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)
    inverse = 1 / torch.tensor(number, dtype=wide)
    return tag((tensor.to(wide) * inverse).to(dtype))


def _moved(source: torch.Tensor, result: torch.Tensor, cuda: bool) -> torch.Tensor:
    """`result` on the other device: a copy, unless it is there already or is new."""
    if on_cuda(source) == cuda and result is source:
        return result
    return tag(result.clone() if result is source else result, cuda)


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`Tensor.to` in all of its forms."""
    source, *rest = args
    cuda = on_cuda(source)
    target = rest[0] if rest else kwargs.get("device", kwargs.get("other"))
    if isinstance(target, torch.Tensor):
        cuda = on_cuda(target)
    elif isinstance(target, (str, int, torch.device)) and not isinstance(target, bool):
        cuda = is_cuda_device(target)
        if cuda and rest:
            rest[0] = "cpu"
        elif cuda:
            kwargs["device"] = "cpu"
    return _moved(source, torch.Tensor.to(source, *rest, **kwargs), cuda)


# ---- torch.cuda ---------------------------------------------------------------------------------


class _Event:
    """`torch.cuda.Event`: records the time of the host, on which everything is finished."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._time = 0.0

    def record(self, _stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return max((end._time - self._time) * 1e3, 1e-6)

    def synchronize(self) -> None:
        pass

    def wait(self, _stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """`torch.cuda.Stream`: kernels run at once, in the order of the calls."""

    cuda_stream = 0
    stream_id = 0
    device = _CUDA
    device_index = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error: Any) -> None:
        pass


class _Profile(torch.profiler.profile):
    """`torch.profiler.profile`, of the CPU alone."""

    def __init__(self, *, activities: Any = None, **options: Any) -> None:
        activities = {torch.profiler.ProfilerActivity.CPU} if activities else None
        super().__init__(activities=activities, **options)


class _DeviceContext:
    """`torch.cuda.device(i)` and `torch.cuda.stream(s)`: there is one device and one stream."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: Any) -> None:
        pass


_TorchGenerator = torch.Generator  # the name in torch is replaced while the block runs


_GPU_RANDOM = _TorchGenerator()  # what is drawn on the GPU leaves the CPU's state alone
_DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
          "normal", "bernoulli", "multinomial", "poisson", "dropout", "normal_", "uniform_",
          "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
          "geometric_"}  # fmt: skip


@contextlib.contextmanager
def _random_state(func: Any, cuda: bool) -> Iterator[None]:
    """The GPU's random state for a function that draws on the GPU."""
    if not cuda or getattr(func, "__name__", "") not in _DRAWS:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(_GPU_RANDOM.get_state())
    try:
        yield
    finally:
        _GPU_RANDOM.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


class _Generator(torch.Generator):
    """A generator that was asked for on the GPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        name = "cpu" if is_cuda_device(device) else device
        return _TorchGenerator.__new__(cls, name)  # type: ignore[call-arg]


def _no_graphs(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(
        "the emulator has no CUDA graphs: kernels run when they are called; call the function "
        "without capturing it"
    )


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture: (9, 0) of sm_90a."""
    m = re.fullmatch(r"sm_(\d{1,2})(\d)[a-f]?", arch)
    if m is None:
        raise ValueError(f"arch must be an architecture such as 'sm_90a', got {arch!r}")
    return int(m[1]), int(m[2])


def properties(arch: str, num_sms: int | None = None) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` returns for the emulated device."""
    major, minor = capability(arch)
    sms, shared = _DEVICES.get(f"sm_{major}{minor}", _DEVICES["sm_90"])
    return SimpleNamespace(
        name=f"tile_kernels emulator ({arch})",
        major=major,
        minor=minor,
        total_memory=80 << 30,
        multi_processor_count=num_sms or sms,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=50 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )


def _seed(seed: int) -> None:
    _GPU_RANDOM.manual_seed(int(seed))


def _answers(arch: str, num_sms: int | None) -> dict[str, Callable[..., Any]]:
    """Functions of `torch.cuda` by name."""
    device = properties(arch, num_sms)
    stream = _Stream()
    nothing = ("synchronize", "set_device", "empty_cache", "ipc_collect", "init", "_lazy_init",
               "reset_peak_memory_stats", "reset_max_memory_allocated", "set_stream", "_sleep",
               "reset_accumulated_memory_stats", "set_per_process_memory_fraction",
               "set_sync_debug_mode")  # fmt: skip
    zero = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved",
            "max_memory_reserved", "get_sync_debug_mode")  # fmt: skip
    yes = ("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported")

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    answers = {n: constant(None) for n in nothing}
    answers |= {n: constant(0) for n in zero}
    answers |= {n: constant(True) for n in yes}
    answers |= {
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "seed": _GPU_RANDOM.seed,
        "seed_all": _GPU_RANDOM.seed,
        "initial_seed": _GPU_RANDOM.initial_seed,
        "get_rng_state": lambda *_args: _GPU_RANDOM.get_state(),
        "get_rng_state_all": lambda: [_GPU_RANDOM.get_state()],
        "set_rng_state": lambda state, *_args: _GPU_RANDOM.set_state(state),
        "set_rng_state_all": lambda states: _GPU_RANDOM.set_state(states[0]),
        "device_count": constant(1),
        "is_current_stream_capturing": constant(False),
        "get_device_name": constant(device.name),
        "get_device_capability": constant((device.major, device.minor)),
        "get_device_properties": constant(device),
        "get_arch_list": constant([arch]),
        "mem_get_info": constant((device.total_memory, device.total_memory)),
        "memory_stats": lambda *_args, **_kwargs: {},
        "memory_summary": constant(""),
        "current_stream": constant(stream),
        "default_stream": constant(stream),
        "Event": _Event,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "device": _DeviceContext,
        "device_of": _DeviceContext,
        "stream": _DeviceContext,
        "CUDAGraph": _no_graphs,
        "graph": _no_graphs,
        "make_graphed_callables": _no_graphs,
    }
    return answers


def _patch_scopes(patches: Patches) -> None:
    """Threads, autocast for the GPU, and parameters, which keep the device of their tensors."""
    parameter, autocast, run = torch.nn.Parameter, torch.autocast, threading.Thread.run
    create, enter, leave = parameter.__new__, autocast.__enter__, autocast.__exit__

    def create_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        return tag(create(cls, data, requires_grad), on_cuda(data))

    def run_thread(self: threading.Thread) -> None:
        with _device_mode():
            run(self)

    def enter_autocast(self: Any) -> Any:
        if self.device == "cuda":
            self.on_cpu = autocast("cpu", self.fast_dtype, self._enabled, self._cache_enabled)
            enter(self.on_cpu)
        return enter(self)

    def leave_autocast(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            leave(self.on_cpu, *error)
        return leave(self, *error)

    patches.set(parameter, "__new__", staticmethod(create_parameter))
    patches.set(threading.Thread, "run", run_thread)
    patches.set(autocast, "__enter__", enter_autocast)
    patches.set(autocast, "__exit__", leave_autocast)


def _patch_autograd(patches: Patches) -> None:
    """Backward passes: `torch.autograd.Function` sees gradients and saved tensors on the GPU."""
    autograd: Any = torch.autograd
    function, node = autograd.Function, autograd.function.BackwardCFunction
    run, call, backward = autograd._engine_run_backward, function.apply, node.apply
    saved = node.saved_tensors

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _device_mode():
            return run(*args, **kwargs)

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = call.__func__(cls, *args, **kwargs)
        if _any_on_cuda(args):
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(getattr(tensor, "grad_fn", None), node):
                    setattr(tensor.grad_fn, _TAG, True)
        return result

    def on_node_device(self: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tag(tensors) if hasattr(self, _TAG) else tensors

    patches.set(autograd, "_engine_run_backward", run_backward)
    patches.set(function, "apply", classmethod(apply_function))
    patches.set(node, "apply", lambda self, *grads: backward(self, *on_node_device(self, grads)))
    patches.set(node, "saved_tensors",
                property(lambda self: on_node_device(self, saved.__get__(self))))  # fmt: skip


@contextlib.contextmanager
def cuda_on_cpu(
    arch: str = "sm_90a",
    *,
    num_sms: int | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> Iterator[None]:
    """Answer PyTorch's CUDA interface with CPU tensors for the length of the block.

    Args:
        arch: Architecture that the device reports, for example `"sm_90a"`.
        num_sms: Multiprocessors that it reports; default those of a data-centre GPU of `arch`.
        note: Receives a sentence about each thing that is left out, such as `torch.compile`.
    """
    from torch.utils import _device

    patches = Patches()
    context_init = _device.DeviceContext.__init__
    context_call = _device.DeviceContext.__torch_function__

    def device_context(self: Any, device: Any) -> None:
        self.stands_for_cuda = is_cuda_device(device)
        context_init(self, torch.device("cpu") if self.stands_for_cuda else device)

    def default_device(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        created = func in _device._device_constructors() and not (kwargs or {}).get("device")
        cuda = created and self.stands_for_cuda
        with _random_state(func, cuda and "generator" not in (kwargs or {})):
            result = context_call(self, func, types, args, kwargs)
        return tag(result) if cuda else result

    def compile_nothing(model: Any = None, **_kwargs: Any) -> Any:
        note("torch.compile is left out: the function runs as it is")
        return model if model is not None else lambda function: function

    try:
        for name, answer in _answers(arch, num_sms).items():
            patches.set(torch.cuda, name, answer)
        for name, value in (("is_available", True), ("device_count", 1), ("synchronize", None),
                            ("current_accelerator", torch.device("cuda"))):  # fmt: skip
            patches.set(torch.accelerator, name, lambda *_args, value=value, **_kwargs: value)
        for name in ("range_push", "range_pop", "mark"):
            patches.set(torch.cuda.nvtx, name, lambda *_args, **_kwargs: None)
        patches.set(torch.version, "cuda", torch.version.cuda or "13.0")
        patches.set(torch, "Generator", _Generator)
        patches.set(torch, "compile", compile_nothing)
        patches.set(torch, "Event", _Event)
        patches.set(torch.profiler, "profile", _Profile)
        patches.set(_device.DeviceContext, "__init__", device_context)
        patches.set(_device.DeviceContext, "__torch_function__", default_device)
        _patch_scopes(patches)
        _patch_autograd(patches)
        _GPU_RANDOM.manual_seed(torch.initial_seed())
        with _DeviceMode():
            yield
    finally:
        patches.restore()
