"""Launches a compiled kernel: what TileLang's host code does, from a description of plain data.

A `Binary` is machine code with the description of its launches (`tile_kernels.emulator.lowering`).
A `Launcher` takes the arguments of the prim_func. What follows from their sizes alone (checks, the
grid, kernel arguments that are sizes, the shapes of TMA descriptors) is computed once where calls
repeat (`Launcher.fixed`); a call then reads addresses, writes them into prepared memory, and calls
the driver.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from tile_kernels.emulator.arguments import TensorSlot, check_scalar
from tile_kernels.emulator.lines import NOTHING
from tile_kernels.emulator.lowering import (
    Kernel,
    Lowered,
    Param,
    TensorMap,
    compile_expressions,
    lower,
)
from tile_kernels.runtime.driver import (
    CONFIG_BYTES,
    CONFIG_SIZES,
    INVALID_CONTEXT,
    Driver,
    argument,
    attributes,
    driver,
)
from tile_kernels.runtime.positions import getter
from tile_kernels.runtime.pytorch import current_raw_stream

data_ptr = Tensor.data_ptr

_MAX_MAPS = 256  # encoded descriptors that one launch remembers; then it forgets all
_SLOT = 8  # bytes of a kernel argument that is no descriptor
_MAP_BYTES = 128
_STREAM_AT = CONFIG_SIZES.size  # in CUlaunchConfig; attributes and their number follow
_FORMATS = {
    "bool": "?7x", "int8": "b7x", "uint8": "B7x", "int16": "h6x", "uint16": "H6x", "int32": "i4x",
    "uint32": "I4x", "int64": "q", "uint64": "Q", "float32": "f4x", "float64": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """Machine code of one prim_func for one architecture, and how it is launched."""

    lowered: Lowered  # without source
    code: bytes  # cubin

    def to_bytes(self) -> bytes:
        """For a file: the size of the description, the description, the code."""
        description = self.lowered.to_json().encode()
        return struct.pack("<I", len(description)) + description + self.code

    @classmethod
    def from_bytes(cls, data: bytes) -> Binary:
        """What `to_bytes` gave."""
        end = 4 + struct.unpack_from("<I", data)[0]
        return cls(Lowered.from_json(data[4:end].decode()), data[end:])


def lower_kernel(prim_func: Any, arch: str, pass_configs: Mapping[str, Any]) -> Lowered:
    """The CUDA source that TileLang generates, and how it is launched. Runs no compiler.

    Raises:
        ValueError: If a launch needs what a `Launcher` cannot do.
    """
    lowered = lower(prim_func, arch=arch, pass_configs=pass_configs, with_lines=False)
    _Signature(lowered)
    return lowered


def compile_binary(prim_func: Any, arch: str, pass_configs: Mapping[str, Any]) -> Binary:
    """Compiles a TileLang kernel. Needs TileLang and nvcc, and no GPU."""
    from tilelang.backend.target import determine_target
    from tilelang.cuda.backend import tilelang_callback_cuda_compile

    lowered = lower_kernel(prim_func, arch, pass_configs)
    target = determine_target({"kind": "cuda", "arch": arch}, return_object=True)
    code = tilelang_callback_cuda_compile(lowered.source, target, dict(pass_configs))
    kernels = tuple([replace(kernel, shared={}) for kernel in lowered.kernels])
    return Binary(replace(lowered, source="", python=NOTHING, kernels=kernels), bytes(code))


class _Signature:
    """The arguments of a prim_func, and the symbols that they determine."""

    def __init__(self, lowered: Lowered) -> None:
        for reason in _unsupported(lowered):
            raise ValueError(
                f"{lowered.name}: {reason}, which only TileLang's own launch supports: set "
                "TILE_KERNELS_LAUNCHER=tilelang"
            )
        self.name, self.params = lowered.name, lowered.params
        self.positions = {param.name: i for i, param in enumerate(lowered.params)}
        passed = {name for kernel in lowered.kernels for name, _ in kernel.args}
        used = passed | {tma_map.tensor for name, tma_map in lowered.maps.items() if name in passed}
        self.slots: list[TensorSlot | Param] = [
            param if param.shape is None else TensorSlot(param, param.name in used)
            for param in lowered.params
        ]
        self.assumptions = lowered.assumptions
        self._assumed = compile_expressions(lowered.assumptions)
        # Scalar arguments by name, and the names of the sizes and strides that tensors determine.
        self.scalars = {p.name: i for i, p in enumerate(lowered.params) if p.shape is None}
        determined = {
            name
            for slot in self.slots
            if isinstance(slot, TensorSlot)
            for _, name in (*slot.symbols, *slot.stride_symbols)
        }
        names: set[str] = set()
        for kernel in lowered.kernels:
            names |= _names((*kernel.grid, *kernel.block, kernel.dyn_bytes))
            for name, kind in kernel.args:
                if kind == "map":
                    tma_map = lowered.maps[name]
                    names |= _names((*tma_map.dims, *tma_map.strides, *tma_map.box))
                elif kind == "tensor":
                    if name not in self.positions:
                        raise ValueError(f"{self.name}: no argument is {name}")
                elif kind not in _FORMATS:
                    raise ValueError(f"{self.name}: {name} has the unsupported dtype {kind}")
                else:
                    names.add(name)
        missing = names - determined - self.scalars.keys()
        if missing:
            raise ValueError(f"{self.name}: no argument determines {', '.join(sorted(missing))}")

    def symbols(self, args: Sequence[Any]) -> dict[str, Any]:
        """Checks arguments as TileLang's host code does; the values of all symbols."""
        if len(args) != len(self.slots):
            names = ", ".join(param.name for param in self.params)
            raise TypeError(
                f"{self.name} takes {len(self.slots)} arguments ({names}), got {len(args)}"
            )
        found: dict[str, Any] = {}
        given: list[tuple[TensorSlot, Any]] = []
        for slot, value in zip(self.slots, args):
            if isinstance(slot, Param):
                check_scalar(slot, value)
                found[slot.name] = value
            elif value is not None or slot.used:
                slot.bind(value, found, "cuda")
                given.append((slot, value))
        for slot, value in given:
            slot.check_derived(value, found)
        devices = {value.get_device() for _, value in given}
        if len(devices) > 1:
            raise ValueError(f"{self.name}: tensors are on the devices {sorted(devices)}")
        for text, holds in zip(self.assumptions, self._assumed(found)):
            if not holds:
                values = ", ".join(f"{name} = {found[name]}" for name in sorted(_names([text])))
                raise ValueError(f"{self.name}: {text} does not hold for {values}")
        return found


def _unsupported(lowered: Lowered) -> Iterator[str]:
    """What a launch needs and a `Launcher` cannot do."""
    if lowered.workspaces:
        yield "the host code allocates memory (T.alloc_global)"
    if any(tma_map.pixels is not None for tma_map in lowered.maps.values()):
        yield "the host code describes images for TMA (im2col)"


def _names(expressions: Iterable[str]) -> set[str]:
    code = compile(f"({' '.join(e + ',' for e in expressions)})", "<launch sizes>", "eval")
    return set(code.co_names) - {"min", "max", "_div", "_mod"}


class _Frame(NamedTuple):
    """Memory for one launch at a time, and what the driver is given of it."""

    memory: Any
    config: Any  # its address, as an argument
    parameters: Any  # the address of `pointers`, as an argument
    pointers: Any
    mapped: list[int]  # addresses of the tensors that the descriptors describe


class _Map:
    """A TMA descriptor, but for its sizes."""

    def __init__(self, tma_map: TensorMap, signature: _Signature) -> None:
        self.position = signature.positions[tma_map.tensor]
        self._rank, self._kind = len(tma_map.dims), tma_map.kind
        self._evaluate = compile_expressions((*tma_map.dims, *tma_map.strides, *tma_map.box))
        self._options = (tma_map.interleave, tma_map.swizzle, tma_map.promotion, tma_map.fill)

    def arguments(self, symbols: dict[str, Any]) -> tuple[Any, ...]:
        """What `Driver.tensor_map` takes after the address; byte strides start at dimension 1."""
        values, rank = self._evaluate(symbols), self._rank
        dims, strides, box = values[:rank], values[rank + 1 : 2 * rank], values[2 * rank :]
        return self._kind, dims, strides, box, self._options


class _Getters(NamedTuple):
    """What takes the arguments of a device function out of the values of a call."""

    tensors: Callable[[Sequence[Any]], Sequence[Any]]
    scalars: Callable[[Sequence[Any]], Sequence[Any]]
    mapped: Callable[[Sequence[Any]], Sequence[Any]]


class _Device:
    """A device function, and where its arguments are in the memory of a launch.

    In this order: CUlaunchConfig, addresses of tensors, scalars of the call, sizes, descriptors. A
    call writes at once: the stream and the attributes, which end CUlaunchConfig, and the next two.
    """

    def __init__(self, kernel: Kernel, lowered: Lowered, signature: _Signature) -> None:
        self.name = kernel.name
        self.launch_sizes = compile_expressions((*kernel.grid, *kernel.block, kernel.dyn_bytes))
        found = attributes(lowered.cooperative, kernel.cluster, kernel.overlaps)
        self._attributes = ctypes.create_string_buffer(b"".join(found))
        # Their address and number, as CUlaunchConfig ends with them.
        self.attributes = (ctypes.addressof(self._attributes), len(found))
        groups: dict[str, list[tuple[int, str, str]]] = {
            "tensor": [], "scalar": [], "size": [], "map": []
        }  # fmt: skip
        for i, (name, kind) in enumerate(kernel.args):
            group = kind if kind in groups else "scalar" if name in signature.scalars else "size"
            groups[group].append((i, name, kind))
        self.tensors = [signature.positions[name] for _, name, _ in groups["tensor"]]
        self.scalars = [signature.scalars[name] for _, name, _ in groups["scalar"]]
        self.scalar_kinds = [kind for _, _, kind in groups["scalar"]]
        self.maps = [_Map(lowered.maps[name], signature) for _, name, _ in groups["map"]]
        self._size_names = [name for _, name, _ in groups["size"]]
        self._sizes = struct.Struct("=" + "".join(_FORMATS[kind] for _, _, kind in groups["size"]))
        formats = [_FORMATS[kind] for kind in self.scalar_kinds]
        self.pack_into = struct.Struct(f"=3Q{len(self.tensors)}Q{''.join(formats)}").pack_into
        order = [i for group in groups.values() for i, _, _ in group]
        num_slots = len(order) - len(self.maps)
        self.first_map = CONFIG_BYTES + _SLOT * num_slots
        widths = [_SLOT] * num_slots + [_MAP_BYTES] * len(self.maps)
        starts = dict(zip(order, itertools.accumulate(widths, initial=CONFIG_BYTES)))
        self.offsets = [starts[i] for i in range(len(order))]
        self.pointers = ctypes.c_void_p * max(1, len(order))

    def getters(self, positions: Sequence[int]) -> _Getters:
        """For values of a call in which the arguments are at these positions."""
        mapped = [tma_map.position for tma_map in self.maps]
        groups = (self.tensors, self.scalars, mapped)
        return _Getters(*[getter([positions[i] for i in group]) for group in groups])

    def image(self, sizes: Sequence[int], symbols: Mapping[str, Any]) -> bytes:
        """The memory of a launch as far as it follows from the sizes."""
        config = CONFIG_SIZES.pack(*sizes).ljust(CONFIG_BYTES, b"\0")
        per_call = bytes(_SLOT * (len(self.tensors) + len(self.scalars)))
        numbers = self._sizes.pack(*[symbols[name] for name in self._size_names])
        return config + per_call + numbers + bytes(_MAP_BYTES * len(self.maps))


class _Launch:
    """A device function with its sizes, on one device."""

    def __init__(
        self,
        device: _Device,
        sizes: tuple[int, ...],
        symbols: dict[str, Any],
        function: Any,
        cuda: Driver,
        index: int,
        getters: _Getters,
    ) -> None:
        self._device, self._sizes, self._cuda, self._index = device, sizes, cuda, index
        self._image = device.image(sizes, symbols)
        self.tensors, self.scalars, self._mapped = getters
        self.frames: list[_Frame] = []  # those that no call is using
        self.function, self.pack_into = function, device.pack_into
        self.attributes, self.finish = device.attributes, None
        if device.maps:
            self.finish = self._finish
            self._map_arguments = [tma_map.arguments(symbols) for tma_map in device.maps]
            self._encoded: dict[tuple[int, int], bytes] = {}

    def new_frame(self) -> _Frame:
        """Memory that has what follows from the sizes."""
        memory = ctypes.create_string_buffer(self._image, len(self._image))
        start = ctypes.addressof(memory)
        pointers = self._device.pointers(*[start + at for at in self._device.offsets])
        parameters = argument(ctypes.addressof(pointers))
        return _Frame(memory, argument(start), parameters, pointers, [])

    def _finish(self, frame: _Frame, values: Sequence[Any]) -> None:
        """Writes the descriptors of tensors that are not where they were."""
        mapped = [*map(data_ptr, self._mapped(values))]
        if mapped == frame.mapped:
            return
        target = ctypes.addressof(frame.memory) + self._device.first_map
        for i, tensor in enumerate(mapped):
            encoded = self._encoded.get((i, tensor))
            if encoded is None:
                encoded = self._cuda.tensor_map(tensor, *self._map_arguments[i])
                if len(self._encoded) >= _MAX_MAPS:
                    self._encoded.clear()
                self._encoded[i, tensor] = encoded
            ctypes.memmove(target, encoded, _MAP_BYTES)
            target += _MAP_BYTES
        frame.mapped[:] = mapped

    def pack_rounded(self, frame: _Frame, stream: int, values: Sequence[Any]) -> None:
        """Writes scalars as C converts them: a number too large for float32 is infinite."""
        given = zip(self.scalars(values), self._device.scalar_kinds)
        rounded = [ctypes.c_float(x).value if kind == "float32" else x for x, kind in given]
        tensors = map(data_ptr, self.tensors(values))
        self.pack_into(frame.memory, _STREAM_AT, stream, *self.attributes, *tensors, *rounded)

    def retry(self, status: int, frame: _Frame) -> None:
        """After a launch that failed: launches again if the thread had no context, or raises."""
        if status == INVALID_CONTEXT:
            self._cuda.need_context(self._index)
            status = self._cuda.launch(frame.config, self.function, frame.parameters, None)
        what = f"launching {self._device.name} with (grid, block, shared bytes) {self._sizes}"
        self._cuda.check(status, what)


class Launcher:
    """Runs a compiled kernel on the CUDA device of its arguments, on PyTorch's current stream.

    That device must be the current one. Each call checks its arguments and computes its launches;
    what `fixed` gives does so once.

    Args:
        binary: The kernel.
        open_driver: Gives the driver at the first call.
    """

    def __init__(self, binary: Binary, open_driver: Callable[[], Driver] = driver) -> None:
        self.binary, self._open_driver = binary, open_driver
        self._signature = signature = _Signature(binary.lowered)
        self._devices = [_Device(k, binary.lowered, signature) for k in binary.lowered.kernels]
        used = [isinstance(slot, TensorSlot) and slot.used for slot in signature.slots]
        self._first = used.index(True)
        self._functions: dict[tuple[int, str], tuple[Any, int]] = {}
        self._getters: dict[tuple[int, ...], list[_Getters]] = {}
        self._library: ctypes.c_void_p | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> None:
        """Launches the kernels; the arguments are those of the prim_func."""
        self.fixed(range(len(args)))(args)

    def fixed(self, positions: Sequence[int]) -> Callable[[Sequence[Any]], None]:
        """What launches the kernels for calls of one size; the first call decides which.

        All calls must have the sizes, strides, dtypes and device of the first one.

        Args:
            positions: Where the arguments of the prim_func are in the values of a call.

        Returns:
            A function of the values of a call.
        """
        prepared: tuple[int, Any, tuple[_Launch, ...]] | None = None

        def launch(values: Sequence[Any]) -> None:
            nonlocal prepared
            if prepared is None:
                prepared = self._prepare(values, positions)
            index, start, launches = prepared
            stream = current_raw_stream(index)
            for each in launches:
                try:
                    frame = each.frames.pop()
                except IndexError:
                    frame = each.new_frame()
                fixed, tensors = each.attributes, map(data_ptr, each.tensors(values))
                try:
                    each.pack_into(
                        frame[0], _STREAM_AT, stream, *fixed, *tensors, *each.scalars(values)
                    )
                except OverflowError:
                    each.pack_rounded(frame, stream, values)
                if each.finish is not None:
                    each.finish(frame, values)
                status = start(frame[1], each.function, frame[2], None)
                if status:
                    each.retry(status, frame)
                each.frames.append(frame)

        return launch

    def _prepare(
        self, values: Sequence[Any], positions: Sequence[int]
    ) -> tuple[int, Any, tuple[_Launch, ...]]:
        """The device, what starts a launch, and the launches of a call with these values."""
        args = [values[i] for i in positions]
        symbols = self._signature.symbols(args)
        index = args[self._first].get_device()
        cuda, key = self._open_driver(), tuple(positions)
        getters = self._getters.get(key)
        if getters is None:  # a few, one for each place where an operator calls the kernel
            getters = self._getters[key] = [device.getters(key) for device in self._devices]
        found = []
        for device, each in zip(self._devices, getters):
            sizes = device.launch_sizes(symbols)
            if 0 in sizes[:3]:  # no blocks
                continue
            function = self._function(cuda, device.name, index, sizes[6])
            found.append(_Launch(device, sizes, symbols, function, cuda, index, each))
        return index, cuda.launch, tuple(found)

    def _function(self, cuda: Driver, name: str, index: int, dynamic_shared: int) -> Any:
        """A function on a device, as an argument of the driver.

        It may have as much dynamic shared memory as the largest of its launches needs, whichever
        thread comes first.
        """
        with self._lock:
            function, allowed = self._functions.get((index, name), (None, -1))
            if function is None or dynamic_shared > allowed:
                cuda.need_context(index)
                if self._library is None:
                    self._library = cuda.load(self.binary.code)
                kernel = cuda.kernel(self._library, name, index, dynamic_shared)
                function = argument(kernel.value or 0)
                self._functions[index, name] = function, dynamic_shared
            return function
