"""Launches one compiled kernel through CUDA's driver, with nothing else in the process.

    python benchmarks/sanitizer_launch.py FOLDER

`benchmarks/sanitizer.py` writes the folder and starts this file under compute-sanitizer, where
importing PyTorch would take longer than the kernel. Every tensor is an allocation of exactly its
size, so that an access past its end is past the end of the allocation.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


def call(function: Any, *args: Any) -> None:
    """Calls the driver; a failure ends the program with its number."""
    status = function(*args)
    if status:
        raise SystemExit(f"{function.__name__} failed with CUDA error {status}")


def numbers(ctype: Any, values: list[int]) -> Any:
    """A C array."""
    return (ctype * len(values))(*values)


def encode_map(cuda: Any, spec: dict[str, Any], address: int) -> Any:
    """A tensor map, aligned to 64 bytes as the driver wants it."""
    room = ctypes.create_string_buffer(192)
    start = (ctypes.addressof(room) + 63) // 64 * 64
    rank = len(spec["dims"])
    call(
        cuda.cuTensorMapEncodeTiled,
        ctypes.c_void_p(start),
        ctypes.c_int(spec["kind"]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        numbers(ctypes.c_uint64, spec["dims"]),
        numbers(ctypes.c_uint64, spec["strides"][1:]),
        numbers(ctypes.c_uint32, spec["box"]),
        numbers(ctypes.c_uint32, [1] * rank),
        ctypes.c_int(spec["interleave"]),
        ctypes.c_int(spec["swizzle"]),
        ctypes.c_int(0),
        ctypes.c_int(spec["fill"]),
    )
    return room, start


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with the dimensions of a cluster."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("dims", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def main() -> None:
    """Runs the kernel of the folder and waits for it."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "launch.json").read_text())
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, function = (ctypes.c_void_p() for _ in range(4))
    call(cuda.cuInit, 0)
    call(cuda.cuDeviceGet, ctypes.byref(device), 0)
    call(cuda.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
    call(cuda.cuCtxSetCurrent, context)
    call(cuda.cuModuleLoad, ctypes.byref(module), str(folder / "kernel.cubin").encode())
    call(cuda.cuModuleGetFunction, ctypes.byref(function), module, spec["name"].encode())
    if spec["dyn_bytes"]:
        call(cuda.cuFuncSetAttribute, function, DYNAMIC_SHARED_BYTES, spec["dyn_bytes"])
    addresses: dict[str, int] = {}
    for name, tensor in spec["tensors"].items():
        pointer = ctypes.c_void_p()
        content = (folder / f"{name}.bin").read_bytes()
        call(cuda.cuMemAlloc_v2, ctypes.byref(pointer), ctypes.c_size_t(len(content)))
        if not tensor["fresh"]:
            call(cuda.cuMemcpyHtoD_v2, pointer, content, ctypes.c_size_t(len(content)))
        addresses[name] = int(pointer.value or 0) + tensor["offset"]
    kept, pointers = [], []
    for name, kind in spec["args"]:
        if kind == "map":
            room, start = encode_map(
                cuda, spec["maps"][name], addresses[spec["maps"][name]["tensor"]]
            )
            kept.append(room)
            pointers.append(start)
        else:
            value = ctypes.c_void_p(addresses[name])
            kept.append(value)
            pointers.append(ctypes.addressof(value))
    attribute = LaunchAttribute(id=CLUSTER_DIMENSION)
    attribute.dims[:3] = spec["cluster"]
    config = LaunchConfig(attributes=ctypes.pointer(attribute))
    config.sizes[:] = [*spec["grid"], *spec["block"], spec["dyn_bytes"]]
    config.num_attributes = int(spec["cluster"] != [1, 1, 1])
    arguments = numbers(ctypes.c_void_p, pointers)
    call(cuda.cuLaunchKernelEx, ctypes.byref(config), function, arguments, None)
    call(cuda.cuCtxSynchronize)
    print("the kernel has ended")


if __name__ == "__main__":
    main()
