"""The `emulate` backend: a launch on CPU tensors runs the kernel's generated CUDA on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tile_kernels.runtime.launch import Kernel


def run(kernel: Kernel, problem: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    raise RuntimeError
