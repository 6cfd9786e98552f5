"""What a kernel's plan needs to know about a GPU, read off the machine or described for one."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

WARP = 32  # threads of a warp


@dataclass(frozen=True)
class Device:
    """The properties of one GPU that decide tile sizes and grids.

    `arch` is the name TileLang and nvcc use (`sm_90a`). Shared memory is in bytes:
    `smem_per_block` is the opt-in limit of one block, `smem_per_sm` what all resident blocks share.
    """

    name: str
    arch: str
    num_sms: int
    smem_per_block: int
    smem_per_sm: int


# One well-known member of each architecture that we compile for. They stand in for the machine
# when there is none: emulation and compiling ahead of time on a computer without a GPU.
DESCRIBED = {
    device.arch: device
    for device in (
        Device("NVIDIA A100", "sm_80", 108, 163 << 10, 164 << 10),
        Device("NVIDIA L40S", "sm_89", 142, 99 << 10, 100 << 10),
        Device("NVIDIA H200", "sm_90a", 132, 227 << 10, 228 << 10),
        Device("NVIDIA B200", "sm_100a", 148, 227 << 10, 228 << 10),
        Device("NVIDIA GeForce RTX 5090", "sm_120a", 170, 99 << 10, 100 << 10),
    )
}
DEFAULT_ARCH = "sm_90a"


def described(arch: str = DEFAULT_ARCH) -> Device:
    """The stand-in device of an architecture, for machines without that GPU."""
    if arch not in DESCRIBED:
        raise ValueError(f"arch must be one of {', '.join(DESCRIBED)}, got {arch!r}")
    return DESCRIBED[arch]


def arch_of_capability(major: int, minor: int) -> str:
    """The architecture name of a compute capability; from 9.0 up the feature-complete `a` form.

    >>> arch_of_capability(9, 0), arch_of_capability(8, 9)
    ('sm_90a', 'sm_89')
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def cuda_device(index: int) -> Device:
    """The CUDA device `index` as it is."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        name=properties.name,
        arch=arch_of_capability(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        smem_per_block=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        smem_per_sm=properties.shared_memory_per_multiprocessor,
    )


def current_device() -> Device:
    """The current CUDA device, or the described default where there is none."""
    if torch.cuda.is_available():
        return cuda_device(torch.cuda.current_device())
    return described()
