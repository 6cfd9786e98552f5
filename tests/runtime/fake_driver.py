"""A CUDA driver that launches nothing and keeps what it was asked, and tensors that fit it."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tile_kernels.runtime.driver import Driver

STREAM = 0x5712EA  # what tests take for PyTorch's current stream


class _Launch(ctypes.Structure):
    """As in fake_cuda.c."""

    _fields_ = [
        ("name", ctypes.c_char * 512),
        ("sizes", ctypes.c_uint32 * 8),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint64),
        ("parameters", ctypes.c_void_p),
    ]


class FakeDriver(Driver):
    """The driver with the library of fake_cuda.c, compiled into `folder`."""

    def __init__(self, folder: Path) -> None:
        library = folder / "libfake_cuda.so"
        source = Path(__file__).with_name("fake_cuda.c")
        command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        super().__init__(str(library))

    def number(self, name: str) -> Any:
        """A counter or setting of the library."""
        return ctypes.c_int.in_dll(self.library, name)

    def launches(self) -> list[_Launch]:
        """All launches since the library was opened."""
        kept = (_Launch * 256).in_dll(self.library, "launches")
        return list(kept)[: self.number("num_launches").value]


def parameters(launch: _Launch, formats: Sequence[str]) -> list[Any]:
    """The arguments of a launch, each read where the launch points to."""
    pointers = (ctypes.c_void_p * len(formats)).from_address(launch.parameters)
    found = []
    for pointer, form in zip(pointers, formats):
        size = struct.calcsize("=" + form)
        values = struct.unpack("=" + form, ctypes.string_at(pointer, size))
        found.append(values if len(values) > 1 else values[0])
    return found


class FakeTensor(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    index = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    def get_device(self) -> int:
        return self.index


def fake(x: torch.Tensor) -> torch.Tensor:
    """`x` on the fake device."""
    return x.as_subclass(FakeTensor)
