"""The CUDA driver's functions that load and launch kernels, by `ctypes`.

The library is opened at the first launch: importing this file needs no driver. Functions return
CUDA's status; `Driver.check` makes an error of it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

LIBRARY = "libcuda.so.1"
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has none yet
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE, _CLUSTER, _OVERLAP = 2, 4, 6  # CU_LAUNCH_ATTRIBUTE_*
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64

# CUlaunchConfig: grid, block, dynamic shared bytes; then stream, attributes, their number.
CONFIG_SIZES = struct.Struct("=7I4x")
CONFIG_BYTES = 56


def attributes(cooperative: bool, cluster: tuple[int, ...], overlaps: bool) -> list[bytes]:
    """CUlaunchAttributes: each an id and a union of 64 bytes."""
    found = []
    if cooperative:
        found.append(struct.pack("=I4xi60x", _COOPERATIVE, 1))
    if tuple(cluster) != (1, 1, 1):
        found.append(struct.pack("=I4x3I52x", _CLUSTER, *cluster))
    if overlaps:
        found.append(struct.pack("=I4xi60x", _OVERLAP, 1))
    return found


class Driver:
    """An open driver library."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self.library = ctypes.CDLL(library)
        except OSError as error:
            raise RuntimeError(f"kernels need NVIDIA's driver: {error}") from None
        self.check(self.library.cuInit(0), "cuInit")
        # (CUlaunchConfig*, CUfunction or CUkernel, void** parameters, void** extra)
        self.launch = self.library.cuLaunchKernelEx

    def check(self, status: int, what: str) -> None:
        """Raises unless `status` is 0."""
        if status:
            name, text = ctypes.c_char_p(), ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(name))
            self.library.cuGetErrorString(status, ctypes.byref(text))
            known = f"{(name.value or b'?').decode()}: {(text.value or b'?').decode()}"
            raise RuntimeError(f"{what} failed with CUDA error {status} ({known})")

    def need_context(self, index: int) -> None:
        """Makes device `index`'s primary context, PyTorch's, current in a thread that has none."""
        context = ctypes.c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if context:
            return
        device = ctypes.c_int()
        self.check(self.library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        retain = self.library.cuDevicePrimaryCtxRetain
        self.check(retain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        self.check(self.library.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def load(self, code: bytes) -> ctypes.c_void_p:
        """A cubin as a library of kernels, which serves every device."""
        library = ctypes.c_void_p()
        arguments = (code, None, None, 0, None, None, 0)
        status = self.library.cuLibraryLoadData(ctypes.byref(library), *arguments)
        self.check(status, "cuLibraryLoadData")
        return library

    def kernel(
        self, library: ctypes.c_void_p, name: str, index: int, dynamic_shared: int
    ) -> ctypes.c_void_p:
        """A kernel of a loaded library, on device `index`, whose context is current."""
        kernel, function, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        get = self.library.cuLibraryGetKernel
        self.check(get(ctypes.byref(kernel), library, name.encode()), f"cuLibraryGetKernel({name})")
        # Loads the code now: a launch that is being captured into a graph could not.
        get = self.library.cuKernelGetFunction
        self.check(get(ctypes.byref(function), kernel), f"cuKernelGetFunction({name})")
        self.check(self.library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        set_attribute = self.library.cuKernelSetAttribute
        status = set_attribute(_MAX_DYNAMIC_SHARED, dynamic_shared, kernel, device)
        self.check(status, f"{name}: {dynamic_shared} bytes of dynamic shared memory")
        return kernel

    def tensor_map(
        self,
        address: int,
        kind: int,
        dims: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        options: tuple[int, int, int, int],
    ) -> bytes:
        """An encoded TMA descriptor.

        Args:
            address: Of the tensor.
            kind: CUtensorMapDataType.
            dims: Elements of each dimension, innermost first.
            strides: Bytes of each dimension but the innermost.
            box: Elements of each dimension that one copy moves.
            options: Interleave, swizzle, L2 promotion, fill of elements out of bounds.
        """
        rank = len(dims)
        memory = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
        offset = -ctypes.addressof(memory) % _TENSOR_MAP_ALIGNMENT
        status = self.library.cuTensorMapEncodeTiled(
            ctypes.byref(memory, offset), kind, rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*dims), (ctypes.c_uint64 * max(1, rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), *options,
        )  # fmt: skip
        shown = f"cuTensorMapEncodeTiled(dims {dims}, strides {strides}, box {box})"
        self.check(status, shown)
        return memory.raw[offset : offset + _TENSOR_MAP_BYTES]


@functools.cache
def driver() -> Driver:
    """The driver of this machine."""
    return Driver()


def argument(address: int) -> Any:
    """An address as an argument of a driver function; it is converted once, not in every call."""
    return ctypes.c_void_p.from_param(address)
